"""Selection shared by ranks: equal to what one would select by itself from all keys, whoever holds the keys."""

import pytest
import torch

from nsa_dcp import comm
from nsa_dcp.indexer import gather_index_cache, select_own, select_positions, select_positions_row_split
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


@pytest.mark.parametrize("world_size", [pytest.param(size, id=f"dcp{size}") for size in (2, 3, 4, 8)])
def test_ranks_that_hold_their_own_keys_alone_select_what_one_with_all_keys_does(world_size):
    """Planted ties, contexts shorter than the group, row counts that it does not divide, padding rows; from gathered
    pages too. What a rank does not own is NaN in its cache.
    """
    for dtype_number in range(3):
        of_ranks = run_ranks(select_own_on_rank, world_size, (world_size, dtype_number))
        expected = of_ranks[0]["expected"]
        for rank, result in enumerate(of_ranks):
            assert torch.equal(result["gathered"], expected)
            for count, part in result["own"].items():
                for row, positions in zip(expected[len(expected) - count :].tolist(), part):
                    assert positions == [p for p in row if p >= 0 and p % world_size == rank]
            assert result["padded"] == result["unpadded"]


@poisoned_allocations()
def select_own_on_rank(rank, _send, world_size, dtype_number):
    group = comm.contiguous_group(world_size)
    dtype = (torch.float64, torch.float32, torch.uint8)[dtype_number]
    batch, q, weights, row_request, context_lens = draw_problem(world_size, dtype)
    own = batch.index_cache(dtype, rank).layers[0]
    total, longest = len(q), max(SEQ_LENS)

    def scored(rows, cache, pages, lens=context_lens):
        return q[rows], weights[rows], cache, pages, row_request[rows], lens[rows], longest, TOPK

    def positions(rows, selection):
        """This rank's rows as positions, by plain integers."""
        found = []
        for row, taken, length in zip(rows.tolist(), selection[0].tolist(), selection[1].tolist()):
            pages = batch.pages[int(row_request[row])]
            assert taken[length:] == [-1] * (TOPK - length)
            found.append([(pages.index(at // 64) * 64 + at % 64) * world_size + rank for at in taken[:length]])
        return found

    own_parts = {}
    for count in sorted({0, 1, world_size - 1, world_size, world_size + 1, total}):
        rows = torch.arange(total - count, total)
        own_parts[count] = positions(rows, select_own(*scored(rows, own, batch.page_table), group=group))

    # Padding rows stand between real ones and see nothing; the real ones select what they do alone.
    rows, lens = torch.arange(2 * world_size + 1), context_lens.clone()
    lens[1 : 2 * world_size : 2] = 0
    padded = select_own(*scored(rows, own, batch.page_table, lens), group=group)
    assert padded[0][1::2].eq(-1).all() and padded[1][1::2].eq(0).all()
    unpadded = select_own(*scored(rows[::2], own, batch.page_table), group=group)

    # Pages in any order, one of them of no request: their places stand in the table.
    used = torch.tensor(sorted({page for pages in batch.pages for page in pages} | {0}), dtype=torch.int32).flip(0)
    places = torch.full((batch.num_pages,), -1, dtype=torch.int32)
    places[used.long()] = torch.arange(len(used), dtype=torch.int32)
    whole = gather_index_cache(own, used, group)
    table = places[batch.page_table.clamp(max=batch.num_pages - 1).long()].clamp(min=0)
    everything = torch.arange(total)
    gathered = select_positions(*scored(everything, whole, index_page_table(table, world_size)))
    replicated = batch.index_cache(dtype).layers[0]
    expected = select_positions(*scored(everything, replicated, index_page_table(batch.page_table, world_size)))
    return {
        "expected": expected,
        "own": own_parts,
        "gathered": gathered,
        "padded": padded[0][::2].tolist(),
        "unpadded": unpadded[0].tolist(),
    }
