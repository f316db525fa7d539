"""Prefill's index keys: every token's key and scale of a batch's contexts, bytes untouched, one context after another.

out[starts[b] + t] = cache[page_table[b, t // 64]][t % 64],    starts[b] = seq_lens[0] + ... + seq_lens[b - 1]

Where ranks hold a part of the keys each, their pages are gathered and joined first.
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check, check_tensor
from nsa_dcp_kernels.kv_format import INDEX_HEAD_DIM, INDEX_KEY_BYTES, PAGE_SIZE


def gather_index_pages(
    cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, num_keys: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the index keys of several contexts out of their pages. No value is read on the host.

    Args:
        cache: [pages, 64 * 132] uint8, of any size.
        page_table: [B, P] int32 or int64. Pages of each context, in order; those past its last may be anything.
        seq_lens: [B] int32 or int64. Tokens of each context, at most 64 P.
        num_keys: their sum.
        longest: the largest of them, or more.

    Returns:
        keys: [num_keys, 128] uint8, float8_e4m3 codes.
        scales: [num_keys, 4] uint8, a float32 each.

    Raises:
        ValueError: a shape or dtype is not as above, or a size is negative.

    Source:
        What sglang 0.5.23's `GetKAndS.execute` returns, for caches past 2**31 bytes too.
    """
    check_tensor(cache, "cache", (None, PAGE_SIZE * INDEX_KEY_BYTES), torch.uint8)
    check_tensor(page_table, "page_table", (None, None), (torch.int32, torch.int64), like=cache)
    check_tensor(seq_lens, "seq_lens", (page_table.shape[0],), (torch.int32, torch.int64), like=cache)
    for name, size in (("num_keys", num_keys), ("longest", longest)):
        check(size >= 0, name, "be 0 or more", size)
    if cache.is_cuda:
        from nsa_dcp_kernels._triton.index_page_gather import gather_index_pages as launch

        return launch(cache, page_table, seq_lens, num_keys, longest)
    return reference.gather_index_pages(cache, page_table, seq_lens, num_keys, longest)


def join_index_pages(shards: torch.Tensor) -> torch.Tensor:
    """Put the pages of ranks that hold every N-th index key each back into the order of the tokens.

    Args:
        shards: [N, G, 64 * 132] uint8, or [N, 64 * G, 128] bfloat16 or float32 (float64 on a CPU): the same G pages of
            each rank, in rank order.

    Returns:
        [N * G, 64 * 132] or [N * 64 * G, 128]: page N * g + m holds slots 64 m and on of the 64 * N that page g of
        every rank make up: a cache that spans every slot of these pages, bytes untouched.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    packed = shards.dtype == torch.uint8
    width = PAGE_SIZE * INDEX_KEY_BYTES if packed else INDEX_HEAD_DIM
    floats = (torch.bfloat16, torch.float32, torch.float64)
    check_tensor(shards, "shards", (None, None, width), (torch.uint8, *floats))
    check(packed or shards.shape[1] % PAGE_SIZE == 0, "shards", "hold whole pages", list(shards.shape))
    if shards.is_cuda:
        from nsa_dcp_kernels._triton.index_page_gather import join_index_pages as launch

        return launch(shards)
    return reference.join_index_pages(shards)
