"""Ownership: the reference against Python integers, and its properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.cases import DCP_SIZES, INTERLEAVE_SIZES, ODD_SIZES, POISON_INT, draw_selection
from nsa_dcp_kernels import localize_topk

selections = st.integers(1, 40).flatmap(
    lambda width: st.lists(st.lists(st.integers(-3, 5000), min_size=width, max_size=width), min_size=1, max_size=4)
)
groups = st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 64]))


def deal(slot: int, dcp_size: int, interleave_size: int) -> tuple[int, int]:
    """(rank, row) of a slot, by dealing blocks of interleave_size slots round robin."""
    block, offset = divmod(slot, interleave_size)
    turn, rank = divmod(block, dcp_size)
    return rank, turn * interleave_size + offset


def localize_by_hand(row: list[int], dcp_size: int, dcp_rank: int, interleave_size: int) -> list[int]:
    dealt = [deal(slot, dcp_size, interleave_size) for slot in row if slot >= 0]
    return [local_row for rank, local_row in dealt if rank == dcp_rank]


def slot_of(row: int, dcp_size: int, dcp_rank: int, interleave_size: int) -> int:
    return row // interleave_size * interleave_size * dcp_size + dcp_rank * interleave_size + row % interleave_size


@pytest.mark.parametrize("width", ODD_SIZES)
@pytest.mark.parametrize("interleave_size", INTERLEAVE_SIZES)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_rows_are_the_owned_slots_divided(dcp_size, interleave_size, width):
    """Filter and divide: sgl-project/sglang 36989 filtered only, vllm-project/vllm 54541 did neither.

    Padding is exactly -1, the only value that FlashMLA skips: deepseek-ai/FlashMLA 109.
    """
    num_slots = 4 * 64 * dcp_size
    slots = draw_selection(5, width, num_slots, seed=width)
    before = slots.clone()
    for rank in range(dcp_size):
        rows, length = localize_topk(slots, dcp_size, rank, interleave_size)
        wanted = [localize_by_hand(row, dcp_size, rank, interleave_size) for row in slots.tolist()]
        assert rows.dtype == length.dtype == torch.int32
        assert length.tolist() == [len(row) for row in wanted]
        assert rows.tolist() == [row + [-1] * (width - len(row)) for row in wanted]
    assert_bitwise_equal(slots, before)


@settings(max_examples=80)
@given(selections, groups)
def test_each_slot_has_one_owner_and_keeps_its_place_in_the_order(selection, group):
    dcp_size, interleave_size = group
    slots = torch.tensor(selection, dtype=torch.int32)
    parts = [localize_topk(slots, dcp_size, rank, interleave_size) for rank in range(dcp_size)]
    for token, row in enumerate(selection):
        found = []
        for rank, (rows, length) in enumerate(parts):
            held = rows[token, : length[token]].tolist()
            assert rows[token, length[token] :].eq(-1).all()
            mine = [slot_of(local_row, dcp_size, rank, interleave_size) for local_row in held]
            assert mine == [slot for slot in row if slot in set(mine)]
            found += mine
        assert sorted(found) == sorted(slot for slot in row if slot >= 0)


@settings(max_examples=40)
@given(st.lists(st.integers(0, POISON_INT), unique=True, min_size=1), groups)
def test_owner_and_row_name_one_slot_each_over_the_whole_range(slots, group):
    found = []
    for rank in range(group[0]):
        rows, length = localize_topk(torch.tensor([slots], dtype=torch.int32), group[0], rank, group[1])
        found += [slot_of(row, group[0], rank, group[1]) for row in rows[0, : length[0]].tolist()]
    assert sorted(found) == sorted(slots)


@pytest.mark.parametrize("interleave_size", INTERLEAVE_SIZES)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_none_has_no_owner_and_no_row(dcp_size, interleave_size):
    """-1 % N is N - 1 in Python: padding would fall to the last rank. Source: deepseek-ai/FlashMLA 109."""
    slots = torch.tensor([[-1, 0], [-7, -(2**31)]], dtype=torch.int32)
    for rank in range(dcp_size):
        rows, length = localize_topk(slots, dcp_size, rank, interleave_size)
        assert length.tolist() == [int(rank == 0), 0]
        assert rows.tolist() == [[0 if rank == 0 else -1, -1], [-1, -1]]


@settings(max_examples=40)
@given(groups, st.integers(1, 300))
def test_consecutive_slots_spread_evenly_over_rows_without_gaps(group, num_slots):
    """A rank's rows of slots 0 .. n-1 are 0 .. m-1: no row is skipped, none used twice."""
    dcp_size, interleave_size = group
    slots = torch.arange(num_slots, dtype=torch.int32).unsqueeze(0)
    lengths = []
    for rank in range(dcp_size):
        rows, length = localize_topk(slots, dcp_size, rank, interleave_size)
        assert rows[0, : length[0]].tolist() == list(range(int(length[0])))
        lengths.append(int(length[0]))
    assert max(lengths) - min(lengths) <= interleave_size


def test_one_rank_owns_everything_unchanged():
    slots = torch.tensor([[9, 3, 7, -1], [0, POISON_INT, -1, -1]], dtype=torch.int32)
    rows, length = localize_topk(slots, 1, 0, 64)
    assert_bitwise_equal(rows, slots)
    assert length.tolist() == [3, 2]


def test_largest_slot_does_not_overflow():
    slots = torch.tensor([[POISON_INT, POISON_INT - 1]], dtype=torch.int32)
    for rank in range(8):
        for interleave_size in INTERLEAVE_SIZES:
            rows, length = localize_topk(slots, 8, rank, interleave_size)
            wanted = localize_by_hand(slots[0].tolist(), 8, rank, interleave_size)
            assert rows[0, : length[0]].tolist() == wanted


@pytest.mark.parametrize(("num_tokens", "width"), [(0, 64), (3, 0), (0, 0)], ids=str)
def test_empty_selections_have_empty_rows(num_tokens, width):
    rows, length = localize_topk(torch.zeros(num_tokens, width, dtype=torch.int32), 4, 1)
    assert rows.shape == (num_tokens, width)
    assert length.tolist() == [0] * num_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 4), 2, 0), "topk_slots must have dtype int32, got float32"),
        ((torch.zeros(4, dtype=torch.int32), 2, 0), r"topk_slots must have shape \[\*, \*\], got \[4\]"),
        ((torch.zeros(2, 4, dtype=torch.int32), 2, 2), r"dcp_rank must be in \[0, 2\), got 2"),
        ((torch.zeros(2, 4, dtype=torch.int32), 2, -1), r"dcp_rank must be in \[0, 2\), got -1"),
        ((torch.zeros(2, 4, dtype=torch.int32), 0, 0), "dcp_size must be at least 1, got 0"),
        ((torch.zeros(2, 4, dtype=torch.int32), 2, 0, 0), "interleave_size must be at least 1, got 0"),
    ],
    ids=["dtype", "rank", "rank-too-large", "negative-rank", "no-ranks", "no-interleave"],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        localize_topk(*arguments)
