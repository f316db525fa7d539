"""What cache rows and FlashMLA's kernels are laid out for, for whoever must answer without torch.

`nsa_dcp_kernels.kv_format` is what kernels read; its package imports torch. A test holds the two together.
"""

KV_LORA_RANK, QK_ROPE_HEAD_DIM = 512, 64
INDEX_HEAD_DIM = 128
# Values that share a scale.
QUANT_TILE = 128
# FP8 values and one float32 scale.
INDEX_KEY_BYTES = INDEX_HEAD_DIM + INDEX_HEAD_DIM // QUANT_TILE * 4
# Rows of a page of one rank, and the step of --chunked-prefill-size.
PAGE_ROWS = 64
# Query heads that FlashMLA's sparse kernels are compiled for.
HEAD_BUCKETS = (64, 128)


def padded_heads(heads: int) -> int:
    """Query heads of the kernel that `heads` of them run in; the largest one's for more than it takes."""
    return next((bucket for bucket in HEAD_BUCKETS if heads <= bucket), HEAD_BUCKETS[-1])
