"""Checkpoints that are not what they seem, by kind: one sentence naming the tensor or field, before a rank starts."""

from collections.abc import Callable

import pytest
import torch
from checkpoint_edits import Weights, check_refused, write_json

UP = "model.layers.1.mlp.up_proj.weight"
KV = "model.layers.2.self_attn.kv_b_proj.weight"
EXPERTS = "model.layers.3.mlp.experts"


def put(name: str, tensor: torch.Tensor) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: tensor})


def change(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: edit(weights[name]).contiguous()})


def spoil(name: str, value: float, dtype: torch.dtype = torch.float32) -> Callable[[Weights], object]:
    def edit(weights: Weights) -> None:
        weights[name] = weights[name].to(dtype)
        weights[name].view(-1)[-1] = value

    return edit


def drop(*fragments: str) -> Callable[[Weights], object]:
    return lambda weights: [weights.pop(name) for name in list(weights) if any(part in name for part in fragments)]


MISSING = {
    "a projection": (drop(KV), [KV]),
    "a norm": (drop("model.norm.weight"), ["model.norm.weight"]),
    "the head": (drop("lm_head"), ["lm_head.weight"]),
    "an indexer": (drop("layers.2.self_attn.indexer"), ["layers.2.self_attn.indexer.k_norm.bias", "and 2 more"]),
    "one expert's projection": (drop(f"{EXPERTS}.3.up_proj"), [f"{EXPERTS}.3.up_proj.weight"]),
    "one expert": (drop(f"{EXPERTS}.7."), [f"{EXPERTS}.7.down_proj.weight", f"{EXPERTS}.7.up_proj.weight"]),
    "a bias of the router": (drop("layers.3.mlp.gate.e_score"), ["layers.3.mlp.gate.e_score_correction_bias"]),
    "a layer": (drop("layers.3."), ["model.layers.3.", "more"]),
}


@pytest.mark.parametrize("edit, parts", MISSING.values(), ids=MISSING)
def test_missing_tensors_are_named(edit, parts, copy, generate):
    check_refused(
        generate(copy(edit)), "checkpoint must hold every tensor of GlmMoeDsaForCausalLM, got none of", *parts
    )


def test_an_expert_of_another_number_does_not_stand_in_for_one_that_is_missing(copy, generate):
    """transformers merges experts in order and would load it as another."""

    def renumber(weights: Weights) -> None:
        for part in ("gate", "up", "down"):
            weights[f"{EXPERTS}.8.{part}_proj.weight"] = weights.pop(f"{EXPERTS}.3.{part}_proj.weight")

    check_refused(generate(copy(renumber)), f"{EXPERTS}.3.down_proj.weight")


UNEXPECTED = {
    "a bias": (put("model.layers.1.mlp.up_proj.bias", torch.ones(512)), "model.layers.1.mlp.up_proj.bias"),
    "a layer too many": (put("model.layers.9.mlp.up_proj.weight", torch.ones(2, 2)), "model.layers.9.mlp.up_proj"),
    "a draft that the config does not name": (put("model.layers.4.eh_proj.weight", torch.ones(1)), "layers.4.eh_proj"),
    "an adapter": (put("model.layers.1.mlp.up_proj.lora_A.weight", torch.ones(2, 2)), "lora_A.weight"),
    "an expert too many": (put(f"{EXPERTS}.8.up_proj.weight", torch.ones(128, 256)), f"{EXPERTS}.8.up_proj"),
    "an indexer in a sharing layer": (
        put("model.layers.1.self_attn.indexer.wk.weight", torch.ones(1)),
        "1.self_attn.indexer.wk",
    ),
}


@pytest.mark.parametrize("edit, part", UNEXPECTED.values(), ids=UNEXPECTED)
def test_unexpected_tensors_are_named(edit, part, copy, generate):
    check_refused(generate(copy(edit)), "must hold the tensors of GlmMoeDsaForCausalLM alone, got", part)


