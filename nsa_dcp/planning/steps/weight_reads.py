"""Bytes of weights that a rank reads in one decode step, counted from the model's dimensions."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nsa_dcp.planning.dimensions import ModelDims


@dataclass(frozen=True)
class WeightSizes:
    """Dimensions that a pool does without and weights are counted from; names are those of a `config.json`."""

    hidden_size: int
    q_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    vocab_size: int


def weight_sizes(model: ModelDims) -> WeightSizes:
    """What a model has of them. ValueError: it has not all."""
    sizes = {field.name: getattr(model, field.name) for field in fields(WeightSizes)}
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        raise ValueError(
            f"config must have {', '.join(missing)} to count weights, got a config without ({model.source})"
        )
    return WeightSizes(**sizes)


def count_weight_bytes(
    model: ModelDims,
    sizes: WeightSizes,
    batch: int,
    *,
    tp_size: int,
    q_parts: int,
    out_parts: int,
    dense_bytes: float,
    expert_bytes: float,
) -> float:
    """Bytes of weights a rank reads in one step; routed experts by the expected number that `batch` tokens touch.

    Args:
        batch: tokens of the step.
        tp_size: GPUs that share the experts, the dense MLPs and the head.
        q_parts, out_parts: GPUs that share the query projections, and the value and output projections.
        expert_bytes, dense_bytes: of one weight of a routed expert, and of any other.
    """
    m = model
    head_dim = sizes.qk_nope_head_dim + m.qk_rope_head_dim
    replicated = sizes.hidden_size * (sizes.q_lora_rank + m.kv_lora_rank + m.qk_rope_head_dim)
    q_side = (
        sizes.q_lora_rank * m.num_attention_heads * head_dim
        + m.kv_lora_rank * m.num_attention_heads * sizes.qk_nope_head_dim
    )
    out_side = (m.kv_lora_rank + sizes.hidden_size) * m.num_attention_heads * sizes.v_head_dim
    attention = replicated + q_side / q_parts + out_side / out_parts
    indexer = sizes.index_n_heads * (sizes.q_lora_rank * 128 + sizes.hidden_size) + sizes.hidden_size * 128
    dense_layers = min(m.first_k_dense_replace or 0, m.num_hidden_layers)
    moe_layers = m.num_hidden_layers - dense_layers
    expert = 3 * sizes.hidden_size * sizes.moe_intermediate_size / tp_size
    touched = sizes.n_routed_experts * (1 - (1 - sizes.num_experts_per_tok / sizes.n_routed_experts) ** batch)
    weights = m.num_hidden_layers * attention + len(m.indexer_layers) * indexer
    weights += dense_layers * 3 * sizes.hidden_size * sizes.intermediate_size / tp_size
    weights += moe_layers * ((m.n_shared_experts or 0) * expert + sizes.hidden_size * sizes.n_routed_experts)
    weights += sizes.hidden_size * sizes.vocab_size / tp_size
    return weights * dense_bytes + moe_layers * touched * expert * expert_bytes
