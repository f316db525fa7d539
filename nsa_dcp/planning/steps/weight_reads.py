"""Bytes of weights that a rank reads in one decode step."""

from __future__ import annotations

from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp.planning.weight_counts import WeightCounts


def count_weight_bytes(
    model: ModelDims,
    counts: WeightCounts,
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
    c = counts
    attention = c.low_rank + (c.query + c.latent_keys) / q_parts + (c.latent_values + c.output) / out_parts
    touched = c.experts * (1 - (1 - c.experts_per_token / c.experts) ** batch)
    weights = model.num_hidden_layers * attention + len(model.indexer_layers) * (c.indexer + c.indexer_gate)
    weights += c.dense_layers * c.dense_mlp / tp_size
    weights += c.moe_layers * (c.shared_experts * c.expert / tp_size + c.router)
    weights += c.vocabulary / tp_size
    return weights * dense_bytes + c.moe_layers * touched * c.expert / tp_size * expert_bytes
