"""Kernels of `select_topk`: a radix selection over order-preserving keys, then a stable compaction.

Scores become 32-bit keys of the same order (-0.0 as 0.0, NaN below -inf). Four launches find the key of the K-th score,
eight bits at a time, each counting the keys that share the bits found so far; a fifth writes the positions of the keys
above it, and of as many equal ones as fit, lower positions first. A row is cut into segments so that few rows still
fill the device; every count is exact and kept per segment, so the result depends neither on the segments nor on the
batch.

Written here because no maintained library gives this order: those that break ties by position need a CUDA toolkit to
compile at run time, order NaN and -0.0 otherwise, and do not return the positions in ascending order.
"""

import torch
import triton
import triton.language as tl

_DIGITS = tl.constexpr(4)
_BINS = tl.constexpr(256)
_BLOCK = 2048
_NUM_WARPS = 8
# Segments are at least this long, and no more than it takes to put this many programs on the device.
_SHORTEST_SEGMENT = 4096
_PROGRAMS = 512


@triton.jit
def _load_keys(logits_row_ptr, position, end):
    """Order-preserving unsigned keys in int32 bits, and which of them exist."""
    held = position < end
    bits = tl.load(logits_row_ptr + position, mask=held, other=0.0).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    bits = tl.where(magnitude == 0, 0, bits)
    key = bits ^ ((bits >> 31) | -0x80000000)
    return tl.where(magnitude > 0x7F800000, 0, key), held


@triton.jit
def _segment(context_lens_ptr, token, segment, NUM_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, length):
    """(start, end) of a segment of a row, from the tokens the row sees."""
    seen = tl.minimum(tl.load(context_lens_ptr + token), length)
    share = tl.cdiv(tl.cdiv(seen, NUM_SEGMENTS), BLOCK) * BLOCK
    start = tl.minimum(segment * share, seen)
    return start, tl.minimum(start + share, seen), seen


