"""sglang's DSA attention backend, on a cache that DCP has spread over ranks.

The stock class hands FlashMLA slots of the whole pool as if they were rows of this rank's, and drops the log-sum-exp.
Only the method that calls the kernel is replaced, and with it the one that plans its launches, once a step, for no rows
in particular, and the filling of a decode graph's page table: writing the cache, gathering heads, merging, all other
metadata and graphs are sglang's. Queries that its own concatenation would not reach come to it joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

from nsa_dcp.sglang_plugin.attention.query_layout import join_far_heads
from nsa_dcp_kernels import LocalSelection, attend_selection, localize_selection
from nsa_dcp_kernels.kv_format import LATENT_DIM

# sglang merges base-2 log-sum-exps for this backend; nsa_dcp_kernels returns natural ones. -inf stays -inf.
LOG2_E = math.log2(math.e)
# The attribute of a selection's tensor that holds what the last layer attended with.
_CARRIED = "_nsa_dcp_prepared"


class DcpDeepseekSparseAttnBackend(DeepseekSparseAttnBackend):
    """Attends to the part of each selection that this DCP rank owns, and returns what merging the parts needs."""

    # sglang's, which ships no types.
    forward_metadata: Any

    def __init__(self, model_runner: Any) -> None:
        """Make the backend, and run the kernel once.

        Args:
            model_runner: sglang's ModelRunner, not a draft's.

        Raises:
            RuntimeError: FlashMLA is missing, does not load or run here, or treats an empty selection in another way.
        """
        super().__init__(model_runner)
        self.check_kernel(self.token_to_kv_pool.get_key_buffer(self.token_to_kv_pool.start_layer))

    @property
    def attended_heads(self) -> int:
        """Query heads that the kernel sees: those of the whole DCP group."""
        return self.num_dcp_q_heads

    def check_kernel(self, kv_cache: torch.Tensor) -> None:
        """Attend to nothing once, so that what is wrong with the kernel stops the server before it is ready.

        It also loads and compiles what must not be loaded while a graph is captured.

        Args:
            kv_cache: a layer's cache, as `_forward_flashmla_kv` is given it.

        Raises:
            RuntimeError: as the constructor.
        """
        rows = cache_rows(kv_cache)
        queries = torch.ones(1, self.attended_heads, LATENT_DIM, dtype=torch.bfloat16, device=rows.device)
        nothing = torch.full((1, self.dsa_index_topk), -1, dtype=torch.int32, device=rows.device)
        out, lse = attend_selection(queries, rows, localize_selection(nothing, self.dcp_size, self.dcp_rank), 1.0)
        if bool(out.any()) or not bool(torch.isneginf(lse).all()):
            raise RuntimeError(
                "nsa-dcp needs a kernel that returns zeros and a log-sum-exp of -inf for an empty selection, found "
                f"{out.abs().max().item()} and {lse.max().item()}: pip install --force-reinstall sgl-flash-mla==1.0.0"
            )

    def _forward_flashmla_kv(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        sm_scale: float,
        layer: Any,
        metadata: Any,
        page_table_1: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend to this rank's rows of a selection.

        Args:
            q_all: [T, H, 576] bfloat16. Absorbed queries of all heads of the DCP group, in rank order.
            kv_cache: [R, 1, 656] float8_e4m3fn (packed) or [R, 1, 576] bfloat16. This rank's rows of one layer.
            v_head_dim: 512.
            sm_scale: multiplies q . k before the softmax.
            layer: sglang's RadixAttention of the gathered heads.
            metadata: sglang's DSAMetadata of this forward.
            page_table_1: [T, K] int32. The selection as slots of the widened pool, -1 anywhere.

        Returns:
            out: [T, H, 512] bfloat16; zeros where this rank owns none of the selection.
            lse: [T, H] float32, base 2; -inf there.

        Raises:
            RuntimeError: the layer attends with this rank's heads alone, over a cache that holds a part of the tokens.
        """
        if layer.tp_q_head_num != self.num_dcp_q_heads:
            raise RuntimeError(
                f"layer {layer.layer_id} attends with {layer.tp_q_head_num} heads where DCP gathers "
                f"{self.num_dcp_q_heads}; nsa-dcp cannot serve this phase"
            )
        queries, rows = q_all.view(-1, layer.tp_q_head_num, layer.head_dim), cache_rows(kv_cache)
        selection = prepare_once(
            page_table_1, layer.layer_id, metadata, lambda slots: self._localize(slots, rows.dtype == torch.uint8)
        )
        out, lse = attend_selection(queries, rows, selection, sm_scale)
        return out, lse * LOG2_E

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        """As sglang's, which joins the two parts of queries itself; of a large chunk's many heads it cannot.

        Args:
            q: [T, H, 512], the latent part; or with `q_rope` None both parts, or the queries of dense attention.
            q_rope: [T, H, 64].
            k, v, layer, forward_batch, save_kv_cache, others: handed through.
        """
        if q_rope is not None:
            rope_dim = layer.head_dim - layer.v_head_dim
            q, q_rope = join_far_heads(q, q_rope, layer.tp_q_head_num, layer.v_head_dim, rope_dim)
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, q_rope=q_rope, **others)

    def _compute_flashmla_metadata(self, cache_seqlens: torch.Tensor, seq_len_q: int) -> NoSchedule:
        """Return what stands in the metadata for the stock kernel's schedule. Nothing is launched.

        Args:
            cache_seqlens, seq_len_q: as sglang calls it.
        """
        return NoSchedule()

    def _localize(self, topk_slots: torch.Tensor, packed: bool) -> LocalSelection:
        heads = self.attended_heads if packed else None
        return localize_selection(topk_slots, self.dcp_size, self.dcp_rank, planned_heads=heads)


