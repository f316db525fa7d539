"""Which commands are refused, and what the message says. Runs without sglang."""

import dataclasses

import pytest

from nsa_dcp.planning.served_format import head_bucket
from nsa_dcp.sglang_plugin.admission.rules.stock_rules import find_stock_refusals
from nsa_dcp.sglang_plugin.admission.validation import (
    ModelFacts,
    describe_problems,
    find_problems,
    is_served_here,
)
from tests.served_settings import CP_DCP, DEEPSEEK, GLM, HOPPER, TP_DCP


def served(**changes):
    return dataclasses.replace(TP_DCP, **changes)


@pytest.mark.parametrize("model", [GLM, DEEPSEEK], ids=["glm", "deepseek-v3.2"])
@pytest.mark.parametrize(
    "settings",
    [
        served(),
        served(dsa_prefill_backend=None, dsa_decode_backend=None, kv_cache_dtype="auto"),
        served(tp_size=4, dcp_size=2, kv_cache_dtype="bfloat16"),
        served(attn_dp_size=2, tp_size=8, dcp_size=4),
        served(dcp_comm_backend="ag_rs", dcp_replicate_q_proj=False),
        served(dcp_comm_backend="a2a", dcp_replicate_q_proj=True),
        served(speculative_algorithm="EAGLE", speculative_eagle_topk=1),
        served(speculative_algorithm="nextn"),
        served(prefill_cuda_graph="disabled", page_size=64),
        served(prefill_attention_backend=None, decode_attention_backend="dsa"),
    ],
    ids=["fp8", "unset", "dcp-below-tp", "attention-dp", "ag_rs", "a2a", "eagle", "nextn", "no-prefill-graph", "dsa"],
)
def test_a_command_that_can_be_served_has_no_problem(settings, model):
    assert find_problems(settings, model, HOPPER) == []


@pytest.mark.parametrize(
    ("changes", "asked", "instead"),
    [
        ({"prefill_attention_backend": "fa3"}, "fa3 for prefill", "--attention-backend nsa"),
        ({"decode_attention_backend": "flashinfer"}, "flashinfer for decode", "--attention-backend nsa"),
        ({"dsa_prefill_backend": "flashmla_sparse"}, "--dsa-prefill-backend flashmla_sparse", "flashmla_kv"),
        ({"dsa_decode_backend": "trtllm"}, "--dsa-decode-backend trtllm", "flashmla_kv"),
        ({"dcp_comm_backend": "fi_a2a"}, "--dcp-comm-backend fi_a2a", "a2a or ag_rs"),
        ({"dcp_comm_backend": "ag_rs", "dcp_replicate_q_proj": True}, "--dcp-replicate-q-proj", "a2a"),
        ({"prefill_cuda_graph": "full"}, "--cuda-graph-backend-prefill full", "disabled"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2", "fp8_e4m3 or bfloat16"),
        ({"page_size": 128}, "--page-size 128", "--page-size 64"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM", "EAGLE or NEXTN"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
            "--speculative-eagle-topk 4",
            "--speculative-eagle-topk 1",
        ),
        ({"tp_size": 6, "dcp_size": 4}, "--tp-size 6 --dcp-size 4", "--tp-size 4 or 8 or 16"),
        ({"tp_size": 8, "dcp_size": 3}, "--tp-size 8 --dcp-size 3", "--dcp-size 2 or 4 or 8"),
    ],
    ids=lambda value: "-".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else "",
)
def test_an_unsupported_command_is_refused_by_name_with_what_would_work(changes, asked, instead):
    (problem,) = find_problems(served(**changes), GLM, HOPPER)
    assert asked in problem.asked
    assert problem.reason
    assert instead in problem.instead


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (dataclasses.replace(GLM, index_kpool=4), "index_kpool 4"),
        (dataclasses.replace(GLM, qk_rope_head_dim=0), "a latent of 512 + 0 values"),
        (dataclasses.replace(GLM, index_topk=2000), "index_topk 2000"),
        (dataclasses.replace(GLM, architecture="LongcatFlashForCausalLM"), "architecture LongcatFlashForCausalLM"),
    ],
    ids=["pooled-index-keys", "no-rope", "ragged-width", "unchecked-architecture"],
)
def test_an_unsupported_checkpoint_is_refused(model, asked):
    (problem,) = find_problems(TP_DCP, model, HOPPER)
    assert problem.asked == asked


