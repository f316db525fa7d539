"""Kernels that fill page tables, by work that follows the contexts' lengths, and that look slots up in them."""

import torch
import triton
import triton.language as tl

_PAGES_PER_STEP = 128
# A row of 1,048,576 tokens has 16,384 pages.
_PROGRAMS_PER_ROW = 8
_POSITIONS_PER_PROGRAM = 1024


@triton.jit
def _fill_page_table_kernel(
    table_ptr,
    slots_ptr,
    requests_ptr,
    lengths_ptr,
    table_stride,
    slots_stride,
    width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(requests_ptr + row).to(tl.int64)
    num_pages = tl.minimum(tl.cdiv(tl.load(lengths_ptr + row).to(tl.int32), PAGE_SIZE), width)
    for first in range(tl.program_id(1) * BLOCK, num_pages, tl.num_programs(1) * BLOCK):
        page = first + tl.arange(0, BLOCK)
        held = page < num_pages
        slot = tl.load(slots_ptr + request * slots_stride + page * PAGE_SIZE, mask=held, other=0)
        tl.store(table_ptr + row * table_stride + page, slot // PAGE_SIZE, mask=held)


@triton.jit
def _look_up_slots_kernel(
    positions_ptr,
    requests_ptr,
    table_ptr,
    slots_ptr,
    width,
    positions_stride,
    table_stride,
    table_width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    request = tl.load(requests_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row * positions_stride + column, mask=held, other=-1).to(tl.int32)
    page_at = position // PAGE_SIZE
    known = (position >= 0) & (page_at < table_width)
    page = tl.load(table_ptr + request * table_stride + page_at, mask=known, other=0)
    slot = tl.where(known, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(slots_ptr + row * width + column, slot, mask=held)


def fill_page_table_(
    page_table: torch.Tensor,
    request_slots: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
) -> None:
    num_rows, width = page_table.shape
    if not page_table.numel():
        return
    _fill_page_table_kernel[(num_rows, _PROGRAMS_PER_ROW)](
        page_table,
        request_slots,
        requests.contiguous(),
        lengths.contiguous(),
        page_table.stride(0),
        request_slots.stride(0),
        width,
        PAGE_SIZE=page_size,
        BLOCK=_PAGES_PER_STEP,
        num_warps=4,
    )


def look_up_slots(
    positions: torch.Tensor, row_request: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    num_rows, width = positions.shape
    slots = torch.empty((num_rows, width), dtype=torch.int32, device=positions.device)
    if not slots.numel():
        return slots
    positions, page_table = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (positions, page_table))
    _look_up_slots_kernel[(num_rows, triton.cdiv(width, _POSITIONS_PER_PROGRAM))](
        positions,
        row_request.contiguous(),
        page_table,
        slots,
        width,
        positions.stride(0),
        page_table.stride(0),
        page_table.shape[1],
        PAGE_SIZE=page_size,
        BLOCK=_POSITIONS_PER_PROGRAM,
        num_warps=4,
    )
    return slots
