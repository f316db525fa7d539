"""Every rank attends to the same selection, whatever path sglang's indexer took to it, and nothing is broadcast twice.

sglang's own `forward_cuda` runs on one rank after the other, each of which breaks ties between equal scores in its own
way. Its kernels are played in torch.
"""

import ast
import inspect
import itertools
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from tests.sglang import decode_metadata as decode
from tests.sglang.selection import test_row_split as prefill
from tests.sglang.selection import test_row_split_decode as row_split_decode
from tests.sglang.selection import test_row_split_verify as row_split_verify

pytestmark = pytest.mark.sglang

played, indexer, make_backend = row_split_decode.played, row_split_decode.indexer, row_split_decode.make_backend
TOPK, TOPK_KERNELS = row_split_decode.TOPK, row_split_decode.TOPK_KERNELS
RANKS = 4


class TieBreaks:
    """Top-k kernels that keep equal scores in an order of the rank that is running."""

    rank = 0

    def order(self, width):
        return torch.randperm(width, generator=torch.Generator().manual_seed(self.rank))

    def select_slots(self, logits, lengths, topk, slots_of_row):
        order = self.order(logits.shape[1])
        outside = torch.arange(logits.shape[1]) >= lengths.unsqueeze(1)
        masked = logits.masked_fill(outside, -torch.inf)[:, order]
        chosen = order[masked.sort(dim=1, descending=True, stable=True).indices[:, :topk]]
        kept = torch.arange(topk) < lengths.unsqueeze(1)
        return torch.where(kept, slots_of_row.gather(1, chosen), -1).to(torch.int32)

    def fast_topk_transform_fused(self, score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts):
        """The fused kernel on rows of several requests."""
        request_of_row = torch.searchsorted(cu_seqlens_q, torch.arange(len(score)), right=True) - 1
        assert row_starts is None
        return self.select_slots(score, lengths, topk, page_table_size_1[request_of_row])

    def select_prefill(self, enable_dual_stream, forward_batch, layer_id, q, weights, metadata):
        """All scores of all rows tie."""
        slots = metadata.attn_metadata.page_table_1[metadata.attn_metadata.token_to_batch_idx.long()]
        lengths = metadata.attn_metadata.dsa_seqlens_expanded
        selection = torch.full((q.shape[0], TOPK), -1, dtype=torch.int32)
        selected = self.select_slots(torch.zeros(slots.shape), lengths, TOPK, slots)
        selection[: len(lengths), : selected.shape[1]] = selected
        return selection


class Relayed:
    """Collectives among ranks that run one after the other, and twice: in the second round every part is there."""

    world_size = RANKS

    def __init__(self):
        self.parts, self.calls = {}, {}

    def rank(self, rank):
        self.calls[rank], count = [], itertools.count()

        def exchange(kind, values):
            self.calls[rank].append(kind)
            call = next(count)
            self.parts[rank, call] = values.clone()
            return [self.parts.get((peer, call), values) for peer in range(RANKS)]

        return SimpleNamespace(
            world_size=RANKS,
            rank_in_group=rank,
            ranks=list(range(RANKS)),
            all_gather_into_tensor=lambda output, part: output.copy_(torch.cat(exchange("all_gather", part))),
            broadcast=lambda values, src: values.copy_(exchange("broadcast", values)[src]),
        )


@pytest.fixture
def tie_breaks(played, monkeypatch):
    breaks = TieBreaks()
    monkeypatch.setattr(row_split_decode, "select_slots", breaks.select_slots)
    return breaks


