"""Context-parallel prefill: which of a chunk's tokens each rank works on, and its view of the batch's requests.

`interleave` deals the flat tokens of the batch round robin. `zigzag` cuts every request into 2 * cp_size blocks and
gives rank r blocks r and 2 * cp_size - 1 - r, which evens causal work; it needs 2 * cp_size tokens of every request.
A chunk that a strategy cannot split is processed without splitting.
"""

from dataclasses import dataclass

import torch

from nsa_dcp.choices import CP_STRATEGIES


@dataclass(frozen=True)
class RankTokens:
    """One rank's share of a chunk.

    Every field is filtered by the same request index, so that lengths, page tables and offsets agree when the rank owns
    no token of some request.

    token_index: [T_local] int64, flat tokens of the chunk that this rank works on, in its own order.
    request_index: [B_local] int64, requests of which it owns at least one token, ascending.
    row_request: [T_local] int32, request of each token, counted among `request_index`.
    q_lens: [B_local] int64, tokens per request, and indptr: [B_local + 1] int64, their prefix sums.
    """

    token_index: torch.Tensor
    request_index: torch.Tensor
    row_request: torch.Tensor
    q_lens: torch.Tensor
    indptr: torch.Tensor


def can_split(extend_lens: list[int], cp_size: int, strategy: str) -> bool:
    """Tell whether a strategy can split a chunk with `extend_lens` new tokens per request over `cp_size` ranks."""
    if strategy == "zigzag":
        return bool(extend_lens) and min(extend_lens) >= 2 * cp_size
    return sum(extend_lens) >= cp_size


def split_tokens(extend_lens: list[int], cp_size: int, strategy: str) -> list[torch.Tensor]:
    """Deal a chunk's flat tokens out to the ranks.

    Args:
        extend_lens: new tokens of each request; the chunk is their concatenation.
        cp_size: ranks.
        strategy: "interleave" or "zigzag".

    Returns:
        One [T_local] int64 tensor per rank. Together they hold every token once. Tokens of one request are contiguous
        within a rank's share, in ascending order.

    Raises:
        ValueError: the strategy is unknown, or cannot split this chunk (ask `can_split` first).
    """
    if strategy not in CP_STRATEGIES:
        raise ValueError(f"cp_strategy must be one of {', '.join(CP_STRATEGIES)}, got {strategy!r}")
    if not can_split(extend_lens, cp_size, strategy):
        raise ValueError(f"extend_lens must be splittable by {strategy} over {cp_size} ranks, got {extend_lens}")
    if strategy == "interleave":
        return [torch.arange(rank, sum(extend_lens), cp_size) for rank in range(cp_size)]
    shares: list[list[torch.Tensor]] = [[] for _ in range(cp_size)]
    start = 0
    for length in extend_lens:
        blocks = torch.arange(start, start + length).tensor_split(2 * cp_size)
        for rank in range(cp_size):
            shares[rank] += [blocks[rank], blocks[2 * cp_size - 1 - rank]]
        start += length
    return [torch.cat(share) for share in shares]


def share_of(token_index: torch.Tensor, extend_lens: list[int]) -> RankTokens:
    """Describe one rank's share of a chunk.

    Args:
        token_index: [T_local] int64, one entry of `split_tokens`.
        extend_lens: new tokens of each request.
    """
    token_request = torch.repeat_interleave(torch.arange(len(extend_lens)), torch.tensor(extend_lens))
    request_index, row_request, q_lens = torch.unique(
        token_request[token_index], return_inverse=True, return_counts=True
    )
    indptr = torch.cat([q_lens.new_zeros(1), q_lens.cumsum(0)])
    return RankTokens(token_index, request_index, row_request.to(torch.int32), q_lens, indptr)


def restore_index(shares: list[torch.Tensor]) -> torch.Tensor:
    """Return where each flat token stands in the ranks' shares, gathered with every share padded to the longest.

    Args:
        shares: `split_tokens`' result.

    Returns:
        [T] int64: token i is row `restore_index[i]` of the gathered [cp_size * max(T_local)] rows.
    """
    longest = max(len(share) for share in shares)
    where = torch.empty(sum(len(share) for share in shares), dtype=torch.int64)
    for rank, share in enumerate(shares):
        where[share] = rank * longest + torch.arange(len(share))
    return where
