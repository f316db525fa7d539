"""A pool's index keys, sharded as its latents are, and what sglang charges its budget for them.

Not served yet: `NSA_DCP_INDEX_KEYS=sharded` is refused before a server comes here. What decode and prefill select from
sharded keys is missing; what they would stand on is here, checked against sglang's own pool and configurator.

A widened page of 64 * dcp_size slots is one page of 64 index keys on every rank, at the page's own number. sglang sizes
its pools before an attention backend is built, so both objects are changed by its own hook registry, in every process
in which plugins are loaded. A hook that does not take is only logged there: whoever builds a backend must look at the
pool (`holds_own_index_keys`).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache

from nsa_dcp_kernels.kv_format import PAGE_SIZE


class ShardedIndexKeyCache(IndexKeyCache):
    """Stands in a pool for sglang's IndexKeyCache: this rank's tokens' keys, in the rows of their latents.

    Args:
        pool: sglang's DSATokenToKVPool, the target's.
        dcp_size, dcp_rank: this rank's place.
    """

    def __init__(self, pool: Any, dcp_size: int, dcp_rank: int) -> None:
        super().__init__(pool, pool.size)
        self.dcp_size, self.dcp_rank = dcp_size, dcp_rank

    def store_quantized(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Write the keys that this rank owns.

        Args:
            layer_id: a layer that owns an indexer.
            loc: [T] int32 or int64, slots of the widened pool.
            index_k, index_k_scale: the whole step's.
        """
        super().store_quantized(layer_id, localise_writes(loc, self.dcp_size, self.dcp_rank), index_k, index_k_scale)

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Refuse: a token would change its rank.

        Raises:
            NotImplementedError: a token is to be moved.
        """
        if tgt_loc.numel():
            raise NotImplementedError("sharded index keys cannot be moved: a slot's rank is part of it")

    def cpu_copy(self, indices: torch.Tensor) -> Any:
        """Copy a request's keys to the host, as sglang's own does with the pages of one rank."""
        return super().cpu_copy(self._own_rows(indices))

    def load_cpu_copy(self, index_k_cpu: Any, indices: torch.Tensor) -> None:
        """Copy them back, to other slots."""
        super().load_cpu_copy(index_k_cpu, self._own_rows(indices))

    def _own_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of the pages that a request's slots, in order, lie in: a page has 64 of them on this rank."""
        pages = slots[:: PAGE_SIZE * self.dcp_size] // (PAGE_SIZE * self.dcp_size)
        in_page = torch.arange(PAGE_SIZE, dtype=slots.dtype, device=slots.device)
        return (pages.unsqueeze(1) * PAGE_SIZE + in_page).flatten()


def localise_writes(slots: torch.Tensor, dcp_size: int, dcp_rank: int) -> torch.Tensor:
    """Where a rank writes the index keys of slots: its own row, or the reserved row 0, which nothing reads.

    sglang's writers skip no slot, so one that another rank owns needs a place.

    Args:
        slots: [T] int32 or int64, slots of the widened pool.
        dcp_size, dcp_rank: the rank's place.

    Returns:
        [T], dtype of `slots`.
    """
    return torch.where(slots % dcp_size == dcp_rank, slots // dcp_size, 0)


def create_index_key_cache(pool: Any) -> IndexKeyCache:
    """What stands for `DSATokenToKVPool._create_index_key_cache`: a draft's pool is whole on every rank, as ever."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_dcp_size == 1 or pool.dcp_replicated:
        return IndexKeyCache(pool, pool.index_buf_size)
    return ShardedIndexKeyCache(pool, parallel.attn_dcp_size, parallel.attn_dcp_rank)


def charge_own_index_keys(
    compute: Callable[..., int], configurator: Any, *, kvc: Any, num_layers: int, allocate_all_layers: bool = False
) -> int | Fraction:
    """What stands around `DefaultPoolConfigurator._compute_dsa_indexer_cell_size`.

    sglang multiplies the result by dcp_size, as every rank has every key. A fraction survives that exactly, for a
    dcp_size of 3 too. A draft's layers are whole on every rank.
    """
    from sglang.srt.runtime_context import get_parallel

    size = compute(configurator, kvc=kvc, num_layers=num_layers, allocate_all_layers=allocate_all_layers)
    if allocate_all_layers or kvc.is_draft_worker:
        return size
    return Fraction(size, get_parallel().attn_dcp_size)


def charge_whole_bytes(compute: Callable[..., Any], configurator: Any, *args: Any, **kwargs: Any) -> int:
    """What stands around `DefaultPoolConfigurator._compute_cell_size`: an integer again."""
    return int(compute(configurator, *args, **kwargs))


def register_hooks() -> None:
    """Have sglang change both objects when it applies its plugins' hooks, before it sizes a pool.

    Nothing but tests calls this: its place is `patches.py`, with its rows in docs/upstream.md, once servers shard.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pools = "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool"
    configurators = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
    HookRegistry.register(f"{pools}._create_index_key_cache", create_index_key_cache, HookType.REPLACE)
    HookRegistry.register(f"{configurators}._compute_dsa_indexer_cell_size", charge_own_index_keys, HookType.AROUND)
    HookRegistry.register(f"{configurators}._compute_cell_size", charge_whole_bytes, HookType.AROUND)


def holds_own_index_keys(pool: Any) -> bool:
    """Whether a pool has the cache above, with as many rows in every layer that selects as its latents have."""
    cache = pool.index_key_cache
    return type(cache) is ShardedIndexKeyCache and all(
        pages.shape[0] == (0 if pool.skip_topk_layers[layer] else pool.size // PAGE_SIZE + 1)
        for layer, pages in enumerate(cache.buffer)
    )