@pytest.fixture
def select_on_ranks(indexer, tie_breaks, publish_rank, monkeypatch):
    """A function that runs `forward_cuda` on every rank; returns the selections and the ranks' collectives, in order.

    `context_parallel`: as in CP-DCP, where the attention-TP group is one rank and the ranks here are the DCP group.
    """
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    from nsa_dcp.sglang_plugin.startup.selection_agreement import select_alike_in_decode, select_alike_on_every_rank

    def make_indexer(q, weights, context_parallel):
        one = object.__new__(Indexer)
        torch.nn.Module.__init__(one)
        vars(one).update({name: value for name, value in vars(indexer).items() if not name.startswith("_")})
        one.alt_stream, one.dsa_enable_prefill_cp, one.logits_with_pp_recv = None, context_parallel, False
        one.use_gfx950_fused_indexer = one.use_aiter_fused_fp8_writer = False
        one.use_dsa_indexer_fusion = True
        one._fused_q_prepare_and_store = lambda *_: (q, weights)
        one._fused_k_weights = lambda x: (x, None)
        one._fused_k_prepare_and_store = lambda *_, **__: None
        one._get_topk_ragged = tie_breaks.select_prefill
        return one

    def run(batch, q, weights, metadata, *, agreeing=True, return_indices=True, context_parallel=False):
        relayed = Relayed()
        backend = SimpleNamespace(get_indexer_metadata=lambda layer_id, forward_batch: metadata)
        monkeypatch.setattr(dsa_indexer, "get_attn_backend", lambda: backend)
        for _ in range(2):
            selections = []
            for rank in range(RANKS):
                tie_breaks.rank, group = rank, relayed.rank(rank)
                if context_parallel:
                    publish_rank(RANKS, rank, attn_cp_size=RANKS, enable_prefill_cp=True, cp_strategy="interleave")
                else:
                    publish_rank(RANKS, rank).override_permanently(attn_tp_group=group)
                one = make_indexer(q, weights, context_parallel)
                layer = object.__new__(DeepseekV2AttentionMLA)
                torch.nn.Module.__init__(layer)
                layer.layer_id, layer.skip_topk, layer.indexer = 0, False, one
                if agreeing:
                    agree = select_alike_in_decode if context_parallel else select_alike_on_every_rank
                    agree(torch.nn.ModuleList([layer]), group)
                x = torch.zeros(q.shape[0], 8)
                selections.append(one.forward_cuda(x, x, None, batch, 0, return_indices))
        assert len({tuple(calls) for calls in relayed.calls.values()}) == 1
        return selections, relayed.calls[0]

    return run


def decode_step(make_backend, num_rows, mode, kernel="v2"):
    """All scores of all rows tie: the weights are zero. Many contexts are longer than a selection. Under speculation
    every request has 4 rows."""
    if mode in ("TARGET_VERIFY", "DRAFT_EXTEND_V2"):
        q, weights, requests, lengths = row_split_verify.draw(num_rows // 4, 4, seed=12, padding=3)
        metadata = row_split_verify.refreshed(make_backend(kernel, 4), requests, lengths)
    else:
        q, weights, requests, lengths = row_split_decode.draw(num_rows, seed=12, padding=3)
        backend = make_backend(kernel)
        decode.prepare_step(backend, requests, lengths, capturing=True)
        metadata = decode.prepare_step(backend, requests, lengths)
    batch = row_split_decode.decode_batch(mode)
    batch.seq_lens, batch.seq_lens_cpu, batch.attn_cp_metadata = lengths, lengths, None
    return batch, q, torch.zeros_like(weights), metadata


def prefill_step(extends, prefixes):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    metadata, _ = prefill.make_metadata(extends, prefixes, unfused=False)
    lengths = torch.tensor([extend + prefix for extend, prefix in zip(extends, prefixes)])
    rows = sum(extends)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        attn_cp_metadata=None,
        out_cache_loc=torch.zeros(rows),
    )
    return batch, torch.zeros(rows, 2, 128), torch.zeros(rows, 2, 1), metadata


def rows_as_sets(selection):
    return [sorted(row) for row in selection.tolist()]


def assert_one_selection(selections):
    assert all(torch.equal(selection, selections[0]) for selection in selections)


