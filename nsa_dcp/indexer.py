"""Selection: the same positions on every rank.

Where every rank holds every index key, each can score every query row (`replicated`); or rank r scores only its 1/N of
the rows and the selections are gathered (`row_split`), 4 * K bytes a row, which makes agreement hold by construction.
Both give equal results: a row's scores do not depend on the rows beside it, and ties fall to the lower position.

Where index keys are sharded, every rank scores every row of a decode step against its own keys, and the ranks agree on
the last token that is selected: 8 bytes a row, and each rank attends to its own tokens up to it. For a prompt's many
rows the pages of index keys are gathered instead, and selected from as above.
"""

import torch

from nsa_dcp import comm
from nsa_dcp.layout import local_seq_lens
from nsa_dcp_kernels import (
    find_threshold,
    gather_pages,
    join_index_pages,
    score_index,
    select_candidates,
    select_topk,
    take_own,
)
from nsa_dcp_kernels.kv_format import PAGE_SIZE

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


def select_own(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    local_pages: torch.Tensor,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    topk: int,
    group: comm.Group,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select this rank's part of what all ranks' sharded index keys select.

    Args:
        q, weights, row_request, context_lens, max_context_len, topk: as in `select_positions`, the same on every rank.
        index_cache: one layer's keys of this rank's tokens.
        local_pages: [B, P] int32. Pages of 64 of its rows of each request; row i of them is position i * N + rank.
        group: the DCP group.

    Returns:
        rows: [T, K] int32, rows of this rank's caches, by ascending position, -1 padded. length: [T] int32. The ranks'
        parts together are what `select_positions` selects from all keys.
    """
    size, rank = comm.size_of(group), comm.rank_in(group)
    local_lens = local_seq_lens(context_lens, size, rank)
    longest = -(-max_context_len // size)
    rows_at_once = max(1, _LOGITS_BYTES // (4 * max(1, longest)))
    parts = [torch.empty(0, 2, topk, dtype=torch.int32, device=q.device)]
    for start in range(0, q.shape[0], rows_at_once):
        part = slice(start, start + rows_at_once)
        logits = score_index(
            q[part], weights[part], index_cache, local_pages, row_request[part], local_lens[part], longest
        )
        parts.append(select_candidates(logits, local_lens[part], topk))
    candidates = torch.cat(parts)
    cutoffs = agree_on_threshold(candidates, group)
    return take_own(candidates, cutoffs, local_pages, size, rank, row_request=row_request)


def agree_on_threshold(candidates: torch.Tensor, group: comm.Group) -> torch.Tensor:
    """Find where each row's selection ends, from all ranks' candidates.

    Each row has one rank that is sent its N lists and answers all with 8 bytes. So a rank receives about 8 K bytes a
    row whatever N is; if every rank gathered every list and searched in it, it would be N times as many.

    Args:
        candidates: [T, 2, K] int32, from `select_candidates`. T is the same on every rank.
        group: the DCP group.

    Returns:
        [T, 2] int32, as `find_threshold`, equal on every rank.
    """
    size, num_rows = comm.size_of(group), candidates.shape[0]
    if not num_rows:
        return candidates.new_empty(0, 2)
    # A row that fills up is answered like any other, and dropped.
    padded = torch.nn.functional.pad(candidates, (0, 0, 0, 0, 0, -num_rows % size))
    lists = comm.exchange(padded.unflatten(0, (size, -1)), group)
    return comm.all_gather(find_threshold(lists), group).flatten(0, 1)[:num_rows]


def gather_index_cache(index_cache: torch.Tensor, pages: torch.Tensor, group: comm.Group) -> torch.Tensor:
    """Gather sharded index keys into a cache that spans every slot of some pages.

    Args:
        index_cache: one layer's keys of this rank's tokens.
        pages: [P] int32. Widened pages, the same on every rank.
        group: the DCP group.

    Returns:
        A cache of P * N pages of 64 slots, as in `select_positions`: widened page i of `pages` is pages N * i and on.
        What no token was written to holds whatever the ranks' caches held.
    """
    own = gather_pages(index_cache, pages, 1 if index_cache.dtype == torch.uint8 else PAGE_SIZE)
    return join_index_pages(comm.all_gather(own, group))
