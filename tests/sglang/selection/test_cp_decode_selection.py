"""CP-DCP decode and verify selection split over the DCP group is the whole batch's, on the CP backend's own metadata,
run at once and as a captured graph.

What is split is shared with TP-DCP: test_row_split_decode.py, whose played kernels run here, and
test_row_split_verify.py.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.sglang import decode_metadata as decode
from tests.sglang.selection import test_row_split_decode as row_split_decode
from tests.sglang.selection import test_row_split_verify as row_split_verify

pytestmark = pytest.mark.sglang

played, indexer = row_split_decode.played, row_split_decode.indexer
TOPK, MAX_LEN, MAX_REQUESTS, LAYERS = (
    row_split_decode.TOPK,
    row_split_decode.MAX_LEN,
    row_split_decode.MAX_REQUESTS,
    row_split_decode.LAYERS,
)


class RelayedBroadcast:
    """A broadcast among ranks that run one after the other, the first of them first."""

    def __init__(self):
        self.first, self.calls = None, 0

    def rank(self, rank):
        def broadcast(selection, src):
            assert src == 0
            assert selection.is_contiguous()
            self.calls += 1
            if rank == src:
                self.first = selection.clone()
            selection.copy_(self.first)

        return broadcast


@pytest.fixture
def num_drafts():
    """Rows that a verify step has of each request; None without speculation."""


@pytest.fixture
def backend(played, num_drafts):
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    from nsa_dcp.sglang_plugin.attention.cp_backend import CpDcpSparseAttnBackend

    was_set = envs.SGLANG_OPT_USE_TOPK_V2.is_set()
    envs.SGLANG_OPT_USE_TOPK_V2.set(True)
    yield decode.make_metadata_backend(
        MAX_REQUESTS, MAX_LEN, TOPK, DSATopKBackend.SGL_KERNEL, True, CpDcpSparseAttnBackend, num_drafts
    )
    if not was_set:
        envs.SGLANG_OPT_USE_TOPK_V2.clear()


@pytest.fixture
def make_ranks(indexer):
    """A function that returns every rank's `_get_topk_paged`, as the factory leaves it, and the broadcasts."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    from nsa_dcp.sglang_plugin.startup.selection_agreement import select_alike_in_decode

    def make(world_size):
        gathers, broadcasts, ranks = decode.RelayedGather(world_size), RelayedBroadcast(), []
        for rank in range(world_size):
            one, layer = object.__new__(type(indexer)), object.__new__(DeepseekV2AttentionMLA)
            for module in (one, layer):
                torch.nn.Module.__init__(module)
            vars(one).update({name: value for name, value in vars(indexer).items() if not name.startswith("_")})
            layer.layer_id, layer.skip_topk, layer.indexer = 0, False, one
            group = gathers.rank(rank)
            group.broadcast = broadcasts.rank(rank)
            select_alike_in_decode(torch.nn.ModuleList([layer]), group)
            ranks.append(one._get_topk_paged)
        return ranks, broadcasts

    return make


def prepared(backend, num_rows, seed, padding=0):
    q, weights, requests, lengths = row_split_decode.draw(num_rows, seed, padding)
    decode.prepare_step(backend, requests, lengths, capturing=True)
    return q, weights, decode.prepare_step(backend, requests, lengths)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("num_rows", [64, 96, 136, 7, 63, 65, 100])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_rank_has_the_selection_of_the_whole_batch(
    played, backend, make_ranks, indexer, world_size, num_rows, padding
):
    q, weights, metadata = prepared(backend, num_rows, 5, padding)
    ranks, broadcasts = make_ranks(world_size)
    split = num_rows >= 64 and num_rows % world_size == 0
    for layer in LAYERS:
        arguments = (row_split_decode.decode_batch(), layer, q.roll(layer, 0), weights.roll(layer, 0), metadata)
        whole = indexer._get_topk_paged(*arguments)
        assert (whole[num_rows:] == -1).all()
        for select in ranks:
            select(*arguments)
        played.scored.clear()
        for select in ranks:
            assert torch.equal(select(*arguments), whole)
        # More rows than the GPU has multiprocessors are scored in parts.
        assert sum(played.scored) == (num_rows if split else num_rows * world_size)
    assert broadcasts.calls == (0 if split else 2 * world_size * len(LAYERS))


