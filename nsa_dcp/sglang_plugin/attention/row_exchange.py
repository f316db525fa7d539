"""TP-DCP prefill by rows: whose rows are whose in one forward, and heads exchanged for rows and back.

Shares are blocks of consecutive rows, as selections are split: what a rank sends of its queries, and what it receives
of the results, then lies as it should, and one transposition of its own rows is left on either way. sglang's all-to-all
splits evenly, so blocks are filled up to the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nsa_dcp.planning.prefill_ways import block_of_rows, most_rows
from nsa_dcp.row_prefill import GatheredPages


@dataclass(frozen=True)
class RowPlan:
    """One forward by rows. The same on every rank of the DCP group, but for `start` and `stop`.

    num_rows: query rows of the batch, without padding.
    start, stop: this rank's rows; none where the batch has fewer rows than ranks.
    parts: the pages of the batch's requests, in pieces that the gather buffer holds.
    """

    num_rows: int
    start: int
    stop: int
    parts: tuple[GatheredPages, ...]


def plan_own_rows(num_rows: int, group: Any, parts: tuple[GatheredPages, ...]) -> RowPlan:
    """Deal the rows out. Args: as in `RowPlan`; group, sglang's DCP group."""
    return RowPlan(num_rows, *block_of_rows(num_rows, group.world_size, group.rank_in_group), parts)


def take_rows(q: torch.Tensor, plan: RowPlan, group: Any) -> torch.Tensor:
    """Exchange heads for rows. All ranks must call it, also one without a row.

    Args:
        q: [T, H, D], contiguous. This rank's heads of every row.
        plan: the forward's.
        group: sglang's DCP group.

    Returns:
        [t, N * H, D], contiguous: this rank's rows, heads in rank order.
    """
    size, most = group.world_size, most_rows(plan.num_rows, group.world_size)
    sent = q
    if plan.num_rows < size * most:
        sent = q.new_zeros(size * most, *q.shape[1:])
        sent[: plan.num_rows] = q
    received = torch.empty_like(sent)
    group.all_to_all_single(received, sent)
    own = received.view(size, most, *q.shape[1:])[:, : plan.stop - plan.start]
    return own.transpose(0, 1).flatten(1, 2)


def return_heads(out: torch.Tensor, plan: RowPlan, group: Any) -> torch.Tensor:
    """Exchange rows for heads: undoes `take_rows`. All ranks must call it.

    Args:
        out: [t, N * H, D]. This rank's rows, heads in rank order.
        plan, group: as there.

    Returns:
        [T, H, D]: this rank's heads of every row.
    """
    size, most = group.world_size, most_rows(plan.num_rows, group.world_size)
    by_head = out.unflatten(1, (size, -1)).transpose(0, 1)
    sent = out.new_empty(size, most, *by_head.shape[2:])
    sent[:, : out.shape[0]] = by_head
    # Nobody keeps them, and NaN in them would alarm whoever looks.
    sent[:, out.shape[0] :] = 0
    received = torch.empty_like(sent)
    group.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1))
    return received.flatten(0, 1)[: plan.num_rows]
