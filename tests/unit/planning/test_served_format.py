"""The planner, the plugin, the engine and the kernels are laid out for the same rows, pages, heads and models."""

import pytest

from nsa_dcp import config
from nsa_dcp.planning import served_format
from nsa_dcp.planning.capacity import plan
from nsa_dcp.planning.dimensions import PRESETS, preset_dims
from nsa_dcp_kernels import _flash_mla, kv_format


@pytest.mark.parametrize(
    "name",
    ["PAGE_SIZE", "KV_LORA_RANK", "QK_ROPE_HEAD_DIM", "LATENT_DIM", "QUANT_TILE", "INDEX_HEAD_DIM", "INDEX_KEY_BYTES"],
)
def test_what_needs_no_torch_has_the_kernels_numbers(name):
    assert getattr(served_format, name) == getattr(kv_format, name)


def test_rows_and_pages_take_the_bytes_that_are_published():
    assert served_format.row_bytes("fp8_e4m3") == kv_format.LATENT_BYTES == 656
    assert served_format.row_bytes("bfloat16") == 2 * kv_format.LATENT_DIM == 1152
    assert served_format.INDEX_PAGE_BYTES == 64 * 132 == 8448


def test_heads_are_padded_as_the_kernel_pads_them():
    for heads in range(1, 129):
        assert served_format.head_bucket(heads) == served_format.padded_heads(heads) == _flash_mla.pad_heads(heads)
    with pytest.raises(NotImplementedError):
        _flash_mla.pad_heads(129)
    with pytest.raises(ValueError):
        served_format.head_bucket(129)
    # What it would take is still counted.
    assert served_format.padded_heads(256) == config.MAX_GATHERED_HEADS == 128


def test_the_engine_runs_what_is_served():
    assert set(config.ARCHITECTURES) == set(served_format.ARCHITECTURES)


def test_published_models_have_the_served_dimensions():
    for preset in PRESETS:
        dims = preset_dims(preset)
        assert dims.architecture in served_format.ARCHITECTURES
        assert (dims.kv_lora_rank, dims.qk_rope_head_dim) == (kv_format.KV_LORA_RANK, kv_format.QK_ROPE_HEAD_DIM)


def test_both_spellings_of_bfloat16_are_planned_alike():
    ours, theirs = (
        plan(preset_dims("glm-5.2"), gpu_memory_gib=40, kv_cache_dtypes=(name,)) for name in ("bf16", "bfloat16")
    )
    assert [row.tokens_per_gpu for row in ours.rows] == [row.tokens_per_gpu for row in theirs.rows]
