"""Writing and reading the caches: packing, quantising once, and scattering to the rows that a rank owns.

    scale(tile) = max|x| / 448,    q = float8_e4m3(clamp(x / scale, -448, 448))

A tile of zeros (or so small that its scale would be subnormal) is stored as zeros under scale 1, so that it reads back
as zeros. Byte layouts: kv_format.py. Memory-bound.
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check, check_rank, check_tensor
from nsa_dcp_kernels.kv_format import (
    INDEX_HEAD_DIM,
    INDEX_KEY_BYTES,
    KV_LORA_RANK,
    LATENT_BYTES,
    LATENT_DIM,
    PAGE_SIZE,
    QK_ROPE_HEAD_DIM,
)

_INPUTS = (torch.bfloat16, torch.float32, torch.float64)
_SLOTS = (torch.int32, torch.int64)


def pack_latent(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """Quantise latents into packed FP8 rows.

    Args:
        k_nope: [T, 512] bfloat16 or float32 (float64 on a CPU). The normalised latent.
        k_rope: [T, 64], dtype of `k_nope`. The shared RoPE key; stored as bfloat16, not quantised.

    Returns:
        [T, 656] uint8.

    Raises:
        ValueError: a shape or dtype is not as above.

    Source:
        FlashMLA's FP8 cache format; for tiles that are not all zero, the bytes of sglang 0.5.23's `quantize_k_cache`.
    """
    _check_latent(k_nope, k_rope)
    if k_nope.is_cuda:
        from nsa_dcp_kernels._triton.kv_pack import pack_latent as launch

        return launch(k_nope, k_rope)
    return reference.pack_latent(k_nope, k_rope)


def unpack_latent(packed: torch.Tensor) -> torch.Tensor:
    """Dequantise packed FP8 rows.

    Args:
        packed: [T, 656] uint8.

    Returns:
        [T, 576] float32.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    check_tensor(packed, "packed", (None, LATENT_BYTES), torch.uint8)
    if packed.is_cuda:
        from nsa_dcp_kernels._triton.kv_pack import unpack_latent as launch

        return launch(packed)
    return reference.unpack_latent(packed)


def scatter_latent_(
    cache: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
) -> None:
    """Write new tokens' latents into the rows that one rank owns; the others' tokens leave no trace.

    Args:
        cache: [R, 656] uint8, written packed and quantised exactly once, or [R, 576] bf16/f32/f64. Modified.
        k_nope: [T, 512]. The whole step's tokens, on every rank.
        k_rope: [T, 64].
        slots: [T] int32 or int64. A negative slot is skipped; no two may be equal.
        dcp_size, dcp_rank: this rank's place, as in `localize_topk`.

    Raises:
        ValueError: a shape, a dtype or the rank is not as above.
    """
    _check_latent(k_nope, k_rope)
    width = LATENT_BYTES if cache.dtype == torch.uint8 else LATENT_DIM
    check_tensor(cache, "cache", (None, width), (torch.uint8, *_INPUTS), like=k_nope)
    check_tensor(slots, "slots", (k_nope.shape[0],), _SLOTS, like=k_nope)
    check_rank(dcp_size, dcp_rank)
    if cache.is_cuda:
        from nsa_dcp_kernels._triton.kv_pack import scatter_latent_ as launch

        return launch(cache, k_nope, k_rope, slots, dcp_size, dcp_rank)
    return reference.scatter_latent_(cache, k_nope, k_rope, slots, dcp_size, dcp_rank)


def scatter_index_keys_(
    cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, dcp_size: int = 1, dcp_rank: int = 0
) -> None:
    """Write new tokens' index keys into the rows that one rank owns.

    Args:
        cache: [pages, 64 * 132] uint8 (float8_e4m3 keys with a scale each), or [R, 128] bf16/f32/f64. Modified.
        keys: [T, 128] bfloat16 or float32 (float64 on a CPU), RoPE applied.
        slots: [T] int32 or int64. A negative slot is skipped; no two may be equal.
        dcp_size, dcp_rank: this rank's place, where index keys are sharded: it keeps slots with slot % dcp_size equal
            to dcp_rank, in row slot // dcp_size. By default the cache spans every slot, and slots are used undivided.

    Raises:
        ValueError: a shape, a dtype or the rank is not as above.
    """
    check_tensor(keys, "keys", (None, INDEX_HEAD_DIM), _INPUTS)
    _check_index_cache(cache, keys)
    check_tensor(slots, "slots", (keys.shape[0],), _SLOTS, like=keys)
    check_rank(dcp_size, dcp_rank)
    if cache.is_cuda:
        from nsa_dcp_kernels._triton.kv_pack import scatter_index_keys_ as launch

        return launch(cache, keys, slots, dcp_size, dcp_rank)
    return reference.scatter_index_keys_(cache, keys, slots, dcp_size, dcp_rank)


def gather_index_keys(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Read index keys back, dequantised.

    Args:
        cache: as in `scatter_index_keys_`.
        slots: [M] int32 or int64; a negative slot reads as zeros.

    Returns:
        [M, 128] float32 (float64 from a float64 cache).

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    _check_index_cache(cache, slots)
    check_tensor(slots, "slots", (None,), _SLOTS)
    if cache.is_cuda:
        from nsa_dcp_kernels._triton.kv_pack import gather_index_keys as launch

        return launch(cache, slots)
    return reference.gather_index_keys(cache, slots)


def _check_latent(k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    check_tensor(k_nope, "k_nope", (None, KV_LORA_RANK), _INPUTS)
    check_tensor(k_rope, "k_rope", (k_nope.shape[0], QK_ROPE_HEAD_DIM), k_nope.dtype, like=k_nope)
    check(not (k_nope.is_cuda and k_nope.dtype == torch.float64), "k_nope", "not be float64 on a GPU", k_nope.dtype)


def _check_index_cache(cache: torch.Tensor, like: torch.Tensor) -> None:
    width = PAGE_SIZE * INDEX_KEY_BYTES if cache.dtype == torch.uint8 else INDEX_HEAD_DIM
    check_tensor(cache, "cache", (None, width), (torch.uint8, *_INPUTS), like=like)