DECODE_STEPS = [
    (64, "DECODE", "all_gather"),
    (96, "DECODE", "all_gather"),
    (8, "DECODE", "broadcast"),
    (63, "DECODE", "broadcast"),
    (66, "DECODE", "broadcast"),
    (64, "TARGET_VERIFY", "all_gather"),
    (288, "TARGET_VERIFY", "all_gather"),
    (48, "TARGET_VERIFY", "broadcast"),
    (72, "TARGET_VERIFY", "broadcast"),
    (64, "DRAFT_EXTEND_V2", "broadcast"),
]


@pytest.mark.parametrize("switched_on", [False, True], ids=["switch-off", "switch-on"])
@pytest.mark.parametrize("kernel", TOPK_KERNELS)
@pytest.mark.parametrize(("num_rows", "mode", "collective"), DECODE_STEPS)
def test_ties_of_a_decode_step_fall_alike_on_every_rank_by_one_collective(
    select_on_ranks, make_backend, monkeypatch, num_rows, mode, collective, kernel, switched_on
):
    if switched_on:
        monkeypatch.setenv("SGLANG_DSA_TOPK_BROADCAST", "1")
    selections, collectives = select_on_ranks(*decode_step(make_backend, num_rows, mode, kernel))
    assert_one_selection(selections)
    # What a user's own switch adds.
    assert collectives == [collective] + ["broadcast"] * switched_on


@pytest.mark.parametrize("switched_on", [False, True], ids=["switch-off", "switch-on"])
@pytest.mark.parametrize(("num_rows", "mode", "collective"), DECODE_STEPS)
def test_under_context_parallelism_they_do_over_the_dcp_group(
    select_on_ranks, make_backend, monkeypatch, num_rows, mode, collective, switched_on
):
    if switched_on:
        # sglang's broadcast is over this rank alone.
        monkeypatch.setenv("SGLANG_DSA_TOPK_BROADCAST", "1")
    step = decode_step(make_backend, num_rows, mode)
    selections, collectives = select_on_ranks(*step, context_parallel=True)
    assert_one_selection(selections)
    assert collectives == [collective]


@pytest.mark.parametrize("extends", [(9, 30, 1), (3,)], ids=["longer-than-a-selection", "selected-whole"])
def test_under_context_parallelism_a_prefill_is_selected_by_each_rank_alone(select_on_ranks, tie_breaks, extends):
    """Also where a selection holds every context: the backend cannot tell, and broadcasts what is not spread."""
    batch, q, weights, metadata = prefill_step(extends, (100, 0, 63)[-len(extends) :] if len(extends) > 1 else (0,))
    selections, collectives = select_on_ranks(batch, q, weights, metadata, context_parallel=True)
    assert collectives == []
    for rank, selection in enumerate(selections):
        tie_breaks.rank = rank
        assert torch.equal(selection, tie_breaks.select_prefill(False, batch, 0, q, weights, metadata))


@pytest.mark.parametrize("switched_on", [False, True], ids=["switch-off", "switch-on"])
def test_ties_of_a_prefill_fall_alike_on_every_rank_by_one_gather(select_on_ranks, monkeypatch, switched_on):
    if switched_on:
        monkeypatch.setenv("SGLANG_DSA_TOPK_BROADCAST", "1")
    selections, collectives = select_on_ranks(*prefill_step((9, 30, 1), (100, 0, 63)))
    assert_one_selection(selections)
    assert collectives == ["all_gather"] + ["broadcast"] * switched_on


@pytest.mark.parametrize("step", ["decode", "verify", "prefill"])
def test_without_us_these_ranks_would_disagree(select_on_ranks, make_backend, step):
    modes = {"decode": "DECODE", "verify": "TARGET_VERIFY"}
    arguments = decode_step(make_backend, 64, modes[step]) if step in modes else prefill_step((9,), (100,))
    (first, *others), collectives = select_on_ranks(*arguments, agreeing=False)
    assert collectives == []
    assert all(rows_as_sets(other) != rows_as_sets(first) for other in others)


