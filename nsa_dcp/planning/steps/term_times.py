"""Microseconds of the parts of a decode step that are read from measured tables."""

from __future__ import annotations

from collections.abc import Mapping

from nsa_dcp.planning.served_format import padded_heads
from nsa_dcp.planning.steps.exchange_times import Values, gather_us, link_us
from nsa_dcp.planning.steps.step_inputs import interpolate

_ROWS_PER_LAUNCH_128 = 132  # two rows for each of the 66 SM parts at 128 heads


def attend_planned_us(values: Values, heads: int, batch: int, valid: float) -> float:
    """Attention over `valid` indices a row on average, between what was measured; over fewer, as over 256."""
    padded, launches = padded_heads(heads), 1
    if padded == 128:
        launches = -(-batch // _ROWS_PER_LAUNCH_128)
    prefix = f"attend_{padded}_valid_"
    times = {int(name.removeprefix(prefix)): table for name, table in values.tables.items() if name.startswith(prefix)}
    # With 64 heads and everything valid the plan walks what FlashMLA's own schedule does.
    times.setdefault(2048, values.tables["attend_stock_64"])
    by_valid: dict[float, float] = {width: interpolate(times[width], batch / launches) for width in sorted(times)}
    return launches * interpolate(by_valid, valid)


def pad_heads_us(table: Mapping[float, float], heads: int, batch: int) -> float:
    """Padding queries to the heads that the kernel has."""
    padded = padded_heads(heads)
    return 0.0 if heads == padded else interpolate(table, batch * padded // 64, extend=True)


def select_us(values: Values, rows: int, context: int) -> float:
    """Scoring and selecting: the rounds of a long context take their time for one row too."""
    scores = interpolate(values.tables["index_scores"], rows * context, extend=True)
    return scores + _search_us(values, rows, context)


def select_sharded_us(values: Values, n: int, rows: int, context: int, topk: int) -> float:
    """Scoring and selecting where each of n ranks has its own index keys, the ranks' agreement left out.

    Every rank scores all rows against 1/n of the keys and selects among them, unless all of them are candidates; finds
    the threshold of its share of the rows among n lists; and takes what it owns.
    """
    own = -(-context // n)
    scores = interpolate(values.tables["index_scores"], rows * own, extend=True)
    local = _search_us(values, rows, own) if own > topk else values.numbers["take_whole_us"]
    found = _search_us(values, -(-rows // n), n * min(own, topk))
    return scores + local + found + values.numbers["take_own_us"]


def agree_us(values: Values, n: int, rows: int, topk: int) -> float:
    """Sending every row's candidates, a key and a position each, to one rank, and gathering its 8 bytes."""
    sent = link_us(values, "all_to_all", rows * topk * 8 * (n - 1) / n, received_share=0.5)
    return sent + gather_us(values, n, -(-rows // n) * 8)


def _search_us(values: Values, rows: int, entries: int) -> float:
    by_context = interpolate(values.tables["select_context"], entries, extend=True)
    return max(by_context, interpolate(values.tables["select_entries"], rows * entries, extend=True))
