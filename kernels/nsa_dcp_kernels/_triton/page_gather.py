"""Kernels of the page gather and of the remap to its buffer."""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels._checks import check

_WORDS_PER_PROGRAM = 1024
_SLOTS_PER_PROGRAM = 1024


@triton.jit
def _gather_pages_kernel(cache_ptr, pages_ptr, out_ptr, page_words, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    moved = word < page_words
    page = tl.load(pages_ptr + place).to(tl.int64)
    values = tl.load(cache_ptr + page * page_words + word, mask=moved)
    tl.store(out_ptr + place * page_words + word, values, mask=moved)


@triton.jit
def _remap_to_gathered_kernel(
    slots_ptr,
    page_pos_ptr,
    rows_ptr,
    width,
    slots_stride,
    num_pages,
    local_rows,
    DCP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    widened_page: tl.constexpr = PAGE_SIZE * DCP_SIZE
    slot = tl.load(slots_ptr + token * slots_stride + column, mask=held, other=-1)
    page = slot // widened_page
    known = (slot >= 0) & (page < num_pages)
    position = tl.load(page_pos_ptr + page, mask=known, other=-1)
    row = slot % DCP_SIZE * local_rows + position * PAGE_SIZE + slot % widened_page // DCP_SIZE
    tl.store(rows_ptr + token * width + column, tl.where(position >= 0, row, -1), mask=held)


def gather_pages(cache: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    check(cache.is_contiguous(), "cache", "be contiguous", f"strides {cache.stride()}")
    gathered = torch.empty((pages.shape[0] * page_size, cache.shape[1]), dtype=cache.dtype, device=cache.device)
    if gathered.numel() == 0:
        return gathered
    page_bytes = page_size * cache.shape[1] * cache.itemsize
    word = torch.int32 if page_bytes % 4 == 0 else torch.uint8
    page_words = page_bytes // word.itemsize
    _gather_pages_kernel[(pages.shape[0], triton.cdiv(page_words, _WORDS_PER_PROGRAM))](
        cache.view(-1).view(word),
        pages.contiguous(),
        gathered.view(-1).view(word),
        page_words,
        BLOCK=_WORDS_PER_PROGRAM,
        num_warps=4,
    )
    return gathered


def remap_to_gathered(
    topk_slots: torch.Tensor, page_pos: torch.Tensor, dcp_size: int, local_rows: int, page_size: int
) -> torch.Tensor:
    num_tokens, width = topk_slots.shape
    if topk_slots.stride(1) != 1:
        topk_slots = topk_slots.contiguous()
    rows = torch.empty((num_tokens, width), dtype=torch.int32, device=topk_slots.device)
    if rows.numel() == 0:
        return rows
    block = min(_SLOTS_PER_PROGRAM, triton.next_power_of_2(width))
    _remap_to_gathered_kernel[(num_tokens, triton.cdiv(width, block))](
        topk_slots,
        page_pos.contiguous(),
        rows,
        width,
        topk_slots.stride(0),
        page_pos.shape[0],
        local_rows,
        DCP_SIZE=dcp_size,
        PAGE_SIZE=page_size,
        BLOCK=block,
        num_warps=4,
    )
    return rows
