"""One step's selection as one rank attends to it: made once, used by every layer that shares the selection."""

from dataclasses import dataclass, field

import torch

from nsa_dcp_kernels.localize import localize_topk
from nsa_dcp_kernels.schedule import SparsePlan, count_parts, localize_and_plan
from nsa_dcp_kernels.schedule_reference import BLOCK
from nsa_dcp_kernels.sparse_mla import attend_sparse, check_attend


@dataclass(frozen=True)
class LocalSelection:
    """The part of a selection that one rank owns.

    rows: [T, K] int32, rows of this rank's cache, -1 padded.
    length: [T] int32, valid leading entries of `rows`.
    dcp_size: ranks that the selection is spread over; 1 plans least. None: not known.
    plans: FlashMLA's launches by padded head count: made by the first layer that attends to a packed cache on a GPU,
        reused by the others. Not an argument.
    """

    rows: torch.Tensor
    length: torch.Tensor
    dcp_size: int | None = None
    plans: dict[int, list[SparsePlan]] = field(default_factory=dict, init=False, repr=False, compare=False)


def localize_selection(
    topk_slots: torch.Tensor, dcp_size: int, dcp_rank: int, *, planned_heads: int | None = None
) -> LocalSelection:
    """Prepare a selection for `attend_selection`.

    Args:
        topk_slots, dcp_size, dcp_rank: as in `localize_topk`.
        planned_heads: query heads of the layers that will attend, where their caches are packed. On a GPU, the plan of
            a selection that one launch holds is then made here, overlapped with the localisation; otherwise by the
            first layer.

    Raises:
        ValueError: as `localize_topk`.
        NotImplementedError, RuntimeError: with `planned_heads` on a GPU, as `attend_sparse`.
    """
    num_tokens, width = topk_slots.shape if topk_slots.dim() == 2 else (0, 0)
    later = True
    if planned_heads is not None and topk_slots.is_cuda and num_tokens and width and not width % BLOCK:
        from nsa_dcp_kernels._flash_mla import count_sms, pad_heads, planning_pays

        heads = pad_heads(planned_heads)
        parts = count_parts(count_sms(topk_slots.device), heads)
        later = num_tokens > 2 * parts or not planning_pays(num_tokens, heads, dcp_size)
    if later:
        return LocalSelection(*localize_topk(topk_slots, dcp_size, dcp_rank), dcp_size)
    rows, length, plans = localize_and_plan(topk_slots, dcp_size, dcp_rank, parts)
    selection = LocalSelection(rows, length, dcp_size)
    selection.plans[heads] = plans
    return selection


def attend_selection(
    q: torch.Tensor, kv_rows: torch.Tensor, selection: LocalSelection, sm_scale: float, *, raw_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a prepared selection.

    Args:
        q, kv_rows, sm_scale: as in `attend_sparse`.
        raw_lse: on a GPU, an empty row's lse may then be +inf, as FlashMLA writes it. That saves a launch, and the
            merges read both alike.

    Returns, raises: as `attend_sparse`.
    """
    if not q.is_cuda:
        return attend_sparse(q, kv_rows, selection.rows, selection.length, sm_scale)
    check_attend(q, kv_rows, selection.rows, selection.length)
    from nsa_dcp_kernels._flash_mla import attend_compact

    return attend_compact(
        q, kv_rows, selection.rows, selection.length, sm_scale, selection.plans, selection.dcp_size, raw_lse
    )