@triton.jit
def _find_digit(counts_ptr, token, digit, vacant, NUM_SEGMENTS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The digit of the last key that fits, and how many of the keys that share it fit."""
    bin_ = tl.arange(0, _BINS)
    segment = tl.arange(0, BLOCK_S)
    at = ((token * _DIGITS + digit) * NUM_SEGMENTS + segment)[:, None] * _BINS + bin_[None, :]
    counts = tl.load(counts_ptr + at, mask=(segment < NUM_SEGMENTS)[:, None], other=0)
    count = tl.sum(counts, axis=0)
    total = tl.sum(count)
    # Keys in this bin and above it.
    from_here = total - tl.cumsum(count, axis=0) + count
    found = tl.maximum(tl.sum((from_here >= vacant).to(tl.int32)) - 1, 0)
    above = tl.sum(tl.where(bin_ > found, count, 0))
    # Of each segment: keys above the digit, and keys that have it.
    segment_above = tl.sum(tl.where((bin_ > found)[None, :], counts, 0), axis=1)
    segment_equal = tl.sum(tl.where((bin_ == found)[None, :], counts, 0), axis=1)
    return found, vacant - above, segment_above, segment_equal


@triton.jit(do_not_specialize=["topk"])
def _count_digit_kernel(
    logits_ptr,
    context_lens_ptr,
    counts_ptr,
    length,
    logits_stride,
    topk,
    DIGIT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    start, end, seen = _segment(context_lens_ptr, token, segment, NUM_SEGMENTS, BLOCK, length)
    vacant = tl.minimum(seen, topk)
    prefix = 0
    for digit in tl.static_range(DIGIT):
        found, vacant, _, _ = _find_digit(counts_ptr, token, digit, vacant, NUM_SEGMENTS, BLOCK_S)
        prefix = (prefix << 8) | found

    count = tl.zeros([_BINS], tl.int32)
    for at in range(start, end, BLOCK):
        position = at + tl.arange(0, BLOCK)
        key, held = _load_keys(logits_ptr + token * logits_stride, position, end)
        if DIGIT > 0:
            # The shift is arithmetic; the mask leaves the digits found so far.
            held = held & (((key >> (32 - 8 * DIGIT)) & ((1 << (8 * DIGIT)) - 1)) == prefix)
        digit_of = (key >> (24 - 8 * DIGIT)) & 255
        count += tl.histogram(tl.where(held, digit_of, 0), _BINS)
        # What is not counted stood in for digit 0.
        absent = BLOCK - tl.sum(held.to(tl.int32))
        count -= tl.where(tl.arange(0, _BINS) == 0, absent, 0)
    counts_at = ((token * _DIGITS + DIGIT) * NUM_SEGMENTS + segment) * _BINS + tl.arange(0, _BINS)
    tl.store(counts_ptr + counts_at, count)


@triton.jit(do_not_specialize=["topk"])
def _write_positions_kernel(
    logits_ptr,
    context_lens_ptr,
    counts_ptr,
    topk_ptr,
    length,
    logits_stride,
    topk,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    start, end, seen = _segment(context_lens_ptr, token, segment, NUM_SEGMENTS, BLOCK, length)
    selected = tl.minimum(seen, topk)
    vacant = selected
    threshold = 0
    segments = tl.arange(0, BLOCK_S)
    above = tl.zeros([BLOCK_S], tl.int32)
    tied = tl.zeros([BLOCK_S], tl.int32)
    for digit in tl.static_range(4):
        found, vacant, segment_above, tied = _find_digit(counts_ptr, token, digit, vacant, NUM_SEGMENTS, BLOCK_S)
        above += segment_above
        threshold = (threshold << 8) | found
    above_before = tl.sum(tl.where(segments < segment, above, 0))
    tied_before = tl.sum(tl.where(segments < segment, tied, 0))

    # Signed comparison of unsigned keys.
    pivot = threshold ^ -0x80000000
    topk_ptr += token * topk
    for at in range(start, end, BLOCK):
        position = at + tl.arange(0, BLOCK)
        key, held = _load_keys(logits_ptr + token * logits_stride, position, end)
        key = key ^ -0x80000000
        is_above = held & (key > pivot)
        is_tied = held & (key == pivot)
        # Both counts in one scan: neither exceeds BLOCK.
        both = is_above.to(tl.int32) + (is_tied.to(tl.int32) << 16)
        so_far = tl.cumsum(both, axis=0)
        above_here = above_before + (so_far & 0xFFFF)
        tied_here = tied_before + (so_far >> 16)
        chosen = is_above | (is_tied & (tied_here <= vacant))
        place = above_here + tl.minimum(tied_here, vacant) - 1
        tl.store(topk_ptr + place, position, mask=chosen)
        counted = tl.sum(both)
        above_before += counted & 0xFFFF
        tied_before += counted >> 16

    # The tail, a share of it per segment.
    for tail in range(selected + segment * BLOCK, topk, NUM_SEGMENTS * BLOCK):
        padding = tail + tl.arange(0, BLOCK)
        tl.store(topk_ptr + padding, tl.full([BLOCK], -1, tl.int32), mask=padding < topk)


def select_topk(logits: torch.Tensor, context_lens: torch.Tensor, topk: int) -> torch.Tensor:
    num_tokens, length = logits.shape
    device = logits.device
    if not num_tokens or not length:
        return torch.full((num_tokens, topk), -1, dtype=torch.int32, device=device)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    positions = torch.empty((num_tokens, topk), dtype=torch.int32, device=device)
    segments = max(1, min(triton.cdiv(_PROGRAMS, num_tokens), triton.cdiv(length, _SHORTEST_SEGMENT), 64))
    segments = triton.next_power_of_2(segments)
    counts = torch.empty((num_tokens, 4, segments, 256), dtype=torch.int32, device=device)
    meta = {"NUM_SEGMENTS": segments, "BLOCK_S": segments, "BLOCK": _BLOCK, "num_warps": _NUM_WARPS}
    grid = (num_tokens, segments)
    args = (logits, context_lens.contiguous(), counts)
    for digit in range(4):
        _count_digit_kernel[grid](*args, length, logits.stride(0), topk, DIGIT=digit, **meta)
    _write_positions_kernel[grid](*args, positions, length, logits.stride(0), topk, **meta)
    return positions
