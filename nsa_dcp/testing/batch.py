"""A batch of requests in a paged pool. Every rank draws the whole of it from one seed and keeps its part."""

from dataclasses import dataclass

import torch

from nsa_dcp.cache import IndexKeyCache, LatentCache
from nsa_dcp.testing.cases import poison_
from nsa_dcp_kernels import pack_latent, unpack_latent
from nsa_dcp_kernels.kv_format import INDEX_HEAD_DIM, LATENT_DIM
from nsa_dcp_kernels.reference import quantise_tiles

PAGE = 64
# Stands behind a request's pages in a page table: reading a cache there raises.
UNUSED_PAGE = 1 << 20


@dataclass(frozen=True)
class Batch:
    """Requests, their pages and their tokens.

    dcp_size: ranks. size: rows that tokens can use on each.
    seq_lens: tokens per request. pages: widened pages per request, in order, scattered over the pool.
    latents: [n, 576] float64 per request. index_keys: [n, 128] float64 per request.
    """

    dcp_size: int
    size: int
    seq_lens: list[int]
    pages: list[list[int]]
    latents: list[torch.Tensor]
    index_keys: list[torch.Tensor]

    @property
    def num_pages(self) -> int:
        """Widened pages of the pool, the reserved one included."""
        return self.size // PAGE + 1

    @property
    def page_table(self) -> torch.Tensor:
        """[B, P] int32, a column wider than any request needs."""
        table = torch.full((len(self.pages), max(map(len, self.pages), default=0) + 1), UNUSED_PAGE, dtype=torch.int32)
        for request, pages in enumerate(self.pages):
            table[request, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table

    def slots(self, request: int) -> list[int]:
        """Slot of each position of a request."""
        page_slots = PAGE * self.dcp_size
        return [
            self.pages[request][position // page_slots] * page_slots + position % page_slots
            for position in range(self.seq_lens[request])
        ]

    def latent_cache(self, dcp_rank: int, dtype: torch.dtype) -> LatentCache:
        """A rank's latents of one layer: poison wherever no token was written."""
        cache = LatentCache(1, self.size, dtype, torch.device("cpu"), self.dcp_size, dcp_rank)
        poison_(cache.layers[0])
        slots, latents = self._tokens(self.latents, LATENT_DIM)
        cache.write(0, latents[:, :512].contiguous(), latents[:, 512:].contiguous(), slots)
        return cache

    def index_cache(self, dtype: torch.dtype, own_rank: int | None = None) -> IndexKeyCache:
        """A rank's index keys of one layer, every token's or its own: poison wherever no token was written."""
        cache = IndexKeyCache([0], self.size, dtype, torch.device("cpu"), self.dcp_size, own_rank)
        poison_(cache.layers[0])
        slots, keys = self._tokens(self.index_keys, INDEX_HEAD_DIM)
        cache.write(0, keys, slots)
        return cache

    def _tokens(self, values: list[torch.Tensor], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and values of all tokens; one that requests share comes once."""
        by_slot = {
            slot: values[request][position]
            for request in range(len(self.pages))
            for position, slot in enumerate(self.slots(request))
        }
        stacked = torch.stack(list(by_slot.values())) if by_slot else torch.zeros(0, width, dtype=torch.float64)
        return torch.tensor(list(by_slot), dtype=torch.int32), stacked


def latents_as_stored(latents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[L, 576] -> [L, 576], rounded to what a cache of `dtype` holds (torch.uint8: packed FP8)."""
    if dtype != torch.uint8:
        return latents.to(dtype)
    return unpack_latent(pack_latent(latents[:, :512].contiguous(), latents[:, 512:].contiguous()))


def index_keys_as_stored(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[L, 128] -> [L, 128], rounded to what a cache of `dtype` holds (torch.uint8: FP8 with a scale per key)."""
    if dtype != torch.uint8:
        return keys.to(dtype)
    quantised, scale = quantise_tiles(keys.float())
    return quantised.float() * scale.unsqueeze(-1)


def draw_batch(seq_lens: list[int], dcp_size: int, seed: int = 0, shared_pages: int = 0) -> Batch:
    """Draw a batch.

    Args:
        seq_lens: tokens per request; 0 is a request without pages.
        dcp_size: ranks.
        seed: of the draw.
        shared_pages: widened pages at the start of request 0 that all requests have in common.
    """
    generator = torch.Generator().manual_seed(seed)
    page_slots = PAGE * dcp_size
    counts = [-(-length // page_slots) for length in seq_lens]
    # Three pages stay unused; page 0 is never handed out.
    size = PAGE * (sum(counts) + 3)
    free = (torch.randperm(size // PAGE, generator=generator) + 1).tolist()
    pages: list[list[int]] = []
    latents: list[torch.Tensor] = []
    index_keys: list[torch.Tensor] = []
    for request, (length, count) in enumerate(zip(seq_lens, counts)):
        latent = torch.randn(length, 576, generator=generator, dtype=torch.float64)
        key = torch.randn(length, 128, generator=generator, dtype=torch.float64)
        common = shared_pages if request else 0
        if common:
            latent[: common * page_slots] = latents[0][: common * page_slots]
            key[: common * page_slots] = index_keys[0][: common * page_slots]
        pages.append([*(pages[0][:common] if common else []), *[free.pop() for _ in range(count - common)]])
        latents.append(latent)
        index_keys.append(key)
    return Batch(dcp_size, size, seq_lens, pages, latents, index_keys)


@dataclass(frozen=True)
class Precision:
    """A cache's dtype (torch.uint8: packed FP8), the queries' dtype, and the relative RMS error that they leave."""

    storage: torch.dtype
    query: torch.dtype
    rms: float


PRECISIONS = (
    Precision(torch.float64, torch.float64, 1e-12),
    Precision(torch.float32, torch.float32, 2e-6),
    Precision(torch.bfloat16, torch.bfloat16, 8e-3),
    Precision(torch.uint8, torch.float32, 2e-6),
    Precision(torch.uint8, torch.bfloat16, 8e-3),
)
