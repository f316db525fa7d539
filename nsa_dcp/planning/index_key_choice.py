"""Where index keys are: replicated over a DCP group or sharded as latents are; and what the other choice would hold."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from nsa_dcp.choices import INDEX_KEYS
from nsa_dcp.planning.capacity import Plan

# A server's choice, for which sglang has no flag.
INDEX_KEYS_VARIABLE = "NSA_DCP_INDEX_KEYS"
SHARDED_NOTE = (
    "sharded index keys: generate runs them; sglang servers of this version hold replicated ones, and refuse the others"
)


def add_index_keys_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--index-keys` to a command; `what` says what it decides there."""
    parser.add_argument("--index-keys", choices=INDEX_KEYS, default=INDEX_KEYS[0], help=what)


def add_index_shards_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--index-shards`, what `--index-keys` was called in 0.1; not in the help, and to go in 0.3."""
    parser.add_argument("--index-shards", type=int, help=argparse.SUPPRESS)


def read_index_keys(index_keys: str, index_shards: int | None, dcp_sizes: Sequence[int]) -> str:
    """The choice that was made, by either name.

    Args:
        index_keys: of `--index-keys`.
        index_shards: of `--index-shards`; None where it is not given.
        dcp_sizes: those that are planned.

    Raises:
        ValueError: a number of shards between one and all ranks, which nothing runs.
    """
    if index_shards is None:
        return index_keys
    if index_shards == 1:
        return "replicated"
    if index_shards < max(dcp_sizes, default=1):
        raise ValueError(
            f"index_shards must be 1 or at least every dcp size: --index-keys replicated or sharded says it now, "
            f"got {index_shards}"
        )
    return "sharded"


def shards_of(index_keys: str, ranks: int) -> int:
    """`index_shards` of `capacity.plan`, for groups of up to `ranks`."""
    return ranks if index_keys == "sharded" else 1


def other_choice(index_keys: str) -> str:
    """The one that was not made."""
    return INDEX_KEYS[1 - INDEX_KEYS.index(index_keys)]


def plan_other(make_plan: Callable[[str], Plan], index_keys: str) -> Plan | None:
    """What `make_plan` gives for the other choice; None where that holds not one page."""
    try:
        return make_plan(other_choice(index_keys))
    except ValueError as error:
        if not str(error).startswith("gpu_memory_gib must leave room"):
            raise
        return None


def compare(result: Plan, other: Plan | None, index_keys: str) -> list[dict[str, object]]:
    """A row for each dcp size above 1 and KV dtype: tokens and multiple over dcp 1 of both choices, for JSON."""
    rows = []
    for number, row in enumerate(result.rows):
        if row.dcp_size == 1:
            continue
        there = other.rows[number] if other else None
        rows.append(
            {
                "dcp_size": row.dcp_size,
                "kv_cache_dtype": row.kv_cache_dtype,
                "index_keys": other_choice(index_keys),
                "tokens_per_node": there.tokens_per_node if there else 0,
                "multiple_over_dcp1": there.multiple_over_dcp1 if there else 0.0,
                "tokens_over_chosen": there.tokens_per_node / row.tokens_per_node if there else 0.0,
            }
        )
    return rows


def describe_other(rows: Sequence[dict[str, object]]) -> list[str]:
    """The comparison as text: nothing where no dcp size is above 1."""
    if not rows:
        return []
    lines = ["", f"with {rows[0]['index_keys']} index keys (--index-keys {rows[0]['index_keys']})"]
    lines.append("KV dtype  dcp  tokens per node  over dcp 1  against the above")
    for row in rows:
        lines.append(
            f"{row['kv_cache_dtype']:<9} {row['dcp_size']:>3}  {row['tokens_per_node']:>15,} "
            f"{row['multiple_over_dcp1']:>10.2f}x {row['tokens_over_chosen']:>17.2f}x"
        )
    return lines