class NoSchedule:
    """Stands where sglang keeps FlashMLA's schedule for a whole step: ours is made with each selection.

    sglang slices it and copies it where it prepares a graph's metadata. It has none of the tensors that the stock
    kernel would be called with, so whatever reads those fails.
    """

    def slice(self, rows: slice) -> NoSchedule:
        """Return the schedule of some rows: this."""
        return self

    def copy_(self, other: NoSchedule) -> None:
        """Take over another schedule: nothing."""


def prepare_once(topk_slots: torch.Tensor, layer_id: int, metadata: object, make: Callable[[torch.Tensor], Any]) -> Any:
    """Return what `make` makes of a selection, from the layer before where that attended to the same one.

    Layers that share a selection are handed the same tensor, and the tensor carries what was made of it, so that
    nothing outlives the forward. That it is the same tensor counts only together with the forward's metadata and with
    consecutive layers: a forward runs ascending layers, so its first one never follows the last one that attended, and
    a tensor which outlives its forward is never taken for the next one's. In a captured graph this is decided at
    capture, and every replay follows it.

    Args:
        topk_slots: [T, K] int32, slots of the widened pool, -1 anywhere.
        layer_id: the layer that is about to attend.
        metadata: the forward's metadata object, of which there is one per forward.
        make: called with the selection, which its result must not hold; the same function in all layers of a forward.
    """
    carried = getattr(topk_slots, _CARRIED, None)
    if carried is not None and carried[0] is metadata and layer_id == carried[1] + 1:
        prepared = carried[2]
    else:
        prepared = make(topk_slots)
    setattr(topk_slots, _CARRIED, (metadata, layer_id, prepared))
    return prepared


def cache_rows(kv_cache: torch.Tensor) -> torch.Tensor:
    """Return one layer's cache as nsa_dcp_kernels takes it, without copying.

    Args:
        kv_cache: [R, 1, 656] float8_e4m3fn or uint8 (packed), or [R, 1, 576] bfloat16.

    Returns:
        [R, 656] uint8, or [R, 576] bfloat16.
    """
    rows = kv_cache.view(kv_cache.shape[0], kv_cache.shape[-1])
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
