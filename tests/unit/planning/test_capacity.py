"""The capacity formula against public measured pools, and the plan's own arithmetic."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_dcp.planning.capacity import GIB, bytes_per_token, plan, temporary_buffers
from nsa_dcp.planning.dimensions import dims_from_config, preset_dims

GLM, DEEPSEEK = preset_dims("glm-5.2"), preset_dims("deepseek-v3.2")
ONE_LAYER = dims_from_config(
    {
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        "max_position_embeddings": 4096,
    },
    name="one layer",
)


@pytest.mark.parametrize(
    ("dcp_size", "few_shards", "many_shards", "measured"),
    [
        pytest.param(8, 1, 8, 3_063_296 / 4_174_336, id="dcp 8 replicated against sharded"),
        pytest.param(8, 4, 8, 3_964_928 / 4_174_336, id="dcp 8 four shards against eight"),
        pytest.param(4, 2, 4, 1_984_256 / 2_088_704, id="dcp 4 two shards against four"),
    ],
)
def test_pool_ratios_match_measured_pools(dcp_size, few_shards, many_shards, measured):
    # Pools of a GLM-5.2 server on 8 GPUs: local-inference-lab/rtx6kpro#35.
    few, many = (
        bytes_per_token(GLM, "fp8_e4m3", dcp_size, index_shards=shards).total for shards in (few_shards, many_shards)
    )
    assert many / few == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype", "multiples"),
    [
        pytest.param(GLM, "fp8_e4m3", (1.0, 1.90, 3.47, 5.88), id="glm fp8"),
        pytest.param(GLM, "bfloat16", (1.0, 1.94, 3.67, 6.61), id="glm bf16"),
        pytest.param(DEEPSEEK, "fp8_e4m3", (1.0, 1.71, 2.66, 3.68), id="deepseek fp8"),
        pytest.param(DEEPSEEK, "bfloat16", (1.0, 1.81, 3.06, 4.65), id="deepseek bf16"),
    ],
)
def test_multiples_over_dcp_1_with_replicated_index_keys(model, kv_cache_dtype, multiples):
    rows = plan(model, gpu_memory_gib=40, kv_cache_dtypes=(kv_cache_dtype,)).rows
    assert [row.dcp_size for row in rows] == [1, 2, 4, 8]
    assert [round(row.multiple_over_dcp1, 2) for row in rows] == list(multiples)
    # The whole pages that are really there say the same.
    assert [row.tokens_per_node / rows[0].tokens_per_node for row in rows] == pytest.approx(multiples, abs=0.01)


def test_fully_sharded_index_keys_scale_with_dcp_size():
    rows = plan(GLM, gpu_memory_gib=40, kv_cache_dtypes=("fp8_e4m3",), index_shards=8).rows
    assert [row.index_shards for row in rows] == [1, 2, 4, 8]
    assert [row.multiple_over_dcp1 for row in rows] == pytest.approx([1, 2, 4, 8])


def test_bytes_per_token_are_split_by_holder():
    cost = bytes_per_token(GLM, "fp8_e4m3", 8, draft_layers=1)
    assert (cost.latent, cost.index_keys, cost.draft) == (78 * 656 / 8, 21 * 132, 656 + 132)
    assert cost.total == 6396 + 2772 + 788
    assert bytes_per_token(GLM, "bfloat16", 2).latent == 78 * 1152 / 2


def test_only_layers_with_an_indexer_are_charged_for_index_keys():
    shared = dims_from_config(
        {**_config_of(4), "indexer_types": ["full", "shared", "full", "shared"]}, name="half of the layers"
    )
    assert bytes_per_token(shared, "fp8_e4m3", 1).index_keys == 2 * 132


@given(
    gib=st.floats(0.01, 300),
    dcp_size=st.sampled_from([1, 2, 4, 8]),
    page_size=st.sampled_from([1, 64, 128]),
    kv_cache_dtype=st.sampled_from(["fp8_e4m3", "bfloat16"]),
    draft_layers=st.integers(0, 2),
)
def test_a_pool_is_the_most_whole_pages_within_the_budget(gib, dcp_size, page_size, kv_cache_dtype, draft_layers):
    (row,) = plan(
        ONE_LAYER,
        gpu_memory_gib=gib,
        kv_cache_dtypes=(kv_cache_dtype,),
        dcp_sizes=(dcp_size,),
        page_size=page_size,
        draft_layers=draft_layers,
    ).rows
    budget, row_bytes = int(gib * GIB), row.bytes_per_token.total * dcp_size
    assert row.tokens_per_gpu % page_size == 0
    assert row.tokens_per_gpu * row_bytes <= budget < (row.tokens_per_gpu + page_size) * row_bytes
    assert row.tokens_per_node == row.tokens_per_gpu * dcp_size
    assert row.largest_context == min(row.tokens_per_node, 4096)


def test_attention_dp_shards_and_replicas_add_up_to_the_node():
    kwargs = {"gpu_memory_gib": 40, "kv_cache_dtypes": ("fp8_e4m3",), "dcp_sizes": (2,)}
    (one,) = plan(GLM, tp_size=8, **kwargs).rows
    (sharded,) = plan(GLM, tp_size=8, attn_dp_size=4, **kwargs).rows
    (replicas,) = plan(GLM, tp_size=2, **kwargs).rows
    assert sharded.tokens_per_node == replicas.tokens_per_node == 4 * one.tokens_per_node
    assert sharded.tokens_per_gpu == one.tokens_per_gpu


def test_the_budget_is_what_the_fraction_leaves_beside_the_weights():
    whole = plan(GLM, gpu_memory_gib=141, mem_fraction_static=0.5, weights_gib=30.5)
    assert whole.budget_bytes == 40 * GIB
    assert whole.rows == plan(GLM, gpu_memory_gib=40).rows


def test_a_head_count_beyond_the_kernel_is_marked_refused():
    rows = plan(DEEPSEEK, gpu_memory_gib=40, tp_size=4, kv_cache_dtypes=("fp8_e4m3",)).rows
    assert [row.refusal for row in rows] == ["", "", ""]
    wide = dims_from_config({**_config_of(2), "num_attention_heads": 256}, name="wide")
    assert "256 gathered heads exceed FlashMLA's 128" in plan(wide, gpu_memory_gib=1).rows[3].refusal


def test_temporary_buffers_count_heads_rows_and_context():
    buffers = temporary_buffers(GLM, "fp8_e4m3", 8, local_heads=8, rows=8192, context=1000, pool_rows=600_000)
    assert buffers.gathered_q == 8192 * 64 * 576 * 2
    assert buffers.exchange == 2 * 8192 * 64 * (1024 + 4)
    assert buffers.attention_scratch == (264 + 132) * 64 * 2048
    assert buffers.page_gather == 1024 * 656  # two widened pages of 512 tokens
    assert buffers.dequantised == 600_000 * 1152
    alone = temporary_buffers(GLM, "fp8_e4m3", 1, local_heads=8, rows=8, context=1000, pool_rows=640)
    assert (alone.gathered_q, alone.exchange, alone.page_gather, alone.dequantised) == (0, 0, 0, 0)
    assert alone.attention_scratch == (8 + 132) * 64 * 2048
    wide = temporary_buffers(DEEPSEEK, "bfloat16", 8, local_heads=16, rows=8192, context=1, pool_rows=640)
    assert (wide.attention_scratch, wide.dequantised) == ((132 + 66) * 128 * 2048, 0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"gpu_memory_gib": 0}, "gpu_memory_gib must be a positive number, got 0"),
        ({"gpu_memory_gib": -1}, "gpu_memory_gib must be a positive number, got -1"),
        ({"gpu_memory_gib": math.nan}, "gpu_memory_gib must be a positive number, got nan"),
        ({"gpu_memory_gib": math.inf}, "gpu_memory_gib must be a positive number, got inf"),
        ({"mem_fraction_static": 1.5}, "mem_fraction_static must be at most 1, got 1.5"),
        ({"mem_fraction_static": 0}, "mem_fraction_static must be a positive number, got 0"),
        ({"weights_gib": -1}, "weights_gib must be 0 or more, got -1"),
        ({"weights_gib": 40}, "must exceed weights_gib"),
        ({"gpu_memory_gib": 1e-6}, "gpu_memory_gib must leave room for one page"),
        ({"kv_cache_dtypes": ("int4",)}, "kv_cache_dtype must be one of fp8_e4m3, bfloat16, got 'int4'"),
        ({"kv_cache_dtypes": ()}, "kv_cache_dtypes must name at least one"),
        ({"dcp_sizes": (3,)}, "dcp_size must divide tp_size / attn_dp_size = 8, got 3"),
        ({"dcp_sizes": (0,)}, "dcp_size must be a positive integer, got 0"),
        ({"index_shards": 3}, "index_shards must divide dcp_size, got 3 at dcp_size 4"),
        ({"index_shards": -1}, "index_shards must be a positive integer, got -1"),
        ({"tp_size": 0}, "tp_size must be a positive integer, got 0"),
        ({"tp_size": 16}, "gpus_per_node must be a multiple of tp_size, got 8 and 16"),
        ({"attn_dp_size": 3}, "tp_size must be a multiple of attn_dp_size, got 8 and 3"),
        ({"draft_layers": -1}, "draft_layers must be an integer of 0 or more, got -1"),
        ({"page_size": 0}, "page_size must be a positive integer, got 0"),
        ({"context": 0}, "context must be a positive integer, got 0"),
        ({"tp_size": 6, "gpus_per_node": 6}, "num_attention_heads must be a multiple of 6, got 64"),
    ],
)
def test_bad_sizes_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        plan(GLM, **{"gpu_memory_gib": 40, **kwargs})


def _config_of(num_layers):
    return {
        "num_hidden_layers": num_layers,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        "max_position_embeddings": 4096,
    }


def test_a_pool_ends_where_slots_would_not_fit_32_bits():
    """Memory for more than 2**31 tokens: the plan holds what the table says, and says what ends it."""
    from nsa_dcp.planning.limits import largest_pool

    (row,) = plan(preset_dims("glm-5.2"), gpu_memory_gib=1_000_000, kv_cache_dtypes=["fp8_e4m3"], dcp_sizes=[8]).rows
    assert row.tokens_per_gpu * 8 == largest_pool(8)[0]
    assert row.cap == "slots of 32 bits"
    (row,) = plan(preset_dims("glm-5.2"), gpu_memory_gib=90, kv_cache_dtypes=["fp8_e4m3"], dcp_sizes=[8]).rows
    assert row.cap == ""


def test_a_pipelines_pool_past_16_million_tokens_is_held_whole():
    """sglang's gather of index keys ends at 16,268,800 tokens; ours does not."""
    (row,) = plan(
        preset_dims("glm-5.2"),
        gpu_memory_gib=141,
        mem_fraction_static=0.85,
        weights_gib=24,
        kv_cache_dtypes=["fp8_e4m3"],
        dcp_sizes=[8],
        pp_size=2,
        pp_layer_partition="38,40",
        gpus_per_node=16,
    ).rows
    assert (row.tokens_per_node, row.cap) == (22_373_376, "")


@pytest.mark.parametrize(("asked", "held"), [(None, 2048), (512, 512), (1, 1)])
def test_a_plan_names_what_its_requests_hold_beside_the_pools(asked, held):
    planned = plan(
        preset_dims("glm-5.2"),
        gpu_memory_gib=139,
        mem_fraction_static=0.85,
        weights_gib=50,
        kv_cache_dtypes=["fp8_e4m3"],
        dcp_sizes=[8],
        max_running_requests=asked,
    )
    (row,) = planned.rows
    assert row.requests == held
    assert row.held.request_table == (held + 1) * (1_048_576 + 4) * 4
    assert planned.left_bytes == int(139 * 0.15 * 2**30)
    assert planned.as_dict()["rows"][0]["held"]["total"] == row.held.total