@pytest.mark.parametrize("extends", [(TOPK,), (5, 1, TOPK - 7)], ids=["one", "several"])
def test_contexts_that_a_selection_holds_are_selected_whole_without_a_collective(
    select_on_ranks, tie_breaks, monkeypatch, extends
):
    kernels = SimpleNamespace(
        fast_topk_transform_fused=tie_breaks.fast_topk_transform_fused, fast_topk_transform_ragged_fused=None
    )
    monkeypatch.setitem(sys.modules, "sgl_kernel", kernels)
    batch, q, weights, metadata = prefill_step(extends, (0,) * (len(extends) - 1) + (TOPK - extends[-1],))
    selections, collectives = select_on_ranks(batch, q, weights, metadata)
    assert collectives == []
    # Here ranks may differ in the order, which nothing reads.
    wholes = [
        sorted(metadata.attn_metadata.page_table_1[request, :length].tolist() + [-1] * (TOPK - length))
        for request, length in zip(
            metadata.attn_metadata.token_to_batch_idx.tolist(), metadata.attn_metadata.dsa_seqlens_expanded.tolist()
        )
    ]
    for selection in selections:
        assert rows_as_sets(selection) == wholes
    assert not torch.equal(selections[0], selections[1])
    selections, _ = select_on_ranks(batch, q, weights, metadata, return_indices=False)
    assert selections == [None] * RANKS


@pytest.mark.parametrize("rows", [0, 5])
def test_idle_and_empty_steps_select_nothing_without_a_collective(select_on_ranks, make_backend, rows):
    batch, q, weights, metadata = decode_step(make_backend, 8, "IDLE")
    empty = prefill_step((3,), (0,))[0]
    empty.seq_lens = empty.seq_lens_cpu = torch.zeros(0, dtype=torch.int64)
    for nothing in (batch, empty):
        selections, collectives = select_on_ranks(nothing, q[:rows], weights[:rows], metadata)
        assert collectives == []
        assert all(torch.equal(selection, torch.full((rows, TOPK), -1)) for selection in selections)


def test_every_path_of_the_indexer_to_a_selection_is_known():
    """What each `return` hands over is made by one of the calls that `selection_agreement` lists."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    function = ast.parse(textwrap.dedent(inspect.getsource(Indexer.forward_cuda))).body[0]
    names = ("topk_result", "fused_topk", "result")
    made = [
        ast.unparse(node.value.func)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names
    ]
    returned = [ast.unparse(node.value) for node in ast.walk(function) if isinstance(node, ast.Return)]
    assert set(returned) == {"None"} | {f"maybe_capture_indexer_topk(layer_id, {name})" for name in names}
    assert sorted(call for call in made if call != "_broadcast_indexer_topk_from_rank0") == [
        "_make_eager_idle_topk_result",
        "self._forward_cuda_k_only",
        "self._get_topk_paged",
        "self._get_topk_ragged",
        "self._gfx950_fused_decode",
        # Empty batches; and the buffer of a prefill graph, with and without indices.
        "torch.empty",
        "torch.full",
        "torch.full",
    ]


def test_a_prefill_graph_is_an_error():
    """Its dispatch hands `_get_topk_ragged` the buffer to fill, which no rank's share would."""
    from sglang.srt.layers.attention.dsa.dsa_prefill_cuda_graph import pcg_dsa_indexer_prefill_split

    from nsa_dcp.sglang_plugin.selection.row_split import RowSplitSelection

    source = inspect.getsource(inspect.getmodule(pcg_dsa_indexer_prefill_split))
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    reached = [call for call in calls if ast.unparse(call.func) == "indexer._get_topk_ragged"]
    assert {len(call.args) for call in reached} == {7}
    with pytest.raises(TypeError):
        inspect.signature(RowSplitSelection.__call__).bind(None, *range(7))
