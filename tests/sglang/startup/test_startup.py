"""The factory fails closed: whatever is not as expected stops the server with one sentence."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.sglang.served_parts import make_weight_updater, record_patches

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("registered", "on_hopper")]

DCP_SIZE, DCP_RANK, HEADS = 4, 1, 64


@pytest.fixture
def runner(make_rank, model_path):
    """A model runner as the factory meets it: real arguments, pool and allocator, a model of one attention layer."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path=model_path(), device="cuda", tp_size=DCP_SIZE, dcp_size=DCP_SIZE, attention_backend="nsa"
    )
    server_args.resolve_once()
    rank = make_rank(DCP_SIZE, DCP_RANK, "bfloat16")
    attention = object.__new__(DeepseekV2AttentionMLA)
    torch.nn.Module.__init__(attention)
    attention.dcp_size, attention.layer_id, attention.skip_topk = DCP_SIZE, 0, False
    attention.indexer = object.__new__(Indexer)
    torch.nn.Module.__init__(attention.indexer)
    attention.indexer.index_topk, attention.indexer.sm_count = 2048, 132
    attention.attn_mqa_for_dcp_decode = SimpleNamespace(tp_q_head_num=HEADS)
    model = torch.nn.ModuleList([attention])
    return SimpleNamespace(
        server_args=server_args,
        model_config=model_config_of(server_args),
        is_draft_worker=False,
        weight_updater=make_weight_updater(lambda: model),
        token_to_kv_pool=rank.pool,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(2049, 65540, dtype=torch.int32, device="meta")),
        max_running_requests=2048,
        token_to_kv_pool_allocator=rank.allocator,
        model=model,
        prefill_attention_backend_str="nsa",
        decode_attention_backend_str="nsa",
    )


