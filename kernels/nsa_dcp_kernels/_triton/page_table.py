"""The kernel that fills page tables: its work follows the contexts' lengths, which the host need not know."""

import torch
import triton
import triton.language as tl

_PAGES_PER_STEP = 128
# A row of 1,048,576 tokens has 16,384 pages.
_PROGRAMS_PER_ROW = 8


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
