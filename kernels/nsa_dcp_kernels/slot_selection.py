"""Exact selection as a server wants it: among a part of each row, and as slots of the cache.

The order is that of `select_topk`, and so the selection of a row depends on its scores alone: not on other rows, on the
width of the tensor, or on which rank selects.
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check, check_tensor
from nsa_dcp_kernels.kv_format import PAGE_SIZE


def select_slots(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    *,
    row_starts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    row_request: torch.Tensor | None = None,
    page_size: int = PAGE_SIZE,
) -> torch.Tensor:
    """Select the first `topk` entries of each row in the order (score descending, position ascending).

    Nothing is read on the host, and what is launched depends on shapes alone, so it can be captured in a graph. What is
    read depends on the lengths, not on the width.

    Args:
        scores: [T, W] float32. Row t's are scores[t, start : start + lengths[t]]; the others are never used, and may be
            anything.
        lengths: [T] int32 or int64. Entries of each row. What lies past the last column is not counted; below 0 is 0.
        topk: K, entries to select at most. A row of no more is selected whole.
        row_starts: [T] int32 or int64, in [0, W]. Each row's first column; 0 if None.
        page_table: [B, P] int32. Pages of each request, in order, of at least as many tokens as its rows have entries.
            Positions are returned if None.
        row_request: [T] int32 or int64. Each row's request, in [0, B); if None, row t's is t.
        page_size: slots per page.

    Returns:
        [T, K] int32: of the selected positions p, counted from the row's start and in ascending order,
        page_table[request, p // page_size] * page_size + p % page_size, or p without a page table; then -1.

    Raises:
        ValueError: a shape or dtype is not as above, topk is below 1, or page_size is.
    """
    check_tensor(scores, "scores", (None, None), torch.float32)
    num_rows = scores.shape[0]
    indices = (("lengths", lengths), ("row_starts", row_starts), ("row_request", row_request))
    for name, values in indices:
        if values is not None:
            check_tensor(values, name, (num_rows,), (torch.int32, torch.int64), like=scores)
    if page_table is not None:
        check_tensor(page_table, "page_table", (None, None), torch.int32, like=scores)
        rows = page_table.shape[0]
        check(row_request is not None or rows == num_rows, "page_table", f"have {num_rows} rows, one a row", rows)
    check(topk >= 1, "topk", "be at least 1", topk)
    check(page_size >= 1, "page_size", "be at least 1", page_size)
    if scores.is_cuda:
        from nsa_dcp_kernels._triton.slot_selection import select_slots as launch
    else:
        launch = reference.select_slots
    return launch(scores, lengths, topk, row_starts, page_table, row_request, page_size)
