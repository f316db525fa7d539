"""The kernel that writes keys and values by head into the rows that a rank owns.

A program holds a few tokens of one head. The number of tokens is an ordinary argument: a prefill of another length
compiles nothing. A token that is not owned costs its slot load. Addresses are 64-bit.
"""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels import kv_format

_TOKENS_PER_PROGRAM = 8
_NUM_WARPS = 4

FP8_MAX = tl.constexpr(kv_format.FP8_MAX)


@triton.jit
def _store(values_ptr, cache_ptr, read_at, write_at, mask, scale, QUANTISE: tl.constexpr):
    values = tl.load(values_ptr + read_at, mask=mask, other=0.0)
    if QUANTISE:
        scaled = tl.div_rn(values.to(tl.float32), scale)
        scaled = tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        tl.store(cache_ptr + write_at, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=mask)
    else:
        tl.store(cache_ptr + write_at, values.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scatter_kv_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_row_stride,
    k_cache_head_stride,
    v_row_stride,
    v_cache_head_stride,
    dcp_rank,
    k_scale,
    v_scale,
    DCP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """The caches are uint8 where QUANTISE."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    owned = (slot >= 0) & (slot % DCP_SIZE == dcp_rank)
    row = (slot // DCP_SIZE)[:, None]
    token = token[:, None]
    mask = owned[:, None] & (dim < HEAD_DIM)
    k_at = token * k_token_stride + head * k_head_stride + dim
    v_at = token * v_token_stride + head * v_head_stride + dim
    _store(k_ptr, k_cache_ptr, k_at, row * k_row_stride + head * k_cache_head_stride + dim, mask, k_scale, QUANTISE)
    _store(v_ptr, v_cache_ptr, v_at, row * v_row_stride + head * v_cache_head_stride + dim, mask, v_scale, QUANTISE)


def scatter_kv_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    k_scale: float,
    v_scale: float,
) -> None:
    num_tokens, num_heads, head_dim = k.shape
    if not k.numel():
        return
    k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (k, v))
    quantise = k_cache.dtype == torch.float8_e4m3fn
    if quantise:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    _scatter_kv_kernel[(triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM), num_heads)](
        k,
        v,
        slots.contiguous(),
        k_cache,
        v_cache,
        num_tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        dcp_rank,
        float(k_scale),
        float(v_scale),
        DCP_SIZE=dcp_size,
        HEAD_DIM=head_dim,
        BLOCK_T=_TOKENS_PER_PROGRAM,
        BLOCK_D=triton.next_power_of_2(head_dim),
        QUANTISE=quantise,
        num_warps=_NUM_WARPS,
    )
