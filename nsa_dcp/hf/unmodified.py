"""The unmodified transformers model, one prompt at a time: what the engine is checked against.

It shares nothing with the engine but the checkpoint: no paging, no sharding, no absorbed projections, no selection.
For a rounding cache it rounds what it caches too: transformers caches the latent and the index key before they are
expanded, so a cache that stores them rounded is all it takes. The FP8 arithmetic is written out here on its own.
"""

from collections.abc import Callable
from typing import Any

import torch

_Cache: Any = object  # what stands behind it is DynamicCache, known once transformers is imported


class _RoundingCache(_Cache):
    """Mixed into transformers' DynamicCache: what it stores, it stores rounded."""

    kv_cache_dtype: str

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        # transformers passes the normalised latent as the key and the rotated shared key as the value.
        if self.kv_cache_dtype == "fp8_e4m3":
            key_states = _round_fp8(key_states, group=128)
        else:
            key_states = _round_bf16(key_states)
        return super().update(key_states, _round_bf16(value_states), layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        if self.kv_cache_dtype == "fp8_e4m3":
            indexer_key_states = _round_fp8(indexer_key_states, group=indexer_key_states.shape[-1])
        return super().update_indexer(indexer_key_states, layer_idx)


class _RoundingKvCache(_Cache):
    """The same for keys and values by head: in FP8 each value on its own, under scale 1."""

    kv_cache_dtype: str

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        round_ = _round_plain_fp8 if self.kv_cache_dtype == "fp8_e4m3" else _round_bf16
        return super().update(round_(key_states), round_(value_states), layer_idx, *args, **kwargs)


def _round_plain_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clip(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _round_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _round_fp8(x: torch.Tensor, group: int) -> torch.Tensor:
    values = x.float().unflatten(-1, (-1, group))
    step = values.abs().max(dim=-1, keepdim=True).values / 448
    # A group of zeros, or so small that no normal step would reach it, is kept as zeros.
    step = step.masked_fill(step < torch.finfo(torch.float32).tiny, 1)
    inverse = 1 / step
    return ((values * inverse).to(torch.float8_e4m3fn).float() * step).flatten(-2).to(x.dtype)


@torch.inference_mode()
def generate_unmodified(
    model: Any,
    prompt_ids: list[int],
    max_new_tokens: int,
    eos_ids: frozenset[int] = frozenset(),
    kv_cache_dtype: str = "float32",
    on_logits: Callable[[torch.Tensor], None] | None = None,
) -> list[int]:
    """Generate greedily with transformers' own forward and cache.

    Args:
        model: an unmodified transformers model of a served architecture.
        prompt_ids: the prompt.
        max_new_tokens: at most.
        eos_ids: ids that end the generation; they are part of it.
        kv_cache_dtype: "float32" caches as computed, "bfloat16" and "fp8_e4m3" what a cache of that format reads back.
        on_logits: called with the [vocab] logits of each generated token.

    Returns:
        The generated ids.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    if kv_cache_dtype != "float32":
        rounding = _RoundingCache if hasattr(model.config, "kv_lora_rank") else _RoundingKvCache
        cache.__class__ = type("RoundingDynamicCache", (rounding, DynamicCache), {})
        cache.kv_cache_dtype = kv_cache_dtype
    output: list[int] = []
    new_tokens = prompt_ids
    while len(output) < max_new_tokens and not (output and output[-1] in eos_ids):
        ids = torch.tensor([new_tokens], device=model.device)
        logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        if on_logits:
            on_logits(logits)
        output.append(int(logits.argmax()))
        new_tokens = output[-1:]
    return output
