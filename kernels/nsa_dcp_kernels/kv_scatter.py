"""Writing keys and values by head: scaled and rounded once, to the rows that a rank owns.

    stored = x                                       in a cache of floats,
    stored = float8_e4m3(clamp(x / scale, -448, 448))     in an FP8 cache, read back as stored * scale

Memory-bound: every owned token's K and V once in and once out, 8 bytes a token that is not owned.
"""

import math

import torch

from nsa_dcp_kernels import kv_head_reference
from nsa_dcp_kernels._checks import check, check_rank, check_tensor
from nsa_dcp_kernels.lse_merge import FLOATS

CACHES = (*FLOATS, kv_head_reference.FP8)
_SLOTS = (torch.int32, torch.int64)


def scatter_kv_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write new tokens' keys and values into the rows that one rank owns; the others' tokens leave no trace.

    Args:
        k_cache, v_cache: [R, K, D] bfloat16, float16, float32 or float8_e4m3fn (float64 on a CPU), of one dtype; any
            strides between rows and heads, values of a head contiguous. Modified.
        k, v: [T, K, D] bfloat16, float16 or float32 (float64 on a CPU). The whole step's tokens.
        slots: [T] int32 or int64, of the widened pool: owner `slot % dcp_size`, row `slot // dcp_size`. A negative slot
            is skipped; no two may be equal.
        dcp_size, dcp_rank: this rank's place.
        k_scale, v_scale: of an FP8 cache; 1 with any other.

    Raises:
        ValueError: a shape, a dtype, a stride, a scale or the rank is not as above.
    """
    check_tensor(k, "k", (None, None, None), FLOATS)
    check_tensor(v, "v", tuple(k.shape), k.dtype, like=k)
    check_tensor(k_cache, "k_cache", (None, k.shape[1], k.shape[2]), CACHES, like=k)
    check_tensor(v_cache, "v_cache", tuple(k_cache.shape), k_cache.dtype, like=k)
    check_tensor(slots, "slots", (k.shape[0],), _SLOTS, like=k)
    check_rank(dcp_size, dcp_rank)
    check_scale("k_scale", k_scale, k_cache)
    check_scale("v_scale", v_scale, v_cache)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check(cache.shape[2] <= 1 or cache.stride(2) == 1, name, "have contiguous heads", f"strides {cache.stride()}")
    if k.is_cuda:
        check(torch.float64 not in (k.dtype, k_cache.dtype), "k", "not be float64 on a GPU", k.dtype)
        from nsa_dcp_kernels._triton.kv_scatter import scatter_kv_ as launch

        return launch(k_cache, v_cache, k, v, slots, dcp_size, dcp_rank, k_scale, v_scale)
    return kv_head_reference.scatter_kv_(k_cache, v_cache, k, v, slots, dcp_size, dcp_rank, k_scale, v_scale)


def round_kv(values: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """What a cache of `dtype` would read back of new keys or values.

    Args:
        values: [T, K, D], as `k` of `scatter_kv_`.
        dtype: of the cache.
        scale: as `k_scale`.

    Returns:
        [T, K, D], dtype of `values`.

    Raises:
        ValueError: a dtype is not as above.
    """
    check_tensor(values, "values", (None, None, None), FLOATS)
    check(dtype in CACHES, "dtype", "be that of a cache", dtype)
    return kv_head_reference.read(kv_head_reference.store(values, dtype, scale), values.dtype, scale)


def check_scale(name: str, scale: float, cache: torch.Tensor) -> None:
    """ValueError: a scale is not positive and finite, or not 1 where the cache is not FP8."""
    check(math.isfinite(scale) and scale > 0, name, "be positive and finite", scale)
    check(scale == 1 or cache.dtype == kv_head_reference.FP8, name, f"be 1 for a cache of {cache.dtype}", scale)
