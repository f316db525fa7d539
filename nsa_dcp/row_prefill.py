"""Prefill attention of rows that ranks own: gather whole pages as bytes, attend to whole selections with all heads.

Both modes end here. In CP-DCP a rank has its rows because it works on their tokens (`cp_dcp`); in TP-DCP by rows it
takes those that it selected for, in exchange for heads (`tp_dcp`).

The chunk's latents were quantised once, by the ordinary cache write. Here nothing is dequantised or quantised: one
all-gather of the pages that the step's requests use yields prefix and chunk in a temporary buffer of the same format.
"""

from dataclasses import dataclass

import torch

from nsa_dcp import comm
from nsa_dcp_kernels import (
    LocalSelection,
    attend_selection,
    gather_pages,
    localize_selection,
    remap_to_gathered,
)
from nsa_dcp_kernels.kv_format import PAGE_SIZE


@dataclass(frozen=True)
class GatheredPages:
    """Which pages a step gathers, and where each stands.

    pages: [P] int32. Widened pages of all the step's requests. The same on every rank.
    page_pos: [num_widened_pages] int32. A page's place in `pages`, -1 where it is not gathered.
    """

    pages: torch.Tensor
    page_pos: torch.Tensor

    @property
    def local_rows(self) -> int:
        """Rows that each rank contributes."""
        return self.pages.shape[0] * PAGE_SIZE


def plan_pages(page_table: torch.Tensor, page_counts: list[int], num_widened_pages: int) -> GatheredPages:
    """List the pages that a step needs.

    Args:
        page_table: [B, P] int32, widened pages.
        page_counts: pages in use of each request, prefix and chunk.
        num_widened_pages: pages of the pool, the reserved one included.

    Returns:
        The step's pages; a page that several requests share is gathered once.
    """
    used = [page_table[request, :count] for request, count in enumerate(page_counts)]
    pages = torch.unique(torch.cat(used)) if used else page_table.new_empty(0)
    page_pos = torch.full((num_widened_pages,), -1, dtype=torch.int32, device=page_table.device)
    page_pos[pages.long()] = torch.arange(pages.shape[0], dtype=torch.int32, device=page_table.device)
    return GatheredPages(pages.to(torch.int32), page_pos)


def gather_rows(kv_rows: torch.Tensor, plan: GatheredPages, group: comm.Group) -> torch.Tensor:
    """Gather the planned pages from every rank.

    Args:
        kv_rows: this rank's cache rows of one layer, [R, W].
        plan: the step's pages.
        group: the DCP group.

    Returns:
        [N * local_rows, W], dtype of `kv_rows`. Rows that no token was written to hold whatever the cache held: only
        rows that a selection names may be read.
    """
    return comm.all_gather(gather_pages(kv_rows, plan.pages), group).flatten(0, 1)


def localize_gathered(topk_slots: torch.Tensor, plan: GatheredPages, dcp_size: int) -> LocalSelection:
    """Prepare a selection for attention over the gathered buffer; layers that share a selection share this.

    Args:
        topk_slots: [T, K] int32, -1 padded. The rows that this rank owns.
        plan: the step's pages.
        dcp_size: ranks that contribute.

    Returns:
        The selection in rows of `gather_rows`' result, for `attend_selection` with all heads: it needs no merge.
    """
    rows = remap_to_gathered(topk_slots, plan.page_pos, dcp_size, plan.local_rows)
    return localize_selection(rows, dcp_size=1, dcp_rank=0)


def attend_gathered(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    plan: GatheredPages,
    selection: LocalSelection,
    sm_scale: float,
    group: comm.Group,
) -> torch.Tensor:
    """Attend with the rows that this rank owns. Every rank of the group must call it, also one that owns none.

    Args:
        q: [t, H, 576]. Absorbed queries of this rank's rows, all heads. t differs between ranks.
        kv_rows: this rank's cache rows of one layer, [R, 656] uint8 or [R, 576], the chunk's included.
        plan: the step's pages.
        selection: of the same rows, from `localize_gathered`.
        sm_scale: multiplies q . k before the softmax.
        group: the DCP group.

    Returns:
        [t, H, 512], dtype of `q`, complete; zeros for a row that selects nothing.
    """
    return attend_selection(q, gather_rows(kv_rows, plan, group), selection, sm_scale, raw_lse=True)[0]
