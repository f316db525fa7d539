"""Index scores on Hopper: DeepGEMM where it applies, the Triton kernel where it does not.

DeepGEMM scores packed FP8 keys for 32 or 64 index heads. Queries are quantised to float8_e4m3 per (token, head) and
their scales folded into the head weights, so scores carry that rounding. A decode batch uses its paged kernel. A
prefill, many rows per request, uses its ragged kernel, which reads each key for two queries at once, over keys that
were gathered into one contiguous run per request.
"""

import functools
from typing import Any

import torch

from nsa_dcp_kernels.kv_format import INDEX_HEAD_DIM, INDEX_KEY_BYTES, PAGE_SIZE

_INSTALL = "pip install 'nsa-dcp[cuda]', or from a checkout: pip install '.[cuda]'"
_HEADS = (32, 64)
# From this many rows per request on, gathering the keys pays.
_RAGGED_ROWS_PER_REQUEST = 8
# Bounds the gathered keys.
_RAGGED_KEY_BYTES = 1 << 30


@functools.cache
def load_deep_gemm() -> Any:
    """Import DeepGEMM.

    Raises:
        RuntimeError: it is missing, is the unrelated PyPI upload of that name, or was built for another torch.
    """
    try:
        import deep_gemm
    except ModuleNotFoundError as error:
        raise RuntimeError(f"scoring FP8 index keys needs sgl-deep-gemm, found no {error.name}: {_INSTALL}") from error
    except (ImportError, OSError, AssertionError) as error:
        raise RuntimeError(
            f"sgl-deep-gemm does not load under torch {torch.__version__} ({error or 'no CUDA toolkit found'}): it "
            "needs a CUDA toolkit; its 0.1.4.post1 needs torch 2.11, its 0.2.3.post2 torch 2.14.1: "
            "pip install 'sgl-deep-gemm==VERSION' of the one that fits"
        ) from error
    if not hasattr(deep_gemm, "fp8_paged_mqa_logits"):
        raise RuntimeError(
            "the installed deep_gemm has no fp8_paged_mqa_logits, needed sgl-deep-gemm >= 0.1.4.post1: "
            f"pip uninstall deep-gemm && {_INSTALL}"
        )
    return deep_gemm


def score_index(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    """As the public function, on a GPU."""
    num_tokens, num_heads, _ = q.shape
    if not num_tokens or not max_context_len:
        return torch.empty((num_tokens, max_context_len), dtype=torch.float32, device=q.device)
    if q.dtype == torch.float64 or index_cache.dtype == torch.float64:
        raise NotImplementedError("float64 scores are for the CPU; on a GPU q and index_cache are bfloat16 or float32")
    if not page_table.numel() or not index_cache.shape[0]:
        raise ValueError(f"page_table must have a page per request, got {list(page_table.shape)}")
    if index_cache.dtype != torch.uint8 or num_heads not in _HEADS:
        from nsa_dcp_kernels._triton.index_logits import score_index as launch

        return launch(q, weights, index_cache, page_table, row_request, context_lens, max_context_len)

    from nsa_dcp_kernels._triton.index_query import erase_past_, quantise_queries

    q_fp8, scaled_weights = quantise_queries(q, weights)
    key_bytes = page_table.shape[0] * max_context_len * INDEX_KEY_BYTES
    rows_per_request = num_tokens // page_table.shape[0]
    if rows_per_request >= _RAGGED_ROWS_PER_REQUEST and key_bytes <= _RAGGED_KEY_BYTES:
        logits = _score_ragged(
            q_fp8, scaled_weights, index_cache, page_table, row_request, context_lens, max_context_len
        )
    else:
        logits = _score_paged(
            q_fp8, scaled_weights, index_cache, page_table, row_request, context_lens, max_context_len
        )
    erase_past_(logits, context_lens)
    return logits


def _score_paged(
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    from nsa_dcp_kernels._triton.index_query import list_pages

    deep_gemm = load_deep_gemm()
    width = min(page_table.shape[1], -(-max_context_len // PAGE_SIZE))
    pages, walked = list_pages(page_table, row_request, context_lens, width, index_cache.shape[0])
    lens = walked.unsqueeze(1)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE_SIZE, deep_gemm.get_num_sms())
    logits = deep_gemm.fp8_paged_mqa_logits(
        q_fp8.unsqueeze(1),
        index_cache.view(-1, PAGE_SIZE, 1, INDEX_KEY_BYTES),
        weights,
        lens,
        pages,
        schedule,
        max_context_len,
        clean_logits=False,
    )
    return _as_torch(logits)


def _score_ragged(
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    deep_gemm = load_deep_gemm()
    num_pages = min(page_table.shape[1], -(-max_context_len // PAGE_SIZE))
    # What lies past a context may be anything: any page that can be read will do.
    pages = page_table[:, :num_pages].clamp(0, index_cache.shape[0] - 1).flatten()
    gathered = index_cache.index_select(0, pages)
    keys = gathered[:, : PAGE_SIZE * INDEX_HEAD_DIM].contiguous().view(torch.float8_e4m3fn).view(-1, INDEX_HEAD_DIM)
    scales = gathered[:, PAGE_SIZE * INDEX_HEAD_DIM :].contiguous().view(torch.float32).flatten()
    start = row_request * (num_pages * PAGE_SIZE)
    logits = deep_gemm.fp8_mqa_logits(
        q_fp8, (keys, scales), weights, start, start + context_lens, clean_logits=False, max_seqlen_k=max_context_len
    )
    return _as_torch(logits)


def _as_torch(tensor: object) -> torch.Tensor:
    """DeepGEMM's binding may hand out its own tensor type."""
    return tensor if isinstance(tensor, torch.Tensor) else torch.from_dlpack(tensor)
