"""A prefill's index keys, gathered by our own kernel: sglang's multiplies a page by its 8,448 bytes in 32 bits.

DCP keeps the keys of dcp_size times a rank's rows on every rank, so a pool of more than 16,268,800 tokens has pages
past 2**31 bytes (`planning/limits.py`), and sglang's gather would score a prompt against other memory.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_dcp.sglang_plugin.compat import require
from nsa_dcp_kernels import gather_index_pages
from nsa_dcp_kernels.kv_format import INDEX_HEAD_DIM, INDEX_KEY_BYTES, PAGE_SIZE


class WideIndexKeyGather:
    """Stands in a pool's index-key cache for its `get_k_and_scale`.

    Args:
        cache: sglang's IndexKeyCache.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __call__(
        self,
        layer_id: int,
        seq_len_tensor: torch.Tensor,
        page_indices: torch.Tensor,
        seq_len_sum: int,
        max_seq_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the keys of a batch's contexts.

        Args:
            layer_id: a layer that owns an indexer.
            seq_len_tensor: [B] int32 or int64, tokens of each context.
            page_indices: [B, P] int32, pages of each, in order.
            seq_len_sum, max_seq_len: of `seq_len_tensor`.

        Returns:
            keys [seq_len_sum, 128] and scales [seq_len_sum, 4], both uint8.
        """
        pages = self.cache.get_buffer(layer_id)
        return gather_index_pages(pages, page_indices, seq_len_tensor, int(seq_len_sum), int(max_seq_len))


def check_index_keys(pool: Any) -> None:
    """Raise unless a pool's index keys are laid out as the kernel reads them.

    Args:
        pool: sglang's DSATokenToKVPool, the target's or a draft's.

    Raises:
        RuntimeError: they are not.
    """
    from sglang.srt.mem_cache.index_key_cache import IndexKeyCache

    cache = pool.index_key_cache
    require(type(cache) is IndexKeyCache, "an IndexKeyCache in the pool", type(cache).__name__)
    require(pool.index_head_dim == INDEX_HEAD_DIM, f"index keys of {INDEX_HEAD_DIM} values", pool.index_head_dim)
    require(pool.index_page_size == PAGE_SIZE, f"index keys in pages of {PAGE_SIZE}", pool.index_page_size)
    for layer, pages in enumerate(cache.buffer):
        if pages.shape[0]:
            width = PAGE_SIZE * INDEX_KEY_BYTES
            require(
                pages.dtype == torch.uint8 and pages.shape[1] == width,
                f"index-key pages of {width} bytes in layer {layer}",
                f"{list(pages.shape)} of {pages.dtype}",
            )
