"""The tables of docs/served_on_h200.md: which of the kept rows stand in which, and how they are written."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping

AT_ONCE, IN_HALVES = "32 new tokens", "32 new tokens, in halves"
MODELS = {
    "glm": "GLM",
    "glm-mtp": "GLM with a draft layer",
    "glm-moe": "GLM with experts",
    "deepseek": "DeepSeek-V3.2",
    "deepseek-moe": "DeepSeek-V3.2 with experts",
    "glm-fp8": "GLM in block-FP8",
    "glm-w4afp8": "GLM in W4AFP8",
    "deepseek-fp8": "DeepSeek-V3.2 in block-FP8",
    "deepseek-w4afp8": "DeepSeek-V3.2 in W4AFP8",
}
Row = Mapping


def options(server: str) -> set[str]:
    """What a server's name says after tpN-dcpM."""
    return set(server.split("-")[2:])


def is_stock(row: Row) -> bool:
    return row["server"].split("-")[1] == "dcp1"


def table_of(row: Row) -> str:
    """Name of the one table in which a row with a reference stands."""
    given = options(row["server"])
    if row["asked"] == "crowd":
        return "gathered-in-parts" if "parts" in row else "crowds"
    if "update" in given:
        return "updates"
    if "retract" in given:
        return "retracted"
    if any(re.fullmatch(r"pp\d+", option) for option in given):
        return "pipelines"
    if row["checkpoint"].endswith("-moe"):
        return "experts"
    if row["checkpoint"].endswith("fp8"):
        return "quantised"
    if row["checkpoint"].endswith("-mtp"):
        return "drafts"
    return f"{row['checkpoint']}-{'bf16' if 'bf16' in given else 'fp8'}"


