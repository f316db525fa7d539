"""Draw what servers were measured to give: output tokens per second over requests at once, one line a mode.

    python -m scripts.benchmarks.servers.plot docs/measured_on_two_h200/bench.json --out docs/throughput.svg

A line ends with the last number of requests that was asked of its server. Where that is because its pool holds no more,
the report says so (the pool's largest case, or one that was skipped for want of slots), and the end is marked. The same
report and the same matplotlib give the same bytes; the numbers drawn stand in the file too, as its description.
"""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa_dcp.command_line import check_output_file
from nsa_dcp.planning.plots.plot_lines import short_count
from scripts.benchmarks.served_setup import setup_of

MODES = ("tp", "tp_dcp", "cp_dcp")
_NAMES = {"tp": "TP", "tp_dcp": "TP-DCP", "cp_dcp": "CP-DCP"}
_COLOURS = {"tp": "#555555", "tp_dcp": "#0b6fb8", "cp_dcp": "#c2571a"}
_MARKERS = {"tp": "s", "tp_dcp": "o", "cp_dcp": "^"}
_ROW_HEIGHT = 0.064  # of a name at a line's end, in highest throughputs


@dataclass(frozen=True)
class Line:
    """A server's throughput at one context.

    Args:
        mode, name: one of `MODES`; what stands at the line's end.
        config, pool_tokens: as the report has them.
        points: (requests at once, output tokens per second), by requests.
        full: its pool holds no more requests than the last point's.
    """

    mode: str
    name: str
    config: str
    pool_tokens: int
    points: tuple[tuple[int, float], ...]
    full: bool


def read_lines(reports: Sequence[Mapping], context: int, configs: Sequence[str] = ()) -> list[Line]:
    """The lines of a plot, TP's first.

    Args:
        reports: as `scripts.benchmarks.servers.bench` keeps them.
        context: tokens of each request when it starts to decode.
        configs: the reports to draw; default: the first of each mode that was asked at this context.

    ValueError: a config has no report, or nothing was measured at this context.
    """
    known = [report["config"] for report in reports]
    missing = [config for config in configs if config not in known]
    if missing:
        raise ValueError(f"config must be one of {', '.join(known)}, got {missing[0]}")
    lines = [_line(report, context) for report in reports if not configs or report["config"] in configs]
    lines = [line for line in lines if line.points]
    if not lines:
        contexts = sorted({case["context"] for report in reports for case in report["decode"]})
        raise ValueError(f"context must be one that was measured, {', '.join(map(str, contexts))}, got {context}")
    if not configs:
        lines = [next(line for line in lines if line.mode == mode) for mode in MODES if mode in {x.mode for x in lines}]
    return sorted(lines, key=lambda line: MODES.index(line.mode))


def _line(report: Mapping, context: int) -> Line:
    mode, setup = setup_of(report)
    cases = sorted((one for one in report["decode"] if one["context"] == context), key=lambda one: one["running"])
    points = {case["running"]: case["tokens_per_s"] for case in cases}
    refused = any(
        one["context"] == context and one["concurrency"] > max(points, default=0) for one in report["skipped"]
    )
    name = _NAMES[mode] if mode == "tp" else f"{_NAMES[mode]} {setup.dcp_size}"
    return Line(
        mode=mode,
        name=name,
        config=report["config"],
        pool_tokens=report["pool"]["tokens"],
        points=tuple((requests, round(rate, 1)) for requests, rate in points.items()),
        full=bool(cases) and (cases[-1]["largest"] or refused),
    )


def describe(lines: Sequence[Line], context: int) -> str:
    """The numbers drawn, as JSON: what the file carries as its description."""
    return json.dumps({"context": context, "lines": [asdict(line) for line in lines]})


