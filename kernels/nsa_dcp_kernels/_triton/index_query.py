"""Kernels around DeepGEMM's scoring: its queries and page lists before, -inf past the context after."""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels import kv_format

FP8_MAX = tl.constexpr(kv_format.FP8_MAX)
SMALLEST_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)
INDEX_HEAD_DIM = tl.constexpr(kv_format.INDEX_HEAD_DIM)
_FILL_BLOCK = 2048


@triton.jit
def _quantise_queries_kernel(
    q_ptr, weights_ptr, fp8_ptr, scaled_ptr, q_stride_t, q_stride_h, weights_stride, num_heads, BLOCK_H: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, INDEX_HEAD_DIM)
    held = head < num_heads
    q_at = token * q_stride_t + (head * q_stride_h)[:, None] + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=held[:, None], other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(q), axis=1), FP8_MAX)
    scale = tl.where(scale < SMALLEST_NORMAL, 1.0, scale)
    scaled = q * tl.div_rn(1.0, scale)[:, None]
    scaled = tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    fp8_at = (token * num_heads + head)[:, None] * INDEX_HEAD_DIM + dim[None, :]
    tl.store(fp8_ptr + fp8_at, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=held[:, None])
    weights = tl.load(weights_ptr + token * weights_stride + head, mask=held, other=0.0)
    tl.store(scaled_ptr + token * num_heads + head, weights * scale, mask=held)


@triton.jit
def _list_pages_kernel(
    page_table_ptr, request_ptr, lens_ptr, pages_ptr, walked_ptr, table_stride, width, num_pages, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lens_ptr + token)
    request = tl.load(request_ptr + token).to(tl.int64)
    # What lies past a context may be anything: page 0 is there to be read.
    read = (column < width) & (column * 64 < length)
    page = tl.load(page_table_ptr + request * table_stride + column, mask=read, other=0)
    tl.store(pages_ptr + token * width + column, tl.minimum(tl.maximum(page, 0), num_pages - 1), mask=column < width)
    # A batch without one block to score is read out of bounds: an empty row has a token scored, and erased.
    tl.store(walked_ptr + token, tl.maximum(length, 1), mask=tl.program_id(1) == 0)


@triton.jit
def _erase_past_kernel(logits_ptr, lens_ptr, logits_stride, length, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    context_len = tl.load(lens_ptr + token)
    start = tl.program_id(1) * BLOCK
    if start + BLOCK > context_len:
        position = start + tl.arange(0, BLOCK)
        past = (position >= context_len) & (position < length)
        tl.store(logits_ptr + token * logits_stride + position, tl.full([BLOCK], float("-inf"), tl.float32), mask=past)


def quantise_queries(q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, Hi, 128], [T, Hi] float32 -> float8_e4m3fn [T, Hi, 128], and weights with each query's scale folded in."""
    num_tokens, num_heads, dim = q.shape
    if q.stride(2) != 1:
        q = q.contiguous()
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    quantised = torch.empty((num_tokens, num_heads, dim), dtype=torch.uint8, device=q.device)
    scaled = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    _quantise_queries_kernel[(num_tokens,)](
        q,
        weights,
        quantised,
        scaled,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        num_heads,
        BLOCK_H=triton.next_power_of_2(num_heads),
        num_warps=4,
    )
    return quantised.view(torch.float8_e4m3fn), scaled


def list_pages(
    page_table: torch.Tensor, row_request: torch.Tensor, context_lens: torch.Tensor, width: int, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's pages [T, width] int32, every one of them readable, and the tokens to walk [T] int32, at least 1."""
    num_tokens = row_request.shape[0]
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    pages = torch.empty((num_tokens, width), dtype=torch.int32, device=page_table.device)
    walked = torch.empty(num_tokens, dtype=torch.int32, device=page_table.device)
    block = min(1024, triton.next_power_of_2(width))
    _list_pages_kernel[(num_tokens, triton.cdiv(width, block))](
        page_table,
        row_request.contiguous(),
        context_lens.contiguous(),
        pages,
        walked,
        page_table.stride(0),
        width,
        num_pages,
        BLOCK=block,
        num_warps=4,
    )
    return pages, walked


def erase_past_(logits: torch.Tensor, context_lens: torch.Tensor) -> None:
    """-inf at and past each row's context; logits [T, L] float32 with dense rows."""
    num_tokens, length = logits.shape
    _erase_past_kernel[(num_tokens, triton.cdiv(length, _FILL_BLOCK))](
        logits, context_lens.contiguous(), logits.stride(0), length, BLOCK=_FILL_BLOCK, num_warps=4
    )
