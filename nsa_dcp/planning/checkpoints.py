"""What published checkpoints take of a GPU, counted from a model's dimensions, and the cards they are served on.

Counted, not measured: a server's log says what its weights really take (`mem usage` of the line `Load weight end`).
Beside the weights of the model this counts what sglang keeps: projections by head split over the ranks, the others and
the indexers whole on every rank, and, under DCP with `a2a`, the query side whole in each DCP group. No draft is in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa_dcp.planning.budget import GIB, require_positive
from nsa_dcp.planning.dimensions import INDEX_HEAD_DIM, ModelDims

_BF16, _FP8 = 2.0, 1.0
# Four bits, and a bfloat16 scale for every 128 weights.
_INT4 = 0.5 + 2 / 128


@dataclass(frozen=True)
class Checkpoint:
    """A published form of a preset's weights.

    Args:
        name: as its publishers call it.
        expert_bytes: bytes per weight of the routed experts; embeddings have two, everything else has one.
    """

    name: str
    expert_bytes: float


@dataclass(frozen=True)
class Card:
    """A GPU that DSA models are served on.

    Args:
        name: as people say it, with the gigabytes on its box.
        free_gib: GiB free before a server loads: of an H200 seen; of the others what nvidia-smi shows less as much.
        sm_count: its SMs.
    """

    name: str
    free_gib: float
    sm_count: int


CHECKPOINTS = {
    "glm-5.2": (Checkpoint("W4AFP8", _INT4), Checkpoint("FP8", _FP8)),
    "deepseek-v3.2": (Checkpoint("FP8", _FP8),),
}
CARDS = (Card("H100 80", 78.0, 132), Card("H200 141", 139.0, 132), Card("H20 96", 94.0, 78), Card("H20 141", 139.0, 78))
# The middle of what published commands for these models give.
USUAL_FRACTION = 0.85


def weights_gib(model: ModelDims, expert_bytes: float, tp_size: int, dcp_size: int = 1) -> float:
    """GiB of weights on one of `tp_size` GPUs, under DCP with sglang's default, a replicated query projection.

    ValueError: the model lacks dimensions, or a size is not a positive integer.
    """
    require_positive(tp_size=tp_size, dcp_size=dcp_size)
    counted = ("hidden_size", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_n_heads", "vocab_size")
    counted += ("intermediate_size", "moe_intermediate_size", "n_routed_experts")
    missing = [name for name in counted if getattr(model, name) is None]
    if missing:
        raise ValueError(f"config must have {', '.join(missing)} to count weights, got a config without")
    m = model
    heads, latent = m.num_attention_heads, m.kv_lora_rank
    moe_layers = m.num_hidden_layers - min(m.first_k_dense_replace or 0, m.num_hidden_layers)
    expert = 3 * m.hidden_size * m.moe_intermediate_size
    query = _FP8 * m.q_lora_rank * heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
    # sglang takes the latent's projection apart when it has loaded it: bfloat16, one half on either side.
    query += _BF16 * latent * heads * m.qk_nope_head_dim
    output = (_FP8 * m.hidden_size + _BF16 * latent) * heads * m.v_head_dim
    whole = _FP8 * m.hidden_size * (m.q_lora_rank + m.latent_dim)
    indexer = _FP8 * (m.index_n_heads * INDEX_HEAD_DIM * m.q_lora_rank + m.hidden_size * INDEX_HEAD_DIM)
    indexer += _BF16 * m.hidden_size * m.index_n_heads
    total = m.num_hidden_layers * (whole + query * dcp_size / tp_size + output / tp_size)
    total += len(m.indexer_layers) * indexer
    total += (m.num_hidden_layers - moe_layers) * _FP8 * 3 * m.hidden_size * m.intermediate_size / tp_size
    total += moe_layers * (expert_bytes * m.n_routed_experts + _FP8 * (m.n_shared_experts or 0)) * expert / tp_size
    total += moe_layers * _BF16 * m.hidden_size * m.n_routed_experts
    total += 2 * _BF16 * m.hidden_size * m.vocab_size / tp_size
    return total / GIB
