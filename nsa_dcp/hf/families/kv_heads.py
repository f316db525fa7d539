"""Models with KV heads (GQA, MHA) in the embedded engine: transformers' attention function replaced, no module.

transformers hands an attention function the queries, keys and values of a step, normed and rotated. Every rank computes
all of them; it keeps its own heads' and caches its own tokens', and the heads' results are gathered for the model's
output projection.
"""

from dataclasses import dataclass
from typing import Any

import torch

from nsa_dcp import comm
from nsa_dcp.cache import KeyValueCache
from nsa_dcp.config import CacheConfig
from nsa_dcp.hf.ranks import Ranks
from nsa_dcp.hf.step import Step
from nsa_dcp.kv_heads.config import KvHeadShape
from nsa_dcp.kv_heads.context_attention import LocalContext, attend_cached, attend_extended
from nsa_dcp.layout import local_seq_lens
from nsa_dcp.planning.kv_heads.sizes import kv_head_of
from nsa_dcp.planning.prefill_ways import PrefillRule
from nsa_dcp_kernels import round_kv

# Under this name transformers knows the function; it makes no mask for a name that it has none for.
_NAME = "nsa_dcp_kv_heads"
_STORAGE_DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
# Arguments of an attention function that would change what a query sees or how it is weighed.
_UNSERVED = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias")


def kv_head_shape(model: Any) -> KvHeadShape:
    """Read the dimensions that matter from a transformers model.

    Raises:
        NotImplementedError: the architecture, or something in its attention, is not served.
    """
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    for layer in model.model.layers:
        window = getattr(layer.self_attn, "sliding_window", None)
        if window is not None:
            raise NotImplementedError(f"sliding_window must be null, got {window}: a window is not spread over ranks")
        widths = {name: getattr(layer.self_attn, name).weight.shape[0] for name in ("k_proj", "v_proj")}
        if set(widths.values()) != {config.num_key_value_heads * head_dim}:
            raise NotImplementedError(
                f"keys and values must be {config.num_key_value_heads} heads of {head_dim}, got projections to {widths}"
            )
    return KvHeadShape(
        architecture=(config.architectures or ["(none named)"])[0],
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=head_dim,
    )


class KvHeadAttention:
    """What an engine holds for a model with KV heads."""

    def __init__(self, model: Any, shape: KvHeadShape, ranks: Ranks, cache_config: CacheConfig) -> None:
        """Allocate the cache and put the attention function in place.

        Args:
            model: a transformers model of one of KV_HEAD_ARCHITECTURES, in evaluation mode, on a CPU.
            shape: its own.
            ranks: this rank's place.
            cache_config: what to cache and how much.

        Raises:
            NotImplementedError: the model is on a GPU.
        """
        from transformers import AttentionInterface

        if model.device.type != "cpu":
            raise NotImplementedError(
                f"device must be cpu for models with KV heads, whose attention has no kernel yet, got {model.device}"
            )
        config = ranks.config
        self.ranks = ranks
        # A row attends to its whole context: there are no selections to own.
        self.prefill_rule: PrefillRule | None = None
        kv_heads, heads = (
            max(shape.num_key_value_heads // config.tp_size, 1),
            shape.num_attention_heads // config.tp_size,
        )
        first = kv_head_of(ranks.rank, config.tp_size, shape.num_key_value_heads)
        self.kv_heads = slice(first, first + kv_heads)
        self.heads = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
        self.cache = KeyValueCache(
            shape.num_hidden_layers,
            cache_config.rows(config.dcp_size),
            kv_heads,
            shape.head_dim,
            _STORAGE_DTYPES.get(cache_config.kv_cache_dtype, model.dtype),
            model.device,
            config.dcp_size,
            ranks.dcp_rank,
        )
        AttentionInterface.register(_NAME, _attend)
        model.set_attn_implementation(_NAME)

    def arguments(self, step: Step) -> dict[str, Any]:
        """What the model's forward is given of a step."""
        config, dcp_rank = self.ranks.config, self.ranks.dcp_rank
        if len(step.last_rows) == len(step.row_request):
            # One token of each request: it is cached before it is attended to, and needs no mask.
            lengths = local_seq_lens(step.context_lens, config.dcp_size, dcp_rank)
            return {"attention_mask": None, "step": _KvHeadStep(self, step, lengths, None, True)}
        starts = torch.cat([step.last_rows.new_zeros(1), step.last_rows + 1])
        prefix = step.context_lens[starts[:-1]] - 1
        lengths = local_seq_lens(prefix, config.dcp_size, dcp_rank)
        return {"attention_mask": None, "step": _KvHeadStep(self, step, lengths, starts, bool((prefix > 0).any()))}

    def usage(self) -> dict[str, int]:
        """Measure what this rank's cache holds, by looking at it.

        Returns:
            kv_rows: rows of one layer that hold a token; kv_bytes: over all layers. kv_pool_bytes: allocated.
        """
        rows = self.cache.count_rows()
        return {
            "kv_rows": rows,
            "kv_bytes": rows * self.cache.bytes_per_row * len(self.cache.layers),
            "kv_pool_bytes": sum(keys.nbytes + values.nbytes for keys, values in self.cache.layers),
        }


@dataclass(frozen=True)
class _KvHeadStep:
    """A step, and what its layers share.

    lengths: [B] int32, rows on this rank of what is attended to in the cache. starts: [B + 1] int64, of the requests'
    tokens; None in a decode step. has_context: whether anything is attended to in the cache, on any rank.
    """

    attention: KvHeadAttention
    step: Step
    lengths: torch.Tensor
    starts: torch.Tensor | None
    has_context: bool

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
        """Cache a layer's new tokens and attend.

        Args:
            layer: index.
            q: [T, H, D]; k, v: [T, K, D]. Of all heads.
            sm_scale: multiplies q . k before the softmax.

        Returns:
            [T, H, D], all heads.
        """
        attention, step = self.attention, self.step
        config, group = attention.ranks.config, attention.ranks.dcp_group
        q, k, v = q[:, attention.heads], k[:, attention.kv_heads], v[:, attention.kv_heads]
        cache = attention.cache
        cache.write(layer, k, v, step.slots)
        context = LocalContext(*cache.layers[layer], step.page_table, self.lengths, step.row_request)
        if self.starts is None:
            out = attend_cached(q, context, sm_scale, group, config.dcp_comm_backend)
        else:
            k, v = round_kv(k, cache.dtype), round_kv(v, cache.dtype)
            prefix = context if self.has_context else None
            out = attend_extended(q, k, v, self.starts, prefix, sm_scale, group, config.dcp_comm_backend)
        return comm.gather_heads(out, attention.ranks.tp_group)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step: _KvHeadStep,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    asked = [name for name in _UNSERVED if others.get(name) is not None]
    if attention_mask is not None or asked:
        raise NotImplementedError(
            f"attention must be causal over the whole context for models with KV heads, got "
            f"{', '.join(asked) or 'a mask'} in layer {module.layer_idx}"
        )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return step.attend(module.layer_idx, q, k, v, scaling).unsqueeze(0), None
