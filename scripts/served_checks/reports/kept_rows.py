"""What docs/served_on_h200/ keeps of servers that were asked: one line of JSON for each comparison of two reports.

A file is named for the revision that was served; `host` numbers the hosts of one revision. Differences are in nats.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

# Every row has these; "reference" is null in the row of a server that others are compared with.
KEY = ("checkpoint", "asked", "server", "host", "reference")
FIELDS = (*KEY, "date", "requests", "capacity", "retractions", "problems")
# What a row with a reference has besides.
COMPARED = ("tokens", "identical", "largest_difference", "moved_rms", "rounding", "parted", "failures")
# What some rows have: of updates, kills and crowds.
OPTIONAL = ("update", "kill_s", "decode_sizes", "halves", "parts")
DIGITS = 5


def row_key(row: Mapping) -> tuple:
    reference = row["reference"]
    return tuple(row[name] for name in KEY[:-1]) + (tuple(sorted(reference.items())) if reference else (),)


def check_row(row: Mapping) -> None:
    """ValueError: a row lacks a field, has one that no page reads, or contradicts itself."""
    name = " ".join(str(row.get(field)) for field in KEY[:-1])
    needed = {*FIELDS, *(COMPARED if row.get("reference") else ())}
    if missing := sorted(needed - row.keys()):
        raise ValueError(f"{name}: a row must have {', '.join(missing)}")
    if unknown := sorted(row.keys() - needed - set(OPTIONAL)):
        raise ValueError(f"{name}: no row has {', '.join(unknown)}")
    if row["asked"] not in ("set", "crowd"):
        raise ValueError(f"{name}: asked must be set or crowd, got {row['asked']!r}")
    if not row["reference"]:
        return
    # A parting place is compared and not identical; so is every token that a failure stopped at.
    if not 0 <= row["identical"] <= row["tokens"]:
        raise ValueError(f"{name}: {row['identical']} of {row['tokens']} tokens cannot be identical")
    if row["tokens"] - row["identical"] < len(row["parted"]):
        raise ValueError(f"{name}: {len(row['parted'])} answers part, and only {row['tokens']} tokens were compared")
    if not math.isfinite(row["largest_difference"]):
        raise ValueError(f"{name}: the largest difference is {row['largest_difference']}")


def read_rows(path: Path) -> list[dict]:
    """Rows of one file, in its order. ValueError: one is not as `check_row` has it, or two are of the same servers."""
    rows: dict[tuple, dict] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            check_row(row)
        except ValueError as error:
            raise ValueError(f"{path.name}:{number}: {error}") from error
        if row_key(row) in rows:
            raise ValueError(f"{path.name}:{number}: there is a row of the same servers already")
        rows[row_key(row)] = row
    return list(rows.values())


def keep_rows(path: Path, rows: Iterable[Mapping]) -> None:
    """Add rows to a file, in the place of those of the same servers that it has."""
    kept = {row_key(row): row for row in (read_rows(path) if path.exists() else [])}
    for row in rows:
        check_row(row)
        kept[row_key(row)] = dict(row)

    def place(row: Mapping) -> tuple:
        return row["asked"] == "crowd", row["host"], bool(row["reference"]), *map(str, row_key(row))

    ordered = sorted(kept.values(), key=place)
    lines = [json.dumps(row, separators=(",", ":"), allow_nan=False) for row in ordered]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def round_nats(value: float) -> float | None:
    """As rows have it; None for nan, the mean of nothing."""
    return None if math.isnan(value) else round(value, DIGITS)
