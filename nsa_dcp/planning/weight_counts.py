"""How many weights a model has, counted from its dimensions, apart by what splits them and what they are stored in."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp.planning.served_format import INDEX_HEAD_DIM

_COUNTED = (
    *("hidden_size", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_n_heads", "intermediate_size"),
    *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "vocab_size"),
)


@dataclass(frozen=True)
class WeightCounts:
    """Weights of one layer that has them, of all heads and over all ranks.

    hidden_size: of the model.
    low_rank: projections to the query's and the cache's low rank; every rank has them whole.
    query, latent_keys: of the query side. latent_values, output: of the output side.
    indexer, indexer_gate: projections of its queries and keys; what weighs its heads.
    dense_mlp, router, expert: a layer's dense MLP, or its router and each one of its experts.
    vocabulary: of the head; embeddings are as many.
    dense_layers, moe_layers: layers with the one and with the other.
    experts, experts_per_token: routed ones. shared_experts: those every token takes.
    """

    hidden_size: int
    low_rank: int
    query: int
    latent_keys: int
    latent_values: int
    output: int
    indexer: int
    indexer_gate: int
    dense_mlp: int
    router: int
    expert: int
    vocabulary: int
    dense_layers: int
    moe_layers: int
    experts: int
    experts_per_token: int
    shared_experts: int


def count_weights(model: ModelDims) -> WeightCounts:
    """Count a model's weights. ValueError: it lacks a dimension that they are counted from."""
    missing = [name for name in _COUNTED if getattr(model, name) is None]
    if missing:
        raise ValueError(
            f"config must have {', '.join(missing)} to count weights, got a config without ({model.source})"
        )
    hidden, q_rank, nope, value, index_heads, dense_width, expert_width, experts, taken, vocabulary = (
        getattr(model, name) for name in _COUNTED
    )
    heads, rank = model.num_attention_heads, model.kv_lora_rank
    dense_layers = min(model.first_k_dense_replace or 0, model.num_hidden_layers)
    return WeightCounts(
        hidden_size=hidden,
        low_rank=hidden * (q_rank + model.latent_dim),
        query=q_rank * heads * (nope + model.qk_rope_head_dim),
        latent_keys=rank * heads * nope,
        latent_values=rank * heads * value,
        output=hidden * heads * value,
        indexer=INDEX_HEAD_DIM * (index_heads * q_rank + hidden),
        indexer_gate=hidden * index_heads,
        dense_mlp=3 * hidden * dense_width,
        router=hidden * experts,
        expert=3 * hidden * expert_width,
        vocabulary=hidden * vocabulary,
        dense_layers=dense_layers,
        moe_layers=model.num_hidden_layers - dense_layers,
        experts=experts,
        experts_per_token=taken,
        shared_experts=model.n_shared_experts or 0,
    )
