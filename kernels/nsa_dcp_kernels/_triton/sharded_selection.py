"""Kernels of selection over sharded index keys: a program a row, which holds the row's candidates in registers."""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels._checks import check
from nsa_dcp_kernels._triton.key_search import _search
from nsa_dcp_kernels._triton.topk import _LARGEST, _NOTHING, _RUN, _count_through
from nsa_dcp_kernels.kv_format import PAGE_SIZE

# Candidates of a row that a program holds. Counting two keys at once takes half an integer for each.
_MOST_CANDIDATES = 32768
_ENTRIES_PER_THREAD = 32
_LAST_POSITION = tl.constexpr(0x7FFFFFFF)
_PAGES_PER_PROGRAM = 1024


@triton.jit(do_not_specialize=["num_rows", "topk"])
def _find_threshold_kernel(lists_ptr, cutoffs_ptr, num_rows, topk, NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    rank = entry // topk
    at = ((rank * num_rows.to(tl.int64) + row) * 2) * topk + entry % topk
    key = tl.load(lists_ptr + at, mask=entry < NUM_RANKS * topk, other=_NOTHING)
    held = tl.sum((key != _NOTHING).to(tl.int32))
    threshold = tl.full([], _NOTHING, tl.int32)
    cut = tl.full([], _LAST_POSITION, tl.int32)
    if held > topk:
        low, _, _ = _search(key, topk, topk, held)
        # The search may end below the last key that fits.
        threshold = tl.min(tl.where(key >= low, key, _LARGEST))
        tied = key == threshold
        ties = tl.sum(tied.to(tl.int32))
        vacant = topk - tl.sum((key > threshold).to(tl.int32))
        if ties > vacant:
            position = tl.load(lists_ptr + at + topk, mask=tied, other=0) * NUM_RANKS + rank
            lower_first = tl.where(tied, _LAST_POSITION - position, _NOTHING)
            low, _, _ = _search(lower_first, vacant, vacant, ties)
            cut = tl.max(tl.where(tied & (lower_first >= low), position, -1))
    tl.store(cutoffs_ptr + 2 * row, threshold)
    tl.store(cutoffs_ptr + 2 * row + 1, cut)


@triton.jit(do_not_specialize=["topk", "pages_stride", "dcp_rank"])
def _take_own_kernel(
    candidates_ptr,
    cutoffs_ptr,
    pages_ptr,
    request_ptr,
    rows_ptr,
    length_ptr,
    topk,
    pages_stride,
    dcp_rank,
    DCP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = row if request_ptr is None else tl.load(request_ptr + row).to(tl.int64)
    entry = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    held = entry < topk
    candidates_ptr += row * 2 * topk
    key = tl.load(candidates_ptr + entry, mask=held, other=_NOTHING)
    local = tl.load(candidates_ptr + topk + entry, mask=held, other=-1)
    threshold = tl.load(cutoffs_ptr + 2 * row)
    cut = tl.load(cutoffs_ptr + 2 * row + 1)
    position = local.to(tl.int64) * DCP_SIZE + dcp_rank
    own = (local >= 0) & ((key > threshold) | ((key == threshold) & (position <= cut)))
    page = tl.load(pages_ptr + request * pages_stride + local // PAGE_SIZE, mask=own, other=0)
    rows_ptr += row * topk
    tl.store(rows_ptr + _count_through(own) - 1, page * PAGE_SIZE + local % PAGE_SIZE, mask=own)
    length = tl.sum(own.to(tl.int32))
    tl.store(length_ptr + row, length)
    tl.store(rows_ptr + entry, tl.full([BLOCK // RUN, RUN], -1, tl.int32), mask=held & (entry >= length))


@triton.jit(do_not_specialize=["local_width", "num_requests", "num_rows", "table_stride", "dcp_rank"])
def _localize_contexts_kernel(
    table_ptr,
    lengths_ptr,
    pages_ptr,
    local_lengths_ptr,
    local_width,
    num_requests,
    num_rows,
    table_stride,
    dcp_rank,
    DCP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Axis 1 is a request's pages, and behind the last request the rows' lengths."""
    line = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if line < num_requests:
        in_table = place < local_width
        page = tl.load(table_ptr + line.to(tl.int64) * table_stride + place * DCP_SIZE, mask=in_table, other=0)
        local_page = tl.where(page >= 0, page // DCP_SIZE, -1)
        tl.store(pages_ptr + line.to(tl.int64) * local_width + place, local_page, mask=in_table)
    else:
        is_row = place < num_rows
        length = tl.maximum(tl.load(lengths_ptr + place, mask=is_row, other=0), 0)
        local_length = length // DCP_SIZE + (length % DCP_SIZE > dcp_rank).to(tl.int32)
        tl.store(local_lengths_ptr + place, local_length.to(tl.int32), mask=is_row)


def localize_contexts(
    page_table: torch.Tensor, lengths: torch.Tensor, dcp_size: int, dcp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    num_requests, width = page_table.shape
    num_rows = lengths.shape[0]
    local_width = triton.cdiv(width, dcp_size)
    local_pages = torch.empty((num_requests, local_width), dtype=torch.int32, device=page_table.device)
    local_lengths = torch.empty(num_rows, dtype=torch.int32, device=page_table.device)
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    blocks = triton.cdiv(max(local_width if num_requests else 0, num_rows), _PAGES_PER_PROGRAM)
    if blocks:
        _localize_contexts_kernel[(blocks, num_requests + 1)](
            page_table,
            lengths.contiguous(),
            local_pages,
            local_lengths,
            local_width,
            num_requests,
            num_rows,
            page_table.stride(0),
            dcp_rank,
            DCP_SIZE=dcp_size,
            BLOCK=_PAGES_PER_PROGRAM,
            num_warps=4,
        )
    return local_pages, local_lengths


def find_threshold(lists: torch.Tensor) -> torch.Tensor:
    """As the public function; N * K at most 32,768."""
    num_ranks, num_rows, _, topk = lists.shape
    candidates = num_ranks * topk
    check(candidates <= _MOST_CANDIDATES, "lists", f"hold at most {_MOST_CANDIDATES} candidates a row", candidates)
    cutoffs = torch.empty((num_rows, 2), dtype=torch.int32, device=lists.device)
    if num_rows:
        block = max(64, triton.next_power_of_2(candidates))
        _find_threshold_kernel[(num_rows,)](
            lists.contiguous(),
            cutoffs,
            num_rows,
            topk,
            NUM_RANKS=num_ranks,
            BLOCK=block,
            num_warps=max(1, block // (32 * _ENTRIES_PER_THREAD)),
        )
    return cutoffs


def take_own(
    candidates: torch.Tensor,
    cutoffs: torch.Tensor,
    local_pages: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    row_request: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the public function; K at most 32,768."""
    num_rows, _, topk = candidates.shape
    check(topk <= _MOST_CANDIDATES, "candidates", f"be at most {_MOST_CANDIDATES} a row", topk)
    rows = torch.empty((num_rows, topk), dtype=torch.int32, device=candidates.device)
    length = torch.empty(num_rows, dtype=torch.int32, device=candidates.device)
    if local_pages.stride(1) != 1:
        local_pages = local_pages.contiguous()
    if num_rows:
        block = max(64, triton.next_power_of_2(topk))
        _take_own_kernel[(num_rows,)](
            candidates.contiguous(),
            cutoffs.contiguous(),
            local_pages,
            None if row_request is None else row_request.contiguous(),
            rows,
            length,
            topk,
            local_pages.stride(0),
            dcp_rank,
            DCP_SIZE=dcp_size,
            PAGE_SIZE=PAGE_SIZE,
            BLOCK=block,
            RUN=_RUN,
            num_warps=max(1, block // (32 * _ENTRIES_PER_THREAD) * 2),
        )
    return rows, length
