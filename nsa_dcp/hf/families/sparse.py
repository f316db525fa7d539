"""DSA models in the embedded engine: their attention modules replaced, latents and index keys cached."""

from typing import Any

import torch

from nsa_dcp.cache import STORAGE_DTYPES, IndexKeyCache, LatentCache
from nsa_dcp.config import CacheConfig, ModelShape
from nsa_dcp.hf.attention import DcpAttention
from nsa_dcp.hf.ranks import Ranks
from nsa_dcp.hf.step import Step
from nsa_dcp.planning.prefill_ways import LayerSizes, PrefillRule


def sparse_shape(model: Any) -> ModelShape:
    """Read the dimensions that matter from a transformers model, its own attention in place.

    Raises:
        NotImplementedError: the architecture, or its row format, is not served.
    """
    config = model.config
    architecture = (getattr(config, "architectures", None) or ["(none named)"])[0]
    missing = [name for name in ("kv_lora_rank", "index_topk") if not hasattr(config, name)]
    # What the model built, not what a field says: DeepSeek's config class does not read `indexer_types`.
    layers = getattr(getattr(model, "model", None), "layers", ())
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    return ModelShape(
        architecture=architecture if not missing else f"{architecture} (without {', '.join(missing)})",
        num_hidden_layers=getattr(config, "num_hidden_layers", 0),
        num_attention_heads=getattr(config, "num_attention_heads", 0),
        kv_lora_rank=getattr(config, "kv_lora_rank", 0),
        qk_rope_head_dim=getattr(config, "qk_rope_head_dim", 0),
        index_head_dim=getattr(config, "index_head_dim", 0),
        index_topk=getattr(config, "index_topk", 0),
        indexer_layers=tuple(
            layer for layer, attention in enumerate(attentions) if getattr(attention, "indexer", None) is not None
        ),
    )


class SparseAttention:
    """What an engine holds for a DSA model."""

    def __init__(self, model: Any, shape: ModelShape, ranks: Ranks, cache_config: CacheConfig) -> None:
        """Allocate the caches and replace the model's attention modules.

        Args:
            model: a transformers `GlmMoeDsaForCausalLM` or `DeepseekV32ForCausalLM`, in evaluation mode.
            shape: its own.
            ranks: this rank's place.
            cache_config: what to cache and how much.
        """
        dcp = ranks.config.dcp_size
        size = cache_config.rows(dcp)
        dtype = STORAGE_DTYPES[cache_config.kv_cache_dtype]
        if dtype == torch.float32 and model.dtype == torch.float64:
            dtype = torch.float64
        # A bf16 cache rounds the latents; index keys it keeps as the model computes them.
        index_dtype = dtype if dtype == torch.uint8 else model.dtype
        self.latents = LatentCache(shape.num_hidden_layers, size, dtype, model.device, dcp, ranks.dcp_rank)
        own_rank = ranks.dcp_rank if ranks.config.shards_index_keys else None
        self.index_keys = IndexKeyCache(list(shape.indexer_layers), size, index_dtype, model.device, dcp, own_rank)
        for index, layer in enumerate(model.model.layers):
            layer.self_attn = DcpAttention(layer.self_attn, index, ranks, self.latents, self.index_keys)
        sizes = LayerSizes(
            dcp_size=dcp,
            heads=shape.num_attention_heads // ranks.config.tp_size,
            row_bytes=self.latents.bytes_per_row,
            topk=shape.index_topk,
            layers=shape.num_hidden_layers,
            selecting_layers=len(shape.indexer_layers),
            value_bytes=2 if model.device.type == "cuda" else model.dtype.itemsize,
            comm_backend=ranks.config.dcp_comm_backend,
            selections_travel=ranks.config.selection == "row_split",
        )
        self.prefill_rule: PrefillRule | None = PrefillRule(sizes, ranks.config.prefill)

    def arguments(self, step: Step) -> dict[str, Any]:
        """What the model's forward is given of a step."""
        return {"attention_mask": {"indexed_attention": None}, "step": step}

    def usage(self) -> dict[str, int]:
        """Measure what this rank's caches hold, by looking at them.

        Returns:
            latent_rows: rows of one layer that hold a token; latent_bytes: over all layers. index_tokens and
            index_key_bytes: the same of the index-key cache. latent_pool_bytes, index_pool_bytes: allocated.
        """
        rows, tokens = self.latents.count_rows(), self.index_keys.count_tokens()
        return {
            "latent_rows": rows,
            "latent_bytes": rows * self.latents.bytes_per_row * len(self.latents.layers),
            "latent_pool_bytes": sum(layer.nbytes for layer in self.latents.layers),
            "index_tokens": tokens,
            "index_key_bytes": tokens * self.index_keys.bytes_per_token,
            "index_pool_bytes": sum(layer.nbytes for layer in self.index_keys.layers.values()),
        }
