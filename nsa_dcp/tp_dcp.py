"""TP-DCP attention: gather the group's query heads, attend to this rank's tokens, merge, keep this rank's heads.

Decode uses it for every row; prefill uses it wherever context parallelism is off or cannot split the chunk.
"""

import torch

from nsa_dcp import comm
from nsa_dcp.wire import PeerWire
from nsa_dcp_kernels import LocalSelection, attend_selection


def attend_sharded(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    selection: LocalSelection,
    sm_scale: float,
    group: comm.Group,
    comm_backend: str,
    wire: PeerWire | None = None,
) -> torch.Tensor:
    """Attend to a selection whose tokens are spread over a DCP group.

    Args:
        q: [T, H, 576]. This rank's absorbed query heads. T and H are the same on every rank.
        kv_rows: this rank's cache rows of one layer, [R, 656] uint8 or [R, 576].
        selection: this rank's part of the selection; the group's ranks hold parts of one and the same.
        sm_scale: multiplies q . k before the softmax.
        group: the DCP group.
        comm_backend: "a2a" or "ag_rs", of what no wire takes.
        wire: the group's, if it has one.

    Returns:
        [T, H, 512], dtype of `q`; zeros for a row that selects nothing.
    """
    gathered = wire.gather_heads(q) if wire and wire.takes_queries(q) else comm.gather_heads(q, group)
    # Both merges read an empty row's +inf as they read -inf.
    out, lse = attend_selection(gathered, kv_rows, selection, sm_scale, raw_lse=True)
    if wire and wire.takes_partials([(out, lse)]):
        return wire.merge_heads([(out, lse)])
    return comm.merge_heads(out, lse, group, comm_backend)
