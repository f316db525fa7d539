"""Verify selection (speculation, several query rows a request) split over the ranks by whole requests is the whole
batch's, through sglang's own `_get_topk_paged` and its own metadata, at once and as a captured graph.

What decode and verify share: test_row_split_decode.py, whose played kernels run here.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests.sglang import decode_metadata as decode
from tests.sglang.selection import test_row_split_decode as row_split_decode

pytestmark = pytest.mark.sglang

played, indexer, make_backend = row_split_decode.played, row_split_decode.indexer, row_split_decode.make_backend
TOPK, MAX_LEN, LAYERS, NUM_SMS = (
    row_split_decode.TOPK,
    row_split_decode.MAX_LEN,
    row_split_decode.LAYERS,
    row_split_decode.NUM_SMS,
)
VERIFY = "TARGET_VERIFY"


@pytest.fixture(autouse=True)
def _published(publish_rank):
    """sglang asks for it where it makes metadata for one step."""
    publish_rank(2, 0)


def draw(num_requests, num_drafts, seed, padding=0):
    """Queries, weights, requests and their lengths before a verify step, whose own rows are part of the context."""
    q, weights, *_ = row_split_decode.draw(num_requests * num_drafts, seed, padding)
    *_, requests, lengths = row_split_decode.draw(num_requests, seed)
    lengths = lengths.clamp(max=MAX_LEN - num_drafts)
    # Contexts that become longer than a selection within the step.
    lengths[5:7] = torch.tensor([TOPK - 1, TOPK - num_drafts + 1])
    return q, weights, requests, lengths


def prepare(backend, requests, lengths, **how):
    return decode.prepare_step(backend, requests, lengths, mode=VERIFY, **how)


def refreshed(backend, requests, lengths):
    """Metadata of a captured size, as a replay finds them."""
    prepare(backend, requests, torch.ones_like(lengths), capturing=True)
    return prepare(backend, requests, lengths)


def make_eager(backend, requests, lengths):
    """Metadata of a step that no graph was captured for."""
    return prepare(backend, requests, lengths, captured=False)


def run_layers(select, queries, metadata, mode=VERIFY):
    q, weights = queries
    batch = row_split_decode.decode_batch(mode)
    return [select(batch, layer, q.roll(layer, 0), weights.roll(layer, 0), metadata) for layer in LAYERS]


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("kernel", row_split_decode.TOPK_KERNELS)
@pytest.mark.parametrize(
    ("num_requests", "num_drafts"), [(16, 4), (24, 3), (32, 2), (40, 4), (64, 3), (72, 4)], ids=lambda number: number
)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_ranks_requests_together_are_the_selection_of_the_whole_batch(
    played, indexer, make_backend, world_size, num_requests, num_drafts, kernel, captured
):
    backend = make_backend(kernel, num_drafts)
    q, weights, requests, lengths = draw(num_requests, num_drafts, seed=5)
    make = refreshed if captured else make_eager
    metadata = make(backend, requests, lengths)
    contexts = (lengths.unsqueeze(1) + torch.arange(1, num_drafts + 1)).flatten()
    splits = row_split_decode.make_splits(indexer._get_topk_paged, decode.RelayedGather(world_size))
    batch = row_split_decode.decode_batch(VERIFY)
    for layer in LAYERS[:2]:
        arguments = (batch, layer, q.roll(layer, 0), weights.roll(layer, 0), metadata)
        whole = indexer._get_topk_paged(*arguments)
        assert torch.equal(whole >= 0, torch.arange(TOPK) < contexts.unsqueeze(1))
        for split in splits:
            split(*arguments)
        for split in splits:
            played.scored.clear()
            assert torch.equal(split(*arguments), whole)
            assert sum(played.scored) == num_requests * num_drafts // world_size
            assert all(rows <= NUM_SMS and rows % num_drafts == 0 for rows in played.scored)


@pytest.mark.parametrize("kernel", row_split_decode.TOPK_KERNELS)
@pytest.mark.parametrize("num_drafts", [2, 3, 4])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_captured_step_selects_by_the_lengths_of_each_replay(indexer, make_backend, kernel, num_drafts, world_size):
    """Also in requests that fill up a captured size: request 0, with the length that sglang gives them."""
    backend, num_requests = make_backend(kernel, num_drafts), 32
    q, weights, requests, lengths = draw(num_requests, num_drafts, seed=6)
    splits = row_split_decode.make_splits(indexer._get_topk_paged, decode.RelayedGather(world_size))
    metadata = prepare(backend, requests, torch.ones_like(lengths), capturing=True)
    batch = row_split_decode.decode_batch(VERIFY)
    graphs, outputs = [], []
    for split in splits:
        for _ in range(2):
            split(batch, LAYERS[0], q, weights, metadata)
        graph = decode.Graph()
        with graph:
            outputs.append(split(batch, LAYERS[0], q, weights, metadata))
        graphs.append(graph)
    for seed in (7, 8):
        new_q, new_weights, requests, lengths = draw(num_requests, num_drafts, seed)
        requests[-5:], lengths[-5:] = 0, backend.get_cuda_graph_seq_len_fill_value()
        q.copy_(new_q)
        weights.copy_(new_weights)
        assert prepare(backend, requests, lengths).attn_metadata is metadata.attn_metadata
        whole = indexer._get_topk_paged(batch, LAYERS[0], q, weights, metadata)
        for graph in [*graphs, *graphs]:
            graph.replay()
        for output in outputs:
            assert torch.equal(output, whole)


@pytest.mark.parametrize("kernel", row_split_decode.TOPK_KERNELS)
def test_a_share_of_more_rows_than_are_scored_at_once_is_selected_in_pieces_of_whole_requests(
    indexer, make_backend, played, kernel
):
    """In a captured graph: its first layer makes each piece's metadata, and no scores are joined."""
    backend, num_requests, num_drafts = make_backend(kernel, 4), 64, 4
    q, weights, requests, lengths = draw(num_requests, num_drafts, seed=6)
    metadata = prepare(backend, requests, torch.ones_like(lengths), capturing=True)
    gather = decode.RelayedGather(2)
    (split, *_) = row_split_decode.make_splits(indexer._get_topk_paged, gather, most_rows=30)
    run_layers(split, (q, weights), metadata)
    for calls in (played.schedules, played.plans, played.scored):
        calls.clear()
    graph = decode.Graph()
    with graph:
        outputs = run_layers(split, (q, weights), metadata)
    # This rank's 32 requests, of which 7 fit.
    rows = [24, 24, 28, 24, 28]
    assert (played.schedules, played.plans) == (rows, rows if kernel == "v2" else [])
    assert played.scored == rows * len(LAYERS)
    prepare(backend, requests, lengths)
    graph.replay()
    for output, whole in zip(outputs, run_layers(indexer._get_topk_paged, (q, weights), metadata), strict=True):
        assert torch.equal(output[:128], whole[:128])


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("kernel", row_split_decode.TOPK_KERNELS)
@pytest.mark.parametrize("num_drafts", [2, 4])
def test_narrowed_metadata_are_what_sglang_makes_for_those_requests_alone(make_backend, num_drafts, kernel, captured):
    from nsa_dcp.sglang_plugin.selection.row_split_decode import narrow_metadata

    def make(requests, lengths):
        return (refreshed if captured else make_eager)(make_backend(kernel, num_drafts), requests, lengths)

    *_, requests, lengths = draw(32, num_drafts, seed=9)
    # The width of a table that is not captured is that of its longest request.
    lengths[[8, 31]] = MAX_LEN - num_drafts
    part = slice(8, 32)
    narrowed, alone = narrow_metadata(make(requests, lengths), part), make(requests[part], lengths[part])
    read = ["page_size", "page_table_1", "real_page_table", "cu_seqlens_q", "cache_seqlens_int32", "topk_v2_plan"]
    read += ["dsa_seqlens_expanded", "dsa_extend_seq_lens_list", "topk_indices_offset", "token_to_batch_idx"]
    pairs = [(getattr(narrowed.attn_metadata, name), getattr(alone.attn_metadata, name)) for name in read]
    others = {field.name for field in dataclasses.fields(alone)} - {"attn_metadata"}
    pairs += [(getattr(narrowed, name), getattr(alone, name)) for name in sorted(others)]
    for mine, theirs in pairs:
        if isinstance(theirs, torch.Tensor):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs


