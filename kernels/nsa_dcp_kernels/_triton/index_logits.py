"""Kernel of `score_index` for what DeepGEMM does not take: bf16 and float32 index caches, any number of index heads.

One program scores one query against one page of 64 keys. The keys are read again for every query, so this is for decode
batches, small models and checks; DeepGEMM scores long prefills.
"""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels import kv_format
from nsa_dcp_kernels._checks import check

INDEX_HEAD_DIM = tl.constexpr(kv_format.INDEX_HEAD_DIM)
INDEX_PAGE_BYTES = tl.constexpr(kv_format.PAGE_SIZE * kv_format.INDEX_KEY_BYTES)
INDEX_SCALES_AT = tl.constexpr(kv_format.PAGE_SIZE * kv_format.INDEX_HEAD_DIM)
PAGE_SIZE = tl.constexpr(kv_format.PAGE_SIZE)


@triton.jit
def _score_page_kernel(
    q_ptr,
    weights_ptr,
    cache_ptr,
    scale_ptr,
    page_table_ptr,
    request_ptr,
    lens_ptr,
    logits_ptr,
    q_stride_t,
    q_stride_h,
    weights_stride,
    table_stride,
    num_heads,
    length,
    PACKED: tl.constexpr,
    DOT_FLOAT32: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    page_at = tl.program_id(1)
    offset = tl.arange(0, PAGE_SIZE)
    position = page_at * PAGE_SIZE + offset
    context_len = tl.load(lens_ptr + token)
    logits_at = token * length + position
    if page_at * PAGE_SIZE >= context_len:
        tl.store(logits_ptr + logits_at, tl.full([PAGE_SIZE], float("-inf"), tl.float32), mask=position < length)
        return
    request = tl.load(request_ptr + token).to(tl.int64)
    page = tl.load(page_table_ptr + request * table_stride + page_at).to(tl.int64)
    dim = tl.arange(0, INDEX_HEAD_DIM)
    head = tl.arange(0, BLOCK_H)
    seen = position < context_len
    if PACKED:
        bits_at = page * INDEX_PAGE_BYTES + offset[:, None] * INDEX_HEAD_DIM + dim[None, :]
        bits = tl.load(cache_ptr + bits_at, mask=seen[:, None], other=0)
        keys = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        scales_at = page * (INDEX_PAGE_BYTES // 4) + INDEX_SCALES_AT // 4 + offset
        scale = tl.load(scale_ptr + scales_at, mask=seen, other=0.0)
    else:
        keys_at = (page * PAGE_SIZE + offset)[:, None] * INDEX_HEAD_DIM + dim[None, :]
        keys = tl.load(cache_ptr + keys_at, mask=seen[:, None], other=0.0)
    q_at = token * q_stride_t + head[:, None] * q_stride_h + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=(head < num_heads)[:, None], other=0.0)
    if DOT_FLOAT32:
        scores = tl.dot(keys.to(tl.float32), tl.trans(q.to(tl.float32)), input_precision="ieee")
    else:
        # An e4m3 value is exact in bf16.
        scores = tl.dot(keys.to(tl.bfloat16), tl.trans(q.to(tl.bfloat16)))
    weights = tl.load(weights_ptr + token * weights_stride + head, mask=head < num_heads, other=0.0)
    logits = tl.sum(tl.maximum(scores, 0.0) * weights[None, :], axis=1)
    if PACKED:
        logits *= scale
    tl.store(logits_ptr + logits_at, tl.where(seen, logits, float("-inf")), mask=position < length)


def score_index(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    check(index_cache.is_contiguous(), "index_cache", "be contiguous", f"strides {index_cache.stride()}")
    num_tokens, num_heads, _ = q.shape
    logits = torch.empty((num_tokens, max_context_len), dtype=torch.float32, device=q.device)
    if logits.numel() == 0:
        return logits
    packed = index_cache.dtype == torch.uint8
    q = q if q.stride(2) == 1 else q.contiguous()
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    _score_page_kernel[(num_tokens, triton.cdiv(max_context_len, kv_format.PAGE_SIZE))](
        q,
        weights,
        index_cache,
        index_cache.view(torch.float32) if packed else None,
        page_table,
        row_request.contiguous(),
        context_lens.contiguous(),
        logits,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        page_table.stride(0),
        num_heads,
        max_context_len,
        PACKED=packed,
        DOT_FLOAT32=q.dtype == torch.float32 or index_cache.dtype == torch.float32,
        BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
        num_warps=4,
    )
    return logits
