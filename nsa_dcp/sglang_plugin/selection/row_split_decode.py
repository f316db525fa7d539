"""In decode each rank selects for its share of a large batch, and all ranks take every row's selection from its
selector.

What row_split.py does for prefill, for steps of the same number of query rows in every request, which are captured in
CUDA graphs: one row in plain decode, as many as there are drafts to check under speculation (target-verify). A share is
of whole requests. All that is decided here is decided from the numbers of requests and rows, which is what a graph is
captured for and the same on every rank. What depends on context lengths is computed on the device from the metadata's
own buffers, inside the graph: sglang rewrites them before a replay, and the host does nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from nsa_dcp.planning.served_format import PAGE_SIZE

# Measured on an H200 with this repository's top-k (docs/performance/kernels.md, "Selection and scoring"): 64 rows of
# 32K save 70 us a layer at dcp 8, and the gather costs 10 to 15; 8 rows of 16K save 6. Longer contexts would lower this
# bound, but are unknown when a graph is captured. A verify step's rows are counted like decode's: on Hopper sglang
# scores each of them on its own.
MIN_ROWS = 64
# The attribute of a step's metadata that holds whose share was selected for, the last layer that did, and by what.
_CARRIED = "_nsa_dcp_narrowed"


class RankRequests:
    """This rank's requests of a decode step, and their metadata, made once a step for all its indexers.

    Nothing of a step is held here: what was made of its metadata is carried by them, and goes when they go.

    Args:
        group: sglang's group of the ranks that have every row of the step: the attention-TP group, or the DCP group
            under context parallelism.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def requests(self, num_requests: int, num_rows: int) -> slice | None:
        """Return this rank's requests of a batch; None where every rank selects for all of them.

        Args:
            num_requests: of the batch, padded to a captured size where it is captured.
            num_rows: of all requests, the same number in each.
        """
        if num_rows < MIN_ROWS or num_requests % self.group.world_size:
            return None
        requests_per_rank = num_requests // self.group.world_size
        start = self.group.rank_in_group * requests_per_rank
        return slice(start, start + requests_per_rank)

    def narrow(self, metadata: Any, layer_id: int, pieces: list[slice]) -> list[Any]:
        """Return the metadata of each piece of this rank's share, from an earlier layer of this step where one made it.

        Layers run in ascending order, so a layer that is not after the last one begins another step. The metadata
        object alone would not tell: a graph's warm-up, its capture and its replays share one, and what the capture
        found made already would be missing from the graph.

        Args:
            metadata: sglang's DSAIndexerMetadata of a decode or verify batch.
            layer_id: the layer that is about to select.
            pieces: of its requests, as `cut_evenly` returned, the same in every layer.
        """
        share, last_layer, narrowed = getattr(metadata.attn_metadata, _CARRIED, (None, layer_id, []))
        if share is not self or layer_id <= last_layer:
            narrowed = [narrow_metadata(metadata, requests) for requests in pieces]
        # The dataclass is frozen.
        object.__setattr__(metadata.attn_metadata, _CARRIED, (self, layer_id, narrowed))
        return narrowed


