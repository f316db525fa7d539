"""sglang's DSA attention backend for CP-DCP: prompts spread over ranks by token, the cache spread over the same ranks.

The model's own DCP code gathers the query heads of one token over the group, which under context parallelism would be
heads of different tokens. So the model is told that there is no DCP (`cp_startup`), and all of it happens here.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.cp.base import get_cp_strategy, is_zigzag
from sglang.srt.layers.cp.utils import is_cp_active

from nsa_dcp.sglang_plugin.attention.backend import DcpDeepseekSparseAttnBackend, cache_rows, prepare_once
from nsa_dcp.sglang_plugin.attention.cp_decode import attend_replicated
from nsa_dcp.sglang_plugin.attention.cp_pages import PageBuffer, plan_parts
from nsa_dcp.sglang_plugin.attention.cp_prefill import PartSelections, attend_parts
from nsa_dcp.sglang_plugin.attention.cp_zigzag import shard_metadata
from nsa_dcp.wire import PeerWire
from nsa_dcp_kernels import LocalSelection
from nsa_dcp_kernels.kv_format import PAGE_SIZE

# The attribute of a spread prefill's metadata that holds the pages its layers gather.
_PARTS = "_nsa_dcp_parts"


class CpDcpSparseAttnBackend(DcpDeepseekSparseAttnBackend):
    """Gathers pages where a prompt is spread over the ranks, and merges partial results where it is not."""

    _wire: PeerWire | None = None

    def __init__(
        self, model_runner: Any, group: Any, comm_backend: str, pages: int, wire: PeerWire | None = None
    ) -> None:
        """Make the backend, run the kernel once, and allocate the gather buffer.

        Args:
            model_runner: sglang's ModelRunner, not a draft's.
            group: sglang's DCP group, which has the ranks of its attention-CP group.
            comm_backend: `a2a` or `ag_rs`.
            pages: pages of each rank that the gather buffer holds.
            wire: the group's, for steps that every rank works on.

        Raises:
            RuntimeError: as the kernel's trial in TP-DCP.
        """
        super().__init__(model_runner)
        self._wire = wire
        first_layer = self.token_to_kv_pool.get_key_buffer(self.token_to_kv_pool.start_layer)
        self._start(group, comm_backend, PageBuffer(cache_rows(first_layer), pages, group))

    def _start(self, group: Any, comm_backend: str, buffer: PageBuffer) -> None:
        self._group, self._comm_backend, self._buffer = group, comm_backend, buffer

    @property
    def attended_heads(self) -> int:
        """Query heads that the kernel sees: all, and the same, on every rank."""
        return self.num_q_heads

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make sglang's metadata of a forward, and list the pages that a spread prefill gathers.

        Args:
            forward_batch: sglang's ForwardBatch.
        """
        super().init_forward_metadata(forward_batch)
        if forward_batch.attn_cp_metadata is None or not is_cp_active(forward_batch):
            return
        if is_zigzag():
            self.forward_metadata = shard_metadata(self.forward_metadata, forward_batch, get_cp_strategy())
        rows = self.token_to_kv_pool.get_key_buffer(self.token_to_kv_pool.start_layer).shape[0]
        parts = plan_parts(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens_cpu.tolist(),
            self.dcp_size,
            rows // PAGE_SIZE,
            self._buffer.pages,
        )
        # The dataclass is frozen, and made anew for each forward: the pages live as long as it does.
        object.__setattr__(self.forward_metadata, _PARTS, parts)

    def _forward_flashmla_kv(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        sm_scale: float,
        layer: Any,
        metadata: Any,
        page_table_1: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to a selection whose tokens lie on all ranks.

        Args:
            q_all: [T, H, 576] bfloat16, absorbed queries. In a spread prefill this rank's tokens and all heads; else
                every rank's tokens and all heads, or this rank's slice of them.
            kv_cache: [R, 1, 656] float8_e4m3fn (packed) or [R, 1, 576] bfloat16. This rank's rows of one layer.
            v_head_dim: 512.
            sm_scale: multiplies q . k before the softmax.
            layer: sglang's RadixAttention.
            metadata: sglang's DSAMetadata of this forward.
            page_table_1: [T, K] int32. The selection as slots of the widened pool, -1 anywhere.

        Returns:
            [T, H, 512] bfloat16, complete; zeros for a row that selects nothing.

        Raises:
            RuntimeError: the layer attends with neither all heads nor a slice of them where it may.
        """
        parts = getattr(metadata, _PARTS, None)
        heads = layer.tp_q_head_num
        if heads != self.num_q_heads and (parts or heads * self.dcp_size != self.num_q_heads):
            raise RuntimeError(
                f"layer {layer.layer_id} attends with {heads} of {self.num_q_heads} heads in a "
                f"{'spread' if parts else 'replicated'} step; nsa-dcp cannot serve this phase"
            )
        queries, rows = q_all.view(-1, heads, layer.head_dim), cache_rows(kv_cache)
        if parts is not None:
            selections = prepare_once(
                page_table_1,
                layer.layer_id,
                metadata,
                lambda slots: PartSelections(slots, parts, self.dcp_size),
            )
            return attend_parts(queries, rows, parts, selections.of(page_table_1), self._buffer, sm_scale)
        selection = prepare_once(
            page_table_1,
            layer.layer_id,
            metadata,
            lambda slots: self._localize_replicated(slots, metadata, rows.dtype == torch.uint8),
        )
        return attend_replicated(
            queries, rows, selection, sm_scale, self.num_q_heads, self._group, self._comm_backend, self._wire
        )

    def _localize_replicated(self, topk_slots: torch.Tensor, metadata: Any, packed: bool) -> LocalSelection:
        # Key ranges are what `_get_topk_ragged` selects by, and it leaves ties to each rank. All other selections are
        # of `_get_topk_paged`, where the ranks agreed (`selection_agreement`). Layers that share the selection share
        # what is overwritten here.
        if metadata.indexer_k_start_end is not None:
            self._group.broadcast(topk_slots, src=0)
        return self._localize(topk_slots, packed)
