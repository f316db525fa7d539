"""Kernel that dequantises packed rows into bf16, for the attention kernel that reads bf16."""

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels import kv_format

NUM_TILES = tl.constexpr(kv_format.NUM_TILES)
QUANT_TILE = tl.constexpr(kv_format.QUANT_TILE)
KV_LORA_RANK = tl.constexpr(kv_format.KV_LORA_RANK)
LATENT_DIM = tl.constexpr(kv_format.LATENT_DIM)
LATENT_BYTES = tl.constexpr(kv_format.LATENT_BYTES)
ROPE_DIM = tl.constexpr(kv_format.QK_ROPE_HEAD_DIM)
_ROWS_PER_PROGRAM = 8


@triton.jit
def _dequantise_kernel(fp8_ptr, scale_ptr, bf16_ptr, out_ptr, num_rows, BLOCK_R: tl.constexpr):
    """fp8_ptr, scale_ptr and bf16_ptr are the cache as uint8, float32 and bfloat16."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    held = row < num_rows
    tile = tl.arange(0, NUM_TILES)
    within = ((tile * QUANT_TILE)[:, None] + tl.arange(0, QUANT_TILE)[None, :])[None, :, :]
    bits = tl.load(fp8_ptr + (row * LATENT_BYTES)[:, None, None] + within, mask=held[:, None, None], other=0)
    scale_at = (row * (LATENT_BYTES // 4) + KV_LORA_RANK // 4)[:, None] + tile[None, :]
    scale = tl.load(scale_ptr + scale_at, mask=held[:, None], other=0.0)
    rope_dim = tl.arange(0, ROPE_DIM)[None, :]
    rope_at = (row * (LATENT_BYTES // 2) + LATENT_BYTES // 2 - ROPE_DIM)[:, None] + rope_dim
    rope = tl.load(bf16_ptr + rope_at, mask=held[:, None], other=0.0)
    nope = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, :, None]
    out_at = (row * LATENT_DIM)[:, None, None] + within
    tl.store(out_ptr + out_at, nope.to(tl.bfloat16), mask=held[:, None, None])
    tl.store(out_ptr + (row * LATENT_DIM + KV_LORA_RANK)[:, None] + rope_dim, rope, mask=held[:, None])


def dequantise_latent(packed: torch.Tensor) -> torch.Tensor:
    """[R, 656] uint8 -> [R, 576] bfloat16."""
    num_rows = packed.shape[0]
    latent = torch.empty((num_rows, kv_format.LATENT_DIM), dtype=torch.bfloat16, device=packed.device)
    if num_rows:
        packed = packed.contiguous()
        _dequantise_kernel[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM),)](
            packed,
            packed.view(torch.float32),
            packed.view(torch.bfloat16),
            latent,
            num_rows,
            BLOCK_R=_ROWS_PER_PROGRAM,
            num_warps=4,
        )
    return latent
