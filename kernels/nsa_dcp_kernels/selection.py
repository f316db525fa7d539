"""One step's selection as one rank attends to it: made once, used by every layer that shares the selection."""

from dataclasses import dataclass, field

import torch

from nsa_dcp_kernels.localize import localize_topk
from nsa_dcp_kernels.schedule import SparsePlan
from nsa_dcp_kernels.sparse_mla import attend_sparse, check_attend


@dataclass(frozen=True)
class LocalSelection:
    """The part of a selection that one rank owns.

    rows: [T, K] int32, rows of this rank's cache, -1 padded.
    length: [T] int32, valid leading entries of `rows`.
    plans: FlashMLA's launches by padded head count: made by the first layer that attends to a packed cache on a GPU,
        reused by the others. Not an argument.
    """

    rows: torch.Tensor
    length: torch.Tensor
    plans: dict[int, list[SparsePlan]] = field(default_factory=dict, init=False, repr=False, compare=False)


def localize_selection(
    topk_slots: torch.Tensor, dcp_size: int, dcp_rank: int, interleave_size: int = 1
) -> LocalSelection:
    """Prepare a selection for `attend_selection`. Args and errors: as `localize_topk`."""
    return LocalSelection(*localize_topk(topk_slots, dcp_size, dcp_rank, interleave_size))


def attend_selection(
    q: torch.Tensor, kv_rows: torch.Tensor, selection: LocalSelection, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a prepared selection. Args, returns and errors: as `attend_sparse`."""
    if not q.is_cuda:
        return attend_sparse(q, kv_rows, selection.rows, selection.length, sm_scale)
    check_attend(q, kv_rows, selection.rows, selection.length)
    from nsa_dcp_kernels._flash_mla import attend_compact

    return attend_compact(q, kv_rows, selection.rows, selection.length, sm_scale, selection.plans)
