"""When packed rows are dequantised before they are attended to, and the memory that takes.

Past one launch's query tokens, FlashMLA's bf16 kernel is faster than planned launches over packed rows, by more than it
takes to dequantise every row once, as long as there are not too many rows (docs/performance/kernels.md). Layers reuse
the memory, one after the other.
"""

from nsa_dcp_kernels.kv_format import LATENT_DIM

# Query tokens: more than one launch holds with 64 heads on 132 SMs ...
_FEWEST_TOKENS = 265
# ... cache rows for each of them, up to which attending to bf16 saves more than dequantising costs: planned launches
# over whole selections lose the most, and the more ranks share a selection the less there is to save ...
_ROWS_PER_TOKEN: dict[int | None, int] = {1: 512, 2: 256}
_FEWEST_ROWS_PER_TOKEN = 128
# ... and the most memory that it may take.
_MOST_BYTES = 1 << 30
_ROW_BYTES = LATENT_DIM * 2


def dequantised_bytes(num_tokens: int, num_rows: int, dcp_size: int | None) -> int:
    """Bytes of the dequantised copy that a call makes; 0 where it attends to packed rows.

    Args:
        num_tokens: query tokens of the call.
        num_rows: rows of the cache that it is given, all of which would be dequantised.
        dcp_size: ranks that the selections are spread over, None where that is not known.
    """
    size = num_rows * _ROW_BYTES
    pays = num_tokens >= _FEWEST_TOKENS and num_rows <= _rows_per_token(dcp_size) * num_tokens
    return size if pays and size <= _MOST_BYTES else 0


def _rows_per_token(dcp_size: int | None) -> int:
    return _ROWS_PER_TOKEN.get(dcp_size, _FEWEST_ROWS_PER_TOKEN)
