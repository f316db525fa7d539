"""Who owns which token: against dealing the slots out one by one, and across the places where slots and rows meet."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.layout import (
    index_page_table,
    local_seq_lens,
    pages_for,
    slots_at,
    widened_page_size,
)
from nsa_dcp.testing.batch import draw_batch
from nsa_dcp.testing.cases import DCP_SIZES, INTERLEAVE_SIZES
from nsa_dcp.testing.oracle import deal_slots
from nsa_dcp_kernels import localize_topk

group_sizes, interleaves = st.sampled_from(DCP_SIZES), st.sampled_from(INTERLEAVE_SIZES)


@given(lens=st.lists(st.integers(0, 2000), max_size=6), dcp_size=group_sizes, interleave=interleaves)
def test_local_seq_lens_count_the_tokens_dealt_to_each_rank(lens, dcp_size, interleave):
    """Sources: vllm-project/vllm 38416, ROCm/ATOM 1746."""
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    owners = [[owner for owner, _ in deal_slots(length, dcp_size, interleave)] for length in lens]
    for rank in range(dcp_size):
        counted = local_seq_lens(seq_lens, dcp_size, rank, interleave)
        assert counted.dtype == torch.int32
        assert counted.tolist() == [of_request.count(rank) for of_request in owners]


@pytest.mark.parametrize("dcp_size", DCP_SIZES)
@pytest.mark.parametrize(
    ("widened_pages", "extra"),
    [pytest.param(pages, extra, id=f"{pages}-pages{extra:+d}") for pages in (1, 2, 5) for extra in (-1, 0, 1)],
)
def test_lengths_around_a_widened_page(dcp_size, widened_pages, extra):
    length = widened_pages * 64 * dcp_size + extra
    per_rank = [int(local_seq_lens(torch.tensor([length]), dcp_size, rank)[0]) for rank in range(dcp_size)]
    expected = [64 * widened_pages] * dcp_size
    if extra == 1:
        expected[0] += 1
    if extra == -1:
        expected[-1] -= 1
    assert per_rank == expected
    assert pages_for(length, dcp_size) == (widened_pages + 1 if extra == 1 else widened_pages)


@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_a_sequence_shorter_than_the_group_leaves_the_last_ranks_nothing(dcp_size):
    """Source: vllm-project/vllm 38416."""
    for length in range(dcp_size + 1):
        held = [int(local_seq_lens(torch.tensor([length]), dcp_size, rank)[0]) for rank in range(dcp_size)]
        assert held == [1] * length + [0] * (dcp_size - length)
    assert pages_for(0, dcp_size) == 0
    assert pages_for(1, dcp_size) == 1


@pytest.mark.parametrize("dcp_rank", [-1, 4, 5])
def test_a_rank_outside_its_group_is_refused(dcp_rank):
    with pytest.raises(ValueError, match=rf"^dcp_rank must be in \[0, 4\), got {dcp_rank}$"):
        local_seq_lens(torch.tensor([3]), 4, dcp_rank)


@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_slots_at_follows_each_requests_own_pages(dcp_size):
    """Requests of unequal lengths, none entries anywhere. Source: vllm-project/vllm-ascend 8547."""
    page = widened_page_size(dcp_size)
    batch = draw_batch([2 * page + 1, 1, page, page - 1], dcp_size, seed=dcp_size)
    for request, length in enumerate(batch.seq_lens):
        positions = torch.arange(length)
        rows = torch.full((length,), request, dtype=torch.int32)
        slots = slots_at(positions, rows, batch.page_table, dcp_size)
        assert slots.dtype == torch.int32
        assert slots.tolist() == batch.slots(request)

    selection = [[0, -1, 2 * page], [-1, -1, 0], [-1, -1, -1], [page - 1, 1, -1], [-1, page - 2, 0]]
    of_row = [0, 1, 1, 2, 3]
    expected = [
        [batch.slots(request)[position] if position >= 0 else -1 for position in row]
        for request, row in zip(of_row, selection)
    ]
    for dtype in (torch.int32, torch.int64):
        slots = slots_at(torch.tensor(selection, dtype=dtype), torch.tensor(of_row), batch.page_table, dcp_size)
        assert slots.dtype == torch.int32
        assert slots.tolist() == expected


def test_slots_at_takes_no_rows():
    table = torch.tensor([[1]], dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    assert slots_at(none, none, table, 2).shape == (0,)
    assert slots_at(torch.zeros(0, 5, dtype=torch.int32), none, table, 2).shape == (0, 5)


@given(data=st.data(), dcp_size=group_sizes)
@settings(max_examples=50)
def test_the_index_cache_keeps_a_position_at_its_undivided_slot(data, dcp_size):
    """The one consumer of slots as they are: no filter and no divide on the way to the index keys.

    Sources: sgl-project/sglang 36886, vllm-project/vllm-ascend 14536, vllm-project/vllm 53635 (pages stay 64 slots).
    """
    page = 64 * dcp_size
    tables = st.lists(st.integers(1, 50), unique=True, min_size=1, max_size=4)
    pages = data.draw(tables)
    position = data.draw(st.integers(0, len(pages) * page - 1))
    inner = index_page_table(torch.tensor([pages], dtype=torch.int32), dcp_size)
    assert inner.dtype == torch.int32
    assert inner.shape == (1, len(pages) * dcp_size)
    widened_slot = pages[position // page] * page + position % page
    assert int(inner[0, position // 64]) * 64 + position % 64 == widened_slot


def test_index_page_table_of_several_requests_keeps_rows_apart():
    table = torch.tensor([[3, 1], [2, 7]], dtype=torch.int32)
    assert index_page_table(table, 2).tolist() == [[6, 7, 2, 3], [4, 5, 14, 15]]
    assert index_page_table(table, 1).tolist() == table.tolist()
    assert index_page_table(table[:0], 2).shape == (0, 4)


@given(data=st.data(), dcp_size=group_sizes)
@settings(max_examples=50)
def test_ownership_can_be_told_from_a_position_or_from_its_slot(data, dcp_size):
    """Pages start at multiples of the widened page, so both spaces agree. Source: sgl-project/sglang 31821."""
    page = widened_page_size(dcp_size)
    pages = data.draw(st.lists(st.integers(1, 50), unique=True, min_size=1, max_size=4))
    position = data.draw(st.integers(0, len(pages) * page - 1))
    slot = pages[position // page] * page + position % page
    of_both = torch.tensor([[position, slot]], dtype=torch.int32)
    held = [
        rows[0, : length[0]].tolist()
        for rows, length in (localize_topk(of_both, dcp_size, rank) for rank in range(dcp_size))
    ]
    assert sorted(len(rows) for rows in held) == [0] * (dcp_size - 1) + [2]
    of_position, of_slot = max(held, key=len)
    # A widened page is one page of 64 rows on every rank.
    assert of_slot == pages[position // page] * 64 + of_position % 64
    assert of_position // 64 == position // page
