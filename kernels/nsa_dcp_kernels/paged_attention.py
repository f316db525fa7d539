"""Attention of models with KV heads (GQA, MHA), in the two parts that DCP makes of it.

    attend_pages   a rank's own rows of each request's context, no mask: what a query may see is said by the lengths
    attend_chunk   the step's own tokens, causal, which every rank has

Each returns a normalised output and its log-sum-exp, so that `merge_partials` puts them together. There is no kernel on
a GPU yet: CUDA tensors are refused.
"""

import torch

from nsa_dcp_kernels import kv_head_reference
from nsa_dcp_kernels._checks import check, check_tensor
from nsa_dcp_kernels.kv_scatter import CACHES, check_scale
from nsa_dcp_kernels.lse_merge import FLOATS

_INTEGERS = (torch.int32, torch.int64)


def attend_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    row_request: torch.Tensor,
    sm_scale: float,
    page_size: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to whole lists of cached rows.

    Args:
        q: [T, H, D] bfloat16, float16, float32 or float64. H is a multiple of K: head h reads KV head h // (H / K).
        k_cache, v_cache: [R, K, D], as in `scatter_kv_`.
        page_table: [B, P] integer. Pages of each request, in order; entries past its length are not read.
        lengths: [B] integer. Rows of each request, which fill its pages in order; 0 or less for none.
        row_request: [T] integer. The request of each query, in [0, B).
        sm_scale: multiplies q . k before the softmax.
        page_size: rows of a page.
        k_scale, v_scale: as in `scatter_kv_`.

    Returns:
        out: [T, H, D], dtype of `q`; zeros where a request has no rows.
        lse: [T, H] float32 (float64 with a float64 `q`), natural log; -inf where a request has no rows.

    Raises:
        ValueError: a shape or dtype is not as above.
        NotImplementedError: the tensors are on a GPU.
    """
    check_tensor(q, "q", (None, None, None), FLOATS)
    _refuse_gpu(q)
    check_tensor(k_cache, "k_cache", (None, None, q.shape[2]), CACHES, like=q)
    check_tensor(v_cache, "v_cache", tuple(k_cache.shape), k_cache.dtype, like=q)
    _check_groups(q, k_cache)
    check_tensor(page_table, "page_table", (None, None), _INTEGERS, like=q)
    check_tensor(lengths, "lengths", (page_table.shape[0],), _INTEGERS, like=q)
    check_tensor(row_request, "row_request", (q.shape[0],), _INTEGERS, like=q)
    check(page_size >= 1, "page_size", "be at least 1", page_size)
    check_scale("k_scale", k_scale, k_cache)
    check_scale("v_scale", v_scale, v_cache)
    return kv_head_reference.attend_pages(
        q, k_cache, v_cache, page_table, lengths, row_request, sm_scale, page_size, k_scale, v_scale
    )


def attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally within each request's new tokens.

    Args:
        q: [T, H, D], as in `attend_pages`.
        k, v: [T, K, D], dtype of `q`. What the cache will hold of the tokens: see `round_kv`.
        starts: [B + 1] integer, ascending from 0 to T. Request b's tokens are starts[b] up to starts[b + 1].
        sm_scale: as in `attend_pages`.

    Returns:
        out: [T, H, D]. lse: [T, H]. As of `attend_pages`; every row sees itself.

    Raises: as `attend_pages`.
    """
    check_tensor(q, "q", (None, None, None), FLOATS)
    _refuse_gpu(q)
    check_tensor(k, "k", (q.shape[0], None, q.shape[2]), q.dtype, like=q)
    check_tensor(v, "v", tuple(k.shape), q.dtype, like=q)
    _check_groups(q, k)
    check_tensor(starts, "starts", (None,), _INTEGERS, like=q)
    bounds = starts.tolist()
    ascending = bounds == sorted(bounds) and bounds[:1] == [0] and bounds[-1:] == [q.shape[0]]
    check(ascending, "starts", f"ascend from 0 to {q.shape[0]}", bounds[:8])
    return kv_head_reference.attend_chunk(q, k, v, starts, sm_scale)


def _check_groups(q: torch.Tensor, k: torch.Tensor) -> None:
    heads = k.shape[1]
    check(heads >= 1 and q.shape[1] % heads == 0, "q", f"have a multiple of {heads} heads", q.shape[1])


def _refuse_gpu(q: torch.Tensor) -> None:
    if q.is_cuda:
        raise NotImplementedError("q must be on a CPU, as this attention has no kernel on a GPU yet, got cuda")
