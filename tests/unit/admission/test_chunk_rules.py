"""Which prefill chunks are refused, and that the size which a refusal names is accepted."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.sglang_plugin.admission.validation import ModelFacts, ServerSettings, find_problems

HOPPER = (9, 0)
GLM = ModelFacts(
    is_dsa=True,
    architecture="GlmMoeDsaForCausalLM",
    num_attention_heads=64,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_topk=2048,
    num_hidden_layers=78,
    hidden_size=6144,
    context_length=1_048_576,
    indexer_layers=(0, 1, *range(2, 78, 4)),
)
DEEPSEEK = dataclasses.replace(
    GLM,
    architecture="DeepseekV32ForCausalLM",
    num_attention_heads=128,
    num_hidden_layers=61,
    hidden_size=7168,
    context_length=163_840,
    indexer_layers=tuple(range(61)),
)
TP_DCP = ServerSettings(dcp_size=8, tp_size=8, kv_cache_dtype="fp8_e4m3", grammar_backend="none")
CP_DCP = dataclasses.replace(TP_DCP, attn_cp_size=8, enable_prefill_cp=True, cp_strategy="interleave")
DRAFT = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}


def judge(settings, model, **changes):
    return find_problems(dataclasses.replace(settings, **changes), model, HOPPER)


def followed(advice: str) -> list[dict[str, int]]:
    """Each way that a refusal advises, as settings."""
    chunk = [{"chunked_prefill_size": int(size)} for size in re.findall(r"--chunked-prefill-size (\d+)", advice)]
    most = [{"chunked_prefill_size": int(size)} for size in re.findall(r"of at most (\d+)", advice)]
    flags = re.findall(r"--(context-length|max-prefill-tokens) (\d+)", advice)
    return chunk + most + ([{name.replace("-", "_"): int(size) for name, size in flags}] if flags else [])


@pytest.mark.parametrize(
    ("base", "model", "changes", "most"),
    [
        (TP_DCP, GLM, {}, 74_606),
        (TP_DCP, DEEPSEEK, {}, 37_303),
        (CP_DCP, GLM, {}, 74_606),
        (TP_DCP, GLM, {"dcp_size": 2}, 349_525),
        (TP_DCP, DEEPSEEK, {"dcp_size": 2}, 261_123),
        (TP_DCP, GLM, DRAFT, 65_403),
        (TP_DCP, DEEPSEEK, DRAFT, 37_303),
        (CP_DCP, GLM, DRAFT, 74_606),
    ],
    ids=["glm", "deepseek-v3.2", "cp-dcp", "glm-dcp2", "deepseek-dcp2", "glm-draft", "deepseek-draft", "cp-dcp-draft"],
)
def test_a_chunk_that_a_kernel_would_not_reach_is_refused(base, model, changes, most):
    at_most = most // 64 * 64
    for size in (64, 8192, 32_768, at_most):
        assert judge(base, model, chunked_prefill_size=size, **changes) == []
    for size in (at_most + 64, 2**20, 2**31):
        (problem,) = judge(base, model, chunked_prefill_size=size, **changes)
        assert problem.asked == f"--chunked-prefill-size {size}"
        assert f"{most:,} tokens" in problem.reason
        assert f"of at most {at_most}" in problem.instead


def test_the_usual_large_chunks_of_both_models_are_served():
    """DeepSeek-V3.2's 32,768 and GLM's 65,536 were accepted and wrong while sglang joined their queries."""
    assert judge(TP_DCP, DEEPSEEK, chunked_prefill_size=32_768) == []
    assert judge(TP_DCP, GLM, chunked_prefill_size=65_536) == []


@pytest.mark.parametrize("size", [1, 63, 10_000, 74_606])
def test_a_chunk_of_broken_pages_is_refused_as_sglang_does(size):
    (problem,) = judge(TP_DCP, GLM, chunked_prefill_size=size)
    assert "whole pages of 64" in problem.reason


def test_a_chunk_is_judged_by_what_a_shard_gets():
    """sglang divides --chunked-prefill-size by --attn-dp-size, and drops the remainder."""
    shards = {"attn_dp_size": 4, "dcp_size": 2, "tp_size": 8}
    assert judge(TP_DCP, GLM, chunked_prefill_size=131_072, **shards) == []
    assert judge(TP_DCP, GLM, chunked_prefill_size=131_073, **shards) == []
    assert judge(TP_DCP, GLM, chunked_prefill_size=32_768, chunk_is_divided=True, **shards) == []
    # What a shard's merge reaches is more than the MLPs do with the rows of four shards.
    assert 2**31 // (32 * 514) > 2**31 // (4 * 6144)
    most = (2**31 - 1) // (4 * 6144) // 64 * 64
    assert judge(TP_DCP, GLM, chunked_prefill_size=4 * most, **shards) == []
    assert judge(TP_DCP, GLM, chunked_prefill_size=most, chunk_is_divided=True, **shards) == []
    for size, divided in ((4 * most + 256, False), (most + 64, True)):
        (problem,) = judge(TP_DCP, GLM, chunked_prefill_size=size, chunk_is_divided=divided, **shards)
        assert f"of at most {4 * most}" in problem.instead
    (problem,) = judge(TP_DCP, GLM, chunked_prefill_size=130_000, **shards)
    assert problem.asked == "--chunked-prefill-size 130000, 32500 for each of 4 shards"


@pytest.mark.parametrize("size", [-1, 0])
def test_without_chunks_the_longest_prompt_is_one(size):
    assert judge(TP_DCP, GLM, chunked_prefill_size=size, context_length=32_768) == []
    assert judge(TP_DCP, GLM, chunked_prefill_size=size, context_length=74_606) == []
    assert judge(TP_DCP, dataclasses.replace(GLM, context_length=65_536), chunked_prefill_size=size) == []
    for changes in ({}, {"context_length": 74_607}, {"context_length": 4096, "max_prefill_tokens": 74_607}):
        (problem,) = judge(TP_DCP, GLM, chunked_prefill_size=size, **changes)
        assert problem.asked == f"--chunked-prefill-size {size}"
        for way in followed(problem.instead):
            assert judge(TP_DCP, GLM, **{"chunked_prefill_size": size, **changes, **way}) == [], way


def test_without_chunks_a_model_of_unknown_context_is_refused():
    unknown = dataclasses.replace(GLM, context_length=0)
    (problem,) = judge(TP_DCP, unknown, chunked_prefill_size=-1)
    assert "of any length" in problem.reason
    assert judge(TP_DCP, unknown, chunked_prefill_size=-1, context_length=74_606) == []


@settings(max_examples=150)
@given(
    st.sampled_from([(8, 1, 8), (8, 1, 2), (8, 2, 4), (8, 4, 2), (16, 1, 16), (16, 2, 8), (4, 1, 4), (32, 1, 32)]),
    st.sampled_from([GLM, DEEPSEEK]),
    st.booleans(),
    st.one_of(st.integers(-2, 2**22), st.integers(0, 2**16).map(lambda pages: 64 * pages)),
    st.one_of(st.none(), st.integers(1, 2**21)),
    st.one_of(st.just(16_384), st.integers(1, 2**20)),
)
def test_what_a_refused_chunk_is_advised_is_accepted(topology, model, draft, chunk, context, together):
    tp_size, shards, dcp_size = topology
    changes = {
        "tp_size": tp_size,
        "attn_dp_size": shards,
        "dcp_size": dcp_size,
        "chunked_prefill_size": chunk,
        "context_length": context,
        "max_prefill_tokens": together,
        **(DRAFT if draft else {}),
    }
    if model.num_attention_heads // (tp_size // shards) * dcp_size > 128:
        return
    for problem in judge(TP_DCP, model, **changes):
        ways = followed(problem.instead)
        assert ways
        for way in ways:
            assert judge(TP_DCP, model, **{**changes, **way}) == [], (problem, way)
