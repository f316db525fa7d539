"""Write config.json of a mid-size GLM-DSA model, for a server that fills in random weights (random_weights.py).

    python -m scripts.benchmarks.servers.mid_size_model OUT [--layers 14] [--experts 16]

A layer has GLM-5.2's shapes: hidden size, heads, ranks, indexer, selected tokens, experts' width and experts per token.
There are fewer layers, the vocabulary is cut with them so that the output head keeps its share of a step, and there are
fewer experts: 16 in bfloat16 over two GPUs are as many bytes of a layer and GPU as 256 in int4 over eight. Use 32
experts on four GPUs and 64 on eight for the same.
"""

import argparse
import json
from pathlib import Path

from nsa_dcp.command_line import make_output_folder
from nsa_dcp.planning.dimensions import dims_from_config, preset_dims
from scripts.served_checks.write_checkpoint import COMMON, GLM

PRESET = "glm-5.2"
# Layers whose indexers follow the preset's rule: the first three own one, then every fourth.
INDEX_TOPK_FREQ, INDEX_SKIP_TOPK_OFFSET = 4, 3
MAX_POSITIONS = 1 << 19
_BF16_BYTES = 2


def mid_size_config(num_layers: int = 14, num_experts: int = 16) -> dict[str, object]:
    """The fields of config.json.

    Raises:
        ValueError: no MoE layer is left, or a token selects more experts than there are.
    """
    preset = preset_dims(PRESET)
    if num_layers <= preset.first_k_dense_replace:
        raise ValueError(f"layers must be more than the {preset.first_k_dense_replace} dense ones, got {num_layers}")
    if num_experts < preset.num_experts_per_tok:
        raise ValueError(f"experts must be at least {preset.num_experts_per_tok}, got {num_experts}")
    names = (
        "hidden_size intermediate_size moe_intermediate_size n_shared_experts num_experts_per_tok kv_lora_rank "
        "q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim num_attention_heads index_n_heads index_topk "
        "first_k_dense_replace"
    )
    pattern = {"index_topk_freq": INDEX_TOPK_FREQ, "index_skip_topk_offset": INDEX_SKIP_TOPK_OFFSET}
    vocab = -(-preset.vocab_size * num_layers // preset.num_hidden_layers // 256) * 256
    config = COMMON | GLM | {name: getattr(preset, name) for name in names.split()}
    config |= {
        "num_hidden_layers": num_layers,
        "num_key_value_heads": preset.num_attention_heads,
        "n_routed_experts": num_experts,
        "vocab_size": vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "num_nextn_predict_layers": 0,
    }
    del config["indexer_types"]
    owners = set(dims_from_config(config | pattern, name="mid-size").indexer_layers)
    return config | {"indexer_types": ["full" if layer in owners else "shared" for layer in range(num_layers)]}


def count_parameters(config: dict) -> int:
    """Weights of the whole model."""
    hidden, heads, q_rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    num_layers, num_dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    attention = hidden * (q_rank + latent + rope) + q_rank * heads * (nope + rope)
    attention += latent * heads * (nope + value) + heads * value * hidden
    index_dim, index_heads = config["index_head_dim"], config["index_n_heads"]
    indexer = q_rank * index_heads * index_dim + hidden * (index_dim + index_heads)
    expert = 3 * hidden * config["moe_intermediate_size"]
    experts = config["n_routed_experts"] + config["n_shared_experts"]
    return (
        num_layers * attention
        + config["indexer_types"].count("full") * indexer
        + num_dense * 3 * hidden * config["intermediate_size"]
        + (num_layers - num_dense) * (experts * expert + hidden * config["n_routed_experts"])
        + 2 * config["vocab_size"] * hidden
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder; made if it is not there")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--experts", type=int, default=16)
    arguments = parser.parse_args()
    try:
        config = mid_size_config(arguments.layers, arguments.experts)
        make_output_folder("out", arguments.out)
    except ValueError as error:
        parser.error(str(error))
    (arguments.out / "config.json").write_text(json.dumps(config, indent=1))
    parameters = count_parameters(config)
    print(
        f"{arguments.out}: {config['num_hidden_layers']} layers, {config['indexer_types'].count('full')} with an "
        f"indexer, {config['n_routed_experts']} experts, vocabulary {config['vocab_size']}: "
        f"{parameters / 1e9:.2f}e9 weights, {parameters * _BF16_BYTES / 1e9:.1f} GB in bfloat16"
    )


if __name__ == "__main__":
    main()
