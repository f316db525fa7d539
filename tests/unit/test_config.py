"""Every refusal: what was asked, why not, and what would work."""

import re

import pytest

from nsa_dcp.config import ARCHITECTURES, CacheConfig, DcpConfig, ModelShape

GLM = {
    "architecture": "GlmMoeDsaForCausalLM",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_layers": (0, 1, 3),
}


def shape(**overrides):
    return ModelShape(**{**GLM, **overrides})


def refusal(message):
    """The whole message, so that what it advises is protected too."""
    return "^" + re.escape(message) + "$"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        pytest.param(
            {"tp_size": 8, "dcp_size": 3},
            ValueError,
            "dcp_size must divide tp_size, since a DCP group is a slice of the TP ranks, got dcp_size 3 with tp_size "
            "8; 1, 2, 4, 8 would work",
            id="dcp-does-not-divide-tp",
        ),
        pytest.param(
            {"tp_size": 2, "dcp_size": 4},
            ValueError,
            "dcp_size must divide tp_size, since a DCP group is a slice of the TP ranks, got dcp_size 4 with tp_size "
            "2; 1, 2 would work",
            id="dcp-larger-than-tp",
        ),
        pytest.param(
            {"tp_size": 4, "dcp_size": 2, "mode": "cp"},
            NotImplementedError,
            "dcp_size must equal the context-parallel size in cp mode, got dcp_size 2 with 4 context-parallel ranks; "
            "use --dcp-size 4, or --mode tp",
            id="cp-with-a-smaller-dcp",
        ),
        pytest.param({"tp_size": 0}, ValueError, "tp_size must be at least 1, got 0", id="no-ranks"),
        pytest.param({"dcp_size": -1}, ValueError, "dcp_size must be at least 1, got -1", id="negative-dcp"),
        pytest.param({"mode": "pp"}, ValueError, "mode must be one of tp, cp, got 'pp'", id="mode"),
        pytest.param(
            {"cp_strategy": "ring"},
            ValueError,
            "cp_strategy must be one of interleave, zigzag, got 'ring'",
            id="cp-strategy",
        ),
        pytest.param(
            {"dcp_comm_backend": "nccl"},
            ValueError,
            "dcp_comm_backend must be one of a2a, ag_rs, got 'nccl'",
            id="comm-backend",
        ),
        pytest.param(
            {"selection": "sharded"},
            ValueError,
            "selection must be one of replicated, row_split, got 'sharded'",
            id="selection",
        ),
    ],
)
def test_a_deployment_that_cannot_work_is_refused(fields, error, message):
    """Sources: sgl-project/sglang DESIGN-5 (only tp % dcp was checked)."""
    with pytest.raises(error, match=refusal(message)):
        DcpConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "cp_size"),
    [
        pytest.param({}, 1, id="one-rank"),
        pytest.param({"tp_size": 8, "dcp_size": 8}, 1, id="tp8-dcp8"),
        pytest.param({"tp_size": 6, "dcp_size": 3}, 1, id="tp6-dcp3"),
        pytest.param({"tp_size": 4, "dcp_size": 4, "mode": "cp", "cp_strategy": "zigzag"}, 4, id="cp4"),
        pytest.param({"tp_size": 4, "dcp_size": 1, "mode": "cp"}, 4, id="cp4-without-dcp"),
    ],
)
def test_a_deployment_that_works_is_accepted(fields, cp_size):
    assert DcpConfig(**fields).cp_size == cp_size


def test_heads_that_tp_cannot_split_are_refused():
    message = "tp_size must divide the model's 6 attention heads, got 4; 1, 2, 3, 6 would work"
    with pytest.raises(ValueError, match=refusal(message)):
        DcpConfig(tp_size=4, dcp_size=2).check_model(shape(num_attention_heads=6))


def test_more_heads_than_flashmla_takes_are_refused():
    message = (
        "a DCP group must gather at most 128 heads, the most FlashMLA takes, got 256 (256 heads, tp_size 8, dcp_size "
        "8); a larger tp_size, or a smaller dcp_size, would work"
    )
    with pytest.raises(NotImplementedError, match=refusal(message)):
        DcpConfig(tp_size=8, dcp_size=8).check_model(shape(num_attention_heads=256))


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        pytest.param({"tp_size": 8, "dcp_size": 8}, 128, id="128-gathered"),
        pytest.param({"tp_size": 8, "dcp_size": 4}, 256, id="256-heads-in-smaller-groups"),
        pytest.param({"tp_size": 3, "dcp_size": 3}, 6, id="6-heads-over-3-ranks"),
    ],
)
def test_gathered_heads_are_counted_per_group(config, heads):
    """Counted unpadded, over the DCP group. Source: vllm-project/vllm 44573."""
    DcpConfig(**config).check_model(shape(num_attention_heads=heads))