class RowSplitDecodeSelection:
    """Stands in an indexer for its `_get_topk_paged`, the selection of decode, verify and draft-extend steps.

    Args:
        select: the indexer's own method.
        share: this rank's, one for all indexers of the model.
        broadcast_selection: overwrites a selection with that of the first rank of the share's group. Every rank calls
            it, and it is captured in graphs.
        most_rows: that the method scores at once, the GPU's SMs. Of more it would join the scores of its pieces, which
            are as wide as the model's longest context: for 256 rows of 1,048,576 it copies 1 GiB a layer.
    """

    def __init__(
        self,
        select: Callable[..., torch.Tensor],
        share: RankRequests,
        broadcast_selection: Callable[[torch.Tensor], Any],
        most_rows: int,
    ) -> None:
        self.select = select
        self.share = share
        self.broadcast_selection = broadcast_selection
        self.most_rows = most_rows

    def __call__(
        self, forward_batch: Any, layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        """Select for this rank's share of a step and gather the others', or select for all and agree.

        Args:
            forward_batch: handed through. Only a decode or verify batch is split.
            layer_id: the layer that selects.
            q_fp8: [T, Hi, 128] float8_e4m3fn. Rows past the batch's own are padding.
            weights: [T, Hi, 1] float32.
            metadata: sglang's DSAIndexerMetadata of the whole batch.

        Returns:
            [T, index_topk] int32, the same on every rank; -1 in padding rows.
        """
        num_requests, num_rows = metadata.get_seqlens_int32().shape[0], metadata.get_seqlens_expanded().shape[0]
        mode = forward_batch.forward_mode
        splits = mode.is_decode() or mode.is_target_verify()
        requests = self.share.requests(num_requests, num_rows) if splits else None
        if requests is None:
            selection = self.select(forward_batch, layer_id, q_fp8, weights, metadata)
            self.broadcast_selection(selection)
            return selection
        rows_per_request = num_rows // num_requests
        pieces = cut_evenly(requests, max(1, self.most_rows // rows_per_request))
        narrowed = self.share.narrow(metadata, layer_id, pieces)
        selected = []
        for piece, part_metadata in zip(pieces, narrowed, strict=True):
            rows = slice(piece.start * rows_per_request, piece.stop * rows_per_request)
            selected.append(self.select(forward_batch, layer_id, q_fp8[rows], weights[rows], part_metadata))
        part = selected[0] if len(selected) == 1 else torch.cat(selected)
        selection = part.new_empty(max(q_fp8.shape[0], num_rows), part.shape[1])
        selection[num_rows:] = -1
        self.share.group.all_gather_into_tensor(selection[:num_rows], part)
        return selection


def cut_evenly(numbers: slice, most: int) -> list[slice]:
    """Cut a non-empty range of numbers into the fewest pieces of at most `most`, as long as each other."""
    total = numbers.stop - numbers.start
    count = -(-total // most)
    ends = [numbers.start + total * piece // count for piece in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


def narrow_metadata(metadata: Any, requests: slice) -> Any:
    """Return an indexer's metadata as if the batch had only some of its requests. No host synchronisation.

    Lengths and page tables are views of the batch's own; the schedule of the scoring kernel and the plan of the top-k
    kernel are made anew, on the device. What selection does not read in these steps stays the whole batch's.

    Args:
        metadata: sglang's DSAIndexerMetadata of a decode or verify batch: every request has as many query rows.
        requests: a non-empty range of them.
    """
    from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2
    from sglang.srt.layers.attention.dsa.utils import resolve_num_sms, resolve_paged_mqa_logits_metadata_fn

    whole = metadata.attn_metadata
    num_requests = whole.cache_seqlens_int32.shape[0]

    def narrow(values: Any) -> Any:
        # One entry a request, or one a row: the same number for every request.
        per_request = len(values) // num_requests
        return values[requests.start * per_request : requests.stop * per_request]

    lengths = narrow(whole.dsa_seqlens_expanded)
    # The top-k kernel reads its plan before it waits for the scores: so it comes before the kernel that writes them.
    plan = None if whole.topk_v2_plan is None else plan_topk_v2(lengths)
    context_lens = schedule = None
    if metadata.paged_mqa_schedule_metadata is not None:
        context_lens = narrow(metadata.paged_mqa_ctx_lens_2d)
        schedule = resolve_paged_mqa_logits_metadata_fn()(context_lens, PAGE_SIZE, resolve_num_sms())
    narrowed = dataclasses.replace(
        whole,
        cache_seqlens_int32=narrow(whole.cache_seqlens_int32),
        # 0, 1, 2, ... over rows, for any of them: verify counts each row as a query of its own too.
        cu_seqlens_q=whole.cu_seqlens_q[: lengths.shape[0] + 1],
        # Absent where nothing reads single slots: captured graphs with the fused top-k, without speculation.
        page_table_1=None if whole.page_table_1 is None else narrow(whole.page_table_1),
        real_page_table=narrow(whole.real_page_table),
        # Its sum is the number of rows. A verify batch has its requests' rows there, or where captured a 1 for each.
        dsa_extend_seq_lens_list=narrow(whole.dsa_extend_seq_lens_list),
        dsa_seqlens_expanded=lengths,
        topk_v2_plan=plan,
    )
    return dataclasses.replace(
        metadata,
        attn_metadata=narrowed,
        paged_mqa_schedule_metadata=schedule,
        paged_mqa_ctx_lens_2d=context_lens,
    )
