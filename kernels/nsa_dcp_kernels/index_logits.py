"""The lightning indexer's scores of a step's queries against their requests' index keys.

    logit[t, s] = sum_h weights[t, h] * relu(q[t, h] . key[slot(request(t), s)])      for s < context_lens[t]

Compute-bound: 2 * 128 * Hi * sum(context_lens) FLOP.
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check, check_tensor
from nsa_dcp_kernels.kv_format import INDEX_HEAD_DIM, INDEX_KEY_BYTES, PAGE_SIZE


def score_index(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    """Score every visible token of each query's request.

    Args:
        q: [T, Hi, 128] bfloat16 or float32 (float64 on a CPU), RoPE applied.
        weights: [T, Hi] float32 (float64 with float64). Head weights; every scale (softmax, heads) is folded in.
        index_cache: [pages, 64 * 132] uint8, or [R, 128] bfloat16/float32/float64: `scatter_index_keys_`.
        page_table: [B, P] int32. Pages of 64 index-cache slots: position s of request b is in slot
            page_table[b, s // 64] * 64 + s % 64.
        row_request: [T] int32. The request of each query.
        context_lens: [T] int32. Tokens a query sees: its position + 1. 0 for a padding row.
        max_context_len: width of the result, at least the largest context_lens. A plain int: no device value is read.

    Returns:
        [T, max_context_len] float32, -inf at and past context_lens. On a CPU the sums are float64, rounded once, so
        that a row's scores do not depend on the rows beside it and equal sums tie.

    Raises:
        ValueError: a shape or dtype is not as above.

    Source:
        DeepSeek-V3.2 (2025), lightning indexer.
    """
    floats = (torch.bfloat16, torch.float32, torch.float64)
    check_tensor(q, "q", (None, None, INDEX_HEAD_DIM), floats)
    check_tensor(weights, "weights", tuple(q.shape[:2]), reference.accumulator(q.dtype), like=q)
    width = PAGE_SIZE * INDEX_KEY_BYTES if index_cache.dtype == torch.uint8 else INDEX_HEAD_DIM
    check_tensor(index_cache, "index_cache", (None, width), (torch.uint8, *floats), like=q)
    check_tensor(page_table, "page_table", (None, None), torch.int32, like=q)
    check_tensor(row_request, "row_request", (q.shape[0],), torch.int32, like=q)
    check_tensor(context_lens, "context_lens", (q.shape[0],), torch.int32, like=q)
    check(max_context_len >= 0, "max_context_len", "not be negative", max_context_len)
    args = (q, weights, index_cache, page_table, row_request, context_lens, max_context_len)
    if q.is_cuda:
        from nsa_dcp_kernels._deep_gemm import score_index as launch

        return launch(*args)
    return reference.score_index(*args)