def write_table(heads: str, rows: Iterable[Iterable[str]]) -> str:
    """Heads are divided by bars; one that begins with `>` is a column of numbers."""
    names = [head.strip() for head in heads.split("|")]
    lines = [
        f"| {' | '.join(name.removeprefix('>') for name in names)} |",
        f"|{'|'.join('---:' if name.startswith('>') else '---' for name in names)}|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def compared(rows: Iterable[Row], table: str) -> list[Row]:
    """Rows of a table, in the page's order: by revision and host, stock servers first, then by ranks."""
    chosen = [row for row in rows if row["reference"] and table_of(row) == table]
    order = list(dict.fromkeys((row["revision"], row["host"]) for row in rows))

    def place(row: Row) -> tuple:
        sizes = tuple(int(number) for number in re.findall(r"\d+", "-".join(row["server"].split("-")[:2])))
        at = order.index((row["revision"], row["host"]))
        return (at, list(MODELS).index(row["checkpoint"]), not is_stock(row), sizes, row["server"])

    return sorted(chosen, key=place)


def _where(row: Row, rows: Iterable[Row]) -> str:
    hosts = {other["host"] for other in rows if other["revision"] == row["revision"]}
    return f"`{row['revision']}`" + (f", host {row['host']}" if len(hosts) > 1 else "")


def _server(row: Row) -> str:
    return row["server"] + (", stock" if is_stock(row) else "")


def _reference(row: Row) -> str:
    reference = row["reference"]
    other_model = f" ({MODELS[reference['checkpoint']]})" if reference["checkpoint"] != row["checkpoint"] else ""
    other_host = f", host {reference['host']}" if reference["host"] != row["host"] else ""
    return reference["server"] + other_model + other_host


def _counted(row: Row) -> str:
    return f"{row['identical']:,} of {row['tokens']:,}"


def _nats(value: float | None, digits: int = 4) -> str:
    """A root mean square, which there is none of no values."""
    return "none" if value is None else f"{value:.{digits}f}"


def _verdict(row: Row) -> str:
    if row["failures"] or row["problems"]:
        return "FAILED"
    return "same tokens" if row["identical"] == row["tokens"] else "same but for near ties"


def set_table(table: str, rows: list[Row]) -> str:
    """Servers that were asked the request set, and what is taken for rounding."""
    chosen = compared(rows, table)
    several = len({row["checkpoint"] for row in chosen}) > 1
    cells = (
        [
            *([MODELS[row["checkpoint"]]] if several else []),
            _server(row),
            _where(row, rows),
            _counted(row),
            _reference(row),
            f"{row['capacity']:,}",
            str(row["retractions"]),
            f"{row['largest_difference']:.4f}",
            "" if row["rounding"] is None else f"{row['rounding']:.4f}",
            _verdict(row),
        ]
        for row in chosen
    )
    heads = "server | at | >identical tokens | reference | >capacity | >retractions | >largest difference, nats"
    return write_table(("model | " if several else "") + heads + " | >rounding, nats | ", cells)


def update_table(rows: list[Row]) -> str:
    cells = []
    for row in compared(rows, "updates"):
        done = row["update"]["status"] == 200
        said = "done" if done else f"refused, status {row['update']['status']}"
        kept = "as before" if row["update"]["tokens_kept"] else "others"
        cells.append([row["server"], _where(row, rows), said, kept, _counted(row), _reference(row)])
    return write_table("server | at | the update is | answers afterwards | >identical tokens | reference", cells)


def _parting(row: Row) -> tuple[str, str]:
    """Answers of 32 tokens that part from the reference's (at once / in halves); how many do so at the same token."""
    if "halves" not in row:
        return "not asked in halves", ""
    at_once, in_halves = (
        {(place["request"], place["position"]) for place in row["parted"] if place["scene"] == scene}
        for scene in (AT_ONCE, IN_HALVES)
    )
    return f"{len(at_once)} / {len(in_halves)}", str(len(at_once & in_halves))


def crowd_table(rows: list[Row]) -> str:
    """Of each server: against its reference, and asked at once against asked in halves."""
    alone = [row for row in rows if row["asked"] == "crowd" and not row["reference"] and "halves" in row]
    cells = []
    for row in [*alone, *compared(rows, "crowds"), *compared(rows, "gathered-in-parts")]:
        if row["reference"] and not is_stock(row["reference"]):
            continue
        halves = row.get("halves") or {}
        gaps = halves.get("near_tie_gaps") or {}
        shown = [f"{_nats(gaps[name][0], 3)} ({gaps[name][1]})" if name in gaps else "" for name in ("short", "long")]
        moved = _nats(halves["moved_rms"]) if halves else ""
        against = ["", "", "", "", ""]
        if row["reference"]:
            against = [_counted(row), _reference(row), _nats(row["moved_rms"]), *_parting(row)]
        cells.append([_server(row), _where(row, rows), *against, moved, *shown])
    heads = "server | at | >identical tokens | reference | >moved, RMS nats | >answers of 32 tokens that part, at once "
    heads += "/ in halves | >the same ones | >at once against in halves: moved, RMS nats | >gaps of near ties move, "
    return write_table(heads + "contexts up to 2,048 (how many) | >longer contexts", cells)


def parts_table(rows: list[Row]) -> str:
    cells = []
    for row in compared(rows, "gathered-in-parts"):
        parts, (cut, batches) = row["parts"], row["parts"]["batches"]
        cells.append(
            [
                _server(row),
                _where(row, rows),
                _counted(row),
                _reference(row),
                f"{parts['largest_batch']:,}",
                str(parts["parts"]),
                f"{cut} of {batches}" if batches else "none" if not cut else str(cut),
                _nats(row["moved_rms"]),
            ]
        )
    heads = "server | at | >identical tokens | reference | >largest batch, tokens of context | >parts it takes"
    return write_table(heads + " | >batches in parts | >moved, RMS nats", cells)


def _mode(row: Row) -> str:
    given = options(row["server"])
    return "CP-DCP, interleave" if "cpi" in given else "CP-DCP, zigzag" if "cpz" in given else "TP-DCP"


def _family(row: Row) -> tuple[str, str, str]:
    """(what is served, mode, cache), in words; the first of them begins with the model's name."""
    what, table = MODELS[row["checkpoint"]], table_of(row)
    if row["asked"] == "crowd":
        what += ", many requests at once"
    elif table in ("retracted", "pipelines"):
        what += {"retracted": ", requests retracted and resumed", "pipelines": ", two pipeline stages"}[table]
    return what, _mode(row), "bf16" if "bf16" in options(row["server"]) else "FP8"


def _under_dcp(rows: list[Row]) -> list[Row]:
    """A row for each server under DCP: its comparison with stock sglang where there is one."""
    found: dict[tuple, Row] = {}
    with_reference = [row for row in rows if row["reference"] and not is_stock(row)]
    for row in sorted(with_reference, key=lambda row: not is_stock(row["reference"])):
        server = (row["revision"], row["host"], row["checkpoint"], row["asked"], row["server"])
        found.setdefault(server, row)
    return list(found.values())


def _sum(rows: Iterable[Row]) -> str:
    rows = list(rows)
    return _counted({name: sum(row[name] for row in rows) for name in ("identical", "tokens")})


def answer(rows: list[Row]) -> str:
    """What all rows say together, in two sentences."""
    found = _under_dcp(rows)
    asked = {name: [row for row in found if row["asked"] == name] for name in ("set", "crowd")}
    wrong = sum(bool(row["failures"] or row["problems"]) for row in found)
    return (
        f"{len(asked['set'])} servers under DCP were asked the request set: {_sum(asked['set'])} tokens are the "
        f"reference's, and {wrong or 'none'} failed. {len(asked['crowd'])} were asked many requests at "
        f"once: {_sum(asked['crowd'])} tokens; answers part at near ties, as they do between two stock servers."
    )


def summary_table(rows: list[Row]) -> str:
    """Servers under DCP by family, each counted once."""
    families: dict[tuple, list[Row]] = {}
    for row in _under_dcp(rows):
        families.setdefault(_family(row), []).append(row)
    modes = ("TP-DCP", "CP-DCP, interleave", "CP-DCP, zigzag")
    names = list(MODELS.values())

    def place(family: tuple) -> tuple:
        what, mode, cache = family
        name, _, more = what.partition(",")
        return (more == " many requests at once", names.index(name), more, cache != "FP8", modes.index(mode))

    order = sorted(families, key=place)
    cells = []
    for family in order:
        found = families[family]
        sizes = sorted({int(row["server"].split("-")[1].removeprefix("dcp")) for row in found})
        cells.append([*family[:2], ", ".join(map(str, sizes)), family[2], str(len(found)), _sum(found)])
    return write_table("model | mode | dcp | cache | >servers | >identical tokens", cells)


def revision_table(rows: list[Row]) -> str:
    """Where and when servers were asked, and how many of them."""
    cells = []
    for revision, host in dict.fromkeys((row["revision"], row["host"]) for row in rows):
        here = [row for row in rows if (row["revision"], row["host"]) == (revision, host)]
        servers = {(row["checkpoint"], row["asked"], row["server"]) for row in here}
        stock = {server for server in servers if "-dcp1" in server[2]}
        cells.append([f"`{revision}`", str(host), here[0]["date"][:10], str(len(servers)), str(len(stock))])
    return write_table("revision | host | date | >servers | >of them stock", cells)


SET_TABLES = (
    "glm-fp8",
    "glm-bf16",
    "retracted",
    "deepseek-fp8",
    "deepseek-bf16",
    "drafts",
    "experts",
    "quantised",
    "pipelines",
)
TABLES: dict[str, Callable[[list[Row]], str]] = {
    "answer": answer,
    "summary": summary_table,
    "revisions": revision_table,
    **{name: functools.partial(set_table, name) for name in SET_TABLES},
    "updates": update_table,
    "crowds": crowd_table,
    "gathered-in-parts": parts_table,
}
