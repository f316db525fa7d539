"""Kernels that write the caches (quantising once, straight into the rows a rank owns) and read them back.

A program holds a few tokens, so that a prefill chunk's programs all run at once and every load is in flight. Where a
rank owns a part of the tokens, one that is not written costs its slot load: its latent is neither loaded nor quantised.
A rank that owns them all does not wait for the slots before it loads.

Divisions are IEEE (`div_rn`), as the reference's are, so a byte does not depend on the device that quantised it.
Triton's `/` would become a multiplication by the rounded 1/448 and an approximate reciprocal, each of which may be a
unit in the last place away.
"""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels import kv_format
from nsa_dcp_kernels._checks import check

_TOKENS_PER_PROGRAM = 4
_NUM_WARPS = 4
# Packing with few warps: a thread's loads are all in flight, and 8,192 tokens' programs fit an H200 at once.
_PACK_WARPS = 2

KV_LORA_RANK = tl.constexpr(kv_format.KV_LORA_RANK)
QK_ROPE_HEAD_DIM = tl.constexpr(kv_format.QK_ROPE_HEAD_DIM)
LATENT_DIM = tl.constexpr(kv_format.LATENT_DIM)
QUANT_TILE = tl.constexpr(kv_format.QUANT_TILE)
NUM_TILES = tl.constexpr(kv_format.NUM_TILES)
LATENT_BYTES = tl.constexpr(kv_format.LATENT_BYTES)
ROPE_AT = tl.constexpr(kv_format.LATENT_BYTES - 2 * kv_format.QK_ROPE_HEAD_DIM)
INDEX_HEAD_DIM = tl.constexpr(kv_format.INDEX_HEAD_DIM)
INDEX_PAGE_BYTES = tl.constexpr(kv_format.PAGE_SIZE * kv_format.INDEX_KEY_BYTES)
INDEX_SCALES_AT = tl.constexpr(kv_format.PAGE_SIZE * kv_format.INDEX_HEAD_DIM)
PAGE_SIZE = tl.constexpr(kv_format.PAGE_SIZE)
FP8_MAX = tl.constexpr(kv_format.FP8_MAX)
SMALLEST_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _quantise(values):
    """[T, tiles, D] float32 -> ([T, tiles, D] uint8 bits of float8_e4m3, [T, tiles] float32 scales)."""
    scale = tl.div_rn(tl.max(tl.abs(values), axis=2), FP8_MAX)
    vanishing = scale < SMALLEST_NORMAL
    scale = tl.where(vanishing, 1.0, scale)
    inverse = tl.where(vanishing, 0.0, tl.div_rn(1.0, scale))
    scaled = values * inverse[:, :, None]
    scaled = tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale


@triton.jit
def _owned_rows(slots_ptr, token, num_tokens, dcp_rank, DCP_SIZE: tl.constexpr):
    """Rows of this rank that the tokens go to, and which of them it owns. Without slots, token t goes to row t."""
    held = token < num_tokens
    if slots_ptr is None:
        row = token.to(tl.int64)
        owned = held
    else:
        slot = tl.load(slots_ptr + token, mask=held, other=-1)
        row = (slot // DCP_SIZE).to(tl.int64)
        owned = (slot >= 0) & (slot % DCP_SIZE == dcp_rank)
    return row, owned


@triton.jit
def _pack_latent_kernel(
    nope_ptr,
    rope_ptr,
    slots_ptr,
    fp8_ptr,
    scale_ptr,
    bf16_ptr,
    num_tokens,
    nope_stride,
    rope_stride,
    dcp_rank,
    DCP_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """fp8_ptr, scale_ptr and bf16_ptr are the cache as uint8, float32 and bfloat16."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row, owned = _owned_rows(slots_ptr, token, num_tokens, dcp_rank, DCP_SIZE)
    read = token < num_tokens if DCP_SIZE == 1 else owned
    token = token.to(tl.int64)
    tile = tl.arange(0, NUM_TILES)

    within = (tile * QUANT_TILE)[:, None] + tl.arange(0, QUANT_TILE)[None, :]
    nope_at = (token * nope_stride)[:, None, None] + within[None, :, :]
    nope = tl.load(nope_ptr + nope_at, mask=read[:, None, None], other=0.0)
    rope_dim = tl.arange(0, QK_ROPE_HEAD_DIM)[None, :]
    rope = tl.load(rope_ptr + (token * rope_stride)[:, None] + rope_dim, mask=read[:, None])

    bits, scale = _quantise(nope.to(tl.float32))
    tl.store(fp8_ptr + (row * LATENT_BYTES)[:, None, None] + within[None, :, :], bits, mask=owned[:, None, None])
    scales_at = (row * (LATENT_BYTES // 4) + KV_LORA_RANK // 4)[:, None] + tile[None, :]
    tl.store(scale_ptr + scales_at, scale, mask=owned[:, None])
    rope_at = (row * (LATENT_BYTES // 2) + ROPE_AT // 2)[:, None] + rope_dim
    tl.store(bf16_ptr + rope_at, rope.to(tl.bfloat16), mask=owned[:, None])


@triton.jit
def _scatter_plain_kernel(
    nope_ptr,
    rope_ptr,
    slots_ptr,
    cache_ptr,
    num_tokens,
    nope_stride,
    rope_stride,
    dcp_rank,
    DCP_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row, owned = _owned_rows(slots_ptr, token, num_tokens, dcp_rank, DCP_SIZE)
    token = token.to(tl.int64)
    dtype = cache_ptr.dtype.element_ty
    nope_dim = tl.arange(0, KV_LORA_RANK)[None, :]
    rope_dim = tl.arange(0, QK_ROPE_HEAD_DIM)[None, :]
    nope = tl.load(nope_ptr + (token * nope_stride)[:, None] + nope_dim, mask=owned[:, None])
    rope = tl.load(rope_ptr + (token * rope_stride)[:, None] + rope_dim, mask=owned[:, None])
    row_at = (row * LATENT_DIM)[:, None]
    tl.store(cache_ptr + row_at + nope_dim, nope.to(dtype), mask=owned[:, None])
    tl.store(cache_ptr + row_at + KV_LORA_RANK + rope_dim, rope.to(dtype), mask=owned[:, None])


@triton.jit
def _unpack_latent_kernel(fp8_ptr, scale_ptr, bf16_ptr, out_ptr, num_tokens, BLOCK_T: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    held = token < num_tokens
    tile = tl.arange(0, NUM_TILES)
    within = ((tile * QUANT_TILE)[:, None] + tl.arange(0, QUANT_TILE)[None, :])[None, :, :]
    bits = tl.load(fp8_ptr + (token * LATENT_BYTES)[:, None, None] + within, mask=held[:, None, None], other=0)
    scales_at = (token * (LATENT_BYTES // 4) + KV_LORA_RANK // 4)[:, None] + tile[None, :]
    scale = tl.load(scale_ptr + scales_at, mask=held[:, None], other=0.0)
    rope_dim = tl.arange(0, QK_ROPE_HEAD_DIM)[None, :]
    rope_at = (token * (LATENT_BYTES // 2) + ROPE_AT // 2)[:, None] + rope_dim
    rope = tl.load(bf16_ptr + rope_at, mask=held[:, None], other=0.0)
    nope = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, :, None]
    tl.store(out_ptr + (token * LATENT_DIM)[:, None, None] + within, nope, mask=held[:, None, None])
    out_at = (token * LATENT_DIM + KV_LORA_RANK)[:, None] + rope_dim
    tl.store(out_ptr + out_at, rope.to(tl.float32), mask=held[:, None])


@triton.jit
def _scatter_index_keys_kernel(
    keys_ptr,
    slots_ptr,
    cache_ptr,
    scale_ptr,
    num_tokens,
    keys_stride,
    dcp_rank,
    DCP_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """scale_ptr is the packed cache as float32."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot, written = _owned_rows(slots_ptr, token, num_tokens, dcp_rank, DCP_SIZE)
    dim = tl.arange(0, INDEX_HEAD_DIM)
    keys_at = (token.to(tl.int64) * keys_stride)[:, None, None] + dim[None, None, :]
    keys = tl.load(keys_ptr + keys_at, mask=written[:, None, None], other=0.0)
    if PACKED:
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        bits, scale = _quantise(keys.to(tl.float32))
        bits_at = (page * INDEX_PAGE_BYTES + offset * INDEX_HEAD_DIM)[:, None, None] + dim[None, None, :]
        tl.store(cache_ptr + bits_at, bits, mask=written[:, None, None])
        scales_at = page * (INDEX_PAGE_BYTES // 4) + INDEX_SCALES_AT // 4 + offset
        tl.store(scale_ptr + scales_at[:, None], scale, mask=written[:, None])
    else:
        cache_at = (slot * INDEX_HEAD_DIM)[:, None, None] + dim[None, None, :]
        tl.store(cache_ptr + cache_at, keys.to(cache_ptr.dtype.element_ty), mask=written[:, None, None])


@triton.jit
def _gather_index_keys_kernel(
    cache_ptr, scale_ptr, slots_ptr, out_ptr, num_slots, PACKED: tl.constexpr, BLOCK_T: tl.constexpr
):
    place = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    held = place < num_slots
    slot = tl.load(slots_ptr + place, mask=held, other=-1).to(tl.int64)
    read = slot >= 0
    dim = tl.arange(0, INDEX_HEAD_DIM)[None, :]
    if PACKED:
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        bits_at = (page * INDEX_PAGE_BYTES + offset * INDEX_HEAD_DIM)[:, None] + dim
        bits = tl.load(cache_ptr + bits_at, mask=read[:, None], other=0)
        scales_at = page * (INDEX_PAGE_BYTES // 4) + INDEX_SCALES_AT // 4 + offset
        scale = tl.load(scale_ptr + scales_at, mask=read, other=0.0)
        keys = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    else:
        keys = tl.load(cache_ptr + (slot * INDEX_HEAD_DIM)[:, None] + dim, mask=read[:, None], other=0.0).to(tl.float32)
    tl.store(out_ptr + (place.to(tl.int64) * INDEX_HEAD_DIM)[:, None] + dim, keys, mask=held[:, None])


def pack_latent(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    packed = torch.empty((k_nope.shape[0], kv_format.LATENT_BYTES), dtype=torch.uint8, device=k_nope.device)
    _write_packed(packed, k_nope, k_rope, None, 1, 0)
    return packed


def unpack_latent(packed: torch.Tensor) -> torch.Tensor:
    num_tokens = packed.shape[0]
    values = torch.empty((num_tokens, kv_format.LATENT_DIM), dtype=torch.float32, device=packed.device)
    if num_tokens:
        packed = packed.contiguous()
        _unpack_latent_kernel[_grid(num_tokens)](
            packed,
            packed.view(torch.float32),
            packed.view(torch.bfloat16),
            values,
            num_tokens,
            BLOCK_T=_TOKENS_PER_PROGRAM,
            num_warps=_NUM_WARPS,
        )
    return values


def scatter_latent_(
    cache: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
) -> None:
    check(cache.is_contiguous(), "cache", "be contiguous", f"strides {cache.stride()}")
    if cache.dtype == torch.uint8:
        _write_packed(cache, k_nope, k_rope, slots, dcp_size, dcp_rank)
    elif k_nope.shape[0]:
        k_nope, k_rope = _dense_rows(k_nope), _dense_rows(k_rope)
        _scatter_plain_kernel[_grid(k_nope.shape[0])](
            k_nope,
            k_rope,
            slots.contiguous(),
            cache,
            k_nope.shape[0],
            k_nope.stride(0),
            k_rope.stride(0),
            dcp_rank,
            DCP_SIZE=dcp_size,
            BLOCK_T=_TOKENS_PER_PROGRAM,
            num_warps=_NUM_WARPS,
        )


def scatter_index_keys_(
    cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, dcp_size: int = 1, dcp_rank: int = 0
) -> None:
    check(cache.is_contiguous(), "cache", "be contiguous", f"strides {cache.stride()}")
    if keys.shape[0]:
        packed = cache.dtype == torch.uint8
        keys = _dense_rows(keys)
        _scatter_index_keys_kernel[_grid(keys.shape[0])](
            keys,
            slots.contiguous(),
            cache,
            cache.view(torch.float32) if packed else None,
            keys.shape[0],
            keys.stride(0),
            dcp_rank,
            DCP_SIZE=dcp_size,
            PACKED=packed,
            BLOCK_T=_TOKENS_PER_PROGRAM,
            num_warps=1,
        )


def gather_index_keys(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    check(cache.is_contiguous(), "cache", "be contiguous", f"strides {cache.stride()}")
    keys = torch.empty((slots.shape[0], kv_format.INDEX_HEAD_DIM), dtype=torch.float32, device=cache.device)
    if slots.shape[0]:
        packed = cache.dtype == torch.uint8
        _gather_index_keys_kernel[_grid(slots.shape[0])](
            cache,
            cache.view(torch.float32) if packed else None,
            slots.contiguous(),
            keys,
            slots.shape[0],
            PACKED=packed,
            BLOCK_T=_TOKENS_PER_PROGRAM,
            num_warps=1,
        )
    return keys


def _write_packed(
    cache: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor | None,
    dcp_size: int,
    dcp_rank: int,
) -> None:
    num_tokens = k_nope.shape[0]
    if not num_tokens:
        return
    k_nope, k_rope = _dense_rows(k_nope), _dense_rows(k_rope)
    _pack_latent_kernel[_grid(num_tokens)](
        k_nope,
        k_rope,
        None if slots is None else slots.contiguous(),
        cache,
        cache.view(torch.float32),
        cache.view(torch.bfloat16),
        num_tokens,
        k_nope.stride(0),
        k_rope.stride(0),
        dcp_rank,
        DCP_SIZE=dcp_size,
        BLOCK_T=_TOKENS_PER_PROGRAM,
        num_warps=_PACK_WARPS,
    )


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Rows may lie apart (a slice of a wider projection), values within a row may not."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _grid(num_tokens: int) -> tuple[int]:
    return (triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM),)
