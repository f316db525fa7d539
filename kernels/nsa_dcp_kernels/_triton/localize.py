"""Kernel of `localize_topk`: a stable partition of each row, one program per row."""

import torch
import triton
import triton.language as tl

_MAX_WARPS = 8


@triton.jit(do_not_specialize=["dcp_rank"])
def _localize_kernel(
    slots_ptr,
    limit_ptr,
    rows_ptr,
    length_ptr,
    slots_stride,
    width,
    dcp_rank,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRIGGERS: tl.constexpr,
):
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    held = column < width
    slot = tl.load(slots_ptr + token * slots_stride + column, mask=held, other=-1)
    owned = (slot >= 0) & (slot // INTERLEAVE % DCP_SIZE == dcp_rank)
    if limit_ptr is not None:
        owned = owned & (column < tl.load(limit_ptr + token))
    row = slot // (INTERLEAVE * DCP_SIZE) * INTERLEAVE + slot % INTERLEAVE

    owned_so_far = tl.cumsum(owned.to(tl.int32), axis=0)
    length = tl.sum(owned.to(tl.int32), axis=0)
    # Every column is written once: the owned ones in front, a -1 behind them for each of the others.
    place = tl.where(owned, owned_so_far - 1, length + column - owned_so_far)
    tl.store(rows_ptr + token * width + place, tl.where(owned, row, -1), mask=held)
    tl.store(length_ptr + token, length)


def localize_topk(
    topk_slots: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    interleave_size: int = 1,
    limit: torch.Tensor | None = None,
    plan_follows: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the public function.

    Args:
        limit: [T] int32; the entries at and past it are dropped too.
        plan_follows: let the blocks of the next launch, `plan_rows`, start before this one ends.
    """
    num_tokens, width = topk_slots.shape
    device = topk_slots.device
    rows = torch.empty((num_tokens, width), dtype=torch.int32, device=device)
    if not num_tokens or not width:
        return rows, torch.zeros(num_tokens, dtype=torch.int32, device=device)
    length = torch.empty(num_tokens, dtype=torch.int32, device=device)
    if topk_slots.stride(1) != 1:
        topk_slots = topk_slots.contiguous()
    block_k = triton.next_power_of_2(width)
    _localize_kernel[(num_tokens,)](
        topk_slots,
        None if limit is None else limit.contiguous(),
        rows,
        length,
        topk_slots.stride(0),
        width,
        dcp_rank,
        DCP_SIZE=dcp_size,
        INTERLEAVE=interleave_size,
        BLOCK_K=block_k,
        TRIGGERS=plan_follows,
        num_warps=min(_MAX_WARPS, max(1, block_k // 256)),
    )
    return rows, length
