"""Weights counted from a config are those of the checkpoint that transformers writes for it, matrix by matrix."""

import math
import re
from collections import Counter

import pytest
from safetensors import safe_open

from nsa_dcp.hf.tiny import NAMES
from nsa_dcp.planning.dimensions import read_config
from nsa_dcp.planning.weight_counts import count_weights

# Matrices of a checkpoint by what splits them. Vectors (norms, biases) are not counted.
KINDS = {
    "low_rank": r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.weight$",
    "query": r"self_attn\.q_b_proj\.weight$",
    "latent": r"self_attn\.kv_b_proj\.weight$",
    "output": r"self_attn\.o_proj\.weight$",
    "indexer": r"indexer\.(wq_b|wk)\.weight$",
    "indexer_gate": r"indexer\.weights_proj\.weight$",
    "router": r"mlp\.gate\.weight$",
    "expert": r"mlp\.experts\.",
    "shared": r"mlp\.shared_experts\.",
    "dense_mlp": r"mlp\.(gate|up|down)_proj\.weight$",
    "head": r"^lm_head\.weight$",
    "embeddings": r"^model\.embed_tokens\.weight$",
}


def matrices(directory):
    """Weights of each kind, over all layers."""
    found = Counter()
    with safe_open(directory / "model.safetensors", "pt") as weights:
        for name in sorted(weights.keys()):
            shape = weights.get_slice(name).get_shape()
            if len(shape) > 1:
                (kind,) = [kind for kind, pattern in KINDS.items() if re.search(pattern, name)]
                found[kind] += math.prod(shape)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_counted_weights_are_those_of_a_checkpoint(name, tiny_checkpoint):
    directory = tiny_checkpoint(name)
    model = read_config(directory)
    counts, found = count_weights(model), matrices(directory)
    layers, selecting = model.num_hidden_layers, len(model.indexer_layers)
    assert found == {
        "low_rank": layers * counts.low_rank,
        "query": layers * counts.query,
        "latent": layers * (counts.latent_keys + counts.latent_values),
        "output": layers * counts.output,
        "indexer": selecting * counts.indexer,
        "indexer_gate": selecting * counts.indexer_gate,
        "router": counts.moe_layers * counts.router,
        "expert": counts.moe_layers * counts.experts * counts.expert,
        "shared": counts.moe_layers * counts.shared_experts * counts.expert,
        "dense_mlp": counts.dense_layers * counts.dense_mlp,
        "head": counts.vocabulary,
        "embeddings": counts.vocabulary,
    }
