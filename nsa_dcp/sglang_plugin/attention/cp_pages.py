"""CP-DCP prefill's buffer: the pages that a batch's requests use, gathered from every rank as bytes, a layer at a time.

The buffer is allocated once, for the longest request that the server admits, and used by every layer of every prefill.
A batch that uses more pages is gathered in parts, and its partial results are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nsa_dcp.row_prefill import GatheredPages, plan_pages
from nsa_dcp_kernels import gather_pages
from nsa_dcp_kernels.kv_format import PAGE_SIZE


def buffer_pages(context_len: int, pool_rows: int, dcp_size: int) -> int:
    """Pages of each rank that the buffer holds: those of the longest request, at most those of the pool.

    Args:
        context_len: the longest request that the server admits, in tokens.
        pool_rows: rows of one rank's pool, a multiple of a page.
        dcp_size: ranks that contribute.
    """
    return max(1, min(-(-context_len // (PAGE_SIZE * dcp_size)), pool_rows // PAGE_SIZE))


def buffer_bytes(pages: int, dcp_size: int, row_bytes: int) -> int:
    """Bytes of one GPU for a buffer of `pages` pages of each rank: the ranks' pages, and this rank's to be sent."""
    return pages * PAGE_SIZE * row_bytes * (dcp_size + 1)


class PageBuffer:
    """Where the ranks' pages of one layer land.

    Args:
        cache_rows: [R, W], a layer's cache on this rank; every layer's has its width and dtype.
        pages: pages of each rank that it holds.
        group: sglang's DCP group.
    """

    def __init__(self, cache_rows: torch.Tensor, pages: int, group: Any) -> None:
        self.pages = pages
        self.group = group
        self._bytes = torch.empty(
            group.world_size * pages * PAGE_SIZE * cache_rows[0].nbytes, dtype=torch.uint8, device=cache_rows.device
        )

    def gather(self, cache_rows: torch.Tensor, part: GatheredPages) -> torch.Tensor:
        """Gather pages of one layer from every rank. All ranks must call it, with the same pages.

        Args:
            cache_rows: [R, W], this rank's cache of the layer.
            part: at most `pages` pages.

        Returns:
            [N * part.local_rows, W], dtype of `cache_rows`, until the next call. Rows that no token was written to
            hold whatever the cache held.

        Raises:
            ValueError: the buffer does not hold so many pages.
        """
        if part.pages.shape[0] > self.pages:
            raise ValueError(f"part must have at most {self.pages} pages, got {part.pages.shape[0]}")
        # NCCL knows no FP8 and need not know any type: a gather moves bytes.
        local = gather_pages(cache_rows, part.pages).view(torch.uint8).flatten()
        gathered = self._bytes[: self.group.world_size * local.shape[0]]
        self.group.all_gather_into_tensor(gathered, local)
        return gathered.view(cache_rows.dtype).view(-1, cache_rows.shape[1])


def plan_parts(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: Sequence[int],
    dcp_size: int,
    num_pages: int,
    pages_per_part: int,
) -> tuple[GatheredPages, ...]:
    """List the pages that a batch's requests use, prefix and chunk, in parts that the buffer holds.

    The same on every rank, whichever requests a rank has tokens of: each rank contributes to the others' requests too.

    Args:
        req_to_token: [requests, context] int32, slots of the widened pool.
        req_pool_indices: [B], rows of it.
        seq_lens: tokens of each request, the chunk's included.
        dcp_size: ranks that contribute.
        num_pages: pages of one rank's cache, the reserved one included; a widened page is one page on every rank.
        pages_per_part: pages that the buffer holds.

    Returns:
        At least one part. A page that several requests share is in one of them, once.
    """
    widened = PAGE_SIZE * dcp_size
    counts = [-(-length // widened) for length in seq_lens]
    first_slots = req_to_token[req_pool_indices, : max(counts) * widened : widened]
    whole = plan_pages(first_slots // widened, counts, num_pages)
    if whole.pages.shape[0] <= pages_per_part:
        return (whole,)
    return tuple(_part(pages, num_pages) for pages in whole.pages.split(pages_per_part))


def _part(pages: torch.Tensor, num_pages: int) -> GatheredPages:
    page_pos = torch.full((num_pages,), -1, dtype=torch.int32, device=pages.device)
    page_pos[pages.long()] = torch.arange(pages.shape[0], dtype=torch.int32, device=pages.device)
    return GatheredPages(pages, page_pos)
