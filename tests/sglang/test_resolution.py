"""Our hooks in sglang's own resolution of real ServerArgs."""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("registered", "on_hopper")]

DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "index_topk": None,
}


@pytest.fixture
def resolve(model_path):
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    def run(config=None, **settings):
        server_args = ServerArgs(model_path=model_path(**(config or {})), device="cuda", **settings)
        server_args.resolve_once()
        return resolving_view(server_args)

    return run


def test_unset_sparse_backends_resolve_to_flashmla_kv(resolve):
    view = resolve(tp_size=8, dcp_size=8, attention_backend="nsa", kv_cache_dtype="fp8_e4m3")
    assert (view.dsa_prefill_backend, view.dsa_decode_backend) == ("flashmla_kv", "flashmla_kv")
    assert (view.kv_cache_dtype, view.page_size, view.attention_backend) == ("fp8_e4m3", 64, "nsa")
    assert view.cuda_graph_config.prefill.backend == "disabled"
    assert view.cuda_graph_config.decode.backend == "full"


def test_a_backend_that_was_asked_for_is_kept_and_the_other_filled(resolve):
    view = resolve(tp_size=4, dcp_size=2, attention_backend="nsa", dsa_decode_backend="flashmla_kv")
    assert (view.dsa_prefill_backend, view.dsa_decode_backend) == ("flashmla_kv", "flashmla_kv")


def test_over_a_wire_no_query_projection_is_replicated(resolve, monkeypatch):
    """The backend gathers queries: sglang's copies of their projection would be memory that nothing reads."""
    server = {"tp_size": 4, "dcp_size": 4, "attention_backend": "nsa", "dcp_comm_backend": "a2a"}
    assert resolve(**server).dcp_replicate_q_proj is True
    monkeypatch.setenv("NSA_DCP_WIRE", "peer")
    assert resolve(**server).dcp_replicate_q_proj is False
    with pytest.raises(ValueError, match="cannot serve --dcp-replicate-q-proj with NSA_DCP_WIRE=peer"):
        resolve(**server, dcp_replicate_q_proj=True)
    monkeypatch.setenv("NSA_DCP_WIRE", "nvlink")
    with pytest.raises(ValueError, match="NSA_DCP_WIRE must be one of nccl, peer, got 'nvlink'"):
        resolve(**server)


def test_without_an_attention_backend_the_models_own_is_used(resolve):
    assert resolve(tp_size=4, dcp_size=4).attention_backend == "dsa"


def test_auto_cache_dtype_says_what_it_became(resolve, caplog):
    with caplog.at_level("WARNING", logger="nsa_dcp"):
        view = resolve(tp_size=4, dcp_size=4, attention_backend="nsa")
    assert view.kv_cache_dtype == "bfloat16"
    assert any("--kv-cache-dtype auto became bfloat16" in record.message for record in caplog.records)


