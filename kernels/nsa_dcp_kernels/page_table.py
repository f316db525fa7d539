"""Between slots and pages: a decode step's page table from the slots of its tokens, and the slots of positions.

Filling the table of a context of L tokens reads L / page_size entries, and writes as many.
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check, check_tensor
from nsa_dcp_kernels.kv_format import PAGE_SIZE


def fill_page_table_(
    page_table: torch.Tensor,
    request_slots: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int = PAGE_SIZE,
) -> None:
    """Write the pages of each row's context; entries past its last page keep what they hold.

    Args:
        page_table: [B, P] int32, rows contiguous. A context of more than P pages fills its row.
        request_slots: [Q, L] int32, rows contiguous. Slots of each request's tokens; those of a page follow each other,
            and the first is a multiple of `page_size`.
        requests: [B] int32 or int64. Each row's request, in [0, Q).
        lengths: [B] int32 or int64. Tokens of each context, 0 to L.
        page_size: slots per page.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    check_tensor(page_table, "page_table", (None, None), torch.int32)
    check_tensor(request_slots, "request_slots", (None, None), torch.int32, like=page_table)
    for name, indices in (("requests", requests), ("lengths", lengths)):
        check_tensor(indices, name, (page_table.shape[0],), (torch.int32, torch.int64), like=page_table)
    for name, rows in (("page_table", page_table), ("request_slots", request_slots)):
        check(rows.stride(1) == 1, name, "have contiguous rows", f"strides {rows.stride()}")
    check(page_size >= 1, "page_size", "be at least 1", page_size)
    if page_table.is_cuda:
        from nsa_dcp_kernels._triton.page_table import fill_page_table_ as launch

        launch(page_table, request_slots, requests, lengths, page_size)
    else:
        reference.fill_page_table_(page_table, request_slots, requests, lengths, page_size)


def look_up_slots(
    positions: torch.Tensor, row_request: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Look up where the tokens at some positions of each row's request are cached.

    Args:
        positions: [T, K] int32 or int64; a negative entry is "none". The others are below P * page_size.
        row_request: [T] int32 or int64. Each row's request, in [0, B).
        page_table: [B, P] int32. Pages of each request, in order.
        page_size: slots per page.

    Returns:
        [T, K] int32: page_table[row_request[t], position // page_size] * page_size + position % page_size; -1 for
        "none".

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    check_tensor(positions, "positions", (None, None), (torch.int32, torch.int64))
    check_tensor(row_request, "row_request", (positions.shape[0],), (torch.int32, torch.int64), like=positions)
    check_tensor(page_table, "page_table", (None, None), torch.int32, like=positions)
    check(page_size >= 1, "page_size", "be at least 1", page_size)
    if positions.is_cuda:
        from nsa_dcp_kernels._triton.page_table import look_up_slots as launch

        return launch(positions, row_request, page_table, page_size)
    return reference.look_up_slots(positions, row_request, page_table, page_size)
