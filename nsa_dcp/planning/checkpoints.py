"""What published checkpoints take of a GPU, counted from a model's dimensions, and the cards they are served on.

Counted, not measured: a server's log says what its weights really take (`mem usage` of the line `Load weight end`).
Beside the weights of the model this counts what sglang keeps: projections by head split over the ranks, the others and
the indexers whole on every rank, and, under DCP with `a2a`, the query side whole in each DCP group. No draft is in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa_dcp.planning.budget import GIB, require_positive
from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp.planning.served_format import INDEX_HEAD_DIM, MOST_SMS

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
CARDS = (
    Card("H100 80", 78.0, MOST_SMS),
    Card("H200 141", 139.0, MOST_SMS),
    Card("H20 96", 94.0, 78),
    Card("H20 141", 139.0, 78),
)
_COUNTED: tuple[str, ...] = (
    "hidden_size",
    "q_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "vocab_size",
)
_COUNTED += ("intermediate_size", "moe_intermediate_size", "n_routed_experts")
# The middle of what published commands for these models give.
USUAL_FRACTION = 0.85


def weights_gib(model: ModelDims, expert_bytes: float, tp_size: int, dcp_size: int = 1) -> float:
    """GiB of weights on one of `tp_size` GPUs, under DCP with sglang's default, a replicated query projection.

    ValueError: the model lacks dimensions, or a size is not a positive integer.
    """
    require_positive(tp_size=tp_size, dcp_size=dcp_size)
    missing = [name for name in _COUNTED if getattr(model, name) is None]
    if missing:
        raise ValueError(f"config must have {', '.join(missing)} to count weights, got a config without")
    hidden, q_rank, nope, value, index_heads, vocabulary, dense_width, expert_width, experts = (
        getattr(model, name) for name in _COUNTED
    )
    heads, layers = model.num_attention_heads, model.num_hidden_layers
    moe_layers = layers - min(model.first_k_dense_replace or 0, layers)
    query = _FP8 * q_rank * heads * (nope + model.qk_rope_head_dim)
    # sglang takes the latent's projection apart when it has loaded it: bfloat16, one half on either side.
    query += _BF16 * model.kv_lora_rank * heads * nope
    output = (_FP8 * hidden + _BF16 * model.kv_lora_rank) * heads * value
    whole = _FP8 * hidden * (q_rank + model.latent_dim)
    indexer = _FP8 * (index_heads * INDEX_HEAD_DIM * q_rank + hidden * INDEX_HEAD_DIM) + _BF16 * hidden * index_heads
    routed = expert_bytes * experts + _FP8 * (model.n_shared_experts or 0)
    total = layers * (whole + query * dcp_size / tp_size + output / tp_size) + len(model.indexer_layers) * indexer
    total += (layers - moe_layers) * _FP8 * 3 * hidden * dense_width / tp_size
    total += moe_layers * (routed * 3 * hidden * expert_width / tp_size + _BF16 * hidden * experts)
    total += 2 * _BF16 * hidden * vocabulary / tp_size
    return total / GIB
