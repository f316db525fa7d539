"""sglang's DSA attention backend for TP-DCP over a wire: gathering heads and merging are ours, not the model's.

The model is told that there is no DCP (`patches.hide_dcp_from_layers`), as in CP-DCP: its layers hand this rank's heads
to attention and expect the same heads, complete. Projections, cache writes and graphs stay sglang's.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_dcp.sglang_plugin.attention.backend import DcpDeepseekSparseAttnBackend, cache_rows, prepare_once
from nsa_dcp.sglang_plugin.attention.cp_decode import attend_replicated
from nsa_dcp.wire import PeerWire


class WiredSparseAttnBackend(DcpDeepseekSparseAttnBackend):
    """Attends for the whole group and returns this rank's heads; steps that the wire does not take use collectives."""

    def __init__(self, model_runner: Any, group: Any, comm_backend: str, wire: PeerWire) -> None:
        """Make the backend, and run the kernel once.

        Args:
            model_runner: sglang's ModelRunner, not a draft's.
            group: sglang's DCP group.
            comm_backend: `a2a` or `ag_rs`, of steps larger than the wire takes.
            wire: the group's.

        Raises:
            RuntimeError: as the kernel's trial in TP-DCP.
        """
        super().__init__(model_runner)
        self._start(group, comm_backend, wire)

    def _start(self, group: Any, comm_backend: str, wire: PeerWire) -> None:
        self._group, self._comm_backend, self._wire = group, comm_backend, wire

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
            q_all: [T, H, 576] bfloat16, absorbed queries of this rank's heads.
            kv_cache: [R, 1, 656] float8_e4m3fn (packed) or [R, 1, 576] bfloat16. This rank's rows of one layer.
            v_head_dim: 512.
            sm_scale: multiplies q . k before the softmax.
            layer: sglang's RadixAttention of this rank's heads.
            metadata: sglang's DSAMetadata of this forward.
            page_table_1: [T, K] int32. The selection as slots of the widened pool, -1 anywhere; the same on every rank.

        Returns:
            [T, H, 512] bfloat16, complete; zeros for a row that selects nothing.

        Raises:
            RuntimeError: the layer attends with other heads than this rank's.
        """
        if layer.tp_q_head_num != self.num_q_heads:
            raise RuntimeError(
                f"layer {layer.layer_id} attends with {layer.tp_q_head_num} heads where a rank has {self.num_q_heads}; "
                "nsa-dcp cannot serve this phase over a wire"
            )
        rows = cache_rows(kv_cache)
        selection = prepare_once(
            page_table_1, layer.layer_id, metadata, lambda slots: self._localize(slots, rows.dtype == torch.uint8)
        )
        return attend_replicated(
            q_all.view(-1, layer.tp_q_head_num, layer.head_dim),
            rows,
            selection,
            sm_scale,
            self.num_dcp_q_heads,
            self._group,
            self._comm_backend,
            self._wire,
        )
