"""What has been built, for the line in a scheduler's log: sizes, and the largest buffers that its steps will take."""

from __future__ import annotations

import dataclasses
from typing import Any

from nsa_dcp.planning.capacity import TemporaryBuffers, temporary_buffers
from nsa_dcp.planning.dimensions import dims_from_config
from nsa_dcp.sglang_plugin.attention.cp_pages import buffer_bytes
from nsa_dcp.sglang_plugin.startup.served_sizes import (
    count_held_memory,
    gather_buffer_pages,
    read_shape,
    read_sizes,
    served_dtype,
)
from nsa_dcp.sglang_plugin.startup.startup_line import startup_line
from nsa_dcp.wire import PeerWire


def describe_server(model_runner: Any, parallel: Any, topk: str, wire: PeerWire | None = None) -> str:
    """Return the log line of what is served: group, heads, bytes per token, buffers of the largest steps.

    Args:
        model_runner: sglang's ModelRunner, its model loaded and its pools built.
        parallel: sglang's parallel context.
        topk: what selects, of `patches.use_exact_topk`.
        wire: the DCP group's, if it has one.
    """
    shape = read_shape(model_runner, parallel)
    return startup_line(
        **shape.line_fields(),
        group_ranks=parallel.dcp_group.ranks,
        comm_backend=parallel.dcp_comm_backend,
        pool=model_runner.token_to_kv_pool,
        buffers=_count_buffers(model_runner, parallel),
        held=count_held_memory(model_runner, parallel),
        topk=topk,
        wire_bytes=None if wire is None else wire.nbytes,
    )


def _count_buffers(model_runner: Any, parallel: Any) -> TemporaryBuffers:
    pool, dcp_size = model_runner.token_to_kv_pool, parallel.attn_dcp_size
    dims = dims_from_config(model_runner.model_config.hf_config.to_dict(), name="served", source="the server")
    sizes, shape = read_sizes(model_runner, parallel), read_shape(model_runner, parallel)

    def count(rows: int, attended_rows: int) -> TemporaryBuffers:
        # No context: TP-DCP gathers queries alone, and CP-DCP's gather buffer is counted as it was made.
        return temporary_buffers(
            dims,
            served_dtype(pool),
            dcp_size,
            local_heads=shape.kept_heads,
            rows=rows,
            context=0,
            pool_rows=attended_rows,
        )

    pool_rows = pool.size + pool.page_size
    if not sizes.spread:
        return count(sizes.rows, pool_rows)
    # What every rank works on: a decode step; and with zigzag a whole chunk, if it holds one short request.
    replicated = count(sizes.rows if sizes.zigzag else sizes.requests * sizes.rows_per_request, pool_rows)
    pages = gather_buffer_pages(model_runner, parallel)
    spread = count(-(-sizes.rows // dcp_size), pages * dcp_size * pool.page_size)
    return dataclasses.replace(
        replicated,
        attention_scratch=max(replicated.attention_scratch, spread.attention_scratch),
        # A spread chunk exchanges no results, but merges two where its pages are gathered in parts.
        exchange=max(replicated.exchange, spread.exchange),
        page_gather=buffer_bytes(pages, dcp_size, pool.kv_buffer[0][0].nbytes),
        dequantised=max(replicated.dequantised, spread.dequantised),
    )
