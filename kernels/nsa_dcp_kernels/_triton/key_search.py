"""Reading a part of a row of scores as ordered keys, and searching for the key that K entries reach, by counting."""

import triton
import triton.language as tl

from nsa_dcp_kernels._triton.topk import _LARGEST, _NOTHING, _order_key


@triton.jit
def _locate(starts_ptr, lens_ptr, row, width, UNIT: tl.constexpr, HAS_STARTS: tl.constexpr):
    """-> (where reading begins, rounded down to a wide load; entries to skip there; entries of the row)."""
    start = tl.load(starts_ptr + row).to(tl.int32) if HAS_STARTS else 0
    length = tl.minimum(tl.load(lens_ptr + row).to(tl.int32), width - start)
    origin = start // UNIT * UNIT
    return origin, start - origin, tl.maximum(length, 0)


@triton.jit
def _read_keys(scores_ptr, entry, skipped, end, UNIT: tl.constexpr):
    """Keys of the entries counted from the origin; _NOTHING for those outside the row."""
    # Up to a whole wide load, which lies in the same 16 bytes.
    bits = tl.load(scores_ptr + entry, mask=entry < (end + UNIT - 1) // UNIT * UNIT, other=0.0)
    return tl.where((entry >= skipped) & (entry < end), _order_key(bits.to(tl.int32, bitcast=True)), _NOTHING)


@triton.jit
def _next_keys(low, high):
    """Two keys that divide (low, high) in three."""
    third = (high - low) // 3
    return low + tl.maximum(third, 1), high - tl.maximum(third, 1)


@triton.jit
def _narrow(low, high, reached, beyond, lower, upper, reach_lower, reach_upper, wanted):
    """Narrow the range of the wanted-th key: at least `wanted` entries, `reached`, reach low; fewer, `beyond`, high."""
    beyond = tl.where(reach_lower < wanted, reach_lower, tl.where(reach_upper < wanted, reach_upper, beyond))
    high = tl.where(reach_lower < wanted, lower, tl.where(reach_upper < wanted, upper, high))
    reached = tl.where(reach_upper >= wanted, reach_upper, tl.where(reach_lower >= wanted, reach_lower, reached))
    low = tl.where(reach_upper >= wanted, upper, tl.where(reach_lower >= wanted, lower, low))
    return low, high, reached, beyond


@triton.jit
def _search(key, wanted, enough, held):
    """The largest key found that at least `wanted` of the `held` entries reach, until no more than `enough` do.

    -> (low, entries that reach it, entries that reach more: exact where more than `enough` reach low)
    """
    low = tl.min(tl.where(key == _NOTHING, _LARGEST, key)).to(tl.int64)
    high = tl.max(key).to(tl.int64) + 1
    reached = held
    beyond = 0
    while (high - low > 1) & (reached > enough):
        lower, upper = _next_keys(low, high)
        # Both are counted at once, as that costs little more than counting one.
        reach = (key >= lower.to(tl.int32)).to(tl.int32) + ((key >= upper.to(tl.int32)).to(tl.int32) << 16)
        reach = tl.sum(reach)
        low, high, reached, beyond = _narrow(
            low, high, reached, beyond, lower, upper, reach & 0xFFFF, reach >> 16, wanted
        )
    return low.to(tl.int32), reached, beyond
