"""Selection over sharded index keys: all ranks in one process against `select_topk`; kernels against references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.layout import local_seq_lens
from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.cases import POISON_INT
from nsa_dcp_kernels import find_threshold, localize_contexts, localize_topk, select_candidates, take_own
from nsa_dcp_kernels import reference as whole
from nsa_dcp_kernels import sharded_selection_reference as reference
from nsa_dcp_kernels._triton import sharded_selection as kernels
from nsa_dcp_kernels._triton import slot_selection

SIZES = [1, 2, 3, 4, 8]
NOTHING, LAST = -(2**31), 2**31 - 1
KINDS = ("normal", "ties", "zeros", "nan", "inf", "one rank", "one rank ties", "constant")


def draw_scores(kind: str, num_rows: int, width: int, dcp_size: int) -> torch.Tensor:
    scores = torch.randn(num_rows, width)
    if kind == "ties":
        return (3 * scores).round()
    if kind == "zeros":
        zeros = torch.tensor([0.0, -0.0])[torch.randint(0, 2, scores.shape)]
        return torch.where(torch.rand_like(scores) < 0.9, zeros, scores)
    if kind == "nan":
        return scores.masked_fill(torch.rand_like(scores) < 0.6, math.nan)
    if kind == "inf":
        special = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
        return torch.where(torch.rand_like(scores) < 0.8, special[torch.randint(0, 4, scores.shape)], scores)
    if kind.startswith("one rank"):
        # All that is selected lies on one rank, and of the others something ties with it.
        scores[:, dcp_size - 1 :: dcp_size] += 100
        return scores.clamp(max=2.0) if kind.endswith("ties") else scores
    return torch.full_like(scores, -3.5) if kind == "constant" else scores


def selected_sets(parts: list[torch.Tensor]) -> list[list[int]]:
    """The ranks' positions of each row; each rank's must be its own, ascending, and followed by -1 alone."""
    rows = []
    for row in range(parts[0].shape[0]):
        everyone: list[int] = []
        for rank, part in enumerate(parts):
            mine = [position for position in part[row].tolist() if position >= 0]
            assert part[row, : len(mine)].tolist() == sorted(mine)
            assert all(position % len(parts) == rank for position in mine)
            everyone += mine
        rows.append(sorted(everyone))
    return rows


def without_padding(selection: torch.Tensor) -> list[list[int]]:
    return [[position for position in row if position >= 0] for row in selection.tolist()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dcp_size", SIZES)
def test_the_ranks_together_select_what_one_selects_from_all_scores(dcp_size, kind):
    topk = 16
    lengths = torch.tensor([0, 1, dcp_size - 1, dcp_size, dcp_size + 1, topk, topk + 1, topk * dcp_size, 200, 301])
    scores = draw_scores(kind, len(lengths), 301, dcp_size)
    # What no row may see is better than all that it may, and NaN in the last column.
    scores.masked_fill_(torch.arange(301) >= lengths.unsqueeze(1), math.inf)
    parts = reference.select_sharded(scores, lengths, topk, dcp_size)
    assert selected_sets(parts) == without_padding(whole.select_topk(scores, lengths, topk))


@pytest.mark.parametrize("kind", ["normal", "zeros", "one rank"])
@pytest.mark.parametrize("dcp_size", SIZES)
def test_the_widths_that_are_served(dcp_size, kind):
    topk = 2048
    lengths = torch.tensor([1, topk - 1, topk, topk + 1, topk * dcp_size - 1, topk * dcp_size + 1, 9000])
    scores = draw_scores(kind, len(lengths), max(9000, int(lengths.max())), dcp_size)
    parts = reference.select_sharded(scores, lengths, topk, dcp_size)
    assert selected_sets(parts) == without_padding(whole.select_topk(scores, lengths, topk))


@settings(max_examples=300)
@given(st.data())
def test_drawn_scores_are_selected_as_by_sorting(data):
    """Against Python's sort, which shares nothing with either way of selecting."""
    dcp_size, topk = data.draw(st.sampled_from(SIZES)), data.draw(st.integers(1, 9))
    values = st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 2.0])
    row = data.draw(st.lists(values, max_size=40))
    scores = torch.tensor([row], dtype=torch.float32).view(1, -1)
    parts = reference.select_sharded(scores, torch.tensor([len(row)]), topk, dcp_size)
    ranks = sorted((math.isnan(score), 0.0 if math.isnan(score) else -score, at) for at, score in enumerate(row))
    assert selected_sets(parts) == [sorted(at for *_, at in ranks[:topk])]


