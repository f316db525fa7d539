"""CP-DCP prefill: whole local pages as bytes, and a selection's place in the buffer that the ranks' pages make.

    temp_row(slot) = slot % N * local_rows + page_pos[slot // (page_size * N)] * page_size + slot % (page_size * N) // N

A page of the allocator holds page_size * N slots and is one page of page_size rows on every rank, so gathering the same
pages from every rank yields each of their tokens exactly once.
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check, check_current_device, check_tensor
from nsa_dcp_kernels.kv_format import PAGE_SIZE


def gather_pages(cache: torch.Tensor, pages: torch.Tensor, page_size: int = PAGE_SIZE) -> torch.Tensor:
    """Copy pages of a cache, bytes untouched, into one contiguous buffer.

    Args:
        cache: [R, W], any dtype. R is a multiple of page_size.
        pages: [P] int32. Pages to copy, in [0, R / page_size); a page may be named more than once.
        page_size: rows per page.

    Returns:
        [P * page_size, W], dtype of `cache`.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    check(cache.dim() == 2 and cache.shape[0] % page_size == 0, "cache", f"be [n * {page_size}, W]", list(cache.shape))
    check_current_device(cache, "cache")
    check_tensor(pages, "pages", (None,), torch.int32, like=cache)
    if cache.is_cuda:
        from nsa_dcp_kernels._triton.page_gather import gather_pages as launch

        return launch(cache, pages, page_size)
    return reference.gather_pages(cache, pages, page_size)


def remap_to_gathered(
    topk_slots: torch.Tensor,
    page_pos: torch.Tensor,
    dcp_size: int,
    local_rows: int,
    page_size: int = PAGE_SIZE,
) -> torch.Tensor:
    """Name the selected slots by their rows in the gathered buffer.

    Args:
        topk_slots: [T, K] int32; a negative entry is "none".
        page_pos: [num_pages] int32. Place of each allocator page among the gathered ones, -1 where it was not gathered.
        dcp_size: N, ranks whose pages were gathered, in rank order.
        local_rows: rows that each rank contributed.
        page_size: rows per page of one rank.

    Returns:
        [T, K] int32: rows of the gathered buffer [N * local_rows, W]; -1 for "none" and for a page not gathered.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    check_tensor(topk_slots, "topk_slots", (None, None), torch.int32)
    check_tensor(page_pos, "page_pos", (None,), torch.int32, like=topk_slots)
    check(dcp_size >= 1, "dcp_size", "be at least 1", dcp_size)
    if topk_slots.is_cuda:
        from nsa_dcp_kernels._triton.page_gather import remap_to_gathered as launch

        return launch(topk_slots, page_pos, dcp_size, local_rows, page_size)
    return reference.remap_to_gathered(topk_slots, page_pos, dcp_size, local_rows, page_size)
