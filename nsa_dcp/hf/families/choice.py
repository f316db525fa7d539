"""The attention families of the embedded engine: which one a model is of, and what an engine asks of it."""

from typing import Any, Protocol

from nsa_dcp.config import CacheConfig, DcpConfig, ModelShape
from nsa_dcp.hf.families.kv_heads import KvHeadAttention, kv_head_shape
from nsa_dcp.hf.families.sparse import SparseAttention, sparse_shape
from nsa_dcp.hf.ranks import Ranks
from nsa_dcp.hf.step import Step
from nsa_dcp.kv_heads.config import KvHeadShape
from nsa_dcp.planning.kv_heads.dims import KV_HEAD_ARCHITECTURES
from nsa_dcp.planning.prefill_ways import PrefillRule


class Shape(Protocol):
    """The dimensions that decide how a model can be split."""

    def check_split(self, config: DcpConfig) -> None:
        """Refuse ranks that the model cannot be split over. Raises ValueError or NotImplementedError."""


class Attention(Protocol):
    """A model's attention under DCP: this rank's caches, and how a step reaches the layers.

    prefill_rule: which way a prompt goes; None where there is one way alone.
    """

    prefill_rule: PrefillRule | None

    def arguments(self, step: Step) -> dict[str, Any]:
        """What the model's forward is given of a step."""

    def usage(self) -> dict[str, int]:
        """What this rank's caches hold, in rows and bytes."""


def model_shape(model: Any) -> ModelShape | KvHeadShape:
    """Read the dimensions that matter from a transformers model, its own attention in place.

    Raises:
        NotImplementedError: the architecture, or something in its attention, is not served.
    """
    architectures = getattr(model.config, "architectures", None) or [""]
    return kv_head_shape(model) if architectures[0] in KV_HEAD_ARCHITECTURES else sparse_shape(model)


def take_over_attention(
    model: Any, shape: ModelShape | KvHeadShape, ranks: Ranks, cache_config: CacheConfig
) -> Attention:
    """Allocate a model's caches and put its attention under DCP.

    Args:
        model: a transformers model, in evaluation mode.
        shape: of `model_shape`; it has been checked against the ranks.
        ranks: this rank's place.
        cache_config: what to cache and how much.
    """
    if isinstance(shape, KvHeadShape):
        return KvHeadAttention(model, shape, ranks, cache_config)
    return SparseAttention(model, shape, ranks, cache_config)
