"""Planning and kernels mean the same rows."""

from nsa_dcp.planning import row_format
from nsa_dcp_kernels import _flash_mla, kv_format


def test_rows_are_those_of_the_kernels():
    shared = ("KV_LORA_RANK", "QK_ROPE_HEAD_DIM", "INDEX_HEAD_DIM", "QUANT_TILE", "INDEX_KEY_BYTES")
    assert {name: getattr(row_format, name) for name in shared} == {name: getattr(kv_format, name) for name in shared}
    assert row_format.PAGE_ROWS == kv_format.PAGE_SIZE


def test_heads_are_padded_to_the_kernel_that_the_launcher_takes():
    for heads in range(1, row_format.HEAD_BUCKETS[-1] + 1):
        assert row_format.padded_heads(heads) == _flash_mla.pad_heads(heads)
    assert row_format.padded_heads(200) == row_format.HEAD_BUCKETS[-1]