@pytest.mark.parametrize(
    ("tp_size", "attn_dp_size", "dcp_size", "allowed"),
    [(4, 2, 2, True), (8, 2, 4, True), (8, 4, 2, True), (4, 4, 2, False), (8, 2, 8, False), (8, 4, 4, False)],
)
def test_a_dcp_group_lies_inside_one_attention_dp_shard(tp_size, attn_dp_size, dcp_size, allowed):
    problems = find_problems(served(tp_size=tp_size, attn_dp_size=attn_dp_size, dcp_size=dcp_size), GLM, HOPPER)
    assert (problems == []) is allowed
    if not allowed:
        assert "one attention-DP shard" in str(problems[0])
        assert f"--attn-dp-size {attn_dp_size}" in problems[0].asked


@pytest.mark.parametrize(
    ("model", "tp_size", "attn_dp_size", "dcp_size", "gathered"),
    [(DEEPSEEK, 8, 1, 8, 128), (DEEPSEEK, 2, 2, 1, None), (DEEPSEEK, 8, 4, 2, 128), (GLM, 2, 1, 2, 64)],
    ids=["v3.2-tp8-dcp8", "dcp-off", "v3.2-dp4-dcp2", "glm-tp2-dcp2"],
)
def test_gathered_heads_up_to_128_are_served(model, tp_size, attn_dp_size, dcp_size, gathered):
    assert find_problems(served(tp_size=tp_size, attn_dp_size=attn_dp_size, dcp_size=dcp_size), model, HOPPER) == []
    if gathered:
        assert head_bucket(gathered) == gathered


@pytest.mark.parametrize("size", [0, -1, -8])
@pytest.mark.parametrize(
    "field",
    ["tp_size", "dp_size", "pp_size", "attn_dp_size", "attn_cp_size", "page_size", "speculative_eagle_topk"],
)
@pytest.mark.parametrize("base", [TP_DCP, CP_DCP], ids=["tp-dcp", "cp-dcp"])
def test_a_size_below_1_is_refused_by_its_name_alone(base, field, size):
    settings = dataclasses.replace(base, speculative_algorithm="EAGLE", **{field: size})
    (problem,) = find_problems(settings, GLM, HOPPER)
    assert problem.asked == f"--{field.replace('_', '-')} {size}"
    assert "at least 1" in problem.reason


@pytest.mark.parametrize("base", [TP_DCP, CP_DCP], ids=["tp-dcp", "cp-dcp"])
def test_a_config_without_heads_is_judged_and_not_divided_by(base):
    settings = dataclasses.replace(base, chunked_prefill_size=8192, enable_hisparse=True)
    problems = find_problems(settings, dataclasses.replace(GLM, num_attention_heads=0), HOPPER)
    assert [problem.asked for problem in problems] == ["--enable-hisparse"]


def test_sizes_below_1_do_not_hide_the_other_problems():
    problems = find_problems(served(tp_size=0, attn_dp_size=-2, page_size=0, enable_hisparse=True), GLM, HOPPER)
    assert [problem.asked for problem in problems] == [
        "--tp-size 0",
        "--attn-dp-size -2",
        "--page-size 0",
        "--enable-hisparse",
    ]