def test_context_parallel_prefill_attends_with_all_heads():
    """Every cp rank holds every head in prefill, whatever the DCP group gathers in decode."""
    config = {"tp_size": 8, "dcp_size": 1}
    DcpConfig(**config).check_model(shape(num_attention_heads=256))
    with pytest.raises(NotImplementedError, match=r"^a DCP group must gather at most 128 heads.* got 256 \(256 heads"):
        DcpConfig(**config, mode="cp").check_model(shape(num_attention_heads=256))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "(none named)"])
def test_an_architecture_without_sparse_attention_is_refused(architecture):
    message = (
        f"architecture {architecture} is not supported: nsa-dcp serves DeepSeek Sparse Attention models, "
        "GlmMoeDsaForCausalLM and DeepseekV32ForCausalLM"
    )
    with pytest.raises(NotImplementedError, match=refusal(message)):
        shape(architecture=architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_served_architectures_are_accepted(architecture):
    assert shape(architecture=architecture).architecture == architecture


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        pytest.param({"kv_lora_rank": 256}, "(256, 64, 128)", id="kv_lora_rank"),
        pytest.param({"qk_rope_head_dim": 32}, "(512, 32, 128)", id="qk_rope_head_dim"),
        pytest.param({"index_head_dim": 64}, "(512, 64, 64)", id="index_head_dim"),
    ],
)
def test_head_dims_that_the_row_format_does_not_hold_are_refused(fields, got):
    message = (
        "kv_lora_rank, qk_rope_head_dim and index_head_dim must be (512, 64, 128), the row format of FlashMLA and "
        f"DeepGEMM, got {got}"
    )
    with pytest.raises(NotImplementedError, match=refusal(message)):
        shape(**fields)


@pytest.mark.parametrize(
    ("layers", "got"), [pytest.param((1, 2), "[1, 2]", id="late"), pytest.param((), "[]", id="none")]
)
def test_a_model_whose_first_layer_selects_nothing_is_refused(layers, got):
    message = (
        "indexer_layers must start with layer 0, since a layer without an indexer reuses an earlier selection, "
        f"got {got}"
    )
    with pytest.raises(ValueError, match=refusal(message)):
        shape(indexer_layers=layers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"kv_cache_dtype": "fp8_e5m2", "max_total_tokens": 1},
            "kv_cache_dtype must be one of float32, bfloat16, fp8_e4m3, got 'fp8_e5m2'",
            id="dtype",
        ),
        pytest.param({"max_total_tokens": 0}, "max_total_tokens must be at least 1, got 0", id="empty-pool"),
        pytest.param({"max_total_tokens": -5}, "max_total_tokens must be at least 1, got -5", id="negative-pool"),
    ],
)
def test_a_cache_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=refusal(message)):
        CacheConfig(**fields)


@pytest.mark.parametrize(
    ("tokens", "dcp_size", "rows"),
    [(1, 1, 64), (64, 1, 64), (65, 1, 128), (1, 8, 64), (64 * 8, 8, 64), (64 * 8 + 1, 8, 128), (1000, 3, 384)],
)
def test_a_rank_gets_whole_pages_for_its_share_of_the_tokens(tokens, dcp_size, rows):
    """The pool is stated in tokens of all ranks together. Sources: sgl-project/sglang 33448, 32730."""
    assert CacheConfig(max_total_tokens=tokens).rows(dcp_size) == rows


def test_configs_cannot_be_changed_after_they_were_checked():
    with pytest.raises(AttributeError):
        DcpConfig().tp_size = 3  # type: ignore[misc]


def test_index_keys_are_replicated_unless_asked_and_a_group_of_one_has_nothing_to_shard():
    assert not DcpConfig(tp_size=2, dcp_size=2).shards_index_keys
    assert DcpConfig(tp_size=2, dcp_size=2, index_keys="sharded").shards_index_keys
    assert not DcpConfig(tp_size=2, index_keys="sharded").shards_index_keys
    with pytest.raises(ValueError, match=refusal("index_keys must be one of replicated, sharded, got 'split'")):
        DcpConfig(index_keys="split")
