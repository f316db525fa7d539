"""The dimensions that planning reads agree with transformers' own configs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from nsa_dcp.planning.dimensions import PRESETS, indexer_layers, preset_dims


@given(num_layers=st.integers(1, 100), freq=st.integers(1, 9), offset=st.integers(1, 9))
def test_indexer_layers_agree_with_transformers(num_layers, freq, offset):
    fields = {"num_hidden_layers": num_layers, "index_topk_freq": freq, "index_skip_topk_offset": offset}
    types = GlmMoeDsaConfig(**fields).indexer_types
    assert indexer_layers(fields) == tuple(layer for layer, kind in enumerate(types) if kind == "full")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_agree_with_the_configs_of_transformers(preset):
    dims = preset_dims(preset)
    config = (GlmMoeDsaConfig if preset == "glm-5.2" else DeepseekV32Config)()
    shared = [
        "num_hidden_layers",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "index_topk",
        "hidden_size",
        "q_lora_rank",
        "qk_nope_head_dim",
        "v_head_dim",
        "index_n_heads",
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "first_k_dense_replace",
        "vocab_size",
    ]
    assert {name: getattr(dims, name) for name in shared} == {name: getattr(config, name) for name in shared}
