"""Memory of a GPU that a server holds beside its pools, by what takes it: bytes as sglang 0.5.23 and we allocate them.

sglang sizes the pools first, from --mem-fraction-static, and allocates these afterwards from what is left. Working
buffers of a prefill chunk are `capacity.TemporaryBuffers`; weights, activations and graphs' own pools are neither's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from nsa_dcp.planning.limits import LIMITS, Sizes
from nsa_dcp.planning.served_format import (
    INDEX_KEY_BYTES,
    KV_LORA_RANK,
    LATENT_DIM,
    MOST_SMS,
    PAGE_SIZE,
    QK_ROPE_HEAD_DIM,
    padded_heads,
)

_INT, _FLOAT, _BF16 = 4, 4, 2
# sglang's --max-running-requests where none is given, for pools that hold few of the longest contexts, and its most.
DEFAULT_REQUESTS, MOST_DEFAULT_REQUESTS = 2_048, 4_096
_DEFAULT_REQUESTS_WITH_DRAFTS = 48
# Requests of the largest decode graph, by default.
DEFAULT_CAPTURED = 512


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """Bytes of one GPU beside its pools.

    Args:
        request_table: slots of every request's tokens, allocated at the start.
        graph_tables: page tables of the captured decode steps, allocated at the start.
        speculation: with drafts, tables of every slot of every row in the graphs of verify, draft and draft-extend
            steps, and a verify step's scores; allocated at the start.
        eager_decode: tables and scores of a step of more requests than the largest graph has, one of them the longest
            that fits, in a number that the ranks cannot share evenly: then each scores all rows, and joins them.
        joined_queries: a chunk's queries in the order that attention takes them, beside those gathered; twice where
            sglang's own concatenation would not reach their heads.
        selections: the selection that is attended to, held until the next: its slots, rows and aligned rows.
        gathered_index_keys: of one prompt of the longest context. A batch takes them of every request in it.
        draft_prefill: with drafts, FlashMLA's split results, padded queries and output for a chunk.
    """

    request_table: int
    graph_tables: int
    speculation: int
    eager_decode: int
    joined_queries: int
    selections: int
    gathered_index_keys: int
    draft_prefill: int

    @property
    def at_start(self) -> int:
        """Bytes that are there before the first request."""
        return self.request_table + self.graph_tables + self.speculation

    @property
    def total(self) -> int:
        """At most: what is there from the start, and the largest of what a prefill or an eager decode step takes."""
        prefill = self.joined_queries + self.selections + self.gathered_index_keys + self.draft_prefill
        return self.at_start + max(prefill, self.eager_decode)

    def as_bytes(self) -> dict[str, int]:
        """Each part by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def default_requests(pool_rows: int, context: int, draft_tokens: int = 0) -> int:
    """Requests that sglang runs at once where --max-running-requests is left out.

    Args:
        pool_rows: rows of one GPU's pool, which is what sglang counts here.
        context: the longest request that the server admits.
        draft_tokens: of a verify step; 0 without speculation.
    """
    if draft_tokens:
        return _DEFAULT_REQUESTS_WITH_DRAFTS
    return max(min(pool_rows * 512 // context, MOST_DEFAULT_REQUESTS), DEFAULT_REQUESTS)


def request_table_columns(context: int, dcp_size: int, draft_tokens: int = 0) -> int:
    """Slots that the request table has for each request: the context, and headroom for what is allocated ahead."""
    headroom = 4 + draft_tokens
    if draft_tokens:
        # Two steps are allocated ahead, in whole pages of the group.
        headroom = max(headroom, 2 * draft_tokens + PAGE_SIZE * dcp_size - 1)
    return context + headroom


def held_memory(sizes: Sizes, *, longest: int, captured: int = DEFAULT_CAPTURED, draft_tokens: int = 0) -> HeldMemory:
    """Bytes beside the pools of one GPU.

    Args:
        sizes: `rows`, `local_heads`, `attended_heads`, `dcp_size`, `spread`, `zigzag`, `index_topk`, `requests` and
            `context` count; `context` is the request table's columns.
        longest: the longest context that the pool can hold, at most the one that the server admits.
        captured: requests of the largest decode graph; 0 without graphs.
        draft_tokens: rows of a request in a verify step; 0 without speculation.
    """
    captured = min(captured, sizes.requests)
    pages = -(-sizes.context // PAGE_SIZE)
    graph_rows = captured * max(draft_tokens, 1)
    wide = graph_rows * sizes.context * _INT
    eager = sizes.requests if sizes.requests > captured else 0
    eager_rows = eager * max(draft_tokens, 1)
    attended_rows = max(sizes.rank_rows, sizes.unspread_rows)
    reached = next(limit for limit in LIMITS if limit.name == "query concatenation").holds(sizes)
    bucket = padded_heads(sizes.local_heads)
    draft_rows = sizes.rank_rows if draft_tokens else 0
    return HeldMemory(
        request_table=(sizes.requests + 1) * sizes.context * _INT,
        graph_tables=graph_rows * pages * _INT,
        speculation=(
            # Verify and draft-extend steps; the draft steps between them, of a row a request; scores.
            2 * wide
            + max(draft_tokens - 2, 0) * captured * sizes.context * _INT
            + graph_rows * sizes.context * _scores(graph_rows)
            + graph_rows * pages * _INT
            if draft_tokens
            else 0
        ),
        eager_decode=eager_rows * longest * (_INT + _scores(eager_rows)),
        joined_queries=attended_rows * sizes.attended_heads * LATENT_DIM * _BF16 * (1 if reached else 2),
        selections=3 * attended_rows * sizes.index_topk * _INT,
        gathered_index_keys=longest * INDEX_KEY_BYTES,
        draft_prefill=(
            (draft_rows + MOST_SMS) * bucket * KV_LORA_RANK * _FLOAT
            + draft_rows * bucket * (2 * KV_LORA_RANK + QK_ROPE_HEAD_DIM) * _BF16
            if draft_tokens
            else 0
        ),
    )


def _scores(rows: int) -> int:
    """Bytes of a row's score of a token: once more where they are joined."""
    # DeepGEMM scores a row a multiprocessor at once: those of a larger step are joined.
    return _FLOAT * (2 if rows > MOST_SMS else 1)
