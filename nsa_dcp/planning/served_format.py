"""What the caches and kernels of a server are laid out for, in numbers: no torch.

`nsa_dcp_kernels` has the same ones for those who load torch anyway; tests/unit/planning/test_served_format.py holds
the two together.
"""

from __future__ import annotations

GLM, DEEPSEEK = "GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM"
ARCHITECTURES = (GLM, DEEPSEEK)
# Of which sglang cuts the attention weights for decode (`CP_DECODE_ATTN_TP_SUPPORTED_ARCHS`).
SLICED_ARCHITECTURES = (GLM,)
KV_CACHE_DTYPES = ("fp8_e4m3", "bfloat16")

# Tokens of a page on one rank: of the pool, of the index-key cache and of FlashMLA.
PAGE_SIZE = 64
KV_LORA_RANK, QK_ROPE_HEAD_DIM = 512, 64
LATENT_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
# Values that share a float32 scale, in latent rows and index keys of FP8.
QUANT_TILE = 128
INDEX_HEAD_DIM = 128
INDEX_KEY_BYTES = INDEX_HEAD_DIM + INDEX_HEAD_DIM // QUANT_TILE * 4
INDEX_PAGE_BYTES = PAGE_SIZE * INDEX_KEY_BYTES
# Query heads that FlashMLA's sparse kernels are compiled for.
HEAD_BUCKETS = (64, 128)
# Multiprocessors of the largest Hopper GPU: parts of FlashMLA's schedule at 64 heads, and rows that DeepGEMM scores at
# once. At 128 heads there are half as many parts.
MOST_SMS = 132


def row_bytes(kv_cache_dtype: str, kv_lora_rank: int = KV_LORA_RANK, rope_dim: int = QK_ROPE_HEAD_DIM) -> int:
    """Bytes of one cached latent row.

    Args:
        kv_cache_dtype: `fp8_e4m3` (packed: FP8 values, a float32 scale for each 128, RoPE values in bfloat16: 656
            bytes) or `bfloat16` (1,152 bytes), also spelt `bf16`.
        kv_lora_rank, rope_dim: values of the two parts.

    ValueError: it is another dtype.
    """
    if kv_cache_dtype == "fp8_e4m3":
        return kv_lora_rank + kv_lora_rank // QUANT_TILE * 4 + rope_dim * 2
    if kv_cache_dtype in ("bfloat16", "bf16"):
        return (kv_lora_rank + rope_dim) * 2
    raise ValueError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}")


def head_bucket(num_heads: int) -> int:
    """Return the query-head count that FlashMLA runs `num_heads` gathered heads at.

    Raises:
        ValueError: `num_heads` is below 1 or above the largest kernel.
    """
    if not 0 < num_heads <= HEAD_BUCKETS[-1]:
        raise ValueError(f"num_heads must be in [1, {HEAD_BUCKETS[-1]}], got {num_heads}")
    return padded_heads(num_heads)


def padded_heads(num_heads: int) -> int:
    """As `head_bucket`, for counting what a server would take that is refused elsewhere: its largest kernel's."""
    return next((bucket for bucket in HEAD_BUCKETS if num_heads <= bucket), HEAD_BUCKETS[-1])
