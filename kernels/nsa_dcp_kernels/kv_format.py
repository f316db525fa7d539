"""Byte layouts of the two caches. Tables with offsets: docs/kv_format.md.

A latent row is 656 bytes: 512 float8_e4m3 values | 4 float32 scales, one per 128 values | 64 bfloat16 RoPE values.
An index-key page holds 64 tokens in 64 * 132 bytes: 64 * 128 float8_e4m3 values, then 64 float32 scales.

Source: FlashMLA (`docs/20250929-hopper-fp8-sparse-deep-dive.md`) and DeepGEMM (`fp8_paged_mqa_logits`).
"""

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
LATENT_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
QUANT_TILE = 128
NUM_TILES = KV_LORA_RANK // QUANT_TILE
LATENT_BYTES = KV_LORA_RANK + 4 * NUM_TILES + 2 * QK_ROPE_HEAD_DIM

INDEX_HEAD_DIM = 128
INDEX_KEY_BYTES = INDEX_HEAD_DIM + 4
PAGE_SIZE = 64

FP8_MAX = 448.0