@pytest.mark.parametrize(
    ("num_requests", "num_drafts"), [(16, 4), (64, 3), (72, 2), (16, 3), (33, 2), (66, 3)], ids=lambda number: number
)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_rank_has_the_verify_selection_of_the_whole_batch(
    played, backend, make_ranks, indexer, world_size, num_requests, num_drafts
):
    """In a captured graph, replayed with other contexts."""
    q, weights, requests, lengths = row_split_verify.draw(num_requests, num_drafts, 5)
    ranks, broadcasts = make_ranks(world_size)
    metadata = row_split_verify.prepare(backend, requests, torch.ones_like(lengths), capturing=True)
    arguments = (row_split_decode.decode_batch("TARGET_VERIFY"), LAYERS[0], q, weights, metadata)
    split = num_requests * num_drafts >= 64 and num_requests % world_size == 0
    if not split:
        # A broadcast is not recorded: the step runs at once.
        row_split_verify.prepare(backend, requests, lengths)
        whole = indexer._get_topk_paged(*arguments)
        assert all(torch.equal(select(*arguments), whole) for select in ranks)
        assert broadcasts.calls == world_size
        return
    graphs, outputs = [], []
    for select in ranks:
        select(*arguments)
        graph = decode.Graph()
        with graph:
            outputs.append(select(*arguments))
        graphs.append(graph)
    row_split_verify.prepare(backend, requests, lengths)
    for graph in [*graphs, *graphs]:
        graph.replay()
    whole = indexer._get_topk_paged(*arguments)
    assert all(torch.equal(output, whole) for output in outputs)
    assert broadcasts.calls == 0


def test_an_idle_step_is_not_split(played, backend, make_ranks, indexer):
    q, weights, metadata = prepared(backend, 64, 5)
    ranks, broadcasts = make_ranks(4)
    arguments = (row_split_decode.decode_batch("IDLE"), 0, q, weights, metadata)
    whole = indexer._get_topk_paged(*arguments)
    played.scored.clear()
    for select in ranks:
        assert torch.equal(select(*arguments), whole)
    assert (played.scored, broadcasts.calls) == ([64] * 4, 4)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_captured_step_selects_by_the_lengths_of_each_replay(backend, make_ranks, indexer, world_size):
    q, weights, requests, lengths = row_split_decode.draw(64, seed=6)
    ranks, _ = make_ranks(world_size)
    # As sglang captures: metadata of the shape, warm-up steps on it, then the step that is recorded.
    metadata = decode.prepare_step(backend, requests, torch.ones(64, dtype=torch.int32), capturing=True)
    graphs, outputs = [], []
    for select in ranks:
        for _ in range(2):
            row_split_decode.run_layers(select, (q, weights), metadata)
        graph = decode.Graph()
        with graph:
            outputs.append(select(row_split_decode.decode_batch(), LAYERS[0], q, weights, metadata))
        graphs.append(graph)
    for seed in (7, 8):
        new_q, new_weights, requests, lengths = row_split_decode.draw(64, seed)
        q.copy_(new_q)
        weights.copy_(new_weights)
        assert decode.prepare_step(backend, requests, lengths).attn_metadata is metadata.attn_metadata
        whole = indexer._get_topk_paged(row_split_decode.decode_batch(), LAYERS[0], q, weights, metadata)
        for graph in [*graphs, *graphs]:
            graph.replay()
        for output in outputs:
            assert torch.equal(output, whole)


def test_captured_metadata_have_no_key_ranges(backend):
    """So the backend takes their selections to be agreed on."""
    *_, metadata = prepared(backend, 8, 5)
    assert metadata.attn_metadata.indexer_k_start_end is None


def test_a_selection_made_by_key_ranges_is_a_prefills():
    """sglang makes them for exactly the steps that `forward_cuda` does not hand to `_get_topk_paged`."""
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = SimpleNamespace(device="cpu")
    ranged = set()
    for mode in ForwardMode:
        batch = SimpleNamespace(
            forward_mode=mode, batch_size=1, seq_lens_cpu=torch.tensor([5]), extend_seq_lens_cpu=[2]
        )
        key_ranges, _ = DeepseekSparseAttnBackend._cal_indexer_k_start_end(backend, batch)
        if key_ranges is not None:
            ranged.add(mode)
    paged = {
        mode for mode in ForwardMode if mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()
    }
    assert {ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL} <= ranged
    assert not ranged & paged
    assert {ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL} & paged == set()
    # What is neither, sglang's DSA does not run.
    assert set(ForwardMode) - ranged - paged == {ForwardMode.PREBUILT}
