"""Kernel of `plan_rows`: schedule_reference.py on the device, one program per row.

Each program weighs the two layouts for its whole launch (sums over at most 2 * parts lengths; repeating them costs less
than a launch that computes them once) and then writes what concerns its own row: the schedule of the parts that start
in it, its entry of `num_splits`, and its indices, moved to where the schedule expects them.

What bounds it is the chain of reductions, so what can share one is packed into it.
"""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels import schedule_reference

BLOCK = tl.constexpr(schedule_reference.BLOCK)
PIECE_COST = tl.constexpr(schedule_reference.PIECE_COST)
LEAST_SHARED = tl.constexpr(schedule_reference.LEAST_SHARED)
# A float32 this large has no bits below one: adding it rounds, and leaves the integer in the low bits.
ROUNDS = tl.constexpr(8388608.0)
ROUNDS_BITS = tl.constexpr(0x4B000000)
_NUM_WARPS = 4


@triton.jit
def _divide(x, inverse):
    """floor(x / d) from 1 / d, exact for 0 <= x < 2^20: x + 0.5 keeps half an entry's distance from every multiple."""
    nearest = ((x.to(tl.float32) + 0.5) * inverse - 0.5) + ROUNDS
    return nearest.to(tl.int32, bitcast=True) - ROUNDS_BITS


