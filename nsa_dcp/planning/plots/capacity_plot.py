"""Plots of a capacity plan and of predicted crossovers, as PNG or SVG. matplotlib is imported only when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa_dcp.planning.capacity import Plan
from nsa_dcp.planning.plots.plot_lines import Line, draw_lines, short_count

_SUFFIXES = (".png", ".svg")
_NAMES = {"tp": "TP", "tp_dcp": "TP-DCP", "cp_dcp": "CP-DCP"}
# Told apart by people who see no red or green, and in print.
_COLOURS = ("#555555", "#0b6fb8", "#c2571a", "#5b8c2a", "#8a4f9e")


def plot_capacity(result: Plan, path: Path) -> None:
    """Tokens per node and bytes per token over dcp size, lines for each KV dtype.

    ValueError: the suffix is not .png or .svg. RuntimeError: matplotlib is missing.
    """
    figure, (tokens, cost) = _figure(path)
    dtypes = list(dict.fromkeys(row.kv_cache_dtype for row in result.rows))
    colours = dict(zip(dtypes, _COLOURS[1:], strict=False))
    held, totals, index_keys = [], [], []
    for dtype in dtypes:
        rows = [row for row in result.rows if row.kv_cache_dtype == dtype]
        costs = [(row.dcp_size, row.bytes_per_token) for row in rows]
        colour = colours[dtype]
        held.append(Line(dtype, tuple((row.dcp_size, row.tokens_per_node / 1e6) for row in rows), colour))
        totals.append(Line(dtype, tuple((size, cost.total / 1e3) for size, cost in costs), colour, unit="total"))
        keys = tuple((size, cost.index_keys / 1e3) for size, cost in costs)
        index_keys.append(Line(dtype, keys, colour, "--", "index keys"))
    sizes = sorted({row.dcp_size for row in result.rows})
    for axes, lines, label in (
        (tokens, held, "million tokens per node"),
        (cost, totals + index_keys, "kB per token per GPU"),
    ):
        axes.set_xlabel("dcp size")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        draw_lines(axes, lines)
        _tick_powers(axes, sizes, [str(size) for size in sizes])
    figure.suptitle(
        f"{result.model.name}: pools of {result.budget_bytes / (1 << 30):.1f} GiB per GPU, tp {result.tp_size}"
    )
    figure.savefig(path)


def plot_crossover(report: Mapping[str, Any], path: Path) -> None:
    """Crossover batch over context, and predicted step ratio to TP over batch; errors as `plot_capacity`."""
    figure, (crossover, ratio) = _figure(path)
    modes = report["modes"]
    colours = dict(zip(("tp", "tp_dcp", "cp_dcp"), _COLOURS, strict=False))
    lines = [
        Line(
            _NAMES[mode],
            tuple((entry["context"], entry[mode]) for entry in report["crossover"] if entry[mode]),
            colours[mode],
            unit="not slower than TP",
        )
        for mode in modes[1:]
    ]
    lines += [
        Line(
            _NAMES[mode],
            tuple((entry["context"], entry[mode]["batch"]) for entry in report["capacity"]),
            colours[mode],
            "--",
            "fits up to",
        )
        for mode in modes
        if report["capacity"]
    ]
    draw_lines(crossover, lines)
    contexts = sorted({entry["context"] for entry in report["predictions"]})
    _tick_powers(crossover, contexts, [short_count(context) for context in contexts])
    crossover.set_xlabel("context, tokens")
    crossover.set_ylabel("batch")
    steps = []
    for mode in modes[1:]:
        for number, context in enumerate(contexts):
            entries = [entry for entry in report["predictions"] if entry["context"] == context]
            points = tuple(
                (entry["batch"], entry["step_us"][mode]["total"] / entry["step_us"]["tp"]["total"])
                for entry in sorted(entries, key=lambda entry: entry["batch"])
            )
            style = "-" if mode == "tp_dcp" else ":"
            name = f"{_NAMES[mode]}, {short_count(context)}"
            steps.append(Line(name, points, _COLOURS[(number + 1) % len(_COLOURS)], style))
    draw_lines(ratio, steps)
    ratio.axhline(1.0, color="black", linewidth=0.8)
    ratio.set_xlabel("batch")
    ratio.set_ylabel("predicted step / TP's")
    for axes in (crossover, ratio):
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"{report['model']}: predicted decode step, tp {report['setup']['tp_size']}, dcp {report['setup']['dcp_size']}"
    )
    figure.savefig(path)


def _tick_powers(axes: Any, values: Sequence[int], labels: Sequence[str]) -> None:
    """A logarithmic axis with a tick at each value, as people say it, and at no other."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, labels=labels)
    axes.minorticks_off()


def _figure(path: Path) -> tuple[Any, Any]:
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"plot must end in {' or '.join(_SUFFIXES)}, got {str(path)!r}")
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "plotting needs matplotlib, found none: pip install 'nsa-dcp[plot]', or from a checkout: pip install "
            "'.[plot]'"
        ) from error
    # A bare Figure draws off screen whatever display or backend the machine has.
    figure = figures.Figure(figsize=(11, 4.5), layout="constrained")
    return figure, figure.subplots(1, 2)
