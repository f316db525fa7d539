"""Attention of tokens that every rank works on, where sglang's layers know of no DCP: queries gathered, parts merged.

CP-DCP's decode, target-verify and prefill chunks that are not split; and all of TP-DCP where it has a wire. Each rank
attends to its own part of the cache, and the parts are merged. A rank starts from, and needs in the end, all heads, or
its own slice of them: CP-DCP with --enable-cp-decode-attn-tp, and TP-DCP.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_dcp.wire import PeerWire
from nsa_dcp_kernels import LocalSelection, attend_selection


def attend_replicated(
    q: torch.Tensor,
    cache_rows: torch.Tensor,
    selection: LocalSelection,
    sm_scale: float,
    num_heads: int,
    group: Any,
    comm_backend: str,
    wire: PeerWire | None = None,
) -> torch.Tensor:
    """Attend to a selection whose tokens are spread over the DCP group.

    Args:
        q: [T, H, 576]. The same tokens on every rank. H is `num_heads`, the same queries everywhere; or this rank's
            slice of them, `num_heads / N`.
        cache_rows: [R, 656] uint8 or [R, 576] bfloat16, this rank's rows of one layer.
        selection: this rank's part of one selection for all ranks.
        sm_scale: multiplies q . k before the softmax.
        num_heads: of the group: in CP-DCP the model's.
        group: sglang's DCP group.
        comm_backend: `a2a` or `ag_rs`, of what no wire takes.
        wire: the group's, if it has one. Whether it takes a step is told by shapes, so alike on every rank.

    Returns:
        [T, H, 512], dtype of `q`, contiguous; zeros for a row that selects nothing.
    """
    sliced = q.shape[1] != num_heads
    if sliced:
        q = _gather_heads(q, group, wire)
    out, lse = attend_selection(q, cache_rows, selection, sm_scale)
    if wire is not None and wire.takes_partials([(out, lse)]):
        merged = wire.merge_heads([(out, lse)])
    else:
        merged = _merge(out.contiguous(), lse.contiguous(), group, comm_backend)
    return merged if sliced else _gather_heads(merged, group, wire)


def _gather_heads(heads: torch.Tensor, group: Any, wire: PeerWire | None) -> torch.Tensor:
    """[T, H / N, D] of every rank -> [T, H, D], in rank order, contiguous."""
    if wire is not None and wire.takes_queries(heads):
        return wire.gather_heads(heads)
    return group.all_gather(heads.contiguous(), dim=1)


def _merge(out: torch.Tensor, lse: torch.Tensor, group: Any, comm_backend: str) -> torch.Tensor:
    """Merge with sglang's own kernels, which capture; return this rank's [T, num_heads / N, 512], contiguous."""
    from sglang.srt.layers.dcp.comm import cp_lse_ag_out_rs_mla, dcp_a2a_lse_reduce

    if comm_backend == "a2a":
        return dcp_a2a_lse_reduce(out, lse, group, is_lse_base_on_e=True, comm_backend=comm_backend)
    return cp_lse_ag_out_rs_mla(out, lse, group, is_lse_base_on_e=True).transpose(0, 1).contiguous()
