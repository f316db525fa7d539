"""CP-DCP commands in sglang's own resolution of real ServerArgs, which without us refuses all of them."""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("registered", "on_hopper")]

CP_DCP = {
    "tp_size": 8,
    "dcp_size": 8,
    "enable_prefill_cp": True,
    "cp_strategy": "interleave",
    "attention_backend": "nsa",
    "kv_cache_dtype": "fp8_e4m3",
}
DEEPSEEK = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "num_attention_heads": 128}


@pytest.fixture
def resolve(model_path):
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    def run(config=None, **settings):
        settings = CP_DCP | settings
        server_args = ServerArgs(model_path=model_path(**(config or {})), device="cuda", **settings)
        server_args.resolve_once()
        return resolving_view(server_args)

    return run


@pytest.mark.parametrize("name", ["nsa", "dsa"])
@pytest.mark.parametrize(
    "settings", [{}, {"attn_cp_size": 8}, {"cp_strategy": "zigzag"}], ids=["unset", "set", "zigzag"]
)
def test_the_cp_group_becomes_the_dcp_group(resolve, name, settings):
    view = resolve(attention_backend=name, **settings)
    assert (view.attn_cp_size, view.dcp_size, view.attn_dp_size, view.page_size) == (8, 8, 1, 64)
    assert (view.dsa_prefill_backend, view.dsa_decode_backend) == ("flashmla_kv", "flashmla_kv")
    # sglang's choice without CUDA.
    assert view.dcp_comm_backend == "ag_rs"
    assert view.cuda_graph_config.prefill.backend == "disabled"
    assert view.cuda_graph_config.decode.backend == "full"


def test_query_projections_are_not_replicated(resolve):
    assert resolve().dcp_replicate_q_proj is False
    assert resolve(dcp_comm_backend="a2a").dcp_replicate_q_proj is False


def test_decode_may_slice_the_attention_weights(resolve):
    assert resolve(enable_cp_decode_attn_tp=True).enable_cp_decode_attn_tp


def test_deepseek_resolves_with_interleave(resolve):
    assert resolve(DEEPSEEK).attn_cp_size == 8


@pytest.mark.parametrize(
    ("config", "settings", "sentence"),
    [
        ({}, {"attn_cp_size": 4}, "--attn-cp-size 4 with --dcp-size 8"),
        ({}, {"dcp_size": 4}, "--dcp-size 4 with --attn-cp-size 8"),
        ({}, {"cp_strategy": None}, "--enable-prefill-cp without --cp-strategy"),
        (DEEPSEEK, {"cp_strategy": "zigzag"}, "--cp-strategy zigzag with DeepseekV32ForCausalLM"),
        (DEEPSEEK, {"enable_cp_decode_attn_tp": True}, "--enable-cp-decode-attn-tp with DeepseekV32ForCausalLM"),
        ({}, {"dcp_replicate_q_proj": True}, "--dcp-replicate-q-proj with --enable-prefill-cp"),
        ({}, {"cuda_graph_backend_prefill": "breakable"}, "--cuda-graph-backend-prefill breakable"),
        # Another way of saying --attn-dp-size, which sglang translates while it resolves.
        ({}, {"dp_size": 2, "dcp_size": 8}, "--attn-dp-size 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_by_us(resolve, config, settings, sentence):
    with pytest.raises(ValueError, match="nsa-dcp cannot serve this command") as error:
        resolve(config, **settings)
    assert sentence in str(error.value)


def test_without_us_sglang_refuses_the_pair(model_path, monkeypatch):
    """When this fails, sglang serves CP with DCP itself: see docs/upstream.md."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    server_args = ServerArgs(model_path=model_path(), device="cuda", **CP_DCP)
    with pytest.raises(ValueError, match="--dcp-size > 1 does not support --enable-prefill-cp"):
        server_args.resolve_once()


def test_what_we_leave_out_of_sglangs_step_is_that_refusal_alone(resolve):
    """Its other checks cannot fail here: DCP is on, and fi_a2a and replicated queries are refused before."""
    import ast
    import inspect
    import textwrap

    from sglang.srt.arg_groups.parallel_hook import handle_decode_context_parallelism

    step = ast.parse(textwrap.dedent(inspect.getsource(handle_decode_context_parallelism))).body[0]
    assert [ast.unparse(statement).split("\n")[0] for statement in step.body] == [
        "run_post_process_pass(server_args, _dcp_comm_backend_default)",
        "cfg = resolving_view(server_args)",
        "if cfg.dcp_size < 1:",
        "if cfg.dcp_size > 1 and cfg.enable_prefill_cp:",
        "if cfg.dcp_comm_backend in ('a2a', 'fi_a2a') and cfg.dcp_size <= 1:",
        "if cfg.dcp_comm_backend == 'fi_a2a' and (not get_platform().is_cuda):",
        "if cfg.dcp_replicate_q_proj:",
    ]
