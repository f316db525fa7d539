"""Zigzag context parallelism for sglang's DSA prefill, which knows interleave alone.

A rank has two blocks of every request: an early one and a late one. Its rows are the early blocks of all requests, then
their late blocks, so for whatever wants rows of a request side by side it looks like twice as many requests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def shard_metadata(whole: Any, forward_batch: Any, strategy: Any) -> Any:
    """Return a batch's DSA metadata as one zigzag rank sees it.

    Args:
        whole: sglang's DSAMetadata of the whole batch, in the order of its tokens.
        forward_batch: sglang's ForwardBatch, its attn_cp_metadata zigzag's.
        strategy: sglang's ZigzagCPStrategy.

    Returns:
        DSAMetadata whose per-token fields are this rank's rows, and whose page_table_1, cu_seqlens_q, cu_seqlens_k and
        lengths have one entry per block: the requests' early blocks, then their late ones. What the index keys are
        gathered by (real_page_table, indexer_seq_lens and the key ranges' origin) stays per request: every rank scores
        against every request.
    """
    blocks = forward_batch.attn_cp_metadata
    rows = strategy.local_q_indices(blocks.total_seq_lens, forward_batch).to(whole.dsa_seqlens_expanded.device)
    key_start, key_end = whole.indexer_k_start_end
    padding = blocks.per_rank_actual_token[strategy.cp_rank] - rows.shape[0]
    # Padding rows come last, and select nothing.
    selected = torch.nn.functional.pad(whole.dsa_cache_seqlens_int32[rows], (0, padding))
    block_lens = [*blocks.actual_seq_q_prev_list, *blocks.actual_seq_q_next_list]
    cache_seqlens = whole.cache_seqlens_int32.repeat(2)
    return dataclasses.replace(
        whole,
        cache_seqlens_int32=cache_seqlens,
        max_seq_len_q=max(block_lens),
        cu_seqlens_q=_cumulated(torch.tensor(block_lens, dtype=torch.int32, device=rows.device)),
        cu_seqlens_k=_cumulated(cache_seqlens),
        page_table_1=whole.page_table_1.repeat(2, 1),
        dsa_cache_seqlens_int32=selected,
        dsa_cu_seqlens_q=torch.arange(selected.shape[0] + 1, dtype=torch.int32, device=rows.device),
        dsa_cu_seqlens_k=_cumulated(selected),
        dsa_extend_seq_lens_list=block_lens,
        dsa_seqlens_expanded=whole.dsa_seqlens_expanded[rows],
        indexer_k_start_end=(key_start[rows], key_end[rows]),
        token_to_batch_idx=whole.token_to_batch_idx[rows],
        # Made for all rows, and nothing here reads it.
        topk_v2_plan=None,
    )


def gather_index_keys(strategy: Any, key: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """Stands in a zigzag strategy for its `materialize_full_indexer_k_cache`: a chunk's index keys, of all its tokens.

    Args:
        strategy: sglang's ZigzagCPStrategy.
        key: [T, 128], of this rank's tokens.
        forward_batch: sglang's ForwardBatch.
    """
    return strategy.gather_kv_cache(key.contiguous(), forward_batch)


def gather_latents(
    strategy: Any, forward_batch: Any, layer: Any, k_nope: torch.Tensor, k_rope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in a zigzag strategy for its `materialize_full_mla_kv`: a chunk's latents, of all its tokens.

    Args:
        strategy, forward_batch: as above.
        layer: not read.
        k_nope, k_rope: [T, 1, 512] and [T, 1, 64], of this rank's tokens.
    """
    latents = strategy.gather_kv_cache(torch.cat([k_nope, k_rope], dim=-1).contiguous(), forward_batch)
    return latents[..., : k_nope.shape[-1]], latents[..., k_nope.shape[-1] :]


def _cumulated(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