def test_every_problem_is_reported_before_sglang_stops_at_its_first(resolve):
    with pytest.raises(ValueError, match="for 5 reasons") as error:
        resolve(
            tp_size=4,
            attn_cp_size=2,
            dcp_size=2,
            attention_backend="nsa",
            enable_prefill_cp=True,
            cp_strategy="interleave",
            dcp_replicate_q_proj=True,
            enable_hisparse=True,
            dsa_decode_backend="trtllm",
            cuda_graph_backend_prefill="breakable",
        )
    for part in ("--attn-cp-size 2", "--dcp-replicate-q-proj", "--enable-hisparse", "trtllm", "breakable"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_graph_config": {"prefill": {"backend": "full"}}},
        {"cuda_graph_backend_prefill": "full"},
        {"decode_attention_backend": "flashinfer"},
        {"dcp_comm_backend": "fi_a2a"},
        {"enable_hierarchical_cache": True},
        {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "mooncake"},
        {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
        {"enable_unified_memory": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_real_command_that_cannot_be_served_is_refused_by_us(resolve, settings):
    with pytest.raises(ValueError, match="nsa-dcp cannot serve this command"):
        resolve(tp_size=4, dcp_size=4, attention_backend="nsa", **settings)


@pytest.mark.parametrize("page_size", [1, 32, 128])
def test_a_page_of_another_size_is_64_as_for_sglang_alone(resolve, page_size):
    assert resolve(tp_size=4, dcp_size=4, attention_backend="nsa", page_size=page_size).page_size == 64


def test_flashmla_auto_over_an_fp8_cache_is_flashmla_kv(resolve):
    settings = {"kv_cache_dtype": "fp8_e4m3", "dsa_prefill_backend": "flashmla_auto"}
    view = resolve(tp_size=4, dcp_size=4, attention_backend="nsa", **settings)
    assert view.dsa_prefill_backend == "flashmla_kv"


def test_a_local_version_of_the_same_release_is_served(resolve, monkeypatch):
    from nsa_dcp.sglang_plugin import compat

    monkeypatch.setattr(compat, "installed_version", lambda: "0.5.23+cu130")
    assert resolve(tp_size=4, dcp_size=4, attention_backend="nsa").dcp_size == 4


def test_a_group_across_two_attention_dp_shards_is_refused_however_it_was_asked_for(resolve):
    with pytest.raises(ValueError, match="--attn-dp-size 4: a DCP group must lie inside one attention-DP shard"):
        resolve(tp_size=4, dp_size=4, enable_dp_attention=True, dcp_size=2, attention_backend="nsa")


def test_attention_dp_with_dcp_inside_each_shard_resolves(resolve):
    view = resolve(tp_size=4, attn_dp_size=2, dcp_size=2, attention_backend="nsa", kv_cache_dtype="fp8_e4m3")
    assert (view.attn_dp_size, view.dcp_size, view.dsa_decode_backend) == (2, 2, "flashmla_kv")


def test_pooled_index_keys_are_refused(resolve):
    with pytest.raises(ValueError, match="index_kpool 4"):
        resolve({"index_kpool": 4}, tp_size=4, dcp_size=4, attention_backend="nsa")


def test_another_sglang_is_refused_at_the_first_step(resolve, monkeypatch):
    from nsa_dcp.sglang_plugin import compat

    monkeypatch.setattr(compat, "installed_version", lambda: "0.5.24")
    with pytest.raises(RuntimeError, match=r"needs sglang 0\.5\.23, found 0\.5\.24"):
        resolve(tp_size=4, dcp_size=4, attention_backend="nsa")


def test_what_resolution_makes_of_a_command_is_checked_as_well(resolve, monkeypatch):
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook("handle_speculative_decoding")
    def choose_something_else(server_args, previous):
        previous(server_args)
        declare_resolution(server_args, "test", dsa_decode_backend="fa3")

    with pytest.raises(ValueError, match="--dsa-decode-backend fa3"):
        resolve(tp_size=4, dcp_size=4, attention_backend="nsa")


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({}, {"tp_size": 4}),
        ({}, {"tp_size": 4, "attention_backend": "nsa", "dsa_decode_backend": "fa3"}),
        (DEEPSEEK_V2, {"tp_size": 4, "dcp_size": 4, "attention_backend": "flashinfer"}),
    ],
    ids=["dsa-without-dcp", "dsa-without-dcp-fa3", "dcp-without-dsa"],
)
def test_a_command_that_is_not_ours_resolves_exactly_as_without_us(model_path, monkeypatch, config, settings):
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.server_args import ServerArgs

    def declarations():
        server_args = ServerArgs(model_path=model_path(**config), device="cuda", random_seed=1, **settings)
        server_args.resolve_once()
        return [(source, {k: repr(v) for k, v in fields.items()}) for source, fields in server_args._resolved_overrides]

    ours = declarations()
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    assert ours == declarations()


@pytest.mark.parametrize(
    "settings",
    [
        {"dcp_size": 0},
        {"dcp_size": -2},
        {"dcp_comm_backend": "a2a"},
        {"dcp_replicate_q_proj": True},
        {"enable_prefill_cp": True},
        {"attn_dp_size": 2, "dp_size": 2},
        {"attn_cp_size": 3},
        {"enable_dsa_cache_layer_split": True},
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_what_doctor_says_sglang_refuses_sglang_refuses(resolve, settings):
    from nsa_dcp.sglang_plugin.admission.rules.stock_rules import find_stock_refusals
    from nsa_dcp.sglang_plugin.admission.server_settings import ServerSettings

    settings = {"tp_size": 4, "attention_backend": "nsa"} | settings
    judged = {name: value for name, value in settings.items() if name != "attention_backend"}
    assert find_stock_refusals(ServerSettings(**judged))
    with pytest.raises((ValueError, AssertionError)) as refusal:
        resolve(**settings)
    assert "nsa-dcp" not in str(refusal.value)


@pytest.mark.parametrize("field", ["tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "page_size"])
def test_a_size_below_1_is_refused_by_name_in_the_server(resolve, field):
    sizes = {"tp_size": 4, "dcp_size": 4} | {field: 0}
    with pytest.raises(ValueError, match=f"nsa-dcp cannot serve .*--{field.replace('_', '-')} 0: it must be"):
        resolve(attention_backend="nsa", **sizes)


@pytest.mark.parametrize(("typed", "resolved"), [(131_072, 32_768), (131_100, 32_775), (-1, -1), (400_000, 100_000)])
def test_a_chunk_is_judged_as_sglang_divides_it(resolve, typed, resolved):
    """By attention DP, in a step between our two hooks: both judge what a forward of a shard has."""
    context = {"context_length": 4096} if typed < 0 else {}
    settings = {"tp_size": 8, "attn_dp_size": 4, "dcp_size": 2, "attention_backend": "nsa", **context}
    if resolved % 64 and resolved > 0:
        with pytest.raises(ValueError, match=f"{resolved} for each of 4 shards.*whole pages of 64"):
            resolve(chunked_prefill_size=typed, **settings)
        return
    if resolved > 87_381:
        resolved_config = {"hidden_size": 6144}
        with pytest.raises(ValueError, match="of at most 349440"):
            resolve(resolved_config, chunked_prefill_size=typed, **settings)
        return
    assert resolve(chunked_prefill_size=typed, **settings).chunked_prefill_size == resolved


WITHOUT_CHUNKS = {"tp_size": 8, "dcp_size": 8, "attention_backend": "nsa", "chunked_prefill_size": -1}


def test_without_chunks_a_short_context_is_served(resolve):
    assert resolve(context_length=32_768, **WITHOUT_CHUNKS).chunked_prefill_size == -1


def test_without_chunks_a_long_context_is_refused(resolve):
    with pytest.raises(ValueError, match=r"of up to 131,072 tokens would be one chunk.*--context-length 74606"):
        resolve({"max_position_embeddings": 131_072}, **WITHOUT_CHUNKS)


@pytest.mark.parametrize(("heads", "chunk"), [(128, 32_768), (64, 65_536)], ids=["deepseek-v3.2", "glm-5.2"])
def test_the_usual_large_chunks_are_served(resolve, heads, chunk):
    config = {"num_attention_heads": heads, "num_key_value_heads": heads}
    view = resolve(config, tp_size=8, dcp_size=8, attention_backend="nsa", chunked_prefill_size=chunk)
    assert view.chunked_prefill_size == chunk
