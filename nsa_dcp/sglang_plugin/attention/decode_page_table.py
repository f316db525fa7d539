"""A decode graph's page table, refreshed page by page before each replay.

sglang launches a program for every 128 tokens of the longest context that it admits, whatever the contexts are: 262,209
for 64 requests at 524,288 tokens, 160 us a step on an H200 (docs/performance/kernels.md). Each of them reads every
token's slot to write the page of one in 64. Lengths are left to sglang's kernel, launched for no tokens at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa_dcp_kernels import fill_page_table_


class PagewiseDecodeMetadata:
    """Stands in a backend for its `_fused_decode_metadata`.

    Args:
        fill: sglang's function of that purpose, `fused_dsa_decode_metadata`.
    """

    def __init__(self, fill: Callable[..., None]) -> None:
        self.fill = fill

    def __call__(
        self,
        *,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        req_to_token: torch.Tensor,
        page_table_1: torch.Tensor | None,
        real_page_table: torch.Tensor,
        bs: int,
        max_len: int,
        physical_page_size: int,
        **lengths: Any,
    ) -> None:
        """Fill what a decode graph reads: lengths, their sums, and each live prefix of its page table.

        Args:
            seq_lens, req_pool_indices: [B] int32 or int64.
            req_to_token: [Q, L] int32, slots of each request's tokens.
            page_table_1: [B, L] int32, a table of slots, which speculation keeps: then sglang's kernel does everything.
            real_page_table: [B, P] int32.
            bs: B.
            max_len: tokens that a row of the tables holds.
            physical_page_size: slots per page.
            lengths: handed through: the tensors of lengths and sums, and dsa_index_topk.
        """
        pagewise = page_table_1 is None
        self.fill(
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            req_to_token=req_to_token,
            page_table_1=page_table_1,
            real_page_table=real_page_table,
            bs=bs,
            max_len=0 if pagewise else max_len,
            physical_page_size=physical_page_size,
            **lengths,
        )
        if pagewise:
            fill_page_table_(real_page_table[:bs], req_to_token, req_pool_indices, seq_lens, physical_page_size)
