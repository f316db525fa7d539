"""Planning FlashMLA's sparse FP8 kernel so that it walks what a rank holds and nothing else.

FlashMLA's schedule is an input. The stock one walks all K indices of every row, valid or not; the plan made here walks
ceil(length / 64) blocks of each row and gives long rows more SM parts. How: schedule_reference.py.
"""

from dataclasses import dataclass

import torch

from nsa_dcp_kernels import schedule_reference
from nsa_dcp_kernels._checks import check, check_rank, check_tensor
from nsa_dcp_kernels.localize import localize_topk
from nsa_dcp_kernels.schedule_reference import BLOCK

HEADS_PER_PART = 64


@dataclass(frozen=True)
class SparsePlan:
    """One FlashMLA launch.

    rows: [T, K] int32, rows of this rank's cache where the schedule expects them: at the start of the array, at its
        end, or both; -1 elsewhere.
    length: [T] int32, valid entries of `rows`.
    schedule: [parts, 8] int32, FlashMLA's `tile_scheduler_metadata`: first row, last row (inclusive), the first row's
        first block, the last row's end block (exclusive), the first row's split, whether the first and the last row are
        split, padding. A part without work has first row T.
    num_splits: [T + 1] int32, prefix sum of the pieces that each row is split into.
    """

    rows: torch.Tensor
    length: torch.Tensor
    schedule: torch.Tensor
    num_splits: torch.Tensor


def count_parts(num_sms: int, h_q: int) -> int:
    """SM parts of a launch with one query token per row.

    Args:
        num_sms: multiprocessors of the device.
        h_q: 64 or 128.

    Raises:
        ValueError: `h_q` is neither, or the device has too few multiprocessors for one part.
    """
    check(h_q in (64, 128), "h_q", "be 64 or 128", h_q)
    parts = num_sms // (h_q // HEADS_PER_PART)
    check(parts >= 1, "num_sms", f"be at least {h_q // HEADS_PER_PART}", num_sms)
    return parts


def plan_sparse(topk_slots: torch.Tensor, dcp_size: int, dcp_rank: int, h_q: int, num_sms: int) -> SparsePlan:
    """Plan one launch over the slots that one rank owns.

    On a GPU: two launches, no host synchronisation, nothing allocated but what is returned.

    Args:
        topk_slots: [T, K] int32, K a multiple of 64, T at most twice the parts. As in `localize_topk`.
        dcp_size, dcp_rank: as in `localize_topk`.
        h_q: query heads after padding, 64 or 128.
        num_sms: multiprocessors of the device.

    Returns:
        The plan. The same on a CPU and a GPU.

    Raises:
        ValueError: a shape, a dtype, the rank or `h_q` is not as above.
    """
    check_tensor(topk_slots, "topk_slots", (None, None), torch.int32)
    check_rank(dcp_size, dcp_rank)
    parts = count_parts(num_sms, h_q)
    num_tokens, width = topk_slots.shape
    check(width > 0 and width % BLOCK == 0, "topk_slots", f"be a multiple of {BLOCK} wide", width)
    check(num_tokens <= 2 * parts, "topk_slots", f"have at most {2 * parts} rows for {parts} parts", num_tokens)
    rows, length, plans = localize_and_plan(topk_slots, dcp_size, dcp_rank, parts)
    return plans[0] if plans else _idle_plan(rows, length, parts)


def localize_and_plan(
    topk_slots: torch.Tensor, dcp_size: int, dcp_rank: int, parts: int
) -> tuple[torch.Tensor, torch.Tensor, list[SparsePlan]]:
    """`localize_topk`, then `plan_rows` on what it returns. On a GPU the two launches overlap."""
    if not topk_slots.is_cuda or not topk_slots.shape[0]:
        rows, length = localize_topk(topk_slots, dcp_size, dcp_rank)
        return rows, length, plan_rows(rows, length, parts)
    check_tensor(topk_slots, "topk_slots", (None, None), torch.int32)
    check_rank(dcp_size, dcp_rank)
    from nsa_dcp_kernels._triton.localize import localize_topk as launch

    rows, length = launch(topk_slots, dcp_size, dcp_rank, plan_follows=True)
    return rows, length, plan_rows(rows, length, parts, after_localize=True)


def plan_rows(rows: torch.Tensor, length: torch.Tensor, parts: int, after_localize: bool = False) -> list[SparsePlan]:
    """Plan rows whose valid entries stand first, in launches of at most 2 * parts rows.

    Args:
        rows: [T, K] int32, contiguous, K a positive multiple of 64.
        length: [T] int32.
        parts: SM parts.
        after_localize: as in the kernel's launcher; no other kernel may stand between the two.

    Returns:
        The plans of consecutive rows, none for T = 0.
    """
    num_tokens = rows.shape[0]
    launch_rows = 2 * parts
    if not num_tokens:
        return []
    if not rows.is_cuda:
        return [_plan_launch(*part, parts) for part in zip(rows.split(launch_rows), length.split(launch_rows))]
    from nsa_dcp_kernels._triton.schedule import plan_rows as launch

    aligned, schedule, num_splits = launch(rows, length, parts, launch_rows, after_localize)
    plans = []
    for start in range(0, num_tokens, launch_rows):
        part = slice(start, start + launch_rows)
        held = min(launch_rows, num_tokens - start)
        at = start // launch_rows
        plans.append(SparsePlan(aligned[part], length[part], schedule[at], num_splits[at, : held + 1]))
    return plans


def _plan_launch(rows: torch.Tensor, length: torch.Tensor, parts: int) -> SparsePlan:
    schedule, num_splits, head_blocks = schedule_reference.schedule_rows(length, rows.shape[1] // BLOCK, parts)
    aligned = schedule_reference.align_rows(rows, length, head_blocks)
    return SparsePlan(aligned, length, schedule, num_splits)


def _idle_plan(rows: torch.Tensor, length: torch.Tensor, parts: int) -> SparsePlan:
    zeros = torch.zeros((parts, 8), dtype=torch.int32, device=rows.device)
    return SparsePlan(rows, length, zeros, torch.zeros(1, dtype=torch.int32, device=rows.device))