def test_padding_rows_of_a_step_that_is_not_captured_select_nothing(indexer, make_backend):
    backend = make_backend("v2", 3)
    q, weights, requests, lengths = draw(24, 3, seed=9, padding=5)
    metadata = make_eager(backend, requests, lengths)
    batch = row_split_decode.decode_batch(VERIFY)
    whole = indexer._get_topk_paged(batch, 0, q, weights, metadata)
    assert (whole[72:] == -1).all()
    splits = row_split_decode.make_splits(indexer._get_topk_paged, decode.RelayedGather(4))
    for split in [*splits, *splits]:
        selection = split(batch, 0, q, weights, metadata)
    assert torch.equal(selection, whole)


@pytest.mark.parametrize(
    ("num_requests", "num_drafts", "world_size", "mode"),
    [(16, 3, 2, VERIFY), (31, 2, 2, VERIFY), (33, 2, 2, VERIFY), (18, 4, 4, VERIFY), (20, 4, 8, VERIFY)]
    + [(44, 4, 8, VERIFY), (66, 4, 4, VERIFY), (64, 4, 8, "DRAFT_EXTEND_V2")],
)
def test_small_and_odd_batches_and_draft_extend_are_not_split_but_agreed_on(
    make_backend, num_requests, num_drafts, world_size, mode
):
    """Requests are what must divide: their rows do in some of these."""
    from nsa_dcp.sglang_plugin.selection.row_split_decode import RankRequests, RowSplitDecodeSelection

    seen, agreed = [], []
    q, weights, requests, lengths = draw(num_requests, num_drafts, seed=11)
    metadata = refreshed(make_backend("v2", num_drafts), requests, lengths)
    batch, result = row_split_decode.decode_batch(mode), object()

    def select(*arguments):
        seen.append(arguments)
        return result

    share = RankRequests(SimpleNamespace(world_size=world_size, rank_in_group=1))
    split = RowSplitDecodeSelection(select, share, agreed.append, NUM_SMS)
    assert split(batch, 0, q, weights, metadata) is result
    assert agreed == [result]
    assert all(mine is given for mine, given in zip(seen[0], (batch, 0, q, weights, metadata), strict=True))


def test_on_hopper_sglang_scores_a_verify_steps_rows_each_on_its_own(played, indexer, make_backend):
    """So a step's rows are counted against the GPU's multiprocessors, and are as much work as decode's."""
    q, weights, requests, lengths = draw(64, 4, seed=5)
    metadata = refreshed(make_backend("v2", 4), requests, lengths)
    assert metadata.paged_mqa_ctx_lens_2d.shape == (256, 1)
    played.scored.clear()
    indexer._get_topk_paged(row_split_decode.decode_batch(VERIFY), 0, q, weights, metadata)
    assert played.scored == [NUM_SMS, 256 - NUM_SMS]