def test_a_name_that_would_break_the_line_is_escaped(copy, generate):
    check_refused(generate(copy(put("a\nb\x1e", torch.ones(1)))), "got a\\nb\\x1e too")
    check_refused(generate(copy(into="other", rope_parameters={"\x1e": float("nan")})), "rope_parameters.\\x1e must be")


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        (UP, lambda tensor: tensor[:5]),
        (UP, lambda tensor: tensor.T),
        ("lm_head.weight", lambda tensor: tensor[:1000]),
        (f"{EXPERTS}.0.up_proj.weight", lambda tensor: tensor[:, :1]),
        ("model.norm.weight", lambda tensor: tensor[None]),
        (KV, lambda tensor: tensor[:0]),
    ],
    ids=["short", "transposed", "vocabulary", "expert", "rank", "empty"],
)
def test_misshapen_tensors_are_named_with_both_shapes(name, edit, copy, generate):
    check_refused(generate(copy(change(name, edit))), f"{name} must have shape [", "as config.json says, got [")


NOT_FINITE = {
    "NaN": spoil(UP, float("nan")),
    "infinity": spoil("lm_head.weight", float("inf")),
    "minus infinity": spoil("model.embed_tokens.weight", float("-inf"), torch.bfloat16),
    "half": spoil(KV, float("nan"), torch.float16),
    "an expert's": spoil(f"{EXPERTS}.5.down_proj.weight", float("nan")),
    "the router's bias": spoil("model.layers.2.mlp.gate.e_score_correction_bias", float("inf")),
    "more than float32 holds": spoil(UP, 1e300, torch.float64),
}


@pytest.mark.parametrize("edit", NOT_FINITE.values(), ids=NOT_FINITE)
def test_values_that_are_not_finite_are_named(edit, copy, generate):
    check_refused(generate(copy(edit)), "weights must be finite as float32, got NaN or infinity in ", ".safetensors")


def quantise(**extra: torch.Tensor) -> Callable[[Weights], object]:
    """Tensors beside, or in place of, one projection's weight."""
    return lambda weights: weights.update(
        {UP.removesuffix("weight") + name.replace("__", "."): x for name, x in extra.items()}
    )


FP8 = torch.ones(512, 256).to(torch.float8_e4m3fn)
STORED = {
    "modelopt FP8": quantise(weight=FP8, weight_scale=torch.ones(1), input_scale=torch.ones(1)),
    "block FP8": quantise(weight=FP8, weight_scale_inv=torch.ones(4, 2)),
    "scales beside plain weights": quantise(weight_scale=torch.ones(1)),
    "FP8 without scales": quantise(weight=FP8),
    "E5M2 without scales": quantise(weight=FP8.float().to(torch.float8_e5m2)),
    "int8 without scales": quantise(weight=torch.ones(512, 256, dtype=torch.int8)),
    "W4AFP8": quantise(weight=torch.ones(512, 128, dtype=torch.int8), weight_scale_inv=torch.ones(512, 2)),
    "NVFP4": quantise(
        weight=torch.ones(512, 128, dtype=torch.uint8),
        weight_scale=FP8[:, :16].contiguous(),
        weight_scale_2=torch.ones(1),
    ),
    "AWQ and GPTQ": lambda weights: (
        weights.pop(UP),
        quantise(
            qweight=torch.ones(32, 512, dtype=torch.int32),
            qzeros=torch.ones(2, 64, dtype=torch.int32),
            scales=torch.ones(2, 512),
        )(weights),
    ),
    "compressed-tensors": lambda weights: (
        weights.pop(UP),
        quantise(
            weight_packed=torch.ones(512, 32, dtype=torch.int32),
            weight_scale=torch.ones(512, 2),
            weight_shape=torch.ones(2, dtype=torch.int64),
        )(weights),
    ),
    "bitsandbytes": quantise(
        weight=torch.ones(65536, 1, dtype=torch.uint8),
        weight__absmax=torch.ones(2048),
        weight__quant_map=torch.ones(16),
    ),
    "scales of a KV cache": put("model.layers.1.self_attn.k_scale", torch.ones(1)),
}


@pytest.mark.parametrize("edit", STORED.values(), ids=STORED)
def test_quantised_weights_are_refused_without_a_quantization_config(edit, copy, generate):
    check_refused(generate(copy(edit)), "must hold weights that are not quantised, got model.layers.1.", "bf16 release")


