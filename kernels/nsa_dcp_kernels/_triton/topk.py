"""Kernel of `select_topk`: a program holds a segment of a row in registers and searches for the K-th score.

Scores become 32-bit keys of the same order (-0.0 as 0.0, NaN below -inf). The largest key that at least K entries reach
is found by trisection, counting the entries in registers; then one scan gives every chosen entry its place. Where not
all entries of that key fit, a scan over them keeps the lower positions. Every count is exact, so the result depends
neither on the order in which threads run nor on the batch.

A row longer than a segment is selected in rounds: the first K of each segment or some more, in ascending position, are
the next round's row. What the whole row selects is among them, and their order decides ties as the positions do.

Written here because no maintained library gives this order: those that break ties by position need a CUDA toolkit to
compile at run time, order NaN and -0.0 otherwise, and do not return the positions in ascending order.
"""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels._checks import check

# Entries of a row that a program holds, 32 to a thread; 16 in later rounds, of which one program has a multiprocessor.
_SEGMENT = 16384
_ENTRIES_PER_THREAD = 32
_LATER_ENTRIES_PER_THREAD = 16
_MAX_WARPS = 16
# The interpreter has no launches to overlap.
_OVERLAPS = not triton.knobs.runtime.interpret
_RUN = 32
_NOTHING = tl.constexpr(-0x80000000)
# The key of +inf.
_LARGEST = tl.constexpr(0x7F800000)


@triton.jit
def _order_key(bits):
    """float32 bits -> int32 of the same order; above _NOTHING, which is left for entries that do not exist."""
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > 0x7F800000, _NOTHING + 1, key)


@triton.jit
def _count_through(flags):
    """[runs, RUN] -> how many are set up to and including each, in row-major order."""
    flags = flags.to(tl.int32)
    of_run = tl.sum(flags, axis=1)
    return tl.cumsum(flags, axis=1) + (tl.cumsum(of_run, axis=0) - of_run)[:, None]


