"""Exact selections, where sglang's default top-k keeps part of the candidates.

A decode step of few long contexts is selected by top-k v2's clusters, which keep 2,048 of the candidates that share the
leading bits of the threshold. Long contexts can have more, and then tokens with lower scores are selected instead
(docs/upstream.md). Prefill's kernel is exact, and for contexts above 64K slower. `ExactTopK` stands where sglang's
attention backend keeps its `DSATopKBackend`, so that every selection of the backend's indexers, whole or a rank's
share, goes through it. A draft worker has a backend of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from nsa_dcp.planning.served_format import PAGE_SIZE
from nsa_dcp.sglang_plugin.compat import require
from nsa_dcp_kernels import select_slots

# Values of the switch, NSA_DCP_TOPK, on which all ranks of a server must agree (`startup.agreement`).
EXACT, STOCK = "exact", "stock"


def read_choice(environ: Mapping[str, str] = os.environ) -> str:
    """Which selections the environment asks for: `exact`, also where it says nothing, or `stock`.

    Raises:
        ValueError: it says something else.
    """
    choice = environ.get("NSA_DCP_TOPK") or EXACT
    if choice not in (EXACT, STOCK):
        raise ValueError(f"NSA_DCP_TOPK must be {EXACT} or {STOCK}, got {choice!r}")
    return choice


class ExactTopK:
    """Stands in a backend for sglang's `DSATopKBackend.SGL_KERNEL`.

    Metadata are made as for that one: the compact page table is filled, and the wide one dropped where it is.

    Args:
        stock: sglang's own.
    """

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def is_sgl_kernel(self) -> bool:
        """Whether fused selections are slots, and metadata are made for that: as the stock one's."""
        return self.stock.is_sgl_kernel()

    def is_torch(self) -> bool:
        """As the stock one."""
        return self.stock.is_torch()

    def is_flashinfer(self) -> bool:
        """As the stock one."""
        return self.stock.is_flashinfer()

    def should_use_topk_v2(self) -> bool:
        """Whether decode graphs have no page table of single slots: this one needs it no more than top-k v2 does."""
        return self.stock.should_use_topk_v2()

    def topk_func(
        self, score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Select positions.

        Args:
            score: [T, W] float32; garbage outside each row's entries.
            lengths: [T] int32, entries of each row.
            topk: width of a selection.
            row_starts: [T] int32, each row's first column; 0 if None.

        Returns:
            [T, topk] int32: positions counted from the row's start, in ascending order, then -1.
        """
        return select_slots(score, lengths, topk, row_starts=row_starts)

    def topk_transform(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        topk_transform_method: Any,
        attn_metadata: Any,
        cu_seqlens_q_topk: torch.Tensor | None = None,
        topk_indices_offset: torch.Tensor | None = None,
        row_starts: torch.Tensor | None = None,
        batch_idx_list: Any = None,
        force_unfused_topk: bool = False,
    ) -> torch.Tensor:
        """Select slots of the widened pool, or positions where sglang maps those itself.

        Args:
            logits, lengths, topk, row_starts: as in `topk_func`.
            topk_transform_method: sglang's TopkTransformMethod. PAGED.
            attn_metadata: sglang's DSAMetadata of the rows, which has their page tables.
            cu_seqlens_q_topk: [B + 1] int32, the first row of each of B entries of `batch_idx_list`, or requests.
            topk_indices_offset: for RAGGED.
            batch_idx_list: requests that the rows are of, in order; all if None.
            force_unfused_topk: return positions.

        Returns:
            [T, topk] int32, then -1.

        Raises:
            RuntimeError: RAGGED, or rows without a request.
        """
        from sglang.srt.environ import envs
        from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod

        if force_unfused_topk or not envs.SGLANG_DSA_FUSE_TOPK.get():
            return self.topk_func(logits, lengths, topk, row_starts)
        require(
            topk_transform_method == TopkTransformMethod.PAGED,
            "selections as slots (PAGED)",
            getattr(topk_transform_method, "name", topk_transform_method),
        )
        num_rows = logits.shape[0]
        if row_starts is None and batch_idx_list is None and attn_metadata.real_page_table.shape[0] == num_rows:
            # A row of pages for each: decode, verify and draft-extend steps, in graphs of which there is no other.
            table, request, page_size = attn_metadata.real_page_table, None, attn_metadata.page_size
        else:
            table, page_size = attn_metadata.page_table_1, 1
            require(cu_seqlens_q_topk is not None, "the first row of each request where selections are mapped", "none")
            assert cu_seqlens_q_topk is not None
            request = requests_of_rows(cu_seqlens_q_topk, num_rows, batch_idx_list)
        return select_slots(
            logits, lengths, topk, row_starts=row_starts, page_table=table, row_request=request, page_size=page_size
        )


def requests_of_rows(first_rows: torch.Tensor, num_rows: int, requests: Any = None) -> torch.Tensor:
    """Return each row's request, without reading a value on the host.

    Args:
        first_rows: [B + 1] int32, the first row of each of B entries, and the number of rows.
        num_rows: T.
        requests: the entries' requests, B of them, if they are not 0, 1, 2, ...

    Returns:
        [T] int32.
    """
    rows = torch.arange(num_rows, dtype=first_rows.dtype, device=first_rows.device)
    entry = torch.searchsorted(first_rows[1:].contiguous(), rows, right=True, out_int32=True)
    if requests is None:
        return entry
    return torch.as_tensor(requests, dtype=torch.int32, device=first_rows.device)[entry]


def check_selection(device: torch.device, topk: int) -> None:
    """Select once as prefill and as decode do, so that what is wrong stops the server before it is ready.

    It also compiles what must not be compiled while a server answers: 30 seconds where nothing is cached.

    Args:
        device: where the server runs.
        topk: width of a selection.

    Raises:
        RuntimeError: a selection is not the expected one.
    """
    for num_rows, width in ((1, 1 << 20), (64, 1 << 16), (264, 1 << 14)):
        # Scores that tie: the best is at every eighth column, so that the first of those are selected.
        column = torch.arange(width, device=device)
        scores = torch.where(column % 8 == 3, 1.0, -column.float() / width).repeat(num_rows, 1)
        lengths = torch.full((num_rows,), width, dtype=torch.int32, device=device)
        table = torch.arange(width, dtype=torch.int32, device=device).unsqueeze(0)
        best = column[column % 8 == 3][:topk]
        # Then the first of the others, where those are too few.
        rest = column[column % 8 != 3][: topk - len(best)]
        expected = torch.cat([best, rest]).sort().values.to(torch.int32).expand(num_rows, topk)
        zeros = torch.zeros_like(lengths)
        as_prefill = select_slots(
            scores, lengths, topk, row_starts=zeros, page_table=table, row_request=zeros, page_size=1
        )
        pages = table[:, : width // PAGE_SIZE].expand(num_rows, -1).contiguous()
        as_decode = select_slots(scores, lengths, topk, page_table=pages, page_size=PAGE_SIZE)
        for phase, selected in (("prefill", as_prefill), ("decode", as_decode)):
            require(
                torch.equal(selected, expected),
                f"the best {topk} of {width} scores selected in {phase}, ties to the lower position",
                f"{int((selected != expected).sum())} entries that differ",
            )
