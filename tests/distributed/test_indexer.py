"""Row-split selection: equal to what every rank would select by itself, and equal on all ranks."""

import pytest
import torch

from nsa_dcp import comm
from nsa_dcp.indexer import select_positions, select_positions_row_split
from nsa_dcp.launcher import run_ranks
from nsa_dcp.layout import index_page_table
from nsa_dcp.testing.batch import draw_batch, index_keys_as_stored
from nsa_dcp.testing.oracle import select_dense
from nsa_dcp.testing.poisoned_memory import poisoned_allocations

SEQ_LENS = [130, 1, 70, 5]
TOPK = 16


def draw_problem(dcp_size, dtype):
    """Requests whose keys tie in many places, and one query row per token."""
    batch = draw_batch(SEQ_LENS, dcp_size, seed=11)
    for keys in batch.index_keys:
        keys[::2] = keys[:1].clone()
    rows = [(request, position + 1) for request, length in enumerate(SEQ_LENS) for position in range(length)]
    generator = torch.Generator().manual_seed(12)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    q = torch.randn(len(rows), 2, 128, generator=generator, dtype=acc)
    weights = torch.randn(len(rows), 2, generator=generator, dtype=acc)
    row_request = torch.tensor([request for request, _ in rows], dtype=torch.int32)
    context_lens = torch.tensor([length for _, length in rows], dtype=torch.int32)
    return batch, q, weights, row_request, context_lens


@pytest.mark.parametrize("world_size", [pytest.param(size, id=f"dcp{size}") for size in (2, 3, 4, 8)])
def test_row_split_selects_what_every_rank_selects_alone(world_size):
    """Token counts that the ranks do not divide, fewer rows than ranks, contexts shorter than topk, planted ties.

    Sources: sgl-project/sglang 31821 (positions until slots are looked up), sgl-project/sglang 33059 (padded rows).
    """
    of_ranks = run_ranks(select_on_rank, world_size, (world_size,))
    for selections in zip(*of_ranks):
        assert all(torch.equal(selection, selections[0]) for selection in selections)

    for dtype, selected in zip((torch.float64, torch.float32, torch.uint8), of_ranks[0]):
        batch, q, weights, row_request, context_lens = draw_problem(world_size, dtype)
        for request, keys in enumerate(batch.index_keys):
            rows = (row_request == request).nonzero().squeeze(1)[::5]
            stored = index_keys_as_stored(keys, dtype)
            expected = select_dense(q[rows], weights[rows], stored, context_lens[rows].tolist(), TOPK)
            assert selected[rows].tolist() == expected


@poisoned_allocations()
def select_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    whole = []
    for dtype in (torch.float64, torch.float32, torch.uint8):
        batch, q, weights, row_request, context_lens = draw_problem(world_size, dtype)
        cache = batch.index_cache(dtype).layers[0]
        pages = index_page_table(batch.page_table, world_size)
        total = len(q)

        def scored(rows, q=q, weights=weights, cache=cache, pages=pages, of=row_request, lens=context_lens):
            return q[rows], weights[rows], cache, pages, of[rows], lens[rows], 130, TOPK

        # Row counts on both sides of a multiple of the group, fewer rows than ranks, and none.
        counts = {0, 1, world_size - 1, world_size, world_size + 1, 3 * world_size - 1, total}
        for count in sorted(counts):
            rows = torch.arange(total - count, total)
            split = select_positions_row_split(*scored(rows), group=group)
            assert split.dtype == torch.int32
            assert torch.equal(split, select_positions(*scored(rows))), f"{count} rows"
        whole.append(select_positions_row_split(*scored(torch.arange(total)), group=group))

        # A request's selection does not depend on the requests beside it, nor on where chunks end.
        for request in range(len(SEQ_LENS)):
            rows = (row_request == request).nonzero().squeeze(1)
            assert torch.equal(select_positions_row_split(*scored(rows), group=group), whole[-1][rows])
        chunks = [select_positions_row_split(*scored(rows), group=group) for rows in torch.arange(total).split(37)]
        assert torch.equal(torch.cat(chunks), whole[-1])

        # A padding row sees nothing and selects nothing, on whichever rank it falls.
        q, weights, cache, pages, of, lens, longest, topk = scored(torch.arange(2 * world_size + 1))
        lens = lens.clone()
        lens[1::2] = 0
        padded = select_positions_row_split(q, weights, cache, pages, of, lens, longest, topk, group=group)
        assert padded[1::2].eq(-1).all()
        assert torch.equal(padded[::2], whole[-1][: 2 * world_size + 1 : 2])
    return whole
