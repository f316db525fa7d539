"""What ranks exchange in a step, over memory that each writes into the others': one kernel packs, sends, waits, merges.

Every rank of the group must make the same calls in one order, on one stream at a time: eagerly, or in CUDA graphs that
all of them replay. A rank that does not come, or comes with something else, ends the others within `wait_limit`: the
kernel says which in `PeerChannels.fault`, and stops its GPU before a result leaves it. Definitions over all ranks'
inputs, without any memory of peers: `peer_reference`.
"""

from collections.abc import Sequence

import torch

from nsa_dcp_kernels._checks import check, check_tensor
from nsa_dcp_kernels.peer_memory import PeerChannels, partial_unit, row_unit

MAX_PIECES = 4
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def exchange_partials(
    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], channels: PeerChannels, *, base_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange partial attention results with the other ranks, and merge those of this rank's heads.

    `merge_partials` over what every rank has of rank r's heads, bit for bit, in rank order; without `base_2`.

    Args:
        pieces: (out, lse) of consecutive query tokens, at most 4: out [T_i, N * H, D] bfloat16 (float16, float32), lse
            [T_i, N * H] float32. All heads of the group, in rank order, attended to this rank's tokens. -inf, +inf and
            NaN in `lse` are an empty partial, whose `out` is not used. D is a multiple of 8.
        channels: this rank's.
        base_2: `lse` is in base 2, taken and returned; natural otherwise.

    Returns:
        merged: [T, H, D], T the sum of the pieces' tokens; zeros where every rank's partial is empty.
        total: [T, H] float32; -inf there.

    Raises:
        ValueError: a shape or dtype is not as above, or the tokens are more than the channels hold.
    """
    check(1 <= len(pieces) <= MAX_PIECES, "pieces", f"be 1 to {MAX_PIECES}", len(pieces))
    first = pieces[0][0]
    check_tensor(first, "out", (None, None, None), _DTYPES)
    _check_reachable(first, channels)
    for out, lse in pieces:
        check_tensor(out, "out", (None, *first.shape[1:]), first.dtype, like=first)
        check_tensor(lse, "lse", tuple(out.shape[:2]), torch.float32, like=first)
    num_heads, dim = first.shape[1:]
    check(num_heads % channels.num_ranks == 0, "out", f"have a multiple of {channels.num_ranks} heads", num_heads)
    check(dim > 0 and dim % 8 == 0, "out", "have values in multiples of 8", dim)
    tokens = sum(out.shape[0] for out, _ in pieces)
    check(holds_partials(channels, tokens, num_heads, dim, first.dtype), "out", "fit the channels", [tokens, num_heads])
    from nsa_dcp_kernels._triton.peer_exchange import exchange_partials as launch

    return launch(pieces, channels, base_2)


def gather_heads_from_peers(q: torch.Tensor, channels: PeerChannels) -> torch.Tensor:
    """Gather the query heads of the group, arranged by head.

    Args:
        q: [T, H, D], of 2 or 4 bytes a value, D * itemsize a multiple of 4. This rank's heads.
        channels: this rank's.

    Returns:
        [T, N * H, D], contiguous, heads in rank order.

    Raises:
        ValueError: a shape or dtype is not as above, or the queries are more than the channels hold.
    """
    check_tensor(q, "q", (None, None, None), _DTYPES)
    _check_reachable(q, channels)
    check(q.shape[2] * q.itemsize % 4 == 0, "q", "have heads of whole 4-byte words", q.shape[2])
    words = q.shape[1] * q.shape[2] * q.itemsize // 4
    check(holds_rows(channels, q.shape[0], words), "q", "fit the channels", list(q.shape))
    from nsa_dcp_kernels._triton.peer_exchange import gather_heads as launch

    return launch(q, channels)


def gather_rows_from_peers(rows: torch.Tensor, channels: PeerChannels) -> torch.Tensor:
    """Gather rows of integers, such as each rank's share of a step's selections.

    Args:
        rows: [R, K] int32.
        channels: this rank's.

    Returns:
        [N * R, K] int32, contiguous, in rank order.

    Raises:
        ValueError: a shape or dtype is not as above, or the rows are more than the channels hold.
    """
    check_tensor(rows, "rows", (None, None), torch.int32)
    _check_reachable(rows, channels)
    check(holds_rows(channels, *rows.shape), "rows", "fit the channels", list(rows.shape))
    from nsa_dcp_kernels._triton.peer_exchange import gather_rows as launch

    return launch(rows, channels)


def holds_partials(channels: PeerChannels, num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether `exchange_partials` takes so many tokens of all `num_heads`."""
    if not num_tokens * num_heads:
        return True
    ranks = channels.num_ranks
    return channels.holds(partial_unit(num_tokens, num_heads // ranks, dim, dtype.itemsize, ranks))


def holds_rows(channels: PeerChannels, num_rows: int, words: int) -> bool:
    """Whether the gathers take so many rows of this rank, of so many 4-byte words."""
    return not num_rows * words or channels.holds(row_unit(num_rows, words))


def _check_reachable(tensor: torch.Tensor, channels: PeerChannels) -> None:
    """Peer memory is a GPU's. (A CPU's ranks exchange by collectives.)"""
    device = channels.addresses.device
    check(tensor.device == device and tensor.is_cuda, "tensors", f"be on a GPU, the channels' {device}", tensor.device)
