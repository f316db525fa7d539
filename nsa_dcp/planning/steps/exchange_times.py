"""Times of what a step's ranks exchange: through NCCL's collectives, or over peer memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nsa_dcp.planning.steps.step_inputs import interpolate


@dataclass(frozen=True)
class Values:
    """What the inputs say: numbers, and tables by ascending key."""

    numbers: Mapping[str, float]
    tables: Mapping[str, Mapping[float, float]]


def exchange_on_nccl(
    values: Values, backend: str, n: int, row_heads: int, value_dim: int, query_bytes: int, merged_bytes: int
) -> dict[str, float]:
    """Microseconds of one layer by term, each collective between kernels that pack, arrange and merge.

    Args:
        backend: `a2a` or `ag_rs`.
        n: ranks.
        row_heads: query tokens times the heads that are attended with.
        value_dim: of a partial result.
        query_bytes: that a rank contributes of the queries; 0 where they are not gathered.
        merged_bytes: the same of merged results; 0 where each rank keeps its heads.
    """
    times = {"combine": interpolate(values.tables["combine"], row_heads, extend=True)}
    if query_bytes:
        times["gather_q"] = gather_us(values, n, query_bytes)
        times["arrange_heads"] = interpolate(values.tables["arrange_heads"], n * query_bytes, extend=True)
    if backend == "a2a":
        received = row_heads * (value_dim * 2 + 4) * (n - 1) / n
        times["exchange"] = link_us(values, "all_to_all", received, received_share=0.5)
    else:
        received = row_heads * value_dim * 4 * (n - 1) / n
        scattered = link_us(values, "reduce_scatter", received, received_share=0.5)
        times["exchange"] = gather_us(values, n, row_heads * 4) + scattered
    if merged_bytes:
        times["exchange"] += gather_us(values, n, merged_bytes)
    return times


def exchange_on_peers(
    values: Values, backend: str, n: int, row_heads: int, value_dim: int, query_bytes: int, merged_bytes: int
) -> dict[str, float]:
    """The same where one kernel packs, sends and merges, and another gathers heads in order. Args: as above."""
    partials = row_heads * (value_dim * 2 + 4) * (n - 1) // n
    times = {"exchange": _peers_us(values, partials)}
    if query_bytes:
        times["gather_q"] = _peers_us(values, query_bytes * (n - 1))
    if merged_bytes:
        times["exchange"] += _peers_us(values, merged_bytes * (n - 1))
    return times


def all_reduce_us(values: Values, n: int, size: int) -> float:
    """Of `size` bytes on each of n ranks."""
    if n == 1:
        return 0.0
    return link_us(values, "all_reduce", size * (n - 1) / n, received_share=0.5)


def gather_us(values: Values, n: int, contributed: float) -> float:
    """Of `contributed` bytes from each of n ranks."""
    return link_us(values, "all_gather", contributed * (n - 1), received_share=1.0)


def _peers_us(values: Values, received: float) -> float:
    return interpolate(values.tables["peer_exchange"], received, extend=True)


def link_us(values: Values, table: str, received: float, received_share: float) -> float:
    """Time to receive `received` bytes; `received_share` is what part of a table's key a rank of two receives."""
    points = values.tables[table]
    if values.numbers["link_bandwidth_gbs"]:
        return next(iter(points.values())) + received / values.numbers["link_bandwidth_gbs"] / 1e3
    return interpolate(points, received / received_share, extend=True)
