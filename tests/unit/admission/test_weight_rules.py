"""The decode slice cuts weights that lie row by row; every other form is refused with it, and with nothing else."""

import dataclasses
import json

import pytest

from nsa_dcp.sglang_plugin.admission.reading.server_command import read_model_facts
from nsa_dcp.sglang_plugin.admission.rules.weight_rules import BLOCK_FP8, UNQUANTISED, projection_format
from nsa_dcp.sglang_plugin.admission.validation import find_problems
from tests.served_settings import CP_DCP, GLM, HOPPER, TP_DCP

SLICE = dataclasses.replace(CP_DCP, enable_cp_decode_attn_tp=True)
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
W4AFP8 = {"quant_method": "w4afp8", "group_size": 128, "weight_block_size": [128, 128]}
# As published, or as sglang's parser of them reads it.
SLICEABLE = [
    None,
    BLOCKS,
    BLOCKS | {"scale_fmt": "ue8m0", "fmt": "e4m3"},
    BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
    W4AFP8,
    {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*"]},
    {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.*.self_attn.*", "lm_head"]}},
    {"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*", "lm_head"]},
    {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]},
    {"quant_method": "fp8", "modules_to_not_convert": [f"model.layers.{n}.self_attn" for n in range(78)]},
]
OTHERS = [
    {"quant_method": "fp8", "activation_scheme": "dynamic"},
    BLOCKS | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
    BLOCKS | {"weight_block_size": [1, 128]},
    {"quant_method": "mxfp8"},
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*router*"]}},
    {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.self_attn.o_proj": {"quant_algo": "NVFP4"}}},
    {"quant_method": "compressed-tensors", "ignore": ["re:.*q_b_proj", "lm_head"]},
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "gptq", "bits": 4, "modules_to_not_convert": []},
    # All layers but one are left out.
    {"quant_method": "fp8", "modules_to_not_convert": [f"model.layers.{n}.self_attn" for n in range(77)]},
    {"quant_method": "awq", "modules_to_not_convert": "self_attn"},
    {"quant_method": "compressed-tensors", "ignore": ["re:("]},
    {},
]


def facts(quantization):
    return dataclasses.replace(GLM, projection_format=projection_format(quantization, GLM.num_hidden_layers))


@pytest.mark.parametrize("quantization", SLICEABLE, ids=str)
def test_weights_that_lie_row_by_row_are_sliced(quantization):
    assert facts(quantization).projection_format in (None, UNQUANTISED, BLOCK_FP8)
    assert find_problems(SLICE, facts(quantization), HOPPER) == []


@pytest.mark.parametrize("quantization", OTHERS, ids=str)
def test_other_weights_are_refused_with_the_slice_and_the_advice_works(quantization):
    (problem,) = find_problems(SLICE, facts(quantization), HOPPER)
    assert problem.asked.startswith("--enable-cp-decode-attn-tp with ")
    assert problem.instead.startswith("drop --enable-cp-decode-attn-tp")
    assert find_problems(CP_DCP, facts(quantization), HOPPER) == []


@pytest.mark.parametrize("quantization", [*SLICEABLE, *OTHERS], ids=str)
def test_without_the_slice_no_weights_are_refused(quantization):
    replicated = dataclasses.replace(TP_DCP, dcp_comm_backend="a2a", dcp_replicate_q_proj=True)
    for settings in (TP_DCP, CP_DCP, replicated):
        assert find_problems(settings, facts(quantization), HOPPER) == []


@pytest.mark.parametrize("quantization", [None, BLOCKS, W4AFP8], ids=str)
def test_humming_packs_the_weights_of_every_checkpoint(quantization):
    asked = dataclasses.replace(SLICE, quantization="humming")
    (problem,) = find_problems(asked, facts(quantization), HOPPER)
    assert "humming" in problem.asked


def test_weights_that_are_quantised_while_they_are_loaded_are_not_sliced():
    (problem,) = find_problems(dataclasses.replace(SLICE, quantization="fp8"), facts(None), HOPPER)
    assert problem.asked == "--enable-cp-decode-attn-tp with fp8 weights"


@pytest.mark.parametrize(
    ("quantization", "named"), [(BLOCKS, "fp8"), (W4AFP8, "w4afp8"), (None, "w4afp8"), (None, "unquant")], ids=str
)
def test_naming_the_checkpoints_own_quantisation_changes_nothing(quantization, named):
    assert find_problems(dataclasses.replace(SLICE, quantization=named), facts(quantization), HOPPER) == []


CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_attention_heads": 64,
    "num_hidden_layers": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
}


@pytest.mark.parametrize(
    ("config", "beside", "found"),
    [
        ({}, None, None),
        ({"quantization_config": BLOCKS}, None, BLOCK_FP8),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, None, "compressed-tensors"),
        ({}, {"quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quantization_config": W4AFP8}, {"quantization": {"quant_algo": "NVFP4"}}, BLOCK_FP8),
    ],
)
def test_a_checkpoint_says_how_it_is_quantised_in_one_of_three_places(tmp_path, config, beside, found):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert read_model_facts(tmp_path).projection_format == found


@pytest.mark.parametrize(("config", "beside"), [({"quantization_config": "fp8"}, "{}"), ({}, "[1"), ({}, "[1]")])
def test_an_unreadable_quantisation_is_one_sentence(tmp_path, config, beside):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    (tmp_path / "hf_quant_config.json").write_text(beside)
    with pytest.raises(ValueError, match=r"quant.* must be"):
        read_model_facts(tmp_path)
