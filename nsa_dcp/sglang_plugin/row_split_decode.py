"""In decode each rank selects for its share of a large batch, and all ranks take every row's selection from its
selector.

What row_split.py does for prefill, for steps of one query row a request, which are captured in CUDA graphs. All that is
decided here is decided from the number of rows, which is what a graph is captured for and the same on every rank. What
depends on context lengths is computed on the device from the metadata's own buffers, inside the graph: sglang rewrites
them before a replay, and the host does nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from nsa_dcp.sglang_plugin.validation import PAGE_SIZE

# Measured on an H200 with this repository's top-k (docs/performance.md, "Selection and scoring"): 64 rows of 32K save
# 70 us a layer at dcp 8, and the gather costs 10 to 15; 8 rows of 16K save 6. Longer contexts would lower this bound,
# but are unknown when a graph is captured.
MIN_ROWS = 64


class DecodeShare:
    """This rank's rows of a decode step, and their metadata, made once a step for all its indexers.

    Args:
        group: sglang's attention-TP group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._whole: object = None
        self._layer_id = -1
        self._narrowed: Any = None

    def rows(self, num_rows: int) -> slice | None:
        """Return this rank's rows of a batch; None where every rank selects for all of them.

        Args:
            num_rows: of the batch, padded to a captured size where it is captured.
        """
        if num_rows < MIN_ROWS or num_rows % self.group.world_size:
            return None
        rows_per_rank = num_rows // self.group.world_size
        start = self.group.rank_in_group * rows_per_rank
        return slice(start, start + rows_per_rank)

    def narrow(self, metadata: Any, layer_id: int, rows: slice) -> Any:
        """Return the metadata of this rank's rows, from an earlier layer of this step where one made it.

        Layers run in ascending order, so a layer that is not after the last one begins another step. The metadata
        object alone would not tell: a graph's warm-up, its capture and its replays share one, and what the capture
        found made already would be missing from the graph.

        Args:
            metadata: sglang's DSAIndexerMetadata of a decode batch.
            layer_id: the layer that is about to select.
            rows: as `rows` returned.
        """
        if metadata.attn_metadata is not self._whole or layer_id <= self._layer_id:
            self._narrowed = narrow_decode_metadata(metadata, rows)
            self._whole = metadata.attn_metadata
        self._layer_id = layer_id
        return self._narrowed


class RowSplitDecodeSelection:
    """Stands in an indexer for its `_get_topk_paged`, the selection of decode, verify and draft-extend steps.

    Args:
        select: the indexer's own method.
        share: this rank's, one for all indexers of the model.
    """

    def __init__(self, select: Callable[..., torch.Tensor], share: DecodeShare) -> None:
        self.select = select
        self.share = share

    def __call__(
        self, forward_batch: Any, layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        """Select for this rank's rows of a decode step and gather the others'; elsewhere select for all.

        Args:
            forward_batch: handed through. Only a decode batch is split.
            layer_id: the layer that selects.
            q_fp8: [T, Hi, 128] float8_e4m3fn. Rows past the batch's own are padding.
            weights: [T, Hi, 1] float32.
            metadata: sglang's DSAIndexerMetadata of the whole batch.

        Returns:
            [T, index_topk] int32, -1 in padding rows; where the batch is split, the same on every rank.
        """
        num_rows = metadata.get_seqlens_int32().shape[0]
        rows = self.share.rows(num_rows) if forward_batch.forward_mode.is_decode() else None
        if rows is None:
            return self.select(forward_batch, layer_id, q_fp8, weights, metadata)
        narrowed = self.share.narrow(metadata, layer_id, rows)
        part = self.select(forward_batch, layer_id, q_fp8[rows], weights[rows], narrowed)
        selection = part.new_empty(max(q_fp8.shape[0], num_rows), part.shape[1])
        selection[num_rows:] = -1
        self.share.group.all_gather_into_tensor(selection[:num_rows], part)
        return selection


def split_decode_rows(model: torch.nn.Module, group: Any) -> None:
    """Let every indexer of a model select for this rank's share of a decode batch. May be called more than once.

    Args:
        model: a loaded DSA model, not a draft.
        group: sglang's attention-TP group.
    """
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    share = DecodeShare(group)
    for indexer in model.modules():
        if isinstance(indexer, Indexer) and not isinstance(indexer._get_topk_paged, RowSplitDecodeSelection):
            indexer._get_topk_paged = RowSplitDecodeSelection(indexer._get_topk_paged, share)


def narrow_decode_metadata(metadata: Any, rows: slice) -> Any:
    """Return an indexer's metadata as if the batch had only some of its rows. No host synchronisation.

    Lengths and page tables are views of the batch's own; the schedule of the scoring kernel and the plan of the top-k
    kernel are made anew, on the device. What decode's selection does not read stays the whole batch's.

    Args:
        metadata: sglang's DSAIndexerMetadata of a decode batch, which has one query row a request.
        rows: a non-empty range of them.
    """
    from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2
    from sglang.srt.layers.attention.dsa.utils import resolve_num_sms, resolve_paged_mqa_logits_metadata_fn

    whole = metadata.attn_metadata
    lengths = whole.dsa_seqlens_expanded[rows]
    # The top-k kernel reads its plan before it waits for the scores: so it comes before the kernel that writes them.
    plan = None if whole.topk_v2_plan is None else plan_topk_v2(lengths)
    context_lens = schedule = None
    if metadata.paged_mqa_schedule_metadata is not None:
        context_lens = metadata.paged_mqa_ctx_lens_2d[rows]
        schedule = resolve_paged_mqa_logits_metadata_fn()(context_lens, PAGE_SIZE, resolve_num_sms())
    narrowed = dataclasses.replace(
        whole,
        cache_seqlens_int32=whole.cache_seqlens_int32[rows],
        # One row a request: 0, 1, 2, ... for any rows.
        cu_seqlens_q=whole.cu_seqlens_q[: rows.stop - rows.start + 1],
        # Absent where nothing reads single slots: captured graphs with the fused top-k.
        page_table_1=None if whole.page_table_1 is None else whole.page_table_1[rows],
        real_page_table=whole.real_page_table[rows],
        dsa_extend_seq_lens_list=whole.dsa_extend_seq_lens_list[rows],
        dsa_seqlens_expanded=lengths,
        topk_v2_plan=plan,
    )
    return dataclasses.replace(
        metadata,
        attn_metadata=narrowed,
        paged_mqa_schedule_metadata=schedule,
        paged_mqa_ctx_lens_2d=context_lens,
    )
