"""The kernel that copies index keys and their scales out of pages."""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels._checks import check
from nsa_dcp_kernels.kv_format import INDEX_HEAD_DIM, INDEX_KEY_BYTES, PAGE_SIZE

# Keys and scales are moved as words of 4 bytes: 32 of a key, and its scale.
_KEY_WORDS = INDEX_HEAD_DIM // 4
_PAGE_WORDS = PAGE_SIZE * INDEX_KEY_BYTES // 4


@triton.jit
def _gather_index_pages_kernel(
    cache_ptr,
    pages_ptr,
    lengths_ptr,
    starts_ptr,
    keys_ptr,
    scales_ptr,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
):
    # Axis 0 is the one that holds more than 65,535 programs: a page each, of the longest context.
    page_at = tl.program_id(0)
    context = tl.program_id(1).to(tl.int64)
    token = page_at.to(tl.int64) * PAGE_SIZE + tl.arange(0, PAGE_SIZE)
    held = token < tl.load(lengths_ptr + context)
    if page_at.to(tl.int64) * PAGE_SIZE < tl.load(lengths_ptr + context):
        page = tl.load(pages_ptr + context * table_stride + page_at).to(tl.int64)
        row = tl.load(starts_ptr + context).to(tl.int64) + token
        in_page = tl.arange(0, PAGE_SIZE)
        word = tl.arange(0, KEY_WORDS)
        source = cache_ptr + page * PAGE_WORDS
        keys = tl.load(source + in_page[:, None] * KEY_WORDS + word[None, :], mask=held[:, None], other=0)
        tl.store(keys_ptr + row[:, None] * KEY_WORDS + word[None, :], keys, mask=held[:, None])
        scales = tl.load(source + PAGE_SIZE * KEY_WORDS + in_page, mask=held, other=0)
        tl.store(scales_ptr + row, scales, mask=held)


def gather_index_pages(
    cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, num_keys: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    check(cache.is_contiguous(), "cache", "be contiguous", f"strides {cache.stride()}")
    keys = torch.empty((num_keys, INDEX_HEAD_DIM), dtype=torch.uint8, device=cache.device)
    scales = torch.empty((num_keys, 4), dtype=torch.uint8, device=cache.device)
    pages_of_longest = min(triton.cdiv(longest, PAGE_SIZE), page_table.shape[1])
    if not num_keys or not pages_of_longest:
        return keys, scales
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    seq_lens = seq_lens.contiguous()
    _gather_index_pages_kernel[(pages_of_longest, page_table.shape[0])](
        cache.view(torch.int32),
        page_table,
        seq_lens,
        seq_lens.cumsum(0, dtype=torch.int64) - seq_lens,
        keys.view(torch.int32),
        scales.view(torch.int32),
        page_table.stride(0),
        PAGE_SIZE=PAGE_SIZE,
        KEY_WORDS=_KEY_WORDS,
        PAGE_WORDS=_PAGE_WORDS,
        num_warps=4,
    )
    return keys, scales


@triton.jit(do_not_specialize=["num_pages"])
def _join_index_pages_kernel(
    shards_ptr,
    pages_ptr,
    num_pages,
    NUM_RANKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    joined = tl.program_id(0).to(tl.int64)
    widened = joined // NUM_RANKS
    in_page = tl.arange(0, PAGE_SIZE)
    slot = joined % NUM_RANKS * PAGE_SIZE + in_page
    source = shards_ptr + ((slot % NUM_RANKS) * num_pages.to(tl.int64) + widened) * PAGE_WORDS
    target = pages_ptr + joined * PAGE_WORDS
    row = slot // NUM_RANKS
    word = tl.arange(0, KEY_WORDS)
    keys = tl.load((source + row * KEY_WORDS)[:, None] + word[None, :])
    tl.store(target + in_page[:, None] * KEY_WORDS + word[None, :], keys)
    if HAS_SCALES:
        tl.store(target + PAGE_SIZE * KEY_WORDS + in_page, tl.load(source + PAGE_SIZE * KEY_WORDS + row))


def join_index_pages(shards: torch.Tensor) -> torch.Tensor:
    num_ranks, rows, width = shards.shape
    packed = shards.dtype == torch.uint8
    joined = torch.empty((num_ranks * rows, width), dtype=shards.dtype, device=shards.device)
    num_pages = rows if packed else rows // PAGE_SIZE
    if num_pages:
        key_words = _KEY_WORDS if packed else width * shards.itemsize // 4
        _join_index_pages_kernel[(num_ranks * num_pages,)](
            shards.contiguous().view(torch.int32),
            joined.view(torch.int32),
            num_pages,
            NUM_RANKS=num_ranks,
            PAGE_SIZE=PAGE_SIZE,
            KEY_WORDS=key_words,
            PAGE_WORDS=_PAGE_WORDS if packed else PAGE_SIZE * key_words,
            HAS_SCALES=packed,
            num_warps=4,
        )
    return joined
