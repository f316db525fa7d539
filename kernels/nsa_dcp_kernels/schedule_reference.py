"""The schedule of one FlashMLA launch, as a pure function of the rows' lengths. What the kernel is tested against.

FlashMLA's sparse FP8 kernel does what its schedule says. A part (one SM, or two with 128 heads) walks blocks of 64
indices over a contiguous range of (row, block): from `begin_block` of its first row to `end_block` of its last one.
Where that is two rows, the first is walked to the end of the index array and the last from its start. So every length
is exact if the first row's indices stand at the end of the array, the last row's at its start, and no part holds more
than two rows (a third, in the middle, is walked in whole, which is exact when its every block holds indices).

The rows are laid out one after the other on a line and the line is cut every `load` blocks, a part per piece:

    row r takes  w[r] = gap[r] + blocks[r]  of the line; cut j is at  j * load,  in a gap it falls on the row's start

`gap` is what a row's start costs, PIECE_COST blocks, or more: a row that is shorter than its share of the line is
padded, so that no part sees three rows. With no more rows than parts a share is a whole part; with up to twice as many
it is half a part, and a cut that would let a part see three rows moves back to the third one's start.

Layouts, each with the smallest load that fits:
    single   a row has parts of its own; with no more rows than parts. Few rows are split.
    paired   two neighbours have parts of their own, so short rows share one and long rows get the others
    even     as above, parts shared by all neighbours: exact balance, but nearly every row is split
Two are weighed: `paired` and `even` where there are more rows than parts; else `single` and, where some rows are more
than twice as long as others, `paired`, or `even`. The second one is taken for less load, or instead of `single` for a
fifth less: parts that all work share the memory's bandwidth, and a split row is written twice.

Splitting over nearly every part costs more than two blocks (measured on an H200), so `single` leaves a quarter of the
parts idle where at most two blocks more per part allow it.

Lengths on the line are in half blocks. Source: FlashMLA (sparse FP8 decoding on SM90).
"""

from dataclasses import dataclass

import torch

BLOCK = 64
# What walking one more row costs a part, in blocks: its queries' load and its output's store.
PIECE_COST = 2
# Where a part may hold two rows, a smaller load would put two cuts into one gap, and a part between them with no block.
LEAST_SHARED = PIECE_COST + 1


@dataclass(frozen=True)
class Balance:
    """Where the line is cut. All int64.

    load: blocks per part. gap2, width2: [T], half blocks of the line before a row's blocks, and in all.
    may_see_three: a cut may have to move back.
    """

    load: int
    gap2: torch.Tensor
    width2: torch.Tensor
    may_see_three: bool


