"""The paged caches of one rank, and the allocator of the widened pages that all are addressed by.

Latent cache: this rank's share of every layer's tokens, `size + page_size` rows. Index-key cache, for the layers that
own an indexer: every token, `(size + page_size) * dcp_size` slots; or, where index keys are sharded, the same tokens as
the latents, in the same rows. Key and value cache, of models with KV heads: as the latents. The first widened page is
never handed out: padding may be written there.
"""

import torch

from nsa_dcp.layout import widened_page_size
from nsa_dcp_kernels import scatter_index_keys_, scatter_kv_, scatter_latent_
from nsa_dcp_kernels.kv_format import INDEX_HEAD_DIM, INDEX_KEY_BYTES, LATENT_BYTES, LATENT_DIM, PAGE_SIZE
from nsa_dcp_kernels.reference import owned_slots

STORAGE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.uint8,
}


class LatentCache:
    """One rank's share of the MLA latents.

    layers: one tensor per layer: [size + page_size, 656] uint8 (packed FP8) or [size + page_size, 576].
    """

    def __init__(
        self, num_layers: int, size: int, dtype: torch.dtype, device: torch.device, dcp_size: int, dcp_rank: int
    ) -> None:
        """Allocate.

        Args:
            num_layers: layers.
            size: rows that tokens can use on this rank, a multiple of the page size.
            dtype: torch.uint8 for packed FP8, else a floating-point dtype.
            device: where.
            dcp_size, dcp_rank: this rank's place.
        """
        width = LATENT_BYTES if dtype == torch.uint8 else LATENT_DIM
        shape = (size + PAGE_SIZE, width)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.dcp_size, self.dcp_rank = dcp_size, dcp_rank
        self._written = _WrittenRows(shape[0], device)

    def write(self, layer: int, k_nope: torch.Tensor, k_rope: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep the tokens that this rank owns, quantised at most once.

        Args:
            layer: index.
            k_nope: [T, 512]. The whole step's tokens.
            k_rope: [T, 64].
            slots: [T] int32; -1 is skipped.
        """
        scatter_latent_(self.layers[layer], k_nope, k_rope, slots, self.dcp_size, self.dcp_rank)
        if not layer:
            self._written.mark(slots // self.dcp_size, owned_slots(slots, self.dcp_size, self.dcp_rank, 1))

    def count_rows(self) -> int:
        """Rows of the first layer that were ever written, also with zeros."""
        return self._written.count()

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token in one layer."""
        return self.layers[0].shape[1] * self.layers[0].itemsize


class IndexKeyCache:
    """Index keys of the layers that own an indexer: every token's, on every rank, or of this rank's tokens alone.

    layers: layer index -> [pages, 64 * 132] uint8 (FP8 keys with a scale each) or [slots, 128].
    """

    def __init__(
        self,
        owning_layers: list[int],
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        dcp_size: int,
        own_rank: int | None = None,
    ) -> None:
        """Allocate.

        Args:
            owning_layers: layers that own an indexer; the others reuse an earlier layer's selection.
            size: rows that tokens can use on one rank's *latent* cache.
            dtype: torch.uint8 for FP8, else a floating-point dtype.
            device: where.
            dcp_size: ranks that share the latents.
            own_rank: this rank's place, where it keeps its own tokens' keys in the latents' rows. None: every token's,
                over all ranks' slots.
        """
        self.shards, self.shard = (1, 0) if own_rank is None else (dcp_size, own_rank)
        slots = (size + PAGE_SIZE) * dcp_size // self.shards
        shape = (slots // PAGE_SIZE, PAGE_SIZE * INDEX_KEY_BYTES) if dtype == torch.uint8 else (slots, INDEX_HEAD_DIM)
        self.layers = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in owning_layers}
        self._written = _WrittenRows(slots, device)

    def write(self, layer: int, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep the step's index keys, or those that this rank owns.

        Args:
            layer: index of a layer that owns an indexer.
            keys: [T, 128]. The whole step's.
            slots: [T] int32, undivided; -1 is skipped.
        """
        scatter_index_keys_(self.layers[layer], keys, slots, self.shards, self.shard)
        if layer == next(iter(self.layers)):
            self._written.mark(slots // self.shards, owned_slots(slots, self.shards, self.shard, 1))

    def count_tokens(self) -> int:
        """Slots of the first owning layer that were ever written, also with zeros."""
        return self._written.count()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all owning layers."""
        per_layer = {
            INDEX_KEY_BYTES if cache.dtype == torch.uint8 else INDEX_HEAD_DIM * cache.itemsize
            for cache in self.layers.values()
        }
        return per_layer.pop() * len(self.layers) if per_layer else 0


class KeyValueCache:
    """One rank's share of the keys and values of its KV heads.

    layers: one pair per layer, keys and values: [size + page_size, K, D] each, halves of one allocation.
    """

    def __init__(
        self,
        num_layers: int,
        size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        dcp_size: int,
        dcp_rank: int,
    ) -> None:
        """Allocate.

        Args:
            num_layers: layers.
            size: rows that tokens can use on this rank, a multiple of the page size.
            num_kv_heads: KV heads of this rank.
            head_dim: values of a head.
            dtype: floating-point; torch.float8_e4m3fn holds values under scale 1.
            device: where.
            dcp_size, dcp_rank: this rank's place.
        """
        shape = (2, size + PAGE_SIZE, num_kv_heads, head_dim)
        pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.layers = [(pool[0], pool[1]) for pool in pools]
        self.dtype, self.dcp_size, self.dcp_rank = dtype, dcp_size, dcp_rank
        self._written = _WrittenRows(shape[1], device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep the tokens that this rank owns, rounded once.

        Args:
            layer: index.
            k, v: [T, K, D]. The whole step's tokens.
            slots: [T] int32; -1 is skipped.
        """
        scatter_kv_(*self.layers[layer], k, v, slots, self.dcp_size, self.dcp_rank)
        if not layer:
            self._written.mark(slots // self.dcp_size, owned_slots(slots, self.dcp_size, self.dcp_rank, 1))

    def count_rows(self) -> int:
        """Rows of the first layer that were ever written, also with zeros."""
        return self._written.count()

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        keys = self.layers[0][0]
        return 2 * keys[0].numel() * keys.itemsize


class _WrittenRows:
    """Which rows of a cache were ever written. What they hold does not tell: a token's latent may be all zeros."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        """Args: num_rows, of the cache; device, where."""
        # One more, for what is not written: every step marks as many entries as it has tokens, in a graph too.
        self._marks = torch.zeros(num_rows + 1, dtype=torch.bool, device=device)

    def mark(self, rows: torch.Tensor, written: torch.Tensor) -> None:
        """Args: rows, [T] integers; written, [T] bool, which of them count."""
        self._marks.index_fill_(0, torch.where(written, rows, self._marks.shape[0] - 1).long(), True)

    def count(self) -> int:
        """Rows that were marked."""
        return int(self._marks[:-1].sum())


class PageAllocator:
    """Hands out widened pages. Deterministic, so that every rank hands out the same ones without talking."""

    def __init__(self, size: int, dcp_size: int) -> None:
        """Args: size, rows that tokens can use on one rank; dcp_size, ranks that share the latents."""
        self.page_slots = widened_page_size(dcp_size)
        self.num_pages = size // PAGE_SIZE + 1
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Widened pages that can be handed out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` widened pages.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"count must be at most the {len(self._free)} free pages, got {count}")
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Take pages back.

        Raises:
            ValueError: a page is not handed out, or is named twice: it would be handed to two requests.
        """
        if len(set(pages)) != len(pages) or not self._held.issuperset(pages):
            raise ValueError(f"pages must be handed out and named once, got {pages}")
        self._held.difference_update(pages)
        self._free.extend(reversed(pages))
