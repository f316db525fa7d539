"""The two ways of a TP-DCP prefill chunk: what a rank receives in one layer of each, and which one a chunk goes.

By queries: every rank gathers all heads of all rows and attends to its own part of every selection; partial results are
exchanged and merged, and the selections, which ranks make for 1/N of the rows each, are gathered.
By rows: a rank attends with the rows that it selected for. Its rows' queries come in exchange for heads, the pages of
the batch's contexts are gathered packed, and results go back in exchange for rows. Nothing is merged, and no selection
travels.

    by queries  (N - 1) [ C h (576 v + 512 v + lse)  +  ceil(C / N) 4 K in a layer that selects ]
    by rows     (N - 1) [ own h 576 v  +  pages 64 row ]  +  (C - own) h 512 v

of C rows, h heads a rank, v bytes a value, `own` of the rows this rank's. By rows wins where C is large against the sum
of contexts. All is integers that every rank has alike, and nothing here is a rank's own state: ranks that went
different ways would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nsa_dcp.choices import PREFILL_WAYS
from nsa_dcp.planning.served_format import KV_LORA_RANK, LATENT_DIM, PAGE_SIZE

_INDEX_BYTES = 4
# What the choice starts from, until whole layers of both ways were timed. A byte of a page counts as 5/4: it is also
# packed and, where it is FP8, dequantised. Below the least rows the latency of one more collective decides.
PAGE_WEIGHT = (5, 4)
LEAST_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """What decides the bytes of a layer: the same on every rank, known before the chunk.

    dcp_size: N.
    heads: query heads of one rank.
    row_bytes: of a token in one layer of the cache.
    topk: K, entries of a selection.
    layers, selecting_layers: attention layers, and those of them that own an indexer.
    value_bytes: of an element of queries and results; log-sum-exps have 4, with values of 8 bytes 8.
    comm_backend: how partial results are merged: "a2a" or "ag_rs".
    selections_travel: whether selections are gathered at all, by queries.
    """

    dcp_size: int
    heads: int
    row_bytes: int
    topk: int
    layers: int
    selecting_layers: int
    value_bytes: int = 2
    comm_backend: str = "a2a"
    selections_travel: bool = True

    def received_by_queries(self, rows: int) -> dict[str, int]:
        """Bytes that every rank receives in a layer that selects, by message.

        Args:
            rows: C, of the whole batch.
        """
        others, row_heads = self.dcp_size - 1, rows * self.heads
        sum_bytes = max(4, self.value_bytes)
        if self.comm_backend == "a2a":
            partial = KV_LORA_RANK * self.value_bytes + sum_bytes
        else:
            # Each rank's log-sum-exps of all heads, and the scaled results reduced as they are summed.
            partial = (KV_LORA_RANK + self.dcp_size) * sum_bytes
        return {
            "queries": others * row_heads * LATENT_DIM * self.value_bytes,
            "partials": others * row_heads * partial,
            "selections": others * most_rows(rows, self.dcp_size) * self.topk * _INDEX_BYTES * self.selections_travel,
        }

    def received_by_rows(self, rows: int, own_rows: int, pages: int) -> dict[str, int]:
        """Bytes that a rank receives in any layer, by message.

        Args:
            rows: C, of the whole batch.
            own_rows: those of them that this rank attends with.
            pages: widened pages that the batch's contexts use, each counted once.
        """
        others = self.dcp_size - 1
        return {
            "queries": others * own_rows * self.heads * LATENT_DIM * self.value_bytes,
            "pages": others * pages * PAGE_SIZE * self.row_bytes,
            "results": (rows - own_rows) * self.heads * KV_LORA_RANK * self.value_bytes,
        }


@dataclass(frozen=True)
class PrefillRule:
    """Chooses the way of each chunk.

    sizes: of the model's layers.
    way: "queries" or "rows", every chunk; "auto", the way in which the rank that receives most receives less, summed
        over the model's layers: layers that share a selection must go one way.
    least_rows: "auto" takes chunks below by queries.
    page_weight: what a byte of a page counts, as a fraction.
    """

    sizes: LayerSizes
    way: str = "auto"
    least_rows: int = LEAST_ROWS
    page_weight: tuple[int, int] = PAGE_WEIGHT

    def __post_init__(self) -> None:
        if self.way not in PREFILL_WAYS:
            raise ValueError(f"way must be one of {', '.join(PREFILL_WAYS)}, got {self.way!r}")

    def goes_by_rows(
        self, extend_lens: Sequence[int], context_lens: Sequence[int], count_pages: Callable[[], int]
    ) -> bool:
        """Tell a chunk's way.

        Args:
            extend_lens: new tokens of each request.
            context_lens: tokens of each request, the new ones included.
            count_pages: counts the different widened pages that the requests use. Asked only where pages that requests
                share would decide: on a server it waits for the GPU.

        Returns:
            True for by rows.
        """
        if self.way != "auto":
            return self.way == "rows"
        rows = sum(extend_lens)
        pages = [widened_pages(length, self.sizes.dcp_size) for length in context_lens]
        if self.moves_less(rows, sum(pages)):
            return True
        return self.moves_less(rows, max(pages, default=0)) and self.moves_less(rows, count_pages())

    def moves_less(self, rows: int, pages: int) -> bool:
        """Whether a chunk of `rows` rows over `pages` widened pages moves less by rows, by weighed bytes."""
        sizes = self.sizes
        if rows < self.least_rows:
            return False
        # The rank with most rows receives most: a row's queries are larger than its results.
        ours = sizes.received_by_rows(rows, most_rows(rows, sizes.dcp_size), pages)
        theirs = sizes.received_by_queries(rows)
        weight, unit = self.page_weight
        by_rows = sizes.layers * (unit * (ours["queries"] + ours["results"]) + weight * ours["pages"])
        by_queries = sizes.layers * (theirs["queries"] + theirs["partials"])
        return by_rows < unit * (by_queries + sizes.selecting_layers * theirs["selections"])


def most_rows(rows: int, dcp_size: int) -> int:
    """Rows of the rank that has most of them."""
    return -(-rows // dcp_size)


def block_of_rows(rows: int, dcp_size: int, dcp_rank: int) -> tuple[int, int]:
    """Start and end of a rank's rows where shares are consecutive, and as large as the first while there are rows."""
    most = most_rows(rows, dcp_size)
    return min(dcp_rank * most, rows), min((dcp_rank + 1) * most, rows)


def widened_pages(num_tokens: int, dcp_size: int) -> int:
    """Widened pages that hold `num_tokens` tokens of one request; each is one page on every rank."""
    return -(-num_tokens // (PAGE_SIZE * dcp_size))