@triton.jit(do_not_specialize=["topk", "num_kept"])
def _select_kernel(
    scores_ptr,
    positions_ptr,
    lens_ptr,
    chosen_keys_ptr,
    chosen_positions_ptr,
    length,
    row_stride,
    topk,
    num_kept,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The first round reads scores and knows positions; later ones read the round before's keys and positions."""
    token = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    # Runs of entries: counted within a run first, then over the runs, which is far less work than one long scan.
    run = tl.arange(0, BLOCK // RUN)
    entry = segment * BLOCK + run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    scores_ptr += token * row_stride
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    # What lies past a context is read, as that keeps the loads wide, and dropped.
    if FIRST:
        seen = tl.minimum(tl.load(lens_ptr + token), length)
        bits = tl.load(scores_ptr + entry, mask=entry < length, other=0.0).to(tl.int32, bitcast=True)
        key = tl.where(entry < seen, _order_key(bits), _NOTHING)
        held = tl.minimum(tl.maximum(seen - segment * BLOCK, 0), BLOCK)
        position = entry
    else:
        key = tl.load(scores_ptr + entry, mask=entry < length, other=_NOTHING)
        position = tl.load(positions_ptr + token * row_stride + entry, mask=entry < length, other=-1)
        held = tl.sum((key != _NOTHING).to(tl.int32))
    wanted = tl.minimum(held, topk)

    # A round that is not the last may keep more than it must: deciding the last bits is left to fewer entries.
    kept = wanted if LAST else tl.minimum(held, num_kept)
    # At least `wanted` keys reach `low`, fewer reach `high`; `reached` reach `low`.
    if FIRST:
        low = tl.full([], _NOTHING + 1, tl.int64)
        high = tl.full([], _LARGEST + 1, tl.int64)
    else:
        # What earlier rounds kept spans far fewer keys than there are.
        low = tl.min(tl.where(key == _NOTHING, _LARGEST, key)).to(tl.int64)
        high = tl.max(key).to(tl.int64) + 1
    reached = held
    while (high - low > 1) & (reached > kept):
        # Two keys at once, as counting both costs little more than counting one.
        third = (high - low) // 3
        lower = low + third
        upper = high - tl.maximum(third, 1)
        reach = (key >= lower.to(tl.int32)).to(tl.int32) + ((key >= upper.to(tl.int32)).to(tl.int32) << 16)
        reach = tl.sum(reach)
        reach_lower = reach & 0xFFFF
        reach_upper = reach >> 16
        high = tl.where(reach_lower < wanted, lower, tl.where(reach_upper < wanted, upper, high))
        low = tl.where(reach_upper >= wanted, upper, tl.where(reach_lower >= wanted, lower, low))
        reached = tl.where(reach_upper >= wanted, reach_upper, tl.where(reach_lower >= wanted, reach_lower, reached))
    threshold = low.to(tl.int32)

    chosen_at = (token * tl.num_programs(1) + segment) * num_kept
    chosen_positions_ptr += chosen_at
    chosen = key >= threshold
    if reached > kept:
        # Not all that tie with the last one fit: the first ones do.
        tied = key == threshold
        vacant = kept - tl.sum((key > threshold).to(tl.int32))
        chosen = chosen & (~tied | (_count_through(tied) <= vacant))
    place = _count_through(chosen) - 1
    # The pointers are said to run like those of the loads, so that the stores keep the loads' layout: without this they
    # are spread over the runs, and every pointer crosses shared memory first. They do not run like that, but a store is
    # only widened where its mask is known to be equal for all it writes, and nothing is known of comparing scores.
    place_ptr = chosen_positions_ptr + place
    place_ptr = tl.multiple_of(tl.max_contiguous(place_ptr, [1, 4]), [1, 16])
    tl.store(place_ptr, position, mask=chosen)
    if not LAST:
        chosen_keys_ptr += chosen_at
        place_ptr = chosen_keys_ptr + place
        place_ptr = tl.multiple_of(tl.max_contiguous(place_ptr, [1, 4]), [1, 16])
        tl.store(place_ptr, key, mask=chosen)
    kept = tl.minimum(reached, kept)
    for start in range(kept // BLOCK * BLOCK, num_kept, BLOCK):
        padding = start + tl.arange(0, BLOCK)
        is_padding = (padding >= kept) & (padding < num_kept)
        if LAST:
            tl.store(chosen_positions_ptr + padding, tl.full([BLOCK], -1, tl.int32), mask=is_padding)
        else:
            tl.store(chosen_keys_ptr + padding, tl.full([BLOCK], _NOTHING, tl.int32), mask=is_padding)


def select_topk(logits: torch.Tensor, context_lens: torch.Tensor, topk: int) -> torch.Tensor:
    """As the public function; topk at most half a segment, 8,192, where rows are longer than a segment."""
    num_tokens, length = logits.shape
    device = logits.device
    if not num_tokens or not length:
        return torch.full((num_tokens, topk), -1, dtype=torch.int32, device=device)
    check(length <= _SEGMENT or topk <= _SEGMENT // 2, "topk", f"be at most {_SEGMENT // 2} on a GPU", topk)
    scores = logits if logits.stride(1) == 1 else logits.contiguous()
    positions: torch.Tensor | None = None
    while True:
        length = scores.shape[1]
        block = min(_SEGMENT, max(64, triton.next_power_of_2(length)))
        segments = triton.cdiv(length, block)
        last = segments == 1
        first = positions is None
        per_thread = _ENTRIES_PER_THREAD if first else _LATER_ENTRIES_PER_THREAD
        # Twice as many as must be kept, where the next round still is one segment with them.
        num_kept = topk if last else min(block, max(topk, min(2 * topk, _SEGMENT // segments)))
        chosen = torch.empty((num_tokens, segments * num_kept), dtype=torch.int32, device=device)
        chosen_keys = None if last else torch.empty_like(chosen)
        _select_kernel[(num_tokens, segments)](
            scores,
            positions,
            context_lens.contiguous(),
            chosen_keys,
            chosen,
            length,
            scores.stride(0),
            topk,
            num_kept,
            FIRST=first,
            LAST=last,
            BLOCK=block,
            RUN=_RUN,
            # A round's blocks start while the round before drains, and wait for it.
            OVERLAPS=_OVERLAPS and not first,
            num_warps=min(_MAX_WARPS, max(1, block // (32 * per_thread))),
            **({"launch_pdl": True} if _OVERLAPS and not first else {}),
        )
        if chosen_keys is None:
            return chosen
        scores, positions = chosen_keys, chosen
