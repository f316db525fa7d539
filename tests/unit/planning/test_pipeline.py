"""Layers of pipeline stages, and the plan of a pipeline: every layer once, and the fullest stage decides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_dcp.planning.capacity import bytes_per_token, plan
from nsa_dcp.planning.dimensions import preset_dims
from nsa_dcp.planning.pipelines import describe_waiting_stage, split_layers, stage_dims, suggest_partition

GLM, DEEPSEEK = preset_dims("glm-5.2"), preset_dims("deepseek-v3.2")


@given(st.integers(1, 100), st.integers(1, 100))
def test_every_layer_is_in_one_stage_and_stages_differ_by_one_layer_at_most(num_layers, pp_size):
    if pp_size > num_layers:
        with pytest.raises(ValueError, match="pp_size must be at most the model's"):
            split_layers(num_layers, pp_size)
        return
    stages = split_layers(num_layers, pp_size)
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))
    sizes = [len(layers) for layers in stages]
    assert sizes == sorted(sizes)
    assert sizes[-1] - sizes[0] <= 1


def test_a_partition_decides_where_there_are_stages():
    assert split_layers(78, 2, "38,40") == [range(38), range(38, 78)]
    assert split_layers(78, 1, "38,40") == [range(78)]


@pytest.mark.parametrize("partition", ["", "78", "38,39", "39,39,0", "-1,79", "a,b", "38;40"])
def test_what_is_no_partition_is_refused_by_name(partition):
    with pytest.raises(ValueError, match=f"SGLANG_PP_LAYER_PARTITION must be 2 positive.*78 layers, got '{partition}'"):
        split_layers(78, 2, partition)


@given(st.sets(st.integers(1, 30)), st.integers(1, 8))
def test_a_suggested_partition_starts_every_stage_where_a_layer_selects(owners, pp_size):
    num_layers, indexer_layers = 31, tuple(sorted({0, *owners}))
    stages = split_layers(num_layers, pp_size)
    partition = suggest_partition(stages, indexer_layers)
    if partition is None:
        assert describe_waiting_stage(stages, indexer_layers) != ""
    else:
        assert describe_waiting_stage(split_layers(num_layers, pp_size, partition), indexer_layers) == ""
    if describe_waiting_stage(stages, indexer_layers) == "":
        assert split_layers(num_layers, pp_size, partition) == stages


def test_stages_have_the_layers_and_the_selections_of_the_model():
    stages = [stage_dims(GLM, layers) for layers in split_layers(78, 4, "18,20,20,20")]
    assert [stage.num_hidden_layers for stage in stages] == [18, 20, 20, 20]
    assert sum(len(stage.indexer_layers) for stage in stages) == len(GLM.indexer_layers)
    assert all(stage.indexer_layers[0] == 0 for stage in stages)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "bfloat16"])
def test_a_pipeline_holds_what_its_fullest_stage_holds(kv_cache_dtype):
    def rows(**pipeline):
        return plan(
            GLM, gpu_memory_gib=40, kv_cache_dtypes=(kv_cache_dtype,), dcp_sizes=(8,), gpus_per_node=16, **pipeline
        ).rows[0]

    whole, even, uneven = (
        rows(),
        rows(pp_size=2, pp_layer_partition="38,40"),
        rows(pp_size=2, pp_layer_partition="6,72"),
    )
    cost = bytes_per_token(stage_dims(GLM, range(6, 78)), kv_cache_dtype, 8)
    assert uneven.bytes_per_token == cost
    # Two replicas without stages, or one pipeline over as many GPUs.
    assert whole.tokens_per_node == 16 * whole.tokens_per_gpu
    assert even.tokens_per_node == 8 * even.tokens_per_gpu
    assert even.tokens_per_gpu == pytest.approx(2 * whole.tokens_per_gpu, rel=0.03)
    assert uneven.tokens_per_gpu < 1.2 * whole.tokens_per_gpu


def test_a_stage_that_waits_for_a_selection_is_refused_with_dcp_alone():
    tp, dcp = plan(
        GLM, gpu_memory_gib=40, kv_cache_dtypes=("fp8_e4m3",), dcp_sizes=(1, 8), pp_size=2, gpus_per_node=16
    ).rows
    assert tp.refusal == ""
    assert dcp.refusal == (
        "layer 39 would start a stage, but attends to a selection made in another; the layers 38,40 would be served"
    )
    assert plan(DEEPSEEK, gpu_memory_gib=40, pp_size=2, gpus_per_node=16).rows[-1].refusal == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus_per_node": 8}, "gpus_per_node must be a multiple of tp_size \\* pp_size, got 8 and 16"),
        ({"draft_layers": 1}, "draft_layers must be 0 in a pipeline"),
        ({"pp_size": 0}, "pp_size must be a positive integer, got 0"),
        ({"pp_layer_partition": "39"}, "SGLANG_PP_LAYER_PARTITION must be 2 positive"),
    ],
)
def test_a_plan_of_no_pipeline_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(GLM, gpu_memory_gib=40, **{"pp_size": 2, "gpus_per_node": 16} | changes)