@pytest.fixture
def build(registered, monkeypatch):
    """Build through the registered factory, with the stock factory and our class replaced by markers."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from nsa_dcp.sglang_plugin.attention import backend
    from nsa_dcp.sglang_plugin.selection import exact_topk

    class Ours(tuple):
        """What the factory asks of a backend that it has made; equal to ("ours", its model runner)."""

        device, dsa_index_topk, _fused_decode_metadata = "cpu", 2048, None

    def make_ours(model_runner):
        from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

        ours = Ours(("ours", model_runner))
        ours.dsa_topk_backend = DSATopKBackend.SGL_KERNEL
        return ours

    monkeypatch.setattr(backend, "DcpDeepseekSparseAttnBackend", make_ours)
    # Tried once in test_exact_topk.py.
    monkeypatch.setattr(exact_topk, "check_selection", lambda device, topk: None)
    for name in ("nsa", "dsa"):
        monkeypatch.setattr(ATTENTION_BACKENDS[name], "stock", lambda model_runner: ("stock", model_runner))
    return lambda model_runner, name="nsa": ATTENTION_BACKENDS[name](model_runner)


@pytest.mark.parametrize("name", ["nsa", "dsa"])
def test_dcp_on_flashmla_kv_gets_our_backend(build, runner, name):
    assert build(runner, name) == ("ours", runner)


@pytest.mark.parametrize("draft", [False, True])
def test_changes_are_made_in_the_order_in_which_patches_lists_them(build, runner, monkeypatch, draft):
    from nsa_dcp.sglang_plugin.startup import weight_updates

    runner.is_draft_worker = draft
    # As on a server whose decode reads copies of weights.
    monkeypatch.setattr(weight_updates, "_find_reason", lambda model, settings: "copied")
    made, listed = record_patches(monkeypatch)
    build(runner)
    assert made == [name for name in listed if name in made]
    targets = {"give_reason_against_updates", "split_rows", "split_decode_rows", "prepare_idle_steps_quietly"}
    targets |= {"fill_page_tables_by_page", "use_exact_topk"}
    assert set(made) == {"gather_index_keys_past_2_gib", "replace_weight_updater"} | (set() if draft else targets)


@pytest.mark.parametrize(("changes", "copied"), [({}, "query projection"), ({"dcp_replicate_q_proj": False}, None)])
def test_weight_updates_are_refused_where_decode_reads_copies_of_weights(build, runner, changes, copied):
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.model_executor.model_runner_components.weight_updater import (
        _unsupported_derived_weight_cache_error as refusal,
    )
    from sglang.srt.server_args import ServerArgs

    runner.server_args = ServerArgs(
        model_path=runner.server_args.model_path,
        device="cuda",
        tp_size=DCP_SIZE,
        dcp_size=DCP_SIZE,
        attention_backend="nsa",
        dcp_comm_backend="a2a",
        **changes,
    )
    runner.server_args.resolve_once()
    assert bool(resolving_view(runner.server_args).dcp_replicate_q_proj) == bool(copied)
    assert refusal(runner.model) is None
    build(runner)
    assert (copied in refusal(runner.model)) if copied else (refusal(runner.model) is None)


@pytest.mark.parametrize("asked", [None, True, False])
def test_sglangs_switch_stays_as_the_user_left_it(build, runner, asked):
    from sglang.srt.environ import envs

    was_set = envs.SGLANG_DSA_TOPK_BROADCAST.is_set()
    if asked is not None:
        envs.SGLANG_DSA_TOPK_BROADCAST.set(asked)
    build(runner)
    assert envs.SGLANG_DSA_TOPK_BROADCAST.get() == bool(asked)
    if not was_set:
        envs.SGLANG_DSA_TOPK_BROADCAST.clear()


def test_the_log_says_what_is_served(build, runner, caplog):
    with caplog.at_level("INFO", logger="nsa_dcp"):
        build(runner)
    (line,) = [record.message for record in caplog.records if record.message.startswith("nsa-dcp serves ")]
    served = json.loads(line.removeprefix("nsa-dcp serves "))
    assert (served["mode"], served["dcp_group"], served["heads"], served["head_bucket"]) == (
        "TP-DCP",
        [0, 1, 2, 3],
        64,
        64,
    )
    assert served["topk"] == "exact"
    assert served["tokens"] == DCP_SIZE * runner.token_to_kv_pool.size


@pytest.mark.parametrize(("asked", "served"), [("stock", "sgl-kernel"), ("exact", "exact"), ("", "exact")])
def test_selections_are_exact_but_where_the_environment_asks_for_sglangs(
    build, runner, monkeypatch, caplog, asked, served
):
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    from nsa_dcp.sglang_plugin.selection.exact_topk import ExactTopK

    monkeypatch.setenv("NSA_DCP_TOPK", asked)
    with caplog.at_level("INFO", logger="nsa_dcp"):
        backend = build(runner)
    assert type(backend.dsa_topk_backend) is (DSATopKBackend if asked == "stock" else ExactTopK)
    assert f'"topk": "{served}"' in caplog.text


def test_another_choice_of_selections_stops_the_server(build, runner, monkeypatch):
    monkeypatch.setenv("NSA_DCP_TOPK", "fast")
    with pytest.raises(ValueError, match="NSA_DCP_TOPK must be exact or stock, got 'fast'"):
        build(runner)


def test_selection_is_split_over_the_attention_tp_group_in_prefill_and_in_decode(build, runner):
    from sglang.srt.layers.attention.dsa.dsa_indexer import _broadcast_indexer_topk_from_rank0_impl
    from sglang.srt.runtime_context import get_parallel

    build(runner)
    indexer = runner.model[0].indexer
    assert indexer._get_topk_ragged.group is get_parallel().attn_tp_group
    assert indexer._get_topk_paged.share.group is get_parallel().attn_tp_group
    assert indexer._get_topk_paged.broadcast_selection is _broadcast_indexer_topk_from_rank0_impl


def test_a_layer_that_shares_a_selection_needs_no_indexer(build, runner):
    runner.model[0].indexer, runner.model[0].skip_topk = None, True
    assert build(runner) == ("ours", runner)


def test_a_draft_worker_gets_sglangs_backend(build, runner):
    runner.is_draft_worker = True
    assert build(runner) == ("stock", runner)
    # Its indexers select for all rows.
    assert not {"_get_topk_paged", "_get_topk_ragged"} & set(vars(runner.model[0].indexer))


def test_without_dcp_sglangs_backend_is_returned_untouched(build, runner, publish_rank):
    publish_rank(1, 0)
    assert build(runner) == ("stock", runner)


def test_another_sparse_backend_on_another_gpu_is_left_to_sglang(build, runner, publish_rank, monkeypatch):
    from sglang.srt.arg_groups.overrides import declare_resolution

    from nsa_dcp.sglang_plugin import resolution

    monkeypatch.setattr(resolution, "_gpu_capability", lambda: (10, 0))
    declare_resolution(runner.server_args, "test", dsa_prefill_backend="trtllm", dsa_decode_backend="trtllm")
    publish_rank(DCP_SIZE, DCP_RANK, dsa_prefill_backend="trtllm", dsa_decode_backend="trtllm")
    assert build(runner) == ("stock", runner)


def break_version(runner, monkeypatch):
    from nsa_dcp.sglang_plugin import compat

    monkeypatch.setattr(compat, "installed_version", lambda: "0.5.24")


def break_symbol(runner, monkeypatch):
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    monkeypatch.setattr(DeepseekSparseAttnBackend, "_forward_flashmla_kv", lambda self, q: q)


def break_hooks(runner, monkeypatch):
    from sglang.srt.arg_groups import resolution_hooks

    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})


def break_published_backend(runner, monkeypatch):
    from sglang.srt.runtime_context import get_exec

    get_exec().kernel._set("dsa_prefill_backend", "flashmla_sparse")


def break_group(runner, monkeypatch):
    from sglang.srt.runtime_context import get_parallel

    monkeypatch.setattr(get_parallel().dcp_group, "rank_in_group", 3)


def break_shard(runner, monkeypatch):
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    shard = SimpleNamespace(world_size=DCP_SIZE, rank_in_group=DCP_RANK, ranks=[0, 1, 4, 5])
    parallel.override_permanently(attn_tp_group=shard)


def break_pool_class(runner, monkeypatch):
    runner.token_to_kv_pool.__class__ = type("OtherPool", (type(runner.token_to_kv_pool),), {})


def break_row_layout(runner, monkeypatch):
    runner.token_to_kv_pool.kv_buffer = [rows[..., :512] for rows in runner.token_to_kv_pool.kv_buffer]


def break_allocator(runner, monkeypatch):
    runner.token_to_kv_pool_allocator.page_size = 64


def break_index_span(runner, monkeypatch):
    cache = runner.token_to_kv_pool.index_key_cache
    cache.buffer = [pages[:-1] for pages in cache.buffer]


def break_lse_base(runner, monkeypatch):
    runner.decode_attention_backend_str = "flashmla"


def break_model(runner, monkeypatch):
    runner.model = torch.nn.ModuleList([torch.nn.Linear(1, 1)])


def break_layer(runner, monkeypatch):
    runner.model[0].dcp_size = 1


def break_prefill_split(runner, monkeypatch):
    from nsa_dcp.sglang_plugin import patches

    monkeypatch.setattr(patches, "split_rows", lambda model, group: None)


def break_decode_split(runner, monkeypatch):
    from nsa_dcp.sglang_plugin import patches

    monkeypatch.setattr(patches, "split_decode_rows", lambda model, group, broadcast_selection: None)


def break_indexer_class(runner, monkeypatch):
    runner.model[0].indexer = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (break_version, r"needs sglang 0\.5\.23, found 0\.5\.24"),
        (break_symbol, r"_forward_flashmla_kv takes \(self, q\)"),
        (break_hooks, "its hook around handle_decode_context_parallelism"),
        (break_published_backend, "both DSA backends to be flashmla_kv, found flashmla_sparse"),
        (break_group, "DCP rank 1, found 3"),
        (break_shard, r"the DCP group \[0, 1, 2, 3\] inside one attention-TP group"),
        (break_pool_class, "a DSATokenToKVPool, found OtherPool"),
        (break_row_layout, "bfloat16 cache rows of 1152 bytes, found 1024"),
        (break_allocator, "an allocator of 512 slots in pages of 256, found 512 in pages of 64"),
        (break_index_span, "index keys for 768 slots in layer 0, found 704"),
        (break_lse_base, "base-2 log-sum-exps to be merged for flashmla"),
        (break_model, "DeepseekV2AttentionMLA layers in the model, found none"),
        (break_layer, "layers that run DCP over 4 ranks, found 1"),
        (break_prefill_split, "layer 0 to select by RowSplitSelection, found _get_topk_ragged of Indexer"),
        (break_decode_split, "layer 0 to select by RowSplitDecodeSelection, found _get_topk_paged of Indexer"),
        (break_indexer_class, "layer 0 to select by RowSplitSelection, found _get_topk_ragged of Linear"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_not_as_expected_stops_the_server(build, runner, monkeypatch, spoil, sentence):
    spoil(runner, monkeypatch)
    with pytest.raises(RuntimeError, match=sentence):
        build(runner)


def test_the_command_is_checked_again_in_the_scheduler(build, runner):
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(runner.server_args, "test", enable_hisparse=True)
    with pytest.raises(ValueError, match="--enable-hisparse"):
        build(runner)


def test_no_backend_in_sglangs_registry_stops_the_server(registered, runner):
    from nsa_dcp.sglang_plugin.plugin import BackendFactory

    runner.is_draft_worker = True
    with pytest.raises(RuntimeError, match="a DSA attention backend in sglang's registry, found none"):
        BackendFactory(None)(runner)


@pytest.mark.parametrize("name", ["nsa", "dsa"])
def test_the_real_backend_is_built_for_the_gathered_heads(registered, runner, name):
    """sglang's constructor and ours, on a CPU; only the GPU's capability is made up."""
    from sglang.kernels.ops.attention.dsa.metadata import fused_dsa_decode_metadata
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from nsa_dcp.sglang_plugin.attention.decode_page_table import PagewiseDecodeMetadata

    runner.device, runner.page_size, runner.kv_cache_dtype = "cpu", 64, torch.bfloat16
    runner.hisparse_coordinator = None
    runner.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(4, 128, dtype=torch.int32), size=4)
    backend = ATTENTION_BACKENDS[name](runner)
    assert (backend.num_q_heads, backend.num_dcp_q_heads, backend.attended_heads) == (16, 64, 64)
    assert (backend.dcp_size, backend.dcp_rank) == (DCP_SIZE, DCP_RANK)
    assert not backend.supports_mha_one_shot
    assert backend.get_topk_transform_method().name == "PAGED"
    assert backend._fused_decode_metadata.fill is fused_dsa_decode_metadata
    assert isinstance(backend._fused_decode_metadata, PagewiseDecodeMetadata)
