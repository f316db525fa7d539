"""Write a tiny checkpoint with real DSA dimensions, saved so that every server size has the same weights.

    python -m scripts.served_checks.write_checkpoint OUT {glm,deepseek,glm-moe,deepseek-moe,glm-mtp,deepseek-mtp,
        glm-fp8,deepseek-fp8,glm-w4afp8,deepseek-w4afp8}

Its attention looks tokens up (lookup_weights.py). With random weights a token's attention averages thousands of values
to almost nothing, losing half of them would hardly show, and rounding alone would settle many answers. A draft layer is
random: it only proposes. All layers are dense, but in the `moe` models and the quantised ones, where all but the first
have experts.

`fp8` and `w4afp8` models are quantised as the published checkpoints are (quantised_weights.py). Their shapes divide
into blocks of 128 on up to 8 ranks, where an expert is as wide on a rank as GLM-5.2's and DeepSeek-V3.2's.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from scripts.served_checks.checkpoints.lookup_weights import LookupWeights
from scripts.served_checks.checkpoints.quantised_weights import quantise, quantization_config

NUM_LAYERS = 4
COMMON = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "first_k_dense_replace": NUM_LAYERS,
    "moe_layer_freq": 1,
    "index_topk": 2048,
    "index_head_dim": 128,
    "rope_theta": 1000000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    # Layers 1 and 3 attend to the selections of layers 0 and 2.
    "indexer_types": ["full", "shared", "full", "shared"],
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
DEEPSEEK = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_n_heads": 64,
}
MODELS = {
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "glm-moe": GLM | {"first_k_dense_replace": 1},
    "deepseek-moe": DEEPSEEK | {"first_k_dense_replace": 1},
    "glm-mtp": GLM | {"num_nextn_predict_layers": 1},
    "deepseek-mtp": DEEPSEEK | {"num_nextn_predict_layers": 1},
}
WIDE_EXPERTS = {"first_k_dense_replace": 1, "moe_intermediate_size": 2048}
QUANTISED = {
    "glm-fp8": (GLM | WIDE_EXPERTS, "fp8"),
    "deepseek-fp8": (DEEPSEEK | WIDE_EXPERTS, "fp8-ue8m0"),
    "glm-w4afp8": (GLM | WIDE_EXPERTS, "w4afp8"),
    "deepseek-w4afp8": (DEEPSEEK | WIDE_EXPERTS, "w4afp8"),
}
MODELS |= {
    name: shape | {"quantization_config": quantization_config(form)} for name, (shape, form) in QUANTISED.items()
}


def write_checkpoint(out: Path, name: str, seed: int = 0, shift: int = 0) -> None:
    """Write config.json and model.safetensors of one of MODELS.

    Args:
        out: a folder; made if it is not there.
        name: a key of MODELS.
        seed: of the random weights. Whatever they are, the model looks up the same tokens.
        shift: answers with the token that is so many further in the vocabulary.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = COMMON | {"num_nextn_predict_layers": 0} | MODELS[name]
    (out / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)
    tensors = {key: tensor.to(torch.bfloat16).contiguous() for key, tensor in _tensors(config, generator)}
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(shift, 0)
    if name in QUANTISED:
        tensors = quantise(tensors, QUANTISED[name][1])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _tensors(config: dict, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    lookup = LookupWeights(config, generator)
    yield "model.embed_tokens.weight", lookup.embedding()
    yield "lm_head.weight", lookup.head()
    yield "model.norm.weight", torch.ones(hidden)
    owns_indexer = [kind == "full" for kind in config.get("indexer_types", ["full"] * num_layers)]
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", torch.ones(hidden)
        yield f"{prefix}post_attention_layernorm.weight", torch.ones(hidden)
        for name, weight in lookup.attention(layer, owns_indexer[layer]).items():
            yield f"{prefix}self_attn.{name}", weight
        # It only has to run: what it adds is small.
        dense = layer < config["first_k_dense_replace"]
        mlp = _mlp(f"{prefix}mlp.", hidden, config["intermediate_size"]) if dense else _experts(f"{prefix}mlp.", config)
        for name, shape, scale in mlp:
            yield name, _fill(shape, scale / 4, generator)
    if config["num_nextn_predict_layers"]:
        for name, shape, scale in _draft_layer(f"model.layers.{num_layers}.", config):
            yield name, _fill(shape, scale, generator)


def _fill(shape: tuple[int, ...], scale: float | None, generator: torch.Generator) -> torch.Tensor:
    """A norm's weight (ones) where the scale is None; else normal values, `scale` over the root of what is summed."""
    if scale is None:
        return torch.ones(shape, dtype=torch.bfloat16)
    spread = scale / shape[-1] ** 0.5 if len(shape) > 1 else scale
    return (torch.randn(shape, generator=generator) * spread).to(torch.bfloat16)


def _draft_attention(prefix: str, config: dict) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope, q_rank = config["kv_lora_rank"], config["qk_rope_head_dim"], config["q_lora_rank"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    yield f"{prefix}input_layernorm.weight", (hidden,), None
    yield f"{prefix}post_attention_layernorm.weight", (hidden,), None
    attention = f"{prefix}self_attn."
    yield f"{attention}q_a_proj.weight", (q_rank, hidden), 1.0
    yield f"{attention}q_a_layernorm.weight", (q_rank,), None
    yield f"{attention}q_b_proj.weight", (heads * (nope + rope), q_rank), 3.0
    yield f"{attention}kv_a_proj_with_mqa.weight", (latent + rope, hidden), 1.0
    yield f"{attention}kv_a_layernorm.weight", (latent,), None
    yield f"{attention}kv_b_proj.weight", (heads * (nope + value), latent), 1.0
    yield f"{attention}o_proj.weight", (hidden, heads * value), 2.0
    index_dim, index_heads = config["index_head_dim"], config["index_n_heads"]
    yield f"{attention}indexer.wq_b.weight", (index_heads * index_dim, q_rank), 1.0
    yield f"{attention}indexer.wk.weight", (index_dim, hidden), 1.0
    yield f"{attention}indexer.k_norm.weight", (index_dim,), None
    yield f"{attention}indexer.k_norm.bias", (index_dim,), 0.1
    yield f"{attention}indexer.weights_proj.weight", (index_heads, hidden), 1.0


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    yield f"{prefix}gate_proj.weight", (width, hidden), 1.0
    yield f"{prefix}up_proj.weight", (width, hidden), 1.0
    yield f"{prefix}down_proj.weight", (hidden, width), 1.0


def _experts(prefix: str, config: dict) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    hidden, experts, width = config["hidden_size"], config["n_routed_experts"], config["moe_intermediate_size"]
    yield f"{prefix}gate.weight", (experts, hidden), 1.0
    yield f"{prefix}gate.e_score_correction_bias", (experts,), 0.1
    yield from _mlp(f"{prefix}shared_experts.", hidden, width * config["n_shared_experts"])
    for expert in range(experts):
        yield from _mlp(f"{prefix}experts.{expert}.", hidden, width)


def _draft_layer(prefix: str, config: dict) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield f"{prefix}embed_tokens.weight", (vocab, hidden), 0.5 * hidden**0.5
    yield f"{prefix}enorm.weight", (hidden,), None
    yield f"{prefix}hnorm.weight", (hidden,), None
    yield f"{prefix}eh_proj.weight", (hidden, 2 * hidden), 1.0
    yield f"{prefix}shared_head.norm.weight", (hidden,), None
    yield f"{prefix}shared_head.head.weight", (vocab, hidden), 4.0
    yield from _draft_attention(prefix, config)
    yield from _experts(f"{prefix}mlp.", config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shift", type=int, default=0, help="answer with the token that is so many further")
    arguments = parser.parse_args()
    write_checkpoint(arguments.out, arguments.model, arguments.seed, arguments.shift)
