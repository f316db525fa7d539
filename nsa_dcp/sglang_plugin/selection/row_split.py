"""In prefill each rank selects for its share of the query rows, and all ranks take every row's selection from its
selector.

Every rank of an attention-TP group holds every index key and the same queries, so stock sglang scores every row on
every rank. Split by rows, scoring costs 1/N, and the ranks agree by construction: one all-gather of 4 * index_topk
bytes a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch


class RowSplitSelection:
    """Stands in an indexer for its `_get_topk_ragged`, the selection of prefill.

    Args:
        select: the indexer's own method.
        index_topk: width of a selection.
        group: sglang's attention-TP group.
    """

    def __init__(self, select: Callable[..., torch.Tensor], index_topk: int, group: Any) -> None:
        self.select = select
        self.index_topk = index_topk
        self.group = group

    def __call__(
        self,
        enable_dual_stream: bool,
        forward_batch: Any,
        layer_id: int,
        q_fp8: torch.Tensor,
        weights: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """Select for this rank's rows and gather the others'.

        Args:
            enable_dual_stream, forward_batch, layer_id: handed through.
            q_fp8: [T, Hi, 128] float8_e4m3fn. Rows past the batch's own are padding.
            weights: [T, Hi, 1] float32.
            metadata: sglang's DSAIndexerMetadata of the whole batch.

        Returns:
            [T, index_topk] int32, the same on every rank; -1 in padding rows.
        """
        num_rows = metadata.get_indexer_kvcache_range()[0].shape[0]
        world_size = self.group.world_size
        rows_per_rank = -(-num_rows // world_size)
        start = min(self.group.rank_in_group * rows_per_rank, num_rows)
        stop = min(start + rows_per_rank, num_rows)
        part = torch.full((rows_per_rank, self.index_topk), -1, dtype=torch.int32, device=q_fp8.device)
        if start < stop:
            part[: stop - start] = self.select(
                enable_dual_stream,
                forward_batch,
                layer_id,
                q_fp8[start:stop],
                weights[start:stop],
                narrow_metadata(metadata, start, stop),
            )
        selection = torch.full(
            (max(q_fp8.shape[0], world_size * rows_per_rank), self.index_topk),
            -1,
            dtype=torch.int32,
            device=part.device,
        )
        if num_rows:
            # Rank r's part lands at row r * rows_per_rank, where its rows stand in the batch.
            self.group.all_gather_into_tensor(selection[: world_size * rows_per_rank], part)
        return selection[: q_fp8.shape[0]]


def narrow_metadata(metadata: Any, start: int, stop: int) -> Any:
    """Return an indexer's metadata as if the batch had only its rows `start` to `stop`, and only the requests they are
    of.

    Args:
        metadata: sglang's DSAIndexerMetadata of an extend batch.
        start, stop: a non-empty range of query rows.
    """
    whole = metadata.attn_metadata
    ends = list(accumulate(whole.dsa_extend_seq_lens_list))
    first = next(request for request, end in enumerate(ends) if end > start)
    last = next(request for request, end in enumerate(ends) if end >= stop) + 1
    # Keys of the requests before: what their logits columns took.
    keys_before = int(whole.indexer_seq_lens_cpu[:first].sum())
    key_start, key_end = whole.indexer_k_start_end
    rows, requests = slice(start, stop), slice(first, last)
    narrowed = dataclasses.replace(
        whole,
        cache_seqlens_int32=whole.cache_seqlens_int32[requests],
        cu_seqlens_q=(whole.cu_seqlens_q[first : last + 1] - start).clamp(0, stop - start),
        cu_seqlens_k=whole.cu_seqlens_k[first : last + 1] - keys_before,
        page_table_1=whole.page_table_1[requests],
        real_page_table=whole.real_page_table[requests],
        dsa_seqlens_expanded=whole.dsa_seqlens_expanded[rows],
        indexer_k_start_end=(key_start[rows] - keys_before, key_end[rows] - keys_before),
        indexer_seq_lens_cpu=whole.indexer_seq_lens_cpu[requests],
        indexer_seq_lens=whole.indexer_seq_lens[requests],
        token_to_batch_idx=whole.token_to_batch_idx[rows] - first,
        # Made for all rows; with per-row key ranges the selection does not read it.
        topk_v2_plan=None,
    )
    return dataclasses.replace(metadata, attn_metadata=narrowed)