@pytest.mark.parametrize("dcp_size", SIZES)
def test_a_rank_attends_to_what_localising_the_whole_selection_would_give_it(dcp_size):
    """Pages in any order, several rows of a request, each with a length of its own."""
    topk, lengths = 32, torch.tensor([700, 701, 702, 64 * dcp_size, 1, 0], dtype=torch.int32)
    row_request = torch.tensor([1, 1, 1, 0, 2, 2])
    widened = torch.randperm(40)[: 3 * 12].view(3, 12).to(torch.int32)
    table = (widened.unsqueeze(-1) * dcp_size + torch.arange(dcp_size, dtype=torch.int32)).flatten(1)
    scores = draw_scores("ties", 6, 702, dcp_size)
    positions = whole.select_topk(scores, lengths, topk)
    slots = whole.look_up_slots(positions, row_request, widened, 64 * dcp_size)
    candidates, pages = [], []
    for rank in range(dcp_size):
        local_pages, local_lengths = localize_contexts(table, lengths, dcp_size, rank)
        candidates.append(select_candidates(scores[:, rank::dcp_size].contiguous(), local_lengths, topk))
        pages.append(local_pages)
    cutoffs = find_threshold(torch.stack(candidates))
    for rank in range(dcp_size):
        own = take_own(candidates[rank], cutoffs, pages[rank], dcp_size, rank, row_request=row_request)
        for mine, expected in zip(own, localize_topk(slots, dcp_size, rank)):
            assert_bitwise_equal(mine, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dcp_size", SIZES)
def test_contexts_are_localised_by_page_and_every_token_is_counted_once(dcp_size, dtype, device):
    lengths = torch.tensor([0, 1, dcp_size, 64 * dcp_size - 1, 2**31 - 1, -3, 100_000], dtype=dtype)
    table = torch.arange(5 * (4 * dcp_size + 1)).view(5, -1).to(torch.int32) * 64
    table[:, 3] = POISON_INT
    total = torch.zeros(len(lengths), dtype=torch.int64)
    for rank in range(dcp_size):
        expected = reference.localize_contexts(table, lengths, dcp_size, rank)
        assert_bitwise_equal(expected[1], local_seq_lens(lengths.clamp(min=0), dcp_size, rank).to(torch.int32))
        by_hand = [[page // dcp_size if page >= 0 else -1 for page in row[::dcp_size]] for row in table.tolist()]
        assert expected[0].tolist() == by_hand
        total += expected[1]
        # Rows of the table that lie apart.
        wide = torch.cat([table, table], dim=1)[:, : table.shape[1]]
        for pages in (table, wide):
            got = kernels.localize_contexts(pages.to(device), lengths.to(device), dcp_size, rank)
            for mine, theirs in zip(got, expected):
                assert_bitwise_equal(mine, theirs)
    assert total.tolist() == lengths.clamp(min=0).tolist()


@pytest.mark.parametrize(
    ("width", "topk", "kind"),
    [(100, 7, kind) for kind in KINDS]
    + [(1, 1, "nan"), (100, 100, "inf"), (3000, 2048, "nan"), (8300, 64, "zeros"), (20000, 33, "one rank ties")],
)
def test_candidates_have_the_keys_of_their_scores(width, topk, kind, device):
    """Rows that are taken whole, that a program holds, and that are longer."""
    scores = draw_scores(kind, 4, width, 3)
    lengths = torch.tensor([width, width // 2, 0, width + 9], dtype=torch.int32)
    expected = reference.select_candidates(scores, lengths, topk)
    assert_bitwise_equal(expected[:, 1], whole.select_slots(scores, lengths, topk, None, None, None, 64))
    for keys, local, row in zip(*expected.unbind(1), scores):
        held = [row[at] for at in local.tolist() if at >= 0]
        # Keys order as scores do, NaN below -inf, and padding below that.
        for key, score in zip(keys.tolist(), held):
            bits = int(abs(score).view(torch.int32))
            assert key == (NOTHING + 1 if score.isnan() else -bits if score < 0 else bits)
        assert keys[len(held) :].tolist() == [NOTHING] * (topk - len(held))
    assert_bitwise_equal(slot_selection.select_candidates(scores.to(device), lengths.to(device), topk), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dcp_size", "topk"), [(1, 5), (2, 64), (3, 1), (4, 100), (8, 7)])
def test_thresholds_and_own_rows_are_the_references(dcp_size, kind, topk, device):
    width, num_rows = 4 * topk * dcp_size + 3, 6
    scores = draw_scores(kind, num_rows, width, dcp_size)
    lengths = torch.tensor([width, width - 1, topk, topk * dcp_size, 1, 0])
    table = torch.randperm(num_rows * -(-width // 64))[: num_rows * -(-width // 64)].view(num_rows, -1).to(torch.int32)
    shards = [reference.localize_contexts(table * dcp_size, lengths, dcp_size, rank) for rank in range(dcp_size)]
    lists = torch.stack(
        [
            reference.select_candidates(scores[:, rank::dcp_size].contiguous(), shards[rank][1], topk)
            for rank in range(dcp_size)
        ]
    )
    cutoffs = reference.find_threshold(lists)
    assert_bitwise_equal(kernels.find_threshold(lists.to(device)), cutoffs)
    for rank in range(dcp_size):
        request = None if rank % 2 else torch.randint(0, num_rows, (num_rows,))
        args = (lists[rank], cutoffs, table, dcp_size, rank, request)
        expected = reference.take_own(*args)
        got = kernels.take_own(*(arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args))
        for mine, theirs in zip(got, expected):
            assert_bitwise_equal(mine, theirs)


@pytest.mark.parametrize("dcp_size", SIZES)
def test_positions_up_to_the_last_of_31_bits_decide_ties(dcp_size, device):
    """Local indices whose positions end where 32 bits do; rows of pages that do too."""
    last = LAST // dcp_size
    locals_of = [sorted({last - step for step in (0, 1, 5, 70, 2**20) if (last - step) * dcp_size + rank <= LAST})
                 for rank in range(dcp_size)]  # fmt: skip
    topk = 4
    lists = torch.full((dcp_size, 1, 2, topk), NOTHING, dtype=torch.int32)
    lists[:, :, 1] = -1
    for rank, local in enumerate(locals_of):
        lists[rank, 0, 0, : len(local[:topk])] = 7
        lists[rank, 0, 1, : len(local[:topk])] = torch.tensor(local[:topk], dtype=torch.int32)
    everyone = sorted(local * dcp_size + rank for rank in range(dcp_size) for local in locals_of[rank][:topk])
    cutoffs = find_threshold(lists)
    assert_bitwise_equal(kernels.find_threshold(lists.to(device)), cutoffs)
    if len(everyone) > topk:
        assert cutoffs.tolist() == [[7, everyone[topk - 1]]]
    pages = torch.zeros(1, last // 64 + 1, dtype=torch.int32)
    pages[0, -(2**20) // 64 - 2 :] = torch.arange(2**20 // 64 + 2, dtype=torch.int32) + (2**31 // 64 - 2**20 // 64 - 2)
    for rank in range(dcp_size):
        expected = take_own(lists[rank], cutoffs, pages, dcp_size, rank)
        taken = [local for local in locals_of[rank][:topk] if local * dcp_size + rank in everyone[:topk]]
        rows = [int(pages[0, local // 64]) * 64 + local % 64 for local in taken]
        assert expected[0].tolist() == [rows + [-1] * (topk - len(rows))]
        got = kernels.take_own(lists[rank].to(device), cutoffs.to(device), pages.to(device), dcp_size, rank, None)
        for mine, theirs in zip(got, expected):
            assert_bitwise_equal(mine, theirs)


def test_no_rows_and_no_scores_select_nothing(device):
    for select in (reference.select_candidates, slot_selection.select_candidates):
        if device == "cuda" and select is reference.select_candidates:
            continue
        lengths = torch.tensor([5, 0], device=device)
        candidates = select(torch.empty(2, 0, device=device), lengths, 3)
        assert candidates.tolist() == [[[NOTHING] * 3, [-1] * 3]] * 2
        assert select(torch.empty(0, 9, device=device), lengths[:0], 3).shape == (0, 2, 3)
    lists = torch.empty(2, 0, 2, 3, dtype=torch.int32, device=device)
    cutoffs = kernels.find_threshold(lists)
    assert cutoffs.shape == (0, 2)
    pages = torch.empty(0, 4, dtype=torch.int32, device=device)
    rows, length = kernels.take_own(lists[0], cutoffs, pages, 2, 0, None)
    assert (rows.shape, length.shape) == ((0, 3), (0,))
    local_pages, local_lengths = kernels.localize_contexts(pages, lengths[:0], 2, 1)
    assert (local_pages.shape, local_lengths.shape) == ((0, 2), (0,))


def test_wrong_arguments_are_refused():
    candidates = torch.zeros(2, 2, 3, dtype=torch.int32)
    cutoffs, pages = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lists must have shape \[\*, \*, 2, \*\]"):
        find_threshold(candidates)
    with pytest.raises(ValueError, match=r"dcp_rank must be in \[0, 2\), got 2"):
        take_own(candidates, cutoffs, pages, 2, 2, row_request=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="local_pages must have 2 rows, one a row, got 1"):
        take_own(candidates, cutoffs, pages, 2, 0)
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        select_candidates(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int32), 0)
    with pytest.raises(ValueError, match="lists must hold at most 32768 candidates a row, got 32769"):
        kernels.find_threshold(torch.zeros(3, 1, 2, 10923, dtype=torch.int32))
