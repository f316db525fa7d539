"""Selection on one rank: against sorting plain lists, with planted ties, whatever stands beside a row."""

import pytest
import torch

from nsa_dcp import indexer
from nsa_dcp.indexer import select_positions, select_positions_row_split
from nsa_dcp.layout import index_page_table
from nsa_dcp.testing.batch import draw_batch, index_keys_as_stored
from nsa_dcp.testing.oracle import select_dense

STORAGES = [
    pytest.param(torch.float64, id="float64"),
    pytest.param(torch.float32, id="float32"),
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.uint8, id="fp8"),
]


def draw_queries(num_tokens, heads, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    q = torch.randn(num_tokens, heads, 128, generator=generator, dtype=acc).to(dtype)
    return q, torch.randn(num_tokens, heads, generator=generator, dtype=acc)


def every_row(batch):
    """All positions of all requests as query rows: (row_request, context_lens)."""
    rows = [(request, position + 1) for request, length in enumerate(batch.seq_lens) for position in range(length)]
    return (
        torch.tensor([request for request, _ in rows], dtype=torch.int32),
        torch.tensor([length for _, length in rows], dtype=torch.int32),
    )


def select(batch, cache, q, weights, row_request, context_lens, topk):
    pages = index_page_table(batch.page_table, batch.dcp_size)
    longest = int(context_lens.max()) if len(context_lens) else 0
    return select_positions(q, weights, cache, pages, row_request, context_lens, longest, topk)


def plant_ties(batch):
    """Give every third position the key of position 0, and every seventh that of position 1."""
    for keys in batch.index_keys:
        keys[::3] = keys[:1].clone()
        keys[1::7] = keys[1:2].clone()


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("dcp_size", [1, 3])
def test_selections_are_the_best_scored_positions_the_lower_one_of_equals(dtype, dcp_size):
    """Over a cache that is poisoned wherever no key was written.

    Sources: ROCm/aiter 5591 (offset in a page), vllm-project/vllm 47827 (past one page).
    """
    batch = draw_batch([64 * dcp_size + 9, 1, 70, 64 * dcp_size], dcp_size)
    plant_ties(batch)
    cache = batch.index_cache(dtype).layers[0]
    row_request, context_lens = every_row(batch)
    q, weights = draw_queries(len(row_request), 2, torch.float64 if dtype == torch.float64 else torch.float32)
    selected = select(batch, cache, q, weights, row_request, context_lens, topk=24)
    assert selected.dtype == torch.int32
    for request, keys in enumerate(batch.index_keys):
        rows = row_request == request
        stored = index_keys_as_stored(keys, dtype)
        assert selected[rows].tolist() == select_dense(q[rows], weights[rows], stored, context_lens[rows].tolist(), 24)


@pytest.mark.parametrize("topk", [1, 64, 100])
def test_a_context_shorter_than_topk_is_selected_whole(topk):
    batch = draw_batch([63, 64, 65], 2)
    row_request, context_lens = every_row(batch)
    q, weights = draw_queries(len(row_request), 2)
    selected = select(batch, batch.index_cache(torch.float32).layers[0], q, weights, row_request, context_lens, topk)
    for row, length in zip(selected.tolist(), context_lens.tolist()):
        assert sum(position >= 0 for position in row) == min(length, topk)
        if length <= topk:
            assert row == list(range(length)) + [-1] * (topk - length)


def test_rows_that_see_nothing_and_batches_of_none_select_nothing():
    """Source: vllm-project/vllm 51970."""
    batch = draw_batch([5, 70], 2)
    cache = batch.index_cache(torch.uint8).layers[0]
    q, weights = draw_queries(3, 2)
    row_request = torch.tensor([0, 1, 1], dtype=torch.int32)
    selected = select(batch, cache, q, weights, row_request, torch.tensor([0, 70, 0], dtype=torch.int32), 8)
    assert selected[0].tolist() == selected[2].tolist() == [-1] * 8
    assert (selected[1] >= 0).all()
    nothing = select(batch, cache, q, weights, row_request, torch.zeros(3, dtype=torch.int32), 8)
    assert nothing.tolist() == [[-1] * 8] * 3
    none = select(batch, cache, q[:0], weights[:0], row_request[:0], torch.zeros(0, dtype=torch.int32), 8)
    assert none.shape == (0, 8)
    assert none.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=["float32", "fp8"])
def test_a_request_selects_the_same_alone_and_among_others(dtype):
    """Sources: vllm-project/vllm 41623, sgl-project/sglang 15227 (metadata of another batch)."""
    batch = draw_batch([90, 1, 200, 17], 2)
    plant_ties(batch)
    cache = batch.index_cache(dtype).layers[0]
    row_request, context_lens = every_row(batch)
    q, weights = draw_queries(len(row_request), 4)
    together = select(batch, cache, q, weights, row_request, context_lens, 16)
    pages = index_page_table(batch.page_table, 2)
    for request, length in enumerate(batch.seq_lens):
        rows = row_request == request
        alone = select_positions(
            q[rows],
            weights[rows],
            cache,
            pages[request : request + 1],
            torch.zeros(length, dtype=torch.int32),
            context_lens[rows],
            length,
            16,
        )
        assert torch.equal(alone, together[rows])
    # In any order of the rows, too.
    order = torch.randperm(len(row_request))
    shuffled = select(batch, cache, q[order], weights[order], row_request[order], context_lens[order], 16)
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("rows_at_once", [1, 7, 63])
def test_selections_do_not_depend_on_how_rows_are_chunked(rows_at_once, monkeypatch):
    batch = draw_batch([70, 20], 2)
    plant_ties(batch)
    cache = batch.index_cache(torch.float32).layers[0]
    row_request, context_lens = every_row(batch)
    q, weights = draw_queries(len(row_request), 2)
    whole = select(batch, cache, q, weights, row_request, context_lens, 32)
    monkeypatch.setattr(indexer, "_LOGITS_BYTES", 4 * 70 * rows_at_once)
    assert torch.equal(select(batch, cache, q, weights, row_request, context_lens, 32), whole)
    # A caller's own chunks, as chunked prefill makes them: each chunk's rows end at a shorter context.
    parts = [
        select(batch, cache, q[part], weights[part], row_request[part], context_lens[part], 32)
        for part in torch.arange(len(row_request)).split(rows_at_once)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_a_wider_score_matrix_than_needed_changes_nothing():
    """What lies past a context is never selected. Source: flashinfer-ai/flashinfer 4365."""
    batch = draw_batch([65, 3], 2)
    cache = batch.index_cache(torch.uint8).layers[0]
    row_request, context_lens = every_row(batch)
    q, weights = draw_queries(len(row_request), 2)
    scored = (q, weights, cache, index_page_table(batch.page_table, 2), row_request, context_lens)
    assert torch.equal(select_positions(*scored, 65, 16), select_positions(*scored, 1000, 16))


def test_a_group_of_one_scores_every_row_itself():
    batch = draw_batch([70], 1)
    row_request, context_lens = every_row(batch)
    q, weights = draw_queries(len(row_request), 2)
    scored = (
        q,
        weights,
        batch.index_cache(torch.float32).layers[0],
        batch.page_table,
        row_request,
        context_lens,
        70,
        9,
    )
    assert torch.equal(select_positions_row_split(*scored, group=None), select_positions(*scored))