def count_blocks(length: torch.Tensor) -> torch.Tensor:
    """[T] valid indices -> [T] int64 blocks walked. FlashMLA must walk something, so an empty row has one."""
    return ((length.long() + BLOCK - 1) // BLOCK).clamp(min=1)


def balance_rows(blocks: torch.Tensor, row_blocks: int, parts: int) -> Balance:
    """Choose the layout and its load.

    Args:
        blocks: [T] int64, 1 <= T <= 2 * parts. Blocks of each row.
        row_blocks: blocks of a whole row of indices, K / 64.
        parts: SM parts.
    """
    num_rows = len(blocks)
    crowded = num_rows > parts
    first = _balance_groups(blocks, parts, 2 if crowded else 1)
    if not crowded and 2 * int(blocks.min()) < int(blocks.max()):
        second = _balance_groups(blocks, parts, 2)
        worst = second.load
    else:
        second = _balance_evenly(blocks, parts, crowded)
        # A cut that moves back leaves its blocks to the next part.
        partial = second.width2[blocks < row_blocks]
        shortest = int(partial.min()) if crowded and len(partial) else 2 * second.load
        worst = second.load + max(0, (2 * second.load - shortest + 1) // 2 - PIECE_COST)
    return second if (worst < first.load if crowded else 5 * worst < 4 * first.load) else first


def _balance_groups(blocks: torch.Tensor, parts: int, size: int) -> Balance:
    groups = blocks
    if size == 2:
        padded = torch.nn.functional.pad(blocks, (0, len(blocks) % 2))
        groups = padded[0::2] + padded[1::2] + PIECE_COST * (padded[1::2] > 0)
    load = 1 if size == 1 else LEAST_SHARED
    while _count_pieces(groups, load) > parts:
        load += 1
    if size == 1:
        relaxed = [more for more in range(load, load + 3) if 4 * _count_pieces(groups, more) <= 3 * parts]
        load = relaxed[0] if relaxed else load
    gap2 = 2 * load * ((groups + load - 1) // load) - 2 * groups
    if size == 2:
        gap2 = torch.stack([gap2, torch.full_like(gap2, 2 * PIECE_COST)], dim=1).flatten()[: len(blocks)]
    return Balance(load, gap2, gap2 + 2 * blocks, False)


def _balance_evenly(blocks: torch.Tensor, parts: int, crowded: bool) -> Balance:
    load, width2 = LEAST_SHARED, _even_widths(blocks, LEAST_SHARED, crowded)
    while int(width2.sum()) > 2 * load * parts:
        load += 1
        width2 = _even_widths(blocks, load, crowded)
    return Balance(load, width2 - 2 * blocks, width2, crowded)


def _count_pieces(groups: torch.Tensor, load: int) -> int:
    return int(((groups + load - 1) // load).sum())


def _even_widths(blocks: torch.Tensor, load: int, crowded: bool) -> torch.Tensor:
    return (2 * (PIECE_COST + blocks)).clamp(min=load if crowded else 2 * load)


def schedule_rows(length: torch.Tensor, row_blocks: int, parts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Schedule one launch.

    Args:
        length: [T] int32, 1 <= T <= 2 * parts. Valid indices per row.
        row_blocks: K / 64.
        parts: SM parts.

    Returns:
        schedule: [parts, 8] int32: first row, last row (inclusive), the first row's first block, the last row's end
            block (exclusive), the first row's split, whether the first and the last row are split, 0. A part without
            work has first row T.
        num_splits: [T + 1] int32, prefix sum of the pieces per row.
        head_blocks: [T] int32. Blocks of a row's indices that stand at the start of the array; the rest stand at its
        end.
    """
    num_rows = len(length)
    blocks = count_blocks(length)
    balance = balance_rows(blocks, row_blocks, parts)
    end2 = balance.width2.cumsum(0)
    start2 = end2 - balance.width2

    # Cut j starts part j. (row, block) of each, one more for the end.
    at2 = 2 * balance.load * torch.arange(parts + 1)
    row = torch.searchsorted(end2, at2, right=True)
    held = row < num_rows
    safe = row.clamp(max=num_rows - 1)
    block = ((at2 - start2[safe] - balance.gap2[safe]) // 2).clamp(min=0)
    if balance.may_see_three:
        before = (safe - 1).clamp(min=0)
        sees_three = (row >= 2) & (at2 - 2 * balance.load < start2[before]) & (blocks[before] < row_blocks)
        block = torch.where(sees_three, 0, block)
    block = torch.where(held, block, 0)

    inside = held & (block > 0)
    pieces = 1 + torch.bincount(row[inside], minlength=num_rows)
    num_splits = torch.nn.functional.pad(pieces.cumsum(0), (1, 0))

    starts_part = torch.zeros(num_rows + 1, dtype=torch.bool)
    starts_part[row[~inside]] = True
    starts_part[num_rows] = True
    first_inside = torch.zeros(num_rows, dtype=torch.int64)
    first_inside.scatter_reduce_(0, row[inside], block[inside], "amin", include_self=False)
    # A row that a later row follows in its part stands at the end of the array; what an earlier part walks from the
    # start of the array stands there.
    head_blocks = torch.where(starts_part[:-1], 0, first_inside)
    uncut_middle = ~starts_part[:-1] & (pieces == 1)
    head_blocks = torch.where(starts_part[1:] | uncut_middle, blocks, head_blocks)

    first, begin = row[:-1], block[:-1]
    next_inside = block[1:] > 0
    last = torch.where(next_inside, row[1:], row[1:] - 1)
    busy = held[:-1]
    first, last = torch.where(busy, first, 0), torch.where(busy, last, 0)
    end = torch.where(next_inside, block[1:], blocks[last])
    tail_shift = row_blocks - blocks
    inside_so_far = inside.cumsum(0)[:-1]
    split = inside_so_far - (num_splits[first] - first)
    record = torch.stack(
        [
            first,
            last,
            begin + torch.where(begin >= head_blocks[first], tail_shift[first], 0),
            end + torch.where(end > head_blocks[last], tail_shift[last], 0),
            torch.where(begin > 0, split, 0),
            (pieces[first] > 1).long(),
            (pieces[last] > 1).long(),
            torch.zeros_like(first),
        ],
        dim=1,
    )
    idle = torch.tensor([num_rows, num_rows - 1, 0, 0, 0, 0, 0, 0])
    schedule = torch.where(busy.unsqueeze(1), record, idle)
    return schedule.to(torch.int32), num_splits.to(torch.int32), head_blocks.to(torch.int32)


def align_rows(rows: torch.Tensor, length: torch.Tensor, head_blocks: torch.Tensor) -> torch.Tensor:
    """Move what of each row follows its first `head_blocks` blocks to the end of the array.

    Args:
        rows: [T, K] int32, valid entries first.
        length: [T] int32. head_blocks: [T] int32.

    Returns:
        [T, K] int32, -1 in between.
    """
    width = rows.shape[1]
    column = torch.arange(width)
    length = length.long().unsqueeze(1)
    head = torch.minimum(BLOCK * head_blocks.long().unsqueeze(1), length)
    tail_shift = width - length
    in_tail = column >= head + tail_shift
    source = torch.where(in_tail, column - tail_shift, column)
    return torch.where((column < head) | in_tail, rows.gather(1, source), -1)
