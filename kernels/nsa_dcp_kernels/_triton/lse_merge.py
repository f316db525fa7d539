"""Kernel of `merge_partials`: one pass over the partials, accumulated in registers."""

import torch
import triton
import triton.language as tl

# Partials held in registers at once. More are taken in turn, under a running maximum.
_PARTIALS_AT_ONCE = 8
_NUM_WARPS = 4


@triton.jit
def partial_weights(lse, m):
    """Unnormalised weights of the next partials.

    lse: [N, H], natural log. m: [H], the running maximum so far, -inf at first.
    Returns weights [N, H] in [0, 1] (0 where lse is not finite), the new maximum, and what the sums so far shrink by.
    """
    valid = (lse == lse) & (tl.abs(lse) != float("inf"))
    m_new = tl.maximum(m, tl.max(tl.where(valid, lse, float("-inf")), axis=0))
    # With every partial empty the maximum is -inf, and -inf - -inf is NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.where(valid, tl.exp(tl.where(valid, lse, 0.0) - shift[None, :]), 0.0)
    return weights, m_new, tl.exp(m - shift)


@triton.jit
def total_lse(m, denominator):
    """[H], [H] -> [H]: log of the summed softmax denominators, -inf where nothing was summed."""
    summed = denominator > 0.0
    return tl.where(summed, m + tl.log(tl.where(summed, denominator, 1.0)), float("-inf"))


@triton.jit
def _merge_partials_kernel(
    out_ptr,
    lse_ptr,
    merged_ptr,
    total_ptr,
    num_heads,
    out_stride_n,
    out_stride_t,
    out_stride_h,
    lse_stride_n,
    lse_stride_t,
    lse_stride_h,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in tl.static_range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)
        held = (n < N)[:, None] & (head < num_heads)[None, :]
        lse_at = n[:, None] * lse_stride_n + token * lse_stride_t + head[None, :] * lse_stride_h
        lse = tl.load(lse_ptr + lse_at, mask=held, other=float("-inf"))
        weights, m, shrink = partial_weights(lse, m)
        out_at = n[:, None] * out_stride_n + token * out_stride_t + head[None, :] * out_stride_h
        # An empty partial is not even loaded: its values may be NaN, and its bytes cost bandwidth.
        read = (weights > 0.0)[:, :, None] & (dim < D)[None, None, :]
        out = tl.load(out_ptr + out_at[:, :, None] + dim[None, None, :], mask=read, other=0.0).to(tl.float32)
        acc = acc * shrink[:, None] + tl.sum(out * weights[:, :, None], axis=0)
        denominator = denominator * shrink + tl.sum(weights, axis=0)

    total = total_lse(m, denominator)
    acc = acc / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    row = token * num_heads + head
    kept = head < num_heads
    merged_at = row[:, None] * D + dim[None, :]
    tl.store(merged_ptr + merged_at, acc.to(merged_ptr.dtype.element_ty), mask=kept[:, None] & (dim < D)[None, :])
    tl.store(total_ptr + row, total, mask=kept)


def merge_partials(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_partials, num_tokens, num_heads, dim = out.shape
    if out.stride(3) != 1:
        out = out.contiguous()
    merged = torch.empty((num_tokens, num_heads, dim), dtype=out.dtype, device=out.device)
    total = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=out.device)
    if merged.numel() == 0:
        return merged, total
    block_d = triton.next_power_of_2(dim)
    # One 16-byte vector per thread and partial.
    block_h = max(1, min(triton.next_power_of_2(num_heads), 32 * _NUM_WARPS * 16 // (block_d * out.itemsize)))
    _merge_partials_kernel[(num_tokens * triton.cdiv(num_heads, block_h),)](
        out,
        lse,
        merged,
        total,
        num_heads,
        *out.stride()[:3],
        *lse.stride(),
        N=num_partials,
        D=dim,
        BLOCK_N=min(_PARTIALS_AT_ONCE, triton.next_power_of_2(num_partials)),
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=_NUM_WARPS,
    )
    return merged, total