@triton.jit
def _load_blocks(length_ptr, row, num_rows):
    """Blocks of a row, 0 outside the launch."""
    held = (row >= 0) & (row < num_rows)
    length = tl.load(length_ptr + row, mask=held, other=0)
    return tl.where(held, tl.maximum((length + (BLOCK - 1)) // BLOCK, 1), 0)


@triton.jit
def _group_blocks(blocks, after, row, pairs):
    """Blocks of the group that a row leads: itself, or with `pairs` also the next; 0 if it leads none."""
    with_partner = blocks + tl.where(after > 0, after + PIECE_COST, 0)
    return tl.where(pairs, tl.where(row % 2 == 0, with_partner, 0), blocks)


@triton.jit
def _count_pieces(groups, load):
    return _divide(groups + (load - 1), 1.0 / load.to(tl.float32))


@triton.jit
def _larger_halves(a, b):
    """The larger of each 16-bit half."""
    return tl.maximum(a & -0x10000, b & -0x10000) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@triton.jit
def _pack(high, low, WIDE: tl.constexpr):
    """Two counts in one integer, so that one reduction serves both: 16 bits each, or 32."""
    if WIDE:
        packed = (high.to(tl.int64) << 32) + low
    else:
        packed = (high << 16) + low
    return packed


@triton.jit
def _unpack(packed, WIDE: tl.constexpr):
    if WIDE:
        high = (packed >> 32).to(tl.int32)
        low = (packed & 0xFFFFFFFF).to(tl.int32)
    else:
        high = packed >> 16
        low = packed & 0xFFFF
    return high, low


@triton.jit
def _smallest_loads(
    groups, blocks, pairs, parts, shares, SECOND_PAIRS: tl.constexpr, LOAD_BITS: tl.constexpr, WIDE: tl.constexpr
):
    """The smallest load of the first layout, parts per group, and of the second: a bit of both at a time.

    The second one is parts per pair, or parts that all rows share evenly.
    """
    first = 0
    second = 0
    for bit in tl.static_range(LOAD_BITS - 1, -1, -1):
        load = first + (1 << bit)
        second_load = second + (1 << bit)
        if SECOND_PAIRS:
            used = _count_pieces(pairs, second_load)
            held = parts
        else:
            used = tl.where(blocks > 0, tl.maximum(2 * (blocks + PIECE_COST), second_load * shares), 0)
            held = 2 * second_load * parts
        pieces, used = _unpack(tl.sum(_pack(_count_pieces(groups, load), used, WIDE), axis=0), WIDE)
        first = tl.where(pieces > parts, load, first)
        second = tl.where(used > held, second_load, second)
    return first + 1, second + 1


@triton.jit
def _line(blocks, after, row, load, inverse, even, pairs, shares):
    """(gap2, width2) of a row on the line, in half blocks; zeros for no row."""
    even_width2 = tl.maximum(2 * (blocks + PIECE_COST), load * shares)
    group = _group_blocks(blocks, after, row, pairs)
    whole = _divide(group + (load - 1), inverse) * load
    follows = pairs & (row % 2 == 1)
    grouped_gap2 = tl.where(follows, 2 * PIECE_COST, 2 * (whole - group))
    gap2 = tl.where(even, even_width2 - 2 * blocks, grouped_gap2)
    gap2 = tl.where(blocks > 0, gap2, 0)
    return gap2, gap2 + 2 * blocks


@triton.jit
def _cut_block(cut, start2, gap2, step):
    """The block of a row at which a cut falls; 0 is the row's start."""
    return tl.maximum((cut * step - start2 - gap2) >> 1, 0)


@triton.jit
def _moves_back(row, cut, start2, before, load, step, shares, moves, row_blocks):
    """Whether the first cut of a row would let the part before it see three rows."""
    before_start2 = start2 - tl.maximum(2 * (before + PIECE_COST), load * shares)
    return moves & (row >= 2) & ((cut - 1) * step < before_start2) & (before < row_blocks)


@triton.jit(do_not_specialize=["total_rows", "launch_rows", "parts"])
def _schedule_kernel(
    rows_ptr,
    length_ptr,
    aligned_ptr,
    schedule_ptr,
    num_splits_ptr,
    total_rows,
    launch_rows,
    width,
    parts,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_CUTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    LOAD_BITS: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    this = tl.program_id(0)
    launch = tl.program_id(1)
    token = launch * launch_rows + this
    num_rows = tl.minimum(launch_rows, total_rows - launch * launch_rows)
    if this >= num_rows:
        return
    length_ptr += launch * launch_rows
    row_blocks = width // BLOCK
    row = tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_K)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()

    blocks = _load_blocks(length_ptr, row, num_rows)
    before = _load_blocks(length_ptr, row - 1, num_rows)
    after = _load_blocks(length_ptr, row + 1, num_rows)
    my_blocks = _load_blocks(length_ptr, this, num_rows)
    my_before = _load_blocks(length_ptr, this - 1, num_rows)
    my_after = _load_blocks(length_ptr, this + 1, num_rows)
    my_length = tl.load(length_ptr + this)
    rows_ptr += token.to(tl.int64) * width
    aligned_ptr += token.to(tl.int64) * width
    # Read before it is known where it goes: most rows stay where they are.
    index = tl.load(rows_ptr + column, mask=column < width, other=-1)

    # Which two layouts are weighed, and the load of each.
    crowded = num_rows > parts
    shares = tl.where(crowded, 1, 2)
    lengths = tl.where(blocks > 0, (blocks << 16) + row_blocks - blocks, 0)
    lengths = tl.reduce(lengths, 0, _larger_halves)
    shortest = row_blocks - (lengths & 0xFFFF)
    second_pairs = (num_rows <= parts) & (2 * shortest < (lengths >> 16))
    groups = _group_blocks(blocks, after, row, crowded)
    if second_pairs:
        two = _group_blocks(blocks, after, row, True)
        first_load, second_load = _smallest_loads(groups, blocks, two, parts, shares, True, LOAD_BITS, WIDE)
    else:
        first_load, second_load = _smallest_loads(groups, blocks, groups, parts, shares, False, LOAD_BITS, WIDE)
    second_load = tl.maximum(second_load, LEAST_SHARED)
    if 4 * num_rows <= 3 * parts:
        # Up to two blocks more per part, where that leaves a quarter of the parts idle.
        pieces = _count_pieces(groups, first_load) + (_count_pieces(groups, first_load + 1) << 10)
        pieces = tl.sum(pieces + (_count_pieces(groups, first_load + 2) << 20), axis=0)
        as_is = 4 * (pieces & 1023) <= 3 * parts
        one_more = 4 * ((pieces >> 10) & 1023) <= 3 * parts
        two_more = 4 * (pieces >> 20) <= 3 * parts
        first_load += tl.where(as_is, 0, tl.where(one_more, 1, tl.where(two_more, 2, 0)))

    # A cut that moves back leaves its blocks to the next part.
    partial2 = tl.maximum(2 * (shortest + PIECE_COST), second_load)
    partial2 = tl.where(crowded & (shortest < row_blocks), partial2, 2 * second_load)
    worst = second_load + tl.maximum((2 * second_load - partial2 + 1) // 2 - PIECE_COST, 0)
    worst = tl.where(second_pairs, second_load, worst)
    takes_second = tl.where(crowded, worst < first_load, 5 * worst < 4 * first_load)
    load = tl.where(takes_second, second_load, first_load)
    even = takes_second & (second_pairs == 0)
    pairs = tl.where(takes_second, second_pairs, crowded)
    step = 2 * load
    inverse = 1.0 / load.to(tl.float32)
    inverse_step = 0.5 * inverse
    moves = even & crowded

    # Every row on the line, and how many pieces it falls into.
    gap2, width2 = _line(blocks, after, row, load, inverse, even, pairs, shares)
    end2 = tl.cumsum(width2, axis=0)
    start2 = end2 - width2
    first_cut = _divide(start2 + (step - 1), inverse_step)
    num_cuts = _divide(end2 + (step - 1), inverse_step) - first_cut
    first_block = _cut_block(first_cut, start2, gap2, step)
    moved = _moves_back(row, first_cut, start2, before, load, step, shares, moves, row_blocks)
    starts_at_cut = (num_cuts > 0) & (moved | (first_block == 0))
    pieces = tl.where(blocks > 0, 1 + num_cuts - starts_at_cut.to(tl.int32), 0)
    so_far = tl.sum(tl.where(row < this, _pack(pieces, width2, WIDE), 0), axis=0)
    splits_before, my_start2 = _unpack(so_far, WIDE)

    # This row, as scalars.
    my_gap2, my_width2 = _line(my_blocks, my_after, this, load, inverse, even, pairs, shares)
    my_cut = _divide(my_start2 + (step - 1), inverse_step)
    end_cut = _divide(my_start2 + my_width2 + (step - 1), inverse_step)
    my_first_block = _cut_block(my_cut, my_start2, my_gap2, step)
    moved = _moves_back(this, my_cut, my_start2, my_before, load, step, shares, moves, row_blocks)
    my_first_block = tl.where(moved, 0, my_first_block)
    starts_part = (end_cut > my_cut) & (my_first_block == 0)
    my_pieces = 1 + end_cut - my_cut - starts_part.to(tl.int32)

    # The first cut past this row ends the last part that starts in it. It falls in the row behind the last that ends
    # before it. (The end of the line needs all 16 bits, which only the lower half has: the upper one has a sign.)
    passed = (blocks > 0) & (end2 <= end_cut * step)
    next_at = tl.max(tl.where(passed, _pack(row + 1, end2, WIDE), 0), axis=0)
    next_row, next_start2 = _unpack(next_at, WIDE)
    next_blocks = _load_blocks(length_ptr, next_row, num_rows)
    next_before = _load_blocks(length_ptr, next_row - 1, num_rows)
    next_after = _load_blocks(length_ptr, next_row + 1, num_rows)
    next_gap2, _ = _line(next_blocks, next_after, next_row, load, inverse, even, pairs, shares)
    next_block = _cut_block(end_cut, next_start2, next_gap2, step)
    moved = _moves_back(next_row, end_cut, next_start2, next_before, load, step, shares, moves, row_blocks)
    next_block = tl.where(moved | (next_row >= num_rows), 0, next_block)
    is_followed = (next_row > this + 1) | (next_block > 0)

    head_blocks = tl.where(starts_part, 0, my_first_block)
    head_blocks = tl.where(is_followed & (starts_part | (my_pieces > 1)), head_blocks, my_blocks)
    head = tl.minimum(head_blocks * BLOCK, my_length)
    if head < my_length:
        shift = width - my_length
        in_tail = (column >= head + shift) & (column < width)
        tail = tl.load(rows_ptr + column - shift, mask=in_tail, other=-1)
        index = tl.where(column < head, index, tail)
    tl.store(aligned_ptr + column, index, mask=column < width)

    tail_shift = row_blocks - my_blocks
    cut = my_cut + tl.arange(0, BLOCK_CUTS)
    begin = tl.where(cut == my_cut, my_first_block, _cut_block(cut, my_start2, my_gap2, step))
    is_last = cut + 1 >= end_cut
    last = tl.where(is_last, tl.where(next_block > 0, next_row, next_row - 1), this)
    end = tl.where(next_block > 0, next_block, next_before)
    end = tl.where(is_last, end, _cut_block(cut + 1, my_start2, my_gap2, step))
    split = tl.where(begin > 0, cut - my_cut + 1 - starts_part.to(tl.int32), 0)
    my_split = (my_pieces > 1).to(tl.int32)
    last_split = tl.where(last == this, my_split, (next_block > 0).to(tl.int32))
    begin += tl.where(begin >= head_blocks, tail_shift, 0)
    end += tl.where((last == this) & (end > head_blocks), tail_shift, 0)
    schedule_ptr += launch * parts * 8
    record_ptr = schedule_ptr + cut * 8
    is_mine = cut < end_cut
    tl.store(record_ptr, tl.full([BLOCK_CUTS], 0, tl.int32) + this, mask=is_mine)
    tl.store(record_ptr + 1, last, mask=is_mine)
    tl.store(record_ptr + 2, begin, mask=is_mine)
    tl.store(record_ptr + 3, end, mask=is_mine)
    tl.store(record_ptr + 4, split, mask=is_mine)
    tl.store(record_ptr + 5, tl.full([BLOCK_CUTS], 0, tl.int32) + my_split, mask=is_mine)
    tl.store(record_ptr + 6, last_split, mask=is_mine)
    tl.store(record_ptr + 7, tl.zeros([BLOCK_CUTS], tl.int32), mask=is_mine)
    num_splits_ptr += launch * (launch_rows + 1)
    tl.store(num_splits_ptr + this, splits_before)

    if this == num_rows - 1:
        tl.store(num_splits_ptr + num_rows, splits_before + my_pieces)
        part = tl.arange(0, BLOCK_PARTS)
        field = tl.arange(0, 8)
        idle = tl.where(field == 0, num_rows, tl.where(field == 1, num_rows - 1, 0))
        idle_at = schedule_ptr + part[:, None] * 8 + field[None, :]
        is_idle = (part >= end_cut) & (part < parts)
        tl.store(idle_at, tl.zeros([BLOCK_PARTS, 8], tl.int32) + idle[None, :], mask=is_idle[:, None])


def plan_rows(
    rows: torch.Tensor, length: torch.Tensor, parts: int, launch_rows: int, after_localize: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Schedule rows whose valid entries stand first, `launch_rows` of them to a FlashMLA launch.

    Args:
        rows: [T, K] int32, contiguous, K a multiple of 64; T at least 1.
        length: [T] int32.
        parts: SM parts.
        launch_rows: at most 2 * parts.
        after_localize: the launch right before this one was `localize_topk` with `plan_follows`: this one's blocks
            start while it drains, and wait for it. (Behind any other kernel that would not be safe: waiting for a
            kernel that itself started early does not wait for what that one overlapped.)

    Returns:
        aligned: [T, K] int32.
        schedule: [launches, parts, 8] int32.
        num_splits: [launches, launch_rows + 1] int32; the last launch fills as many as it has rows, and one.
    """
    num_tokens, width = rows.shape
    launch_rows = min(launch_rows, num_tokens)
    launches = triton.cdiv(num_tokens, launch_rows)
    row_blocks = width // schedule_reference.BLOCK
    aligned = torch.empty_like(rows)
    schedule = torch.empty((launches, parts, 8), dtype=torch.int32, device=rows.device)
    num_splits = torch.empty((launches, launch_rows + 1), dtype=torch.int32, device=rows.device)
    # No load exceeds two whole rows and what their starts cost.
    load_bits = (2 * (row_blocks + schedule_reference.PIECE_COST)).bit_length()
    # The line's length under the largest load tried, in half blocks: a row takes at most a part, or half of one.
    longest = max(launch_rows, 2 * min(launch_rows, parts)) << load_bits
    _schedule_kernel[(launch_rows, launches)](
        rows,
        length.contiguous(),
        aligned,
        schedule,
        num_splits,
        num_tokens,
        launch_rows,
        width,
        parts,
        BLOCK_T=triton.next_power_of_2(launch_rows),
        BLOCK_K=triton.next_power_of_2(width),
        BLOCK_CUTS=triton.next_power_of_2(row_blocks + 1),
        BLOCK_PARTS=triton.next_power_of_2(parts),
        LOAD_BITS=load_bits,
        WIDE=longest >= 1 << 16,
        OVERLAPS=after_localize,
        num_warps=_NUM_WARPS,
        **({"launch_pdl": True} if after_localize else {}),
    )
    return aligned, schedule, num_splits
