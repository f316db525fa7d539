"""One step's selection as one rank attends to it: made once, used by every layer that shares the selection."""

from dataclasses import dataclass

import torch

from nsa_dcp_kernels.localize import localize_topk
from nsa_dcp_kernels.sparse_mla import attend_sparse


@dataclass(frozen=True)
class LocalSelection:
    """The part of a selection that one rank owns.

    rows: [T, K] int32, rows of this rank's cache, -1 padded.
    length: [T] int32, valid leading entries of `rows`.
    """

    rows: torch.Tensor
    length: torch.Tensor


def localize_selection(
    topk_slots: torch.Tensor, dcp_size: int, dcp_rank: int, interleave_size: int = 1
) -> LocalSelection:
    """Prepare a selection for `attend_selection`. Args and errors: as `localize_topk`."""
    return LocalSelection(*localize_topk(topk_slots, dcp_size, dcp_rank, interleave_size))


def attend_selection(
    q: torch.Tensor, kv_rows: torch.Tensor, selection: LocalSelection, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a prepared selection. Args, returns and errors: as `attend_sparse`."""
    return attend_sparse(q, kv_rows, selection.rows, selection.length, sm_scale)
