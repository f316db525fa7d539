"""Which CP-DCP commands are refused, and what the message says. Runs without sglang."""

import dataclasses

import pytest

from nsa_dcp.sglang_plugin.admission.validation import find_problems
from tests.served_settings import CP_DCP, DEEPSEEK, GLM, HOPPER, TP_DCP


def served(**changes):
    return dataclasses.replace(CP_DCP, **changes)


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        (served(), GLM),
        (served(), DEEPSEEK),
        # As typed: sglang widens the CP group to the whole shard.
        (served(attn_cp_size=1), GLM),
        (served(enable_cp_decode_attn_tp=True), GLM),
        (served(cp_strategy="zigzag"), GLM),
        (served(cp_strategy="zigzag", attn_cp_size=1, enable_cp_decode_attn_tp=True), GLM),
        (served(attn_dp_size=2, attn_cp_size=4, dcp_size=4, grammar_backend="none"), GLM),
        (served(grammar_backend="xgrammar"), GLM),
        (served(speculative_algorithm="NEXTN", speculative_eagle_topk=1), GLM),
        (served(dcp_comm_backend="ag_rs", dcp_replicate_q_proj=False), GLM),
        (served(kv_cache_dtype="bfloat16"), DEEPSEEK),
    ],
    ids=[
        "glm",
        "deepseek-v3.2",
        "cp-size-unset",
        "sliced",
        "zigzag",
        "zigzag-sliced-unset",
        "attention-dp",
        "structured-outputs",
        "nextn",
        "ag_rs",
        "bfloat16",
    ],
)
def test_a_command_that_can_be_served_has_no_problem(settings, model):
    assert find_problems(settings, model, HOPPER) == []


@pytest.mark.parametrize(
    ("changes", "model", "asked", "instead"),
    [
        ({"enable_prefill_cp": False}, GLM, "--attn-cp-size 8 without --enable-prefill-cp", "--enable-prefill-cp"),
        ({"cp_strategy": None}, GLM, "--enable-prefill-cp without --cp-strategy", "--cp-strategy interleave"),
        ({"attn_cp_size": 4}, GLM, "--tp-size 8 --attn-cp-size 4 with --dcp-size 8", "--attn-cp-size 8 --dcp-size 8"),
        ({"attn_cp_size": 4, "dcp_size": 4}, GLM, "--attn-cp-size 4 with --dcp-size 4", "--dcp-size 8"),
        ({"dcp_size": 4}, GLM, "--dcp-size 4 with --attn-cp-size 8", "use --dcp-size 8"),
        ({"dcp_size": 4, "attn_cp_size": 1}, GLM, "--dcp-size 4 with --attn-cp-size 8", "use --dcp-size 8"),
        ({"cp_strategy": "zigzag"}, DEEPSEEK, "--cp-strategy zigzag with DeepseekV32ForCausalLM", "interleave"),
        (
            {"cp_strategy": "zigzag", "speculative_algorithm": "NEXTN"},
            GLM,
            "--cp-strategy zigzag with --speculative-algorithm NEXTN",
            "interleave",
        ),
        (
            {
                "enable_cp_decode_attn_tp": True,
                "attn_dp_size": 2,
                "attn_cp_size": 4,
                "dcp_size": 4,
                "grammar_backend": "none",
            },
            GLM,
            "--enable-cp-decode-attn-tp with --attn-dp-size 2",
            "drop --enable-cp-decode-attn-tp, or use --attn-cp-size 8 --dcp-size 8",
        ),
        ({"enable_cp_decode_attn_tp": True}, DEEPSEEK, "--enable-cp-decode-attn-tp with DeepseekV32", "drop"),
        ({"dcp_replicate_q_proj": True}, GLM, "--dcp-replicate-q-proj with --enable-prefill-cp", "leave it out"),
        (
            {"prefill_attention_backend": "nsa", "decode_attention_backend": "dsa"},
            GLM,
            "attention backends nsa for prefill and dsa for decode",
            "--attention-backend nsa",
        ),
        ({"enable_dsa_cache_layer_split": True}, GLM, "--enable-dsa-cache-layer-split", "drop it"),
        ({}, dataclasses.replace(GLM, num_attention_heads=60), "--tp-size 8 --attn-cp-size 8", "--tp-size"),
        ({}, dataclasses.replace(GLM, num_attention_heads=256), "--tp-size 8 --attn-cp-size 8", "drop"),
    ],
    ids=[
        "no-prefill-cp",
        "no-strategy",
        "attention-tp",
        "attention-tp-and-small-dcp",
        "dcp-below-cp",
        "dcp-below-unset-cp",
        "zigzag-deepseek",
        "zigzag-speculation",
        "slice-attention-dp",
        "slice-deepseek",
        "replicated-queries",
        "two-backends",
        "layer-split",
        "indivisible-heads",
        "too-many-heads",
    ],
)
def test_an_unsupported_command_is_refused_by_name_with_what_would_work(changes, model, asked, instead):
    (problem,) = find_problems(served(**changes), model, HOPPER)
    assert asked in problem.asked
    assert problem.reason
    assert instead in problem.instead


def test_a_group_across_two_attention_dp_shards_is_refused():
    (problem,) = find_problems(served(attn_dp_size=2, attn_cp_size=4), GLM, HOPPER)
    assert "one attention-DP shard" in problem.reason


@pytest.mark.parametrize("grammar_backend", [None, "xgrammar", "llguidance"])
def test_structured_outputs_with_attention_dp_are_refused(grammar_backend):
    """sglang chooses a grammar backend where none is given, and any client may send a schema."""
    changes = {"attn_dp_size": 2, "attn_cp_size": 4, "dcp_size": 4, "grammar_backend": grammar_backend}
    (problem,) = find_problems(served(**changes), GLM, HOPPER)
    assert "--attn-dp-size 2" in problem.asked
    assert "--grammar-backend none" in problem.instead
    # Without context parallelism the ranks of a shard are the attention-TP group.
    assert find_problems(dataclasses.replace(TP_DCP, attn_dp_size=2, dcp_size=4), GLM, HOPPER) == []


@pytest.mark.parametrize("speculative_algorithm", ["NEXTN", "EAGLE"])
def test_speculation_with_attention_dp_is_refused(speculative_algorithm):
    """Ranks that accept different drafts have contexts of different lengths from then on."""
    settings = served(
        attn_dp_size=2,
        attn_cp_size=4,
        dcp_size=4,
        grammar_backend="none",
        speculative_algorithm=speculative_algorithm,
        speculative_eagle_topk=1,
    )
    (problem,) = find_problems(settings, GLM, HOPPER)
    assert f"--attn-dp-size 2 and --speculative-algorithm {speculative_algorithm}" in problem.asked
    assert "drop" in problem.instead
