"""The factory under context parallelism: what it builds, what it changes, and what stops the server."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from tests.sglang import cp_simulation as simulation
from tests.sglang.served_parts import record_patches

pytestmark = pytest.mark.sglang

make_cp_runner = simulation.make_cp_runner
CP_SIZE, HEADS = 4, simulation.HEADS


@pytest.fixture
def make_runner(make_cp_runner):
    """A function that returns rank 1's runner with a model of two attention layers, which share a selection."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    def build(**settings):
        runner = make_cp_runner(simulation.RelayedGroup(CP_SIZE).rank(1), **settings)
        layers = torch.nn.ModuleList([object.__new__(DeepseekV2AttentionMLA) for _ in range(2)])
        for layer in layers:
            torch.nn.Module.__init__(layer)
            layer.dcp_size, layer.current_attention_backend, layer.w_kc_qrep = CP_SIZE, None, None
            layer.attn_mqa = SimpleNamespace(tp_q_head_num=HEADS)
            layer.layer_id, layer.skip_topk, layer.indexer = 0, True, None
        layers[0].skip_topk, layers[0].indexer = False, object.__new__(Indexer)
        torch.nn.Module.__init__(layers[0].indexer)
        layers[0].indexer.sm_count = 132
        runner.model = layers
        return runner

    return build


def build(runner, name="nsa"):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS[name](runner)


@pytest.mark.parametrize("name", ["nsa", "dsa"])
@pytest.mark.parametrize("strategy", ["interleave", "zigzag"])
def test_the_backend_attends_with_all_heads_and_the_model_leaves_dcp_to_it(make_runner, name, strategy):
    from sglang.srt.environ import envs
    from sglang.srt.layers.cp.base import get_cp_strategy

    from nsa_dcp.sglang_plugin.attention.cp_backend import CpDcpSparseAttnBackend

    runner = make_runner(strategy=strategy)
    backend = build(runner, name)
    assert type(backend) is CpDcpSparseAttnBackend
    assert (backend.num_q_heads, backend.attended_heads) == (HEADS, HEADS)
    assert (backend.dcp_size, backend.dcp_rank) == (CP_SIZE, 1)
    assert [layer.dcp_size for layer in runner.model] == [1, 1]
    assert not backend.supports_mha_one_shot
    assert backend.get_topk_transform_method().name == "PAGED"
    # The broadcast over the attention-TP group would be this rank's alone.
    assert not envs.SGLANG_DSA_TOPK_BROADCAST.get()
    assert ("materialize_full_indexer_k_cache" in vars(get_cp_strategy())) == (strategy == "zigzag")


@pytest.mark.parametrize("strategy", ["interleave", "zigzag"])
def test_changes_are_made_in_the_order_in_which_patches_lists_them(make_runner, monkeypatch, strategy):
    runner = make_runner(strategy=strategy)
    made, listed = record_patches(monkeypatch)
    build(runner)
    assert made == [name for name in listed if name in made]
    both = {"gather_index_keys_past_2_gib", "hide_dcp_from_layers", "split_decode_rows", "fill_page_tables_by_page"}
    zigzag = {"patch_zigzag_strategy"} if strategy == "zigzag" else set()
    assert set(made) == both | zigzag | {"use_exact_topk"}


def test_the_log_says_what_is_served(make_runner, caplog):
    runner = make_runner(strategy="zigzag")
    with caplog.at_level("INFO", logger="nsa_dcp"):
        build(runner)
    (line,) = [record.message for record in caplog.records if record.message.startswith("nsa-dcp serves ")]
    served = json.loads(line.removeprefix("nsa-dcp serves "))
    assert (served["mode"], served["cp_strategy"], served["dcp_group"]) == ("CP-DCP", "zigzag", [0, 1, 2, 3])
    assert (served["heads"], served["head_bucket"]) == (HEADS, 64)
    # The pool is smaller than the longest context: 10 pages of each of 4 ranks, and this rank's to be sent.
    assert served["buffer_budget_bytes"]["page_gather"] == 10 * 64 * 656 * 5
    # Ranks have rows of their own: none are exchanged for heads.
    assert [name for name, nbytes in served["buffer_budget_bytes"].items() if nbytes == 0] == ["row_exchange"]
    assert min(served["buffer_budget_bytes"].values()) == 0


