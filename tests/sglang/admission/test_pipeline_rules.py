"""Pipelines: a stage that would start at a layer without a selection of its own is refused, and so is what no pipeline
was run with. The stages judged are those that sglang makes."""

import dataclasses
import json

import pytest

from nsa_dcp.planning.pipelines import PARTITION_VARIABLE, split_layers
from nsa_dcp.sglang_plugin.admission.validation import find_problems
from scripts.served_checks import write_checkpoint
from tests.served_settings import CP_DCP, DEEPSEEK, GLM, HOPPER, TP_DCP


def judge(settings=TP_DCP, model=GLM, **changes):
    return find_problems(dataclasses.replace(settings, **{"pp_size": 2} | changes), model, HOPPER)


@pytest.mark.parametrize("settings", [TP_DCP, CP_DCP, dataclasses.replace(CP_DCP, enable_cp_decode_attn_tp=True)])
def test_stages_that_start_at_a_layer_that_selects_are_served(settings):
    assert judge(settings, pp_layer_partition="38,40") == []
    assert judge(settings, pp_size=3, pp_layer_partition="26,28,24") == []


def test_where_every_layer_selects_any_stages_are_served():
    assert judge(model=DEEPSEEK) == []
    assert judge(model=DEEPSEEK, pp_size=61) == []
    assert judge(model=DEEPSEEK, pp_layer_partition="1,60") == []


def test_a_stage_that_would_wait_for_a_selection_is_refused_with_a_partition_that_is_served():
    (problem,) = judge()
    assert problem.asked == "--pp-size 2"
    assert "layer 39 would start a stage" in problem.reason
    assert problem.instead == f"set {PARTITION_VARIABLE}=38,40"
    assert judge(pp_layer_partition=problem.instead.rpartition("=")[2]) == []
    for pp_size in range(3, 13):
        for problem in judge(pp_size=pp_size):
            assert judge(pp_size=pp_size, pp_layer_partition=problem.instead.rpartition("=")[2]) == []


def test_more_stages_than_there_are_selections_have_no_partition():
    few = dataclasses.replace(GLM, num_hidden_layers=4, indexer_layers=(0,))
    (problem,) = judge(model=few)
    assert problem.instead == "use fewer stages"


@pytest.mark.parametrize("partition", ["", "39", "38,39", "40,40", "78,0", "-1,79", "a,b", "38;40"])
def test_a_partition_that_is_none_is_refused_by_its_name(partition):
    (problem,) = judge(pp_layer_partition=partition)
    assert problem.asked == f"{PARTITION_VARIABLE}={partition}"


def test_more_stages_than_layers_are_refused():
    (problem,) = judge(model=DEEPSEEK, pp_size=62)
    assert problem.asked == "--pp-size 62"


@pytest.mark.parametrize(
    ("settings", "changes", "flag"),
    [
        (TP_DCP, {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}, "--speculative-algorithm EAGLE"),
        (CP_DCP, {"cp_strategy": "zigzag"}, "--cp-strategy zigzag"),
        (TP_DCP, {"attn_dp_size": 2, "dcp_size": 4}, "--attn-dp-size 2"),
        (TP_DCP, {"pp_async_batch_depth": 1}, "--pp-async-batch-depth 1"),
        (TP_DCP, {"enable_dynamic_chunking": True}, "--enable-dynamic-chunking"),
    ],
)
def test_what_no_pipeline_was_run_with_is_refused(settings, changes, flag):
    (problem,) = judge(settings, pp_layer_partition="38,40", **changes)
    assert problem.asked == f"--pp-size 2 with {flag}"
    assert judge(settings, pp_size=1, **changes) == []


@pytest.mark.sglang
@pytest.mark.parametrize(("num_layers", "pp_size"), [(78, 2), (78, 4), (61, 2), (61, 7), (5, 5), (4, 3)])
def test_stages_are_those_of_sglang(num_layers, pp_size, set_layer_partition):
    from sglang.srt.distributed.utils import get_pp_indices

    set_layer_partition(None)
    bounds = [get_pp_indices(num_layers, rank, pp_size) for rank in range(pp_size)]
    assert split_layers(num_layers, pp_size) == [range(*bound) for bound in bounds]


@pytest.mark.sglang
@pytest.mark.usefixtures("registered", "on_hopper")
@pytest.mark.parametrize(("partition", "refused"), [(None, False), ("1,3", True), ("2,2", False), ("3,1", True)])
def test_sglang_hands_the_partition_and_the_layers_that_select_to_our_rule(
    tmp_path, set_layer_partition, parse_server_args, partition, refused
):
    # Layers 0 and 2 of four select.
    fields = write_checkpoint.COMMON | {"num_nextn_predict_layers": 0} | write_checkpoint.MODELS["glm"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    set_layer_partition(partition)
    command = f"--model-path {tmp_path} --device cuda --tp-size 2 --dcp-size 2 --pp-size 2 --attention-backend nsa"
    args = parse_server_args([*command.split(), "--kv-cache-dtype", "fp8_e4m3"])
    if refused:
        with pytest.raises(ValueError, match="would start a stage"):
            args.resolve_once()
    else:
        args.resolve_once()
