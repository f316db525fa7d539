"""What published checkpoints take of a GPU, counted from a model's dimensions, and the cards they are served on.

Counted, not measured: a server's log says what its weights really take (`mem usage` of the line `Load weight end`).
Beside the weights of the model this counts what sglang keeps: projections by head split over the ranks, the others and
the indexers whole on every rank, and, under DCP with `a2a`, the query side whole in each DCP group. No draft is in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa_dcp.planning.budget import GIB, require_positive
from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp.planning.served_format import MOST_SMS
from nsa_dcp.planning.weight_counts import count_weights

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
# The middle of what published commands for these models give.
USUAL_FRACTION = 0.85


def weights_gib(model: ModelDims, expert_bytes: float, tp_size: int, dcp_size: int = 1) -> float:
    """GiB of weights on one of `tp_size` GPUs, under DCP with sglang's default, a replicated query projection.

    ValueError: the model lacks dimensions, or a size is not a positive integer.
    """
    require_positive(tp_size=tp_size, dcp_size=dcp_size)
    c, layers = count_weights(model), model.num_hidden_layers
    # sglang takes the latent's projection apart when it has loaded it: bfloat16, one half on either side.
    query = _FP8 * c.query + _BF16 * c.latent_keys
    output = _FP8 * c.output + _BF16 * c.latent_values
    routed = expert_bytes * c.experts + _FP8 * c.shared_experts
    total = layers * (_FP8 * c.low_rank + query * dcp_size / tp_size + output / tp_size)
    total += len(model.indexer_layers) * (_FP8 * c.indexer + _BF16 * c.indexer_gate)
    total += c.dense_layers * _FP8 * c.dense_mlp / tp_size
    total += c.moe_layers * (routed * c.expert / tp_size + _BF16 * c.router)
    total += 2 * _BF16 * c.vocabulary / tp_size
    return total / GIB
