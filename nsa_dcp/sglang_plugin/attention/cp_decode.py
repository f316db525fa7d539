"""CP-DCP attention of tokens that every rank works on: decode, target-verify, and prefill chunks that are not split.

As in TP-DCP each rank attends to its own part of the cache, and the parts are merged. What differs is which heads a
rank starts from and needs in the end: all of them, or with --enable-cp-decode-attn-tp its own slice.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_dcp_kernels import LocalSelection, attend_selection


def attend_replicated(
    q: torch.Tensor,
    cache_rows: torch.Tensor,
    selection: LocalSelection,
    sm_scale: float,
    num_heads: int,
    group: Any,
    comm_backend: str,
) -> torch.Tensor:
    """Attend to a selection whose tokens are spread over the DCP group.

    Args:
        q: [T, H, 576]. The same tokens on every rank. H is `num_heads`, the same queries everywhere; or this rank's
            slice of them, `num_heads / N`.
        cache_rows: [R, 656] uint8 or [R, 576] bfloat16, this rank's rows of one layer.
        selection: this rank's part of one selection for all ranks.
        sm_scale: multiplies q . k before the softmax.
        num_heads: of the model.
        group: sglang's DCP group.
        comm_backend: `a2a` or `ag_rs`.

    Returns:
        [T, H, 512], dtype of `q`, contiguous; zeros for a row that selects nothing.
    """
    sliced = q.shape[1] != num_heads
    if sliced:
        q = group.all_gather(q.contiguous(), dim=1)
    out, lse = attend_selection(q, cache_rows, selection, sm_scale)
    merged = _merge(out.contiguous(), lse.contiguous(), group, comm_backend)
    return merged if sliced else group.all_gather(merged, dim=1)


def _merge(out: torch.Tensor, lse: torch.Tensor, group: Any, comm_backend: str) -> torch.Tensor:
    """Merge with sglang's own kernels, which capture; return this rank's [T, num_heads / N, 512], contiguous."""
    from sglang.srt.layers.dcp.comm import cp_lse_ag_out_rs_mla, dcp_a2a_lse_reduce

    if comm_backend == "a2a":
        return dcp_a2a_lse_reduce(out, lse, group, is_lse_base_on_e=True, comm_backend=comm_backend)
    return cp_lse_ag_out_rs_mla(out, lse, group, is_lse_base_on_e=True).transpose(0, 1).contiguous()
