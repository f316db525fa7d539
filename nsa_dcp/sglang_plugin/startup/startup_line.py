"""The line in a scheduler's log that says what nsa-dcp serves: mode, group, kernel, bytes per token, buffer budgets,
and what else is held beside the pools.

`nsa-dcp serves {...}`, the braces being JSON. Byte counts are of the pool that was really built, not of a plan.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from nsa_dcp.planning.capacity import TemporaryBuffers
from nsa_dcp.planning.held_memory import HeldMemory

PREFIX = "nsa-dcp serves "


def startup_line(
    *,
    mode: str,
    group_ranks: Sequence[int],
    gathered_heads: int,
    head_bucket: int,
    comm_backend: str,
    pool: Any,
    buffers: TemporaryBuffers,
    held: HeldMemory,
    topk: str,
    cp_strategy: str | None = None,
    wire_bytes: int | None = None,
) -> str:
    """The line.

    Args:
        mode: `TP-DCP` or `CP-DCP`.
        group_ranks: global ranks of this rank's DCP group, in order.
        gathered_heads, head_bucket: query heads of an attention call, and those of the kernel that takes them.
        comm_backend: `a2a` or `ag_rs`.
        pool: sglang's DSATokenToKVPool of this rank.
        buffers: budgets, from `capacity.temporary_buffers`.
        held: what else lies beside the pools.
        topk: what selects: `exact`, or the name of sglang's top-k backend.
        cp_strategy: `interleave` or `zigzag` in CP-DCP.
        wire_bytes: of peer memory that the ranks exchange through, beside what is held; None: they use NCCL.

    ValueError: the group is empty.
    """
    if not group_ranks:
        raise ValueError("group_ranks must hold at least this rank, got none")
    line = {
        "mode": mode,
        **({"cp_strategy": cp_strategy} if cp_strategy else {}),
        "dcp_size": len(group_ranks),
        "dcp_group": list(group_ranks),
        "heads": gathered_heads,
        "head_bucket": head_bucket,
        "dcp_comm_backend": comm_backend,
        "wire": "nccl" if wire_bytes is None else "peer",
        **({} if wire_bytes is None else {"wire_bytes": wire_bytes}),
        "topk": topk,
        **pool_facts(pool, len(group_ranks)),
        "buffer_budget_bytes": {
            "gathered_q": buffers.gathered_q,
            "attention_scratch": buffers.attention_scratch,
            "exchange": buffers.exchange,
            "page_gather": buffers.page_gather,
            "dequantised": buffers.dequantised,
        },
        "held_bytes": held.as_bytes(),
    }
    return PREFIX + json.dumps(line)


def pool_facts(pool: Any, dcp_size: int) -> dict[str, float]:
    """What a pool holds: rows of this GPU, tokens of the group and of a unit of cached prefixes, and bytes per token on
    this GPU.

    Args:
        pool: `size` rows in pages of `page_size`; `kv_buffer`, one [rows, ...] tensor a layer;
            `index_k_with_scale_buffer`, one [pages, bytes] tensor a layer, of no pages where a layer owns no indexer.
        dcp_size: GPUs that share a request's latents.
    """
    slots = (pool.size + pool.page_size) * dcp_size
    return {
        "rows_per_gpu": pool.size,
        "tokens": pool.size * dcp_size,
        # The allocator hands out a page of every rank at once, and the radix cache keeps whole ones.
        "prefix_unit_tokens": pool.page_size * dcp_size,
        "latent_bytes_per_token": sum(rows[0].nbytes for rows in pool.kv_buffer) / dcp_size,
        "index_key_bytes_per_token": sum(pages.nbytes for pages in pool.index_k_with_scale_buffer) / slots,
    }
