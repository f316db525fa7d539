"""Kernels of `select_slots`: exact selection from rows of any length, in two readings of the scores.

1. The largest score of each of 4,096 groups of a row (every 4,096th entry). The K-th largest of these bounds the K-th
   score from below, whatever the scores are: at least K entries reach it. Of scores in no particular order some 3,000
   do, of 1,048,576 too.
2. The positions of the entries that reach the bound, in ascending order, by each program of the row for its range.
3. One program of a row selects among those that were found, as `select_topk` does: by counting how many entries reach a
   score, so that all counts are exact, and by position where scores tie. Where more were found than it holds, because
   scores tie at the bound or repeat with the groups' period, it counts over the row itself: slower, and as exact.

A row that a program holds is selected from directly, and costs no more where the tensor is wider than its context, as
those of captured graphs are.
"""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels._checks import check
from nsa_dcp_kernels._triton.key_search import _locate, _narrow, _next_keys, _read_keys, _search
from nsa_dcp_kernels._triton.topk import _LARGEST, _NOTHING, _RUN, _count_through, _order_key

# Groups of a row, and the entries that a program takes at once. At least topk.
_GROUPS = 4096
# Entries that the last program holds: what it may be handed. Groups have two entries or more in longer rows.
_HELD = 8192
# Programs that a launch should have, several to a multiprocessor, and those of one row at most.
_PROGRAMS = 512
_MOST_SPLITS = 64
_FEW_SPLITS = 8
# A program's range is worth a program from here.
_LEAST_RANGE = 2 * _GROUPS
# Rows of one launch: bounds what is held for the candidates, 32 KiB a row.
_MOST_ROWS = 2048
# Sixteen warps of this many registers: two programs to a multiprocessor.
_REGISTERS = 64
# The interpreter has no launches to overlap.
_OVERLAPS = not triton.knobs.runtime.interpret