def read_description(svg: str) -> dict:
    """What `describe` wrote into a drawing. ValueError: the drawing has no description."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", svg, re.DOTALL)
    if not found:
        raise ValueError("the drawing must have a description, got none")
    return json.loads(found.group(1).replace("&quot;", '"').replace("&amp;", "&"))


def draw(lines: Sequence[Line], context: int, title: str, path: Path) -> None:
    """Write the plot. ValueError: the suffix is not .png or .svg. RuntimeError: matplotlib is missing."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"out must end in .png or .svg, got {str(path)!r}")
    try:
        matplotlib = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise RuntimeError("plotting needs matplotlib, found none: pip install 'nsa-dcp[plot]'") from error
    with matplotlib.rc_context({"svg.hashsalt": "nsa-dcp", "svg.fonttype": "path", "font.size": 10}):
        figure = figures.Figure(figsize=(8.4, 4.4), layout="constrained")
        figure.patch.set_facecolor("white")
        axes = figure.subplots()
        highest = max(rate for line in lines for _, rate in line.points)
        widest = max(requests for line in lines for requests, _ in line.points)
        for line in lines:
            axes.plot(*zip(*line.points, strict=True), color=_COLOURS[line.mode], marker=_MARKERS[line.mode], ms=4.5)
        top = _name_ends(axes, lines, highest, widest)
        axes.set_xlim(0, widest * 1.3)
        axes.set_ylim(0, max(highest * 1.12, top * 1.04))
        asked = sorted({requests for line in lines for requests, _ in line.points})
        axes.set_xticks(_apart(asked, widest / 20))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel(f"requests at once, each of {short_count(context)} tokens")
        axes.set_ylabel("output, tokens/s")
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        # Without a date, and by a fixed salt, the same numbers give the same bytes.
        metadata = {"Date": None, "Description": describe(lines, context)} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=metadata, dpi=150)


def _name_ends(axes: Any, lines: Sequence[Line], highest: float, widest: int) -> float:
    """A name at each line's end, none over another, and a cross where a pool is full; returns where the names end."""
    top = 0.0
    for line in sorted(lines, key=lambda line: line.points[-1][1]):
        (requests, rate), colour = line.points[-1], _COLOURS[line.mode]
        text = line.name
        if line.full:
            axes.plot(requests, rate, marker="x", ms=11, mew=2, color=colour)
            text = f"{line.name}: its pool of\n{line.pool_tokens:,} tokens\nis full at {requests} requests"
        half = highest * _ROW_HEIGHT * (text.count("\n") + 1) / 2
        if requests == widest:
            height = max(rate, top + half, half)
        else:  # other lines go on from here: below them all
            lowest = min(max(point for point in other.points if point[0] <= requests)[1] for other in lines)
            height = max(lowest - highest * 0.05 - half, half)
        top = height + half if requests == widest else top
        axes.annotate(text, (requests, height), (9, 0), textcoords="offset points", color=colour, va="center")
    return top


def _apart(values: Sequence[int], gap: float) -> list[int]:
    """The values, less those that would stand closer than `gap` to one kept before; the last of them always stays."""
    kept = [values[-1]]
    for value in reversed(values[:-1]):
        if kept[-1] - value >= gap:
            kept.append(value)
    return sorted(kept)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; 0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("bench", type=Path, help="the JSON that scripts.benchmarks.servers.bench wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".svg or .png")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each request; default 4096")
    parser.add_argument("--config", nargs="+", default=[], help="the servers to draw; default: the first of each mode")
    args = parser.parse_args(argv)
    try:
        check_output_file("--out", args.out)
        reports = json.loads(args.bench.read_text(encoding="utf-8"))["reports"]
        lines = read_lines(reports, args.context, args.config)
        draw(lines, args.context, _title(reports), args.out)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    return 0


def _title(reports: Sequence[Mapping]) -> str:
    host = reports[0]["host"]
    gpus = f"{len(host['gpus'])} {host['gpus'][0].split(',')[0]}"
    pool = f"{reports[0]['pool']['gib_per_rank']:g} GiB of KV pool a GPU"
    return f"{gpus}, {host['date'][:10]}, {pool}, steps that only decode"


if __name__ == "__main__":
    raise SystemExit(main())
