"""Kernels of the messages that `a2a` exchanges.

A packed row is D * itemsize + 4 bytes, so rows are aligned to 4 bytes and no more: everything moves as 4-byte words,
and a word of a 16-bit dtype is a pair of values.
"""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels._triton.lse_merge import partial_weights, total_lse

_PARTIALS_AT_ONCE = 8
_NUM_WARPS = 4
_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _pack_partials_kernel(
    out_ptr,
    lse_ptr,
    packed_ptr,
    num_tokens,
    heads_per_rank,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    NUM_HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    head_blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    word = tl.arange(0, BLOCK_W)
    held = head < NUM_HEADS
    moved = held[:, None] & (word < WORDS)[None, :]

    values = tl.load(
        out_ptr + token * out_stride_t + (head.to(tl.int64) * out_stride_h)[:, None] + word[None, :], mask=moved
    )
    lse = tl.load(lse_ptr + token * lse_stride_t + head.to(tl.int64) * lse_stride_h, mask=held)
    rank = head // heads_per_rank
    row = (rank.to(tl.int64) * num_tokens + token) * heads_per_rank + head % heads_per_rank
    tl.store(packed_ptr + (row * (WORDS + 1))[:, None] + word[None, :], values, mask=moved)
    tl.store(packed_ptr + row * (WORDS + 1) + WORDS, lse, mask=held)


@triton.jit
def _unpack_partials_kernel(
    packed_ptr, out_ptr, lse_ptr, num_rows, WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    word = tl.arange(0, BLOCK_W)
    held = row < num_rows
    moved = held[:, None] & (word < WORDS)[None, :]
    values = tl.load(packed_ptr + (row * (WORDS + 1))[:, None] + word[None, :], mask=moved)
    lse = tl.load(packed_ptr + row * (WORDS + 1) + WORDS, mask=held)
    tl.store(out_ptr + (row * WORDS)[:, None] + word[None, :], values, mask=moved)
    tl.store(lse_ptr + row, lse, mask=held)


@triton.jit
def _merge_packed_kernel(
    packed_ptr,
    merged_ptr,
    total_ptr,
    num_rows,
    N: tl.constexpr,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A row is one (token, head): partial n's row r starts at word (n * num_rows + r) * (WORDS + 1)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    word = tl.arange(0, BLOCK_W)
    pairs: tl.constexpr = DTYPE.primitive_bitwidth == 16

    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_R], tl.float32)
    low = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    high = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for start in tl.static_range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)
        held = (n < N)[:, None] & (row < num_rows)[None, :]
        at = (n[:, None] * num_rows + row[None, :]) * (WORDS + 1)
        # Loaded as bits: what is not held reads as those of -inf.
        lse_bits = tl.load(packed_ptr + at + WORDS, mask=held, other=-8388608)
        weights, m, shrink = partial_weights(lse_bits.to(tl.float32, bitcast=True), m)
        read = (weights > 0.0)[:, :, None] & (word < WORDS)[None, None, :]
        values = tl.load(packed_ptr + at[:, :, None] + word[None, None, :], mask=read, other=0)
        scale = weights[:, :, None]
        if pairs:
            first = values.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            second = (values >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            low = low * shrink[:, None] + tl.sum(first * scale, axis=0)
            high = high * shrink[:, None] + tl.sum(second * scale, axis=0)
        else:
            low = low * shrink[:, None] + tl.sum(values.to(tl.float32, bitcast=True) * scale, axis=0)
        denominator = denominator * shrink + tl.sum(weights, axis=0)

    kept = row < num_rows
    tl.store(total_ptr + row, total_lse(m, denominator), mask=kept)
    divisor = tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    if pairs:
        merged = tl.interleave(low / divisor, high / divisor)
        value = tl.arange(0, 2 * BLOCK_W)
        values_per_row: tl.constexpr = 2 * WORDS
    else:
        merged = low / divisor
        value = word
        # Triton compiles one of the two branches.
        values_per_row: tl.constexpr = WORDS  # type: ignore[no-redef]
    merged_at = (row * values_per_row)[:, None] + value[None, :]
    tl.store(merged_ptr + merged_at, merged.to(DTYPE), mask=kept[:, None] & (value < values_per_row)[None, :])


def pack_partials(out: torch.Tensor, lse: torch.Tensor, dcp_size: int) -> torch.Tensor:
    num_tokens, num_heads, dim = out.shape
    heads_per_rank = num_heads // dcp_size
    words = _words(dim, out.dtype)
    shape = (dcp_size, num_tokens, heads_per_rank, 4 * (words + 1))
    packed = torch.empty(shape, dtype=torch.uint8, device=out.device)
    if packed.numel() == 0:
        return packed
    out_words = _as_words(out)
    block_w, block_h = _blocks(words, num_heads)
    _pack_partials_kernel[(num_tokens * triton.cdiv(num_heads, block_h),)](
        out_words,
        lse.view(torch.int32),
        packed.view(torch.int32),
        num_tokens,
        heads_per_rank,
        *out_words.stride()[:2],
        *lse.stride(),
        NUM_HEADS=num_heads,
        WORDS=words,
        BLOCK_H=block_h,
        BLOCK_W=block_w,
        num_warps=_NUM_WARPS,
    )
    return packed


def unpack_partials(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    dim = (packed.shape[3] - 4) // dtype.itemsize
    words = _words(dim, dtype)
    out = torch.empty((*packed.shape[:3], dim), dtype=dtype, device=packed.device)
    lse = torch.empty(packed.shape[:3], dtype=torch.float32, device=packed.device)
    num_rows = lse.numel()
    if num_rows == 0:
        return out, lse
    block_w, block_r = _blocks(words, num_rows)
    _unpack_partials_kernel[(triton.cdiv(num_rows, block_r),)](
        _as_words(packed.contiguous()),
        out.view(torch.int32),
        lse.view(torch.int32),
        num_rows,
        WORDS=words,
        BLOCK_R=block_r,
        BLOCK_W=block_w,
        num_warps=_NUM_WARPS,
    )
    return out, lse


def merge_packed(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_partials, num_tokens, num_heads, row_bytes = packed.shape
    dim = (row_bytes - 4) // dtype.itemsize
    words = _words(dim, dtype)
    merged = torch.empty((num_tokens, num_heads, dim), dtype=dtype, device=packed.device)
    total = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=packed.device)
    if merged.numel() == 0:
        return merged, total
    block_w = triton.next_power_of_2(words)
    # Two words per thread and partial.
    block_r = max(1, 32 * _NUM_WARPS * 2 // block_w)
    _merge_packed_kernel[(triton.cdiv(total.numel(), block_r),)](
        _as_words(packed.contiguous()),
        merged,
        total,
        total.numel(),
        N=num_partials,
        WORDS=words,
        DTYPE=_TRITON_DTYPES[dtype],
        BLOCK_N=min(_PARTIALS_AT_ONCE, triton.next_power_of_2(num_partials)),
        BLOCK_R=block_r,
        BLOCK_W=block_w,
        num_warps=_NUM_WARPS,
    )
    return merged, total


def _words(dim: int, dtype: torch.dtype) -> int:
    """Return the 4-byte words of one head's output."""
    if dim * dtype.itemsize % 4:
        raise NotImplementedError(
            f"packed partials on a GPU need outputs of whole 4-byte words: an even head dim with {dtype}, got {dim}"
        )
    return dim * dtype.itemsize // 4


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Reinterpret as int32. Copies only what cannot be: rows that are not contiguous or not aligned to 4 bytes."""
    step = 4 // tensor.itemsize
    aligned = tensor.storage_offset() % step == 0 and all(stride % step == 0 for stride in tensor.stride()[:-1])
    if tensor.stride(-1) != 1 or not aligned:
        # Dense values may start within a word, and `contiguous` would leave them there.
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.int32)


def _blocks(words: int, rows: int) -> tuple[int, int]:
    """Return (words, rows) of one program's block: eight words per thread."""
    block_w = triton.next_power_of_2(words)
    return block_w, max(1, min(triton.next_power_of_2(rows), 32 * _NUM_WARPS * 8 // block_w))