def test_the_budget_has_two_results_of_a_spread_chunk(make_runner, caplog):
    """They are merged where a batch's pages are gathered in parts, and are more than a decode step exchanges."""
    with caplog.at_level("INFO", logger="nsa_dcp"):
        build(make_runner(strategy="interleave", chunked_prefill_size=8192))
    (line,) = [record.message for record in caplog.records if record.message.startswith("nsa-dcp serves ")]
    budget = json.loads(line.removeprefix("nsa-dcp serves "))["buffer_budget_bytes"]
    assert budget["exchange"] == 2 * (8192 // CP_SIZE) * HEADS * (512 * 2 + 4)


def test_the_buffer_is_allocated_before_anything_is_served(make_runner):
    backend = build(make_runner())
    assert backend._buffer.pages == 10
    assert backend._buffer._bytes.nbytes == 4 * 10 * 64 * 656


def test_decode_selection_is_split_over_the_dcp_group_and_prefills_is_left_as_it_is(make_runner):
    from sglang.srt.runtime_context import get_parallel

    runner = make_runner()
    build(runner)
    indexer, group = runner.model[0].indexer, get_parallel().dcp_group
    assert indexer._get_topk_paged.share.group is group
    assert indexer._get_topk_paged.broadcast_selection.func is group.broadcast
    assert indexer._get_topk_paged.broadcast_selection.keywords == {"src": 0}
    # A rank selects for its own tokens of a spread prefill.
    assert "_get_topk_ragged" not in vars(indexer)


def test_a_draft_worker_gets_sglangs_backend(make_runner, monkeypatch):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    monkeypatch.setattr(ATTENTION_BACKENDS["nsa"], "stock", lambda model_runner: ("stock", model_runner))
    runner = make_runner()
    runner.is_draft_worker = True
    assert build(runner) == ("stock", runner)
    assert [layer.dcp_size for layer in runner.model] == [CP_SIZE, CP_SIZE]
    assert "_get_topk_paged" not in vars(runner.model[0].indexer)


def other_ranks(runner, monkeypatch):
    from sglang.srt.runtime_context import get_parallel

    # Every other rank: as many, and this one among them.
    group = SimpleNamespace(world_size=CP_SIZE, rank_in_group=1, ranks=[0, 1, 4, 5])
    get_parallel().override_permanently(attn_cp_group=group)


def another_strategy(runner, monkeypatch):
    from sglang.srt.layers.cp import base, zigzag

    monkeypatch.setattr(base, "_STRATEGY", type("OtherStrategy", (zigzag.ZigzagCPStrategy,), {})(CP_SIZE))


def smaller_strategy(runner, monkeypatch):
    from sglang.srt.layers.cp import base, interleave

    monkeypatch.setattr(base, "_STRATEGY", interleave.InterleaveCPStrategy(2))


def layer_without_dcp(runner, monkeypatch):
    runner.model[1].dcp_size = 1


def layer_that_has_run(runner, monkeypatch):
    runner.model[1].current_attention_backend = "nsa"


def door_that_changed(runner, monkeypatch):
    from sglang.srt.layers.cp.base import ContextParallelStrategy

    monkeypatch.setattr(ContextParallelStrategy, "materialize_full_mla_kv", lambda self, latents: None)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (other_ranks, r"the DCP group to be the attention-CP group \[0, 1, 4, 5\], found \[0, 1, 2, 3\]"),
        (another_strategy, "sglang's interleave or zigzag strategy, found OtherStrategy"),
        (smaller_strategy, "a strategy for 4 ranks, found 2"),
        (layer_without_dcp, "layers that run DCP over 4 ranks, found 1"),
        (layer_that_has_run, "attention layers that have not run"),
        (door_that_changed, r"materialize_full_mla_kv takes \(self, latents\)"),
    ],
    ids=["group", "strategy", "strategy-size", "layer", "layer-has-run", "door"],
)
def test_what_is_not_as_expected_stops_the_server(make_runner, monkeypatch, spoil, sentence):
    runner = make_runner()
    spoil(runner, monkeypatch)
    with pytest.raises(RuntimeError, match=sentence):
        build(runner)
    assert runner.model[0].dcp_size == CP_SIZE


@pytest.mark.parametrize("missing", ["split", "indexer"])
def test_a_layer_that_would_select_in_another_way_stops_the_server(make_runner, monkeypatch, missing):
    from nsa_dcp.sglang_plugin import patches

    runner = make_runner()
    if missing == "split":
        monkeypatch.setattr(patches, "split_decode_rows", lambda model, group, broadcast_selection: None)
    else:
        runner.model[0].indexer = torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="layer 0 to select by RowSplitDecodeSelection, found _get_topk_paged of"):
        build(runner)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attn_tp_size": 2}, "an attention-TP size of 1 under context parallelism, found 2"),
        ({"attn_cp_rank": 2}, "attention-CP rank 1, found 2"),
        ({"dcp_replicate_q_proj": True}, "query projections that are not gathered, found --dcp-replicate-q-proj"),
    ],
    ids=["attention-tp", "rank", "replicated-queries"],
)
def test_groups_that_sglang_or_the_command_check_rule_out_stop_the_server_too(changes, sentence):
    from nsa_dcp.sglang_plugin.startup.cp_startup import check_groups

    group = SimpleNamespace(ranks=[0, 1])
    fields = {"attn_tp_size": 1, "attn_cp_rank": 1, "attn_dcp_rank": 1, "dcp_replicate_q_proj": False} | changes
    with pytest.raises(RuntimeError, match=sentence):
        check_groups(SimpleNamespace(dcp_group=group, attn_cp_group=group, **fields))


def test_the_command_is_checked_again_in_the_scheduler(make_runner, monkeypatch):
    from nsa_dcp.sglang_plugin import resolution

    runner = make_runner()
    settings, *rest = resolution.read_command(runner.server_args)
    changed = dataclasses.replace(settings, dcp_replicate_q_proj=True)
    monkeypatch.setattr(resolution, "read_command", lambda server_args: (changed, *rest))
    with pytest.raises(ValueError, match="--dcp-replicate-q-proj with --enable-prefill-cp"):
        build(runner)
