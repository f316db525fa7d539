"""TP-DCP attention, each rank having its heads of every row: by queries or, in prefill, by rows.

By queries: gather the group's query heads, attend to this rank's tokens, merge, keep this rank's heads. Decode uses it
for every row, prefill where it moves fewer bytes (`planning.prefill_ways`).
By rows: exchange heads for rows, attend with the own ones by `row_prefill`, exchange back. Nothing is merged.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class RowShares:
    """Which rank of a DCP group attends with which of a step's query rows. The same on every rank, but for `own`.

    own: this rank's rows, as a slice of the step's.
    by_owner: [T] int64, all rows in the order in which they travel: rank 0's, rank 1's, ..
    place: [T] int64, where each row stands in `by_owner`.
    counts: rows of each rank; some may have none.
    """

    own: slice
    by_owner: torch.Tensor
    place: torch.Tensor
    counts: list[int]

    def take_rows(self, q: torch.Tensor, group: comm.Group) -> torch.Tensor:
        """Exchange heads for rows: [T, H, D], this rank's heads of every row -> [t, N * H, D], its rows, all heads."""
        return comm.exchange_heads_for_rows(q[self.by_owner], self.counts, group)

    def return_heads(self, out: torch.Tensor, group: comm.Group) -> torch.Tensor:
        """Exchange rows for heads: [t, N * H, D] -> [T, H, D]. Undoes `take_rows`."""
        return comm.exchange_rows_for_heads(out, self.counts, group)[self.place]


def deal_rows(num_rows: int, dcp_size: int, dcp_rank: int, device: torch.device) -> RowShares:
    """Deal a step's rows out round robin, as row-split selection does: neighbouring rows see contexts of like lengths.

    Args:
        num_rows: T; ranks past it get none.
        dcp_size, dcp_rank: this rank's place.
        device: where the queries are.
    """
    # A slice: `arange(rank, T, N)` is an error where a rank has no row.
    shares = [torch.arange(num_rows)[rank::dcp_size] for rank in range(dcp_size)]
    by_owner = torch.cat(shares)
    return RowShares(
        own=slice(dcp_rank, num_rows, dcp_size),
        by_owner=by_owner.to(device),
        place=by_owner.argsort().to(device),
        counts=[len(share) for share in shares],
    )
