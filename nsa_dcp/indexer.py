"""Selection: the same positions on every rank.

Every rank holds every index key, so each can score every query row (`replicated`); or rank r scores only its 1/N of the
rows and the selections are gathered (`row_split`), 4 * K bytes a row, which makes agreement hold by construction. Both
give equal results: a row's scores do not depend on the rows beside it, and ties fall to the lower position.
"""

import torch

from nsa_dcp import comm
from nsa_dcp_kernels import score_index, select_topk

# Bounds the [rows, max_context_len] float32 scores held at once.
_LOGITS_BYTES = 1 << 30


def select_positions(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    index_pages: torch.Tensor,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    topk: int,
) -> torch.Tensor:
    """Score and select for every given row.

    Args:
        q: [T, Hi, 128]. Index queries, RoPE applied.
        weights: [T, Hi] float32 (float64 with float64), scales folded in.
        index_cache: one layer's index-key cache.
        index_pages: [B, P] int32. Pages of 64 slots of each request.
        row_request: [T] int32.
        context_lens: [T] int32. Tokens each row sees.
        max_context_len: at least the largest of them.
        topk: K.

    Returns:
        [T, K] int32 positions, ascending, -1 padded.
    """
    rows_at_once = max(1, _LOGITS_BYTES // (4 * max(1, max_context_len)))
    parts = []
    for start in range(0, q.shape[0], rows_at_once):
        part = slice(start, start + rows_at_once)
        logits = score_index(
            q[part], weights[part], index_cache, index_pages, row_request[part], context_lens[part], max_context_len
        )
        parts.append(select_topk(logits, context_lens[part], topk))
    if not parts:
        return torch.empty(0, topk, dtype=torch.int32, device=q.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def select_positions_row_split(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    index_pages: torch.Tensor,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    topk: int,
    group: comm.Group,
) -> torch.Tensor:
    """As `select_positions`, with rank r scoring rows r, r + N, r + 2 N, ... and the selections gathered.

    Neighbouring rows see contexts of nearly equal length, so dealing them out round robin evens the work.
    """
    size, rank = comm.size_of(group), comm.rank_in(group)
    num_tokens = q.shape[0]
    if size == 1 or not num_tokens:
        return select_positions(q, weights, index_cache, index_pages, row_request, context_lens, max_context_len, topk)
    mine = slice(rank, num_tokens, size)
    selected = select_positions(
        q[mine].contiguous(),
        weights[mine].contiguous(),
        index_cache,
        index_pages,
        row_request[mine].contiguous(),
        context_lens[mine].contiguous(),
        max_context_len,
        topk,
    )
    longest = -(-num_tokens // size)
    padded = torch.nn.functional.pad(selected, (0, 0, 0, longest - selected.shape[0]), value=-1)
    # [N, longest, K] -> row i * N + n is row i of rank n.
    return comm.all_gather(padded, group).transpose(0, 1).flatten(0, 1)[:num_tokens]