@triton.jit
def _store_slots(out_ptr, keys_ptr, table_ptr, place, position, key, mask, PAGE: tl.constexpr):
    """Store positions, or the slots that a page table gives them; and the keys, where they are wanted."""
    if keys_ptr is not None:
        tl.store(keys_ptr + place, key, mask=mask)
    if PAGE:
        position = tl.load(table_ptr + position // PAGE, mask=mask, other=0) * PAGE + position % PAGE
    tl.store(out_ptr + place, position, mask=mask)


# What varies from call to call must not compile anew while a server serves.
_VARYING = ("width", "row_units", "out_stride", "table_stride", "topk", "splits")
_UNALIGNED = ("starts_ptr", "lens_ptr", "request_ptr", "table_ptr")


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _group_maxima_kernel(
    scores_ptr,
    starts_ptr,
    lens_ptr,
    maxima_ptr,
    width,
    row_units,
    UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    HELD: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    origin, skipped, length = _locate(starts_ptr, lens_ptr, row, width, UNIT, HAS_STARTS)
    if length > HELD:
        scores_ptr += row * row_units * UNIT + origin
        # A program has some neighbouring groups, and looks at several entries of each at once.
        group = tl.program_id(1) * (GROUPS // PARTS) + tl.arange(0, GROUPS // PARTS)
        entry = tl.arange(0, PARTS)[:, None] * GROUPS + group[None, :]
        largest = tl.full([PARTS, GROUPS // PARTS], _NOTHING, tl.int32)
        for at in range(0, skipped + length, GROUPS * PARTS):
            largest = tl.maximum(largest, _read_keys(scores_ptr, entry + at, skipped, skipped + length, UNIT))
        tl.store(maxima_ptr + row * GROUPS + group, tl.max(largest, axis=0))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _collect_kernel(
    scores_ptr,
    starts_ptr,
    lens_ptr,
    maxima_ptr,
    bounds_ptr,
    counts_ptr,
    candidates_ptr,
    width,
    row_units,
    topk,
    splits,
    UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    HELD: tl.constexpr,
    HAS_MAXIMA: tl.constexpr,
    RUN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    origin, skipped, length = _locate(starts_ptr, lens_ptr, row, width, UNIT, HAS_STARTS)
    if length > HELD:
        end = skipped + length
        scores_ptr += row * row_units * UNIT + origin
        entry = tl.arange(0, GROUPS // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
        if HAS_MAXIMA:
            largest = tl.load(maxima_ptr + row * GROUPS + entry)
        else:
            largest = tl.full([GROUPS // RUN, RUN], _NOTHING, tl.int32)
            for at in range(0, end, GROUPS):
                largest = tl.maximum(largest, _read_keys(scores_ptr, entry + at, skipped, end, UNIT))
        # A few candidates more cost less than finding the K-th.
        bound, _, _ = _search(largest, topk, topk + topk // 16, GROUPS)

        place_ptr = candidates_ptr + (row * splits + split) * HELD
        found = 0
        blocks = tl.cdiv(end, GROUPS)
        per_split = tl.cdiv(blocks, splits)
        for block in range(split * per_split, tl.minimum((split + 1) * per_split, blocks)):
            key = _read_keys(scores_ptr, entry + block * GROUPS, skipped, end, UNIT)
            chosen = key >= bound
            place = found + _count_through(chosen) - 1
            tl.store(place_ptr + place, entry + block * GROUPS - skipped, mask=chosen & (place < HELD))
            found += tl.sum(chosen.to(tl.int32))
        tl.store(counts_ptr + row * splits + split, found)
        if split == 0:
            tl.store(bounds_ptr + row, bound)


@triton.jit
def _select_held(
    scores_ptr,
    candidates_ptr,
    counts_ptr,
    out_ptr,
    keys_ptr,
    table_ptr,
    direct,
    held,
    topk,
    splits,
    PAGE: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    """Select among at most BLOCK entries: a row's first, or those that were found."""
    entry = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    position = entry
    if not direct:
        # Where each split's candidates follow those of the splits before.
        at = entry
        before = 0
        for split in range(splits):
            at = tl.where(entry >= before, entry - before + split * HELD, at)
            before += tl.load(counts_ptr + split)
        position = tl.load(candidates_ptr + at, mask=entry < held, other=0)
    bits = tl.load(scores_ptr + position, mask=entry < held, other=0.0).to(tl.int32, bitcast=True)
    key = tl.where(entry < held, _order_key(bits), _NOTHING)
    threshold, reached, beyond = _search(key, topk, topk, held)
    chosen = key >= threshold
    if reached > topk:
        # Not all that tie with the last one fit: the first ones do.
        tied = key == threshold
        chosen = chosen & (~tied | (_count_through(tied) <= topk - beyond))
    _store_slots(out_ptr, keys_ptr, table_ptr, _count_through(chosen) - 1, position, key, chosen, PAGE)


@triton.jit
def _select_from_row(
    scores_ptr,
    bound,
    out_ptr,
    keys_ptr,
    table_ptr,
    skipped,
    end,
    topk,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Select from a row of which more entries than can be held reach the bound: `_search`, counting over memory."""
    entry = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    low = bound.to(tl.int64)
    high = tl.full([], _LARGEST + 1, tl.int64)
    reached = end
    beyond = 0
    # First whether the rest of them tie at the bound, which is the likeliest.
    lower, upper = low + 1, high - 1
    while (high - low > 1) & (reached > topk):
        # The halves of an entry count blocks, of which a row has fewer than 65,536.
        reach = tl.zeros([BLOCK // RUN, RUN], tl.int32)
        for at in range(0, end, BLOCK):
            key = _read_keys(scores_ptr, entry + at, skipped, end, UNIT)
            reach += (key >= lower.to(tl.int32)).to(tl.int32) + ((key >= upper.to(tl.int32)).to(tl.int32) << 16)
        reach_lower = tl.sum(reach & 0xFFFF)
        reach_upper = tl.sum((reach >> 16) & 0xFFFF)
        low, high, reached, beyond = _narrow(low, high, reached, beyond, lower, upper, reach_lower, reach_upper, topk)
        lower, upper = _next_keys(low, high)
    threshold = low.to(tl.int32)
    vacant = tl.where(reached > topk, topk - beyond, topk)
    placed = 0
    ties = 0
    for at in range(0, end, BLOCK):
        key = _read_keys(scores_ptr, entry + at, skipped, end, UNIT)
        tied = key == threshold
        chosen = (key > threshold) | (tied & (ties + _count_through(tied) <= vacant))
        place = placed + _count_through(chosen) - 1
        _store_slots(out_ptr, keys_ptr, table_ptr, place, entry + at - skipped, key, chosen, PAGE)
        placed += tl.sum(chosen.to(tl.int32))
        ties += tl.sum(tied.to(tl.int32))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _finish_kernel(
    scores_ptr,
    starts_ptr,
    lens_ptr,
    bounds_ptr,
    counts_ptr,
    candidates_ptr,
    table_ptr,
    request_ptr,
    out_ptr,
    keys_ptr,
    width,
    row_units,
    out_stride,
    table_stride,
    topk,
    splits,
    UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_REQUESTS: tl.constexpr,
    PAGE: tl.constexpr,
    GROUPS: tl.constexpr,
    HELD: tl.constexpr,
    RUN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    origin, skipped, length = _locate(starts_ptr, lens_ptr, row, width, UNIT, HAS_STARTS)
    if PAGE:
        request = tl.load(request_ptr + row).to(tl.int64) if HAS_REQUESTS else row
        table_ptr += request * table_stride
    out_ptr += row * out_stride
    if keys_ptr is not None:
        keys_ptr += row * out_stride
    scores_ptr += row * row_units * UNIT + origin
    if length <= topk:
        for at in range(0, topk, GROUPS):
            place = at + tl.arange(0, GROUPS)
            _store_slots(out_ptr, None, table_ptr, place, place, place, place < length, PAGE)
            tl.store(out_ptr + place, tl.full([GROUPS], -1, tl.int32), mask=(place >= length) & (place < topk))
            if keys_ptr is not None:
                key = _read_keys(scores_ptr, skipped + place, skipped, skipped + length, UNIT)
                tl.store(keys_ptr + place, key, mask=place < topk)
    else:
        direct = length <= HELD
        counts_ptr += row * splits
        candidates_ptr += row * splits * HELD
        held = length
        if not direct:
            held = 0
            for split in range(splits):
                held += tl.load(counts_ptr + split)
        if held <= GROUPS:
            _select_held(
                scores_ptr + skipped, candidates_ptr, counts_ptr, out_ptr, keys_ptr, table_ptr, direct, held,
                topk, splits, PAGE, HELD, GROUPS, RUN,
            )  # fmt: skip
        elif held <= HELD:
            _select_held(
                scores_ptr + skipped, candidates_ptr, counts_ptr, out_ptr, keys_ptr, table_ptr, direct, held,
                topk, splits, PAGE, HELD, HELD, RUN,
            )  # fmt: skip
        else:
            bound = tl.load(bounds_ptr + row)
            _select_from_row(
                scores_ptr, bound, out_ptr, keys_ptr, table_ptr, skipped, skipped + length, topk,
                PAGE, GROUPS, RUN, UNIT,
            )  # fmt: skip


def select_slots(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None,
    page_table: torch.Tensor | None,
    row_request: torch.Tensor | None,
    page_size: int,
) -> torch.Tensor:
    """As the public function; topk at most 4,096, rows of fewer than 2^28 entries."""
    out = torch.empty((scores.shape[0], topk), dtype=torch.int32, device=scores.device)
    _select(scores, lengths, topk, row_starts, page_table, row_request, page_size, out, None)
    return out


def select_candidates(scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
    """As the public function, within the limits of `select_slots`."""
    candidates = torch.empty((scores.shape[0], 2, topk), dtype=torch.int32, device=scores.device)
    _select(scores, lengths, topk, None, None, None, 0, candidates[:, 1], candidates[:, 0])
    return candidates


def _select(scores, lengths, topk, row_starts, page_table, row_request, page_size, out, keys) -> None:
    num_rows, width = scores.shape
    check(topk <= _GROUPS, "topk", f"be at most {_GROUPS} on a GPU", topk)
    check(width < _GROUPS << 16, "scores", f"have fewer than {_GROUPS << 16} columns", width)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    if page_table is not None and page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    for at in range(0, num_rows, _MOST_ROWS):
        rows = slice(at, at + _MOST_ROWS)
        _launch(
            scores[rows],
            lengths[rows],
            topk,
            None if row_starts is None else row_starts[rows],
            page_table if page_table is None or row_request is not None else page_table[rows],
            None if row_request is None else row_request[rows],
            page_size,
            out[rows],
            None if keys is None else keys[rows],
        )


def _launch(scores, lengths, topk, row_starts, page_table, row_request, page_size, out, keys) -> None:
    num_rows, width = scores.shape
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * num_rows <= _PROGRAMS and 2 * splits * _LEAST_RANGE <= width:
        splits *= 2
    # Sixteen bytes at once, where rows begin at such addresses.
    unit = 4 if scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0 else 1
    read = (scores, row_starts, lengths)
    shape = (width, scores.stride(0) // unit)
    layout = {"UNIT": unit, "HAS_STARTS": row_starts is not None, "GROUPS": _GROUPS, "HELD": _HELD}
    # Where the last program reads rows directly, nothing reads these.
    maxima = bounds = counts = candidates = out
    if width > _HELD:
        if splits > 1:
            maxima = scores.new_empty((num_rows, _GROUPS), dtype=torch.int32)
            parts = _MOST_SPLITS if splits > _FEW_SPLITS else _FEW_SPLITS
            _group_maxima_kernel[(num_rows, parts)](*read, maxima, *shape, **layout, PARTS=parts, num_warps=8)
        bounds = scores.new_empty(num_rows, dtype=torch.int32)
        counts = scores.new_empty((num_rows, splits), dtype=torch.int32)
        candidates = scores.new_empty((num_rows, splits, _HELD), dtype=torch.int32)
        _collect_kernel[(num_rows, splits)](
            *read, maxima, bounds, counts, candidates, *shape, topk, splits,
            **layout, HAS_MAXIMA=splits > 1, RUN=_RUN, num_warps=16, maxnreg=_REGISTERS, **_overlapping(splits > 1),
        )  # fmt: skip
    _finish_kernel[(num_rows,)](
        *read, bounds, counts, candidates, page_table, row_request, out, keys,
        *shape, out.stride(0), page_table.stride(0) if page_table is not None else 0, topk, splits,
        **layout, HAS_REQUESTS=row_request is not None, PAGE=page_size if page_table is not None else 0, RUN=_RUN,
        num_warps=16, maxnreg=_REGISTERS, **_overlapping(width > _HELD),
    )  # fmt: skip


def _overlapping(follows: bool) -> dict[str, bool]:
    """A launch that starts while the one before drains, and waits for it."""
    return {"OVERLAPS": True, "launch_pdl": True} if _OVERLAPS and follows else {"OVERLAPS": False}