def test_flags_of_context_parallelism_are_judged_without_it_too():
    (split,) = find_problems(served(enable_dsa_cache_layer_split=True), GLM, HOPPER)
    assert split.asked == "--enable-dsa-cache-layer-split"
    (sliced,) = find_problems(served(enable_cp_decode_attn_tp=True), DEEPSEEK, HOPPER)
    assert sliced.asked == "--enable-cp-decode-attn-tp with DeepseekV32ForCausalLM"
    assert find_problems(served(enable_cp_decode_attn_tp=True), GLM, HOPPER) == []


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"dcp_size": 0}, "--dcp-size 0"),
        ({"dcp_size": -2}, "--dcp-size -2"),
        ({"dcp_comm_backend": "a2a"}, "--dcp-comm-backend a2a with --dcp-size 1"),
        ({"dcp_replicate_q_proj": True}, "--dcp-replicate-q-proj with --dcp-size 1"),
        ({"enable_prefill_cp": True}, "--enable-prefill-cp without --cp-strategy"),
        ({"attn_dp_size": 2, "dp_size": 2}, "--dp-size 2 with --attn-dp-size 2"),
        ({"attn_cp_size": 3}, "--tp-size 8 --attn-dp-size 1 --attn-cp-size 3"),
        ({"enable_dsa_cache_layer_split": True}, "--enable-dsa-cache-layer-split"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sglangs_own_refusals_are_known(changes, asked):
    stock = dataclasses.replace(TP_DCP, dcp_size=1)
    assert find_stock_refusals(stock) == []
    (problem,) = find_stock_refusals(dataclasses.replace(stock, **changes))
    assert problem.asked == asked
    assert problem.reason and problem.instead


def test_a_cache_split_by_layers_on_a_prefill_worker_is_left_to_sglang():
    worker = {"disaggregation_mode": "prefill", "enable_prefill_cp": True, "cp_strategy": "interleave"}
    settings = served(dcp_size=1, enable_dsa_cache_layer_split=True, **worker)
    assert find_stock_refusals(settings) == []


def test_more_gathered_heads_than_a_kernel_takes_are_refused():
    wide = dataclasses.replace(DEEPSEEK, num_attention_heads=256)
    (problem,) = find_problems(TP_DCP, wide, HOPPER)
    assert "256 gathered heads" in problem.reason


def test_all_problems_of_a_command_are_reported_together():
    problems = find_problems(served(enable_hisparse=True, page_size=1, dcp_comm_backend="fi_a2a"), GLM, HOPPER)
    message = describe_problems(problems, 8)
    assert len(problems) == 3
    for flag in ("--enable-hisparse", "--page-size 1", "fi_a2a"):
        assert flag in message


@pytest.mark.parametrize(
    ("settings", "model", "capability"),
    [
        (served(dcp_size=1, enable_hisparse=True), GLM, HOPPER),
        (served(speculative_algorithm="NGRAM", page_size=1), ModelFacts(is_dsa=False), HOPPER),
        (served(dsa_prefill_backend="trtllm", dsa_decode_backend="trtllm", enable_hisparse=True), GLM, (10, 0)),
        (served(dsa_prefill_backend=None, dsa_decode_backend=None), GLM, (10, 0)),
    ],
    ids=["dcp-off", "no-dsa", "blackwell-trtllm", "blackwell-unset"],
)
def test_a_command_that_is_not_ours_is_left_alone(settings, model, capability):
    assert not is_served_here(settings, model, capability)
    assert find_problems(settings, model, capability) == []


def test_flashmla_kv_on_another_gpu_is_refused():
    (problem,) = find_problems(TP_DCP, GLM, (10, 0))
    assert "10.0" in problem.asked


@pytest.mark.parametrize(("heads", "bucket"), [(1, 64), (32, 64), (64, 64), (65, 128), (128, 128)])
def test_head_bucket_is_the_smallest_kernel_that_holds_them(heads, bucket):
    assert head_bucket(heads) == bucket


@pytest.mark.parametrize("heads", [0, -1, 129])
def test_head_bucket_refuses_what_no_kernel_holds(heads):
    with pytest.raises(ValueError, match="num_heads must be in"):
        head_bucket(heads)
