"""Exact selection where every rank holds the index keys of its own tokens alone.

Position p belongs to rank p % N and is its local index p // N. In the order of `select_topk`, a token of the first K of
all is among the first K of its owner: fewer come before it there. So each rank selects K candidates by its own keys; of
the N lists of a row, one (threshold, cut) is found, 8 bytes; and each rank attends to its candidates above the
threshold, and to those at it whose position is at most the cut. The ranks' parts are disjoint, and together they are
what `select_topk` selects from all scores. No selection travels, and no two ranks need equal scores.

    candidates = select_candidates(score_index(own keys, local lengths), local lengths, K)     on every rank
    cutoffs    = find_threshold(every rank's candidates)                                       on one rank for each row
    rows       = take_own(candidates, cutoffs, ...)                                            on every rank
"""

import torch

from nsa_dcp_kernels import sharded_selection_reference as reference
from nsa_dcp_kernels._checks import check, check_rank, check_tensor

_INDICES = (torch.int32, torch.int64)


def localize_contexts(
    page_table: torch.Tensor, lengths: torch.Tensor, dcp_size: int, dcp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn what addresses all tokens of some contexts into what addresses those of one rank.

    Args:
        page_table: [B, P] int32. Pages of 64 slots that count every rank's, of each request, in order. The allocator
            hands out 64 * dcp_size slots at once, so that each starts at a multiple of that. Negative: none.
        lengths: [T] int32 or int64. Tokens that each query row sees. A row has its own length, also where several rows
            of a request are verified at once: a draft's newest token may be on any rank. Below 0 is 0.
        dcp_size, dcp_rank: this rank's place.

    Returns:
        local_pages: [B, ceil(P / dcp_size)] int32. Pages of this rank's cache; page p holds its tokens of positions
            64 * dcp_size * p and on. -1 for none.
        local_lengths: [T] int32. Tokens of each row that this rank owns. Over all ranks they sum to `lengths`.

    Raises:
        ValueError: a shape, a dtype or the rank is not as above.
    """
    check_tensor(page_table, "page_table", (None, None), torch.int32)
    check_tensor(lengths, "lengths", (None,), _INDICES, like=page_table)
    check_rank(dcp_size, dcp_rank)
    if page_table.is_cuda:
        from nsa_dcp_kernels._triton.sharded_selection import localize_contexts as launch

        return launch(page_table, lengths, dcp_size, dcp_rank)
    return reference.localize_contexts(page_table, lengths, dcp_size, dcp_rank)


def select_candidates(scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
    """Select the first `topk` of one rank's tokens, with what their order is decided by.

    Args:
        scores: [T, W] float32. This rank's tokens, by local index; never used at or past the row's length.
        lengths: [T] int32 or int64. This rank's tokens of each row. A row of no more than `topk` is taken whole.
        topk: K.

    Returns:
        [T, 2, K] int32, the message that ranks exchange. [:, 0]: sort keys, integers in the order of the scores, -0.0
        as 0.0, NaN below -inf. [:, 1]: local indices, ascending. Past the last, the lowest integer and -1.

    Raises:
        ValueError: as `select_slots`, which selects here.
    """
    check_tensor(scores, "scores", (None, None), torch.float32)
    check_tensor(lengths, "lengths", (scores.shape[0],), _INDICES, like=scores)
    check(topk >= 1, "topk", "be at least 1", topk)
    if scores.is_cuda:
        from nsa_dcp_kernels._triton.slot_selection import select_candidates as launch

        return launch(scores, lengths, topk)
    return reference.select_candidates(scores, lengths, topk)


def find_threshold(lists: torch.Tensor) -> torch.Tensor:
    """Find, for each row, the last token that the group selects.

    Args:
        lists: [N, T, 2, K] int32. Every rank's `select_candidates`, in rank order. Positions are below 2**31.

    Returns:
        [T, 2] int32: the K-th largest sort key of all, and the largest position that is selected among the tokens that
        have it: 2**31 - 1 where all of them are. Where the lists hold no more than K candidates in all, the lowest
        integer as key: every candidate is selected.

    Raises:
        ValueError: a shape or dtype is not as above; on a GPU, N * K is above 32,768.
    """
    check_tensor(lists, "lists", (None, None, 2, None), torch.int32)
    check(lists.shape[0] >= 1, "lists", "hold at least one rank's", lists.shape[0])
    check(lists.shape[3] >= 1, "lists", "hold at least one candidate a row", lists.shape[3])
    if lists.is_cuda:
        from nsa_dcp_kernels._triton.sharded_selection import find_threshold as launch

        return launch(lists)
    return reference.find_threshold(lists)


def take_own(
    candidates: torch.Tensor,
    cutoffs: torch.Tensor,
    local_pages: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    *,
    row_request: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the candidates that the group selects, as rows of this rank's cache: what `localize_topk` would return.

    Args:
        candidates: [T, 2, K] int32. This rank's, from `select_candidates`.
        cutoffs: [T, 2] int32, from `find_threshold`.
        local_pages: [B, P] int32, from `localize_contexts`. Pages of 64 rows of each request.
        dcp_size, dcp_rank: this rank's place.
        row_request: [T] int32 or int64. Each row's request, in [0, B); if None, row t's is t.

    Returns:
        topk_rows: [T, K] int32. The selected rows that this rank owns, by ascending position, then -1.
        topk_length: [T] int32. How many they are. Over all ranks they sum to min(K, the row's tokens).

    Raises:
        ValueError: a shape, a dtype or the rank is not as above.
    """
    check_tensor(candidates, "candidates", (None, 2, None), torch.int32)
    num_rows = candidates.shape[0]
    check_tensor(cutoffs, "cutoffs", (num_rows, 2), torch.int32, like=candidates)
    check_tensor(local_pages, "local_pages", (None, None), torch.int32, like=candidates)
    check_rank(dcp_size, dcp_rank)
    if row_request is None:
        check(local_pages.shape[0] == num_rows, "local_pages", f"have {num_rows} rows, one a row", local_pages.shape[0])
    else:
        check_tensor(row_request, "row_request", (num_rows,), _INDICES, like=candidates)
    if candidates.is_cuda:
        from nsa_dcp_kernels._triton.sharded_selection import take_own as launch
    else:
        launch = reference.take_own
    return launch(candidates, cutoffs, local_pages, dcp_size, dcp_rank, row_request)
