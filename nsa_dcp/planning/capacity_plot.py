"""Plots of a capacity plan and of predicted crossovers, as PNG or SVG. matplotlib is imported only when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsa_dcp.planning.capacity import Plan

_SUFFIXES = (".png", ".svg")


def plot_capacity(result: Plan, path: Path) -> None:
    """Tokens per node and bytes per token over dcp size, one line per KV dtype.

    ValueError: the suffix is not .png or .svg. RuntimeError: matplotlib is missing.
    """
    figure, (tokens, cost) = _figure(path)
    for kv_cache_dtype in dict.fromkeys(row.kv_cache_dtype for row in result.rows):
        rows = [row for row in result.rows if row.kv_cache_dtype == kv_cache_dtype]
        sizes = [row.dcp_size for row in rows]
        tokens.plot(sizes, [row.tokens_per_node / 1e6 for row in rows], marker="o", label=kv_cache_dtype)
        (line,) = cost.plot(
            sizes, [row.bytes_per_token.total / 1e3 for row in rows], marker="o", label=f"{kv_cache_dtype} total"
        )
        cost.plot(
            sizes,
            [row.bytes_per_token.index_keys / 1e3 for row in rows],
            linestyle="--",
            color=line.get_color(),
            label=f"{kv_cache_dtype} index keys",
        )
    for axes, label in ((tokens, "million tokens per node"), (cost, "kB per token per GPU")):
        axes.set_xlabel("dcp size")
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            sorted({row.dcp_size for row in result.rows}), labels=sorted({row.dcp_size for row in result.rows})
        )
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(
        f"{result.model.name}: pools of {result.budget_bytes / (1 << 30):.1f} GiB per GPU, tp {result.tp_size}"
    )
    figure.savefig(path)


def plot_crossover(report: Mapping[str, Any], path: Path) -> None:
    """Crossover batch over context, and predicted step ratio to TP over batch; errors as `plot_capacity`."""
    figure, (crossover, ratio) = _figure(path)
    names = {"tp": "TP", "tp_dcp": "TP-DCP", "cp_dcp": "CP-DCP"}
    modes = report["modes"]
    for mode in modes[1:]:
        points = [(entry["context"], entry[mode]) for entry in report["crossover"] if entry[mode]]
        crossover.plot(
            [context for context, _ in points],
            [batch for _, batch in points],
            marker="o",
            label=f"{names[mode]} not slower than TP",
        )
    for mode in modes if report["capacity"] else ():
        crossover.plot(
            [entry["context"] for entry in report["capacity"]],
            [entry[mode]["batch"] for entry in report["capacity"]],
            linestyle="--",
            label=f"{names[mode]} fits up to",
        )
    crossover.set_xlabel("context, tokens")
    crossover.set_xscale("log", base=2)
    crossover.set_ylabel("batch")
    contexts = sorted({entry["context"] for entry in report["predictions"]})
    for mode in modes[1:]:
        for context in contexts:
            entries = [entry for entry in report["predictions"] if entry["context"] == context]
            ratio.plot(
                [entry["batch"] for entry in entries],
                [entry["step_us"][mode]["total"] / entry["step_us"]["tp"]["total"] for entry in entries],
                marker="o",
                linestyle="-" if mode == "tp_dcp" else ":",
                label=f"{names[mode]}, {context:,} tokens",
            )
    ratio.axhline(1.0, color="black", linewidth=0.8)
    ratio.set_xlabel("batch")
    ratio.set_ylabel("predicted step / TP's")
    for axes in (crossover, ratio):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(
        f"{report['model']}: predicted decode step, tp {report['setup']['tp_size']}, dcp {report['setup']['dcp_size']}"
    )
    figure.savefig(path)


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
