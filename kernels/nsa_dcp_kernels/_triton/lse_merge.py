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
    AT_ONCE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Partials are named, not a tensor axis: no reduction over them can cross threads, so nothing is exchanged.

    (As an axis, Triton 3.6 spreads it over the warps, and every weight and sum goes through shared memory.)
    """
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    kept = head < num_heads
    moved = kept[:, None] & (dim < D)[None, :]
    lse_ptr += token * lse_stride_t + head.to(tl.int64) * lse_stride_h
    out_ptr += token * out_stride_t + (head.to(tl.int64) * out_stride_h)[:, None] + dim[None, :]

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in tl.static_range(0, N, AT_ONCE):
        lses = ()
        outs = ()
        for i in tl.static_range(AT_ONCE):
            if start + i < N:
                n = tl.full([], start + i, tl.int64)
                lse = tl.load(lse_ptr + n * lse_stride_n, mask=kept, other=float("-inf"))
                real = (lse == lse) & (tl.abs(lse) != float("inf"))
                # Triton unrolls the loop, with a longer tuple each time.
                lses = lses + (tl.where(real, lse, float("-inf")),)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):
            if start + i < N:
                n = tl.full([], start + i, tl.int64)
                # An empty partial is not even loaded: its values may be NaN, and its bytes cost bandwidth.
                read = moved & (lses[i] != float("-inf"))[:, None]
                outs = outs + (tl.load(out_ptr + n * out_stride_n, mask=read, other=0.0),)  # type: ignore[assignment]
        m_new = m
        for i in tl.static_range(AT_ONCE):
            if start + i < N:
                m_new = tl.maximum(m_new, lses[i])
        # With every partial empty the maximum is -inf, and -inf - -inf is NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        shrink = tl.exp(m - shift)
        acc *= shrink[:, None]
        denominator *= shrink
        m = m_new
        for i in tl.static_range(AT_ONCE):
            if start + i < N:
                weight = tl.exp(lses[i] - shift)
                acc += outs[i].to(tl.float32) * weight[:, None]
                denominator += weight

    acc = acc / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    row = token * num_heads + head
    tl.store(merged_ptr + (row * D)[:, None] + dim[None, :], acc.to(merged_ptr.dtype.element_ty), mask=moved)
    tl.store(total_ptr + row, total_lse(m, denominator), mask=kept)


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
        AT_ONCE=min(_PARTIALS_AT_ONCE, num_partials),
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=_NUM_WARPS,
    )
    return merged, total