@pytest.mark.parametrize(
    ("declared", "part"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quantization_config fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantization_config modelopt NVFP4"),
        ({"quant_algo": "W4A8_MXFP4_FP8"}, "W4A8_MXFP4_FP8"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors pack-quantized"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": ["w4afp8"]}, "quantization_config ['w4afp8']"),
        ({}, "quantization_config without a method"),
        ("fp8", "quantization_config 'fp8'"),
    ],
    ids=str,
)
def test_a_quantization_config_is_refused_by_its_method(declared, part, copy, generate):
    check_refused(generate(copy(quantization_config=declared)), "that are not quantised, got ", part)


def test_modelopts_own_file_counts(copy, generate):
    directory = copy()
    (directory / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'
    )
    assert generate(directory)[2]
    (directory / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    check_refused(generate(directory), "hf_quant_config.json FP8")


FIELDS = {
    "another model's type": ({"model_type": "deepseek_v3"}, "model_type must be glm_moe_dsa, that of GlmMoeDsa"),
    "no type": ({"model_type": None}, "model_type must be glm_moe_dsa"),
    "another architecture": ({"architectures": ["DeepseekV32ForCausalLM"]}, "model_type must be deepseek_v32"),
    "an unknown architecture": ({"architectures": ["MistralForCausalLM"]}, "architecture MistralForCausalLM is not"),
    "architectures as a string": ({"architectures": "GlmMoeDsaForCausalLM"}, "architectures must be a list of names"),
    "a null": ({"q_lora_rank": None}, "Field 'q_lora_rank' expected int, got NoneType"),
    "a string": ({"hidden_size": "256"}, "'hidden_size' expected int, got str"),
    "a negative size": ({"intermediate_size": -1}, "negative dimension -1"),
    "NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number, got nan"),
    "a nested infinity": ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_parameters.rope_theta must be a"),
    "more layers than could be": ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
    "more layers than tensors": (
        {"num_hidden_layers": 500, "indexer_types": None, "mlp_layer_types": None, "layer_types": None},
        "num_hidden_layers must be at most the 113 tensors",
    ),
    "more experts than could be": ({"n_routed_experts": 10**9}, "n_routed_experts must be at most the 113 tensors"),
    "more chosen than experts": ({"num_experts_per_tok": 9}, "config.json must describe a model that runs"),
    "groups that do not divide": ({"n_group": 3}, "config.json must describe a model that runs"),
    "no selection": ({"index_topk": 0}, "index_topk must be a positive integer, got 0"),
    "a selection too wide": ({"index_topk": 10**9}, "index_topk must be at most 65536"),
    "short indexer_types": ({"indexer_types": ["full"]}, "config.json must describe a model that runs"),
    "an unknown activation": ({"hidden_act": "sine"}, "config.json must describe a model that runs"),
    "tuples": ({"return_dict": False}, "config.json must describe a model that runs"),
    "another width": ({"hidden_size": 512}, "must have shape [1024, 512], as config.json says, got [1024, 256]"),
    "biases": ({"attention_bias": True}, "got none of model.layers.0.self_attn.kv_a_proj_with_mqa.bias"),
}


@pytest.mark.parametrize("fields, part", FIELDS.values(), ids=FIELDS)
def test_a_config_that_does_not_fit_is_refused_by_its_field(fields, part, copy, generate):
    check_refused(generate(copy(**fields)), part)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "factor": 4.0}
LONG |= {"original_max_position_embeddings": 64}


@pytest.mark.parametrize("rope", [LONG, {"rope_type": "dynamic", "factor": 4.0}], ids=["longrope", "dynamic"])
def test_a_rope_that_depends_on_the_length_is_refused(rope, copy, generate):
    directory = copy(rope_parameters={"rope_theta": 10000.0, **rope})
    check_refused(generate(directory), f"rope_type {rope['rope_type']} is not supported: its frequencies depend on")
    write_json(directory / "config.json", rope_parameters=None, rope_scaling={"type": rope["rope_type"], **rope})
    check_refused(generate(directory), f"rope_type {rope['rope_type']} is not supported")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    ],
    ids=["yarn", "linear", "llama3"],
)
def test_a_rope_of_fixed_frequencies_is_served(rope, copy, generate):
    assert generate(copy(rope_parameters={"rope_theta": 10000.0, **rope}))[2]
