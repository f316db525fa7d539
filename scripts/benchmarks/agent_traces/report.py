"""What a replay measured: percentiles, throughput, cache hits and errors, as plain data and as an HTML or PNG page."""

from __future__ import annotations

import html
import importlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks.agent_traces.replay import CallResult

SUMMARY_SUFFIXES = (".html", ".png")
_PERCENTILES = (50, 90, 99)


def summarise(
    results: Sequence[CallResult], *, wall_s: float, planned_calls: int, setup: dict[str, object]
) -> dict[str, object]:
    """The report as plain data. Times are of calls that succeeded; a call with an error counts as an error only.

    `cache_hit_rate` is cached over prompt tokens of the calls whose server says both; None where no call does.
    """
    good = [result for result in results if not result.error]
    told = [result for result in good if result.cached_tokens is not None and result.prompt_tokens]
    output_tokens = sum(result.output_tokens or 0 for result in good)
    prompt_tokens = sum(result.prompt_tokens or 0 for result in good)
    return {
        "complete": len(results) == planned_calls,
        "setup": setup,
        "calls": {
            "planned": planned_calls,
            "finished": len(results),
            "succeeded": len(good),
            "failed": len(results) - len(good),
        },
        "errors": dict(Counter(result.error for result in results if result.error).most_common()),
        "wall_s": wall_s,
        "ttft_s": distribution([result.ttft_s for result in good]),
        "tpot_s": distribution([result.tpot_s for result in good]),
        "latency_s": distribution([result.latency_s for result in good]),
        "prompt_tokens": distribution([result.prompt_tokens for result in good]),
        "output_tokens": distribution([result.output_tokens for result in good]),
        "throughput": {
            "calls_per_s": len(good) / wall_s if wall_s else None,
            "prompt_tokens_per_s": prompt_tokens / wall_s if wall_s else None,
            "output_tokens_per_s": output_tokens / wall_s if wall_s else None,
        },
        "cache_hit_rate": sum(r.cached_tokens for r in told) / sum(r.prompt_tokens for r in told) if told else None,
    }


def distribution(values: Sequence[float | None]) -> dict[str, float] | None:
    """Count, mean, percentiles (nearest rank) and largest of the values that are not None; None if there is none."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    ranks = {f"p{p}": known[math.ceil(p / 100 * len(known)) - 1] for p in _PERCENTILES}
    return {"count": len(known), "mean": sum(known) / len(known), **ranks, "max": known[-1]}


def format_summary(report: dict[str, object]) -> str:
    """The report as text."""
    calls, throughput = report["calls"], report["throughput"]
    lines = [
        f"{calls['succeeded']} of {calls['planned']} calls succeeded, {calls['failed']} failed, "
        f"in {report['wall_s']:.1f} s"
    ]
    if not report["complete"]:
        lines.append(f"incomplete: {calls['planned'] - calls['finished']} calls were not made")
    for name, label, factor, unit in _MEASURES:
        values = report[name]
        if values is None:
            lines.append(f"{label:<14} nothing measured")
        else:
            parts = "  ".join(f"{key} {values[key] * factor:,.1f}" for key in ("mean", "p50", "p90", "p99", "max"))
            lines.append(f"{label:<14} {parts}  {unit}")
    if throughput["calls_per_s"] is not None:
        lines.append(
            f"throughput     {throughput['calls_per_s']:.2f} calls/s, "
            f"{throughput['prompt_tokens_per_s']:,.0f} input and "
            f"{throughput['output_tokens_per_s']:,.0f} output tokens/s"
        )
    rate = report["cache_hit_rate"]
    lines.append(f"cache hits     {'not reported by the server' if rate is None else f'{rate:.1%} of input tokens'}")
    lines += [f"error x{count}: {error}" for error, count in report["errors"].items()]
    return "\n".join(lines)


def write_summary(report: dict[str, object], results: Sequence[CallResult], path: Path) -> None:
    """Write a page: `.html` needs nothing, `.png` needs matplotlib. ValueError and RuntimeError as `check_summary`."""
    check_summary(path)
    good = [result for result in results if not result.error]
    panels = [
        ("time to first token, s, over input tokens", [(r.prompt_tokens, r.ttft_s) for r in good]),
        ("time per output token, ms, over start time, s", [(r.started_s, r.tpot_s and r.tpot_s * 1e3) for r in good]),
    ]
    panels = [(title, [(x, y) for x, y in points if x is not None and y is not None]) for title, points in panels]
    if path.suffix == ".png":
        _write_png(report, panels, path)
    else:
        figures = "".join(f"<h2>{html.escape(title)}</h2>{_scatter(points)}" for title, points in panels)
        path.write_text(
            "<!doctype html><meta charset='utf-8'><title>trace replay</title>"
            "<style>body{font-family:sans-serif;margin:2em}pre{background:#f4f4f4;padding:1em}</style>"
            f"<h1>trace replay</h1><pre>{html.escape(format_summary(report))}</pre>{figures}"
            f"<h2>setup</h2><pre>{html.escape(chr(10).join(f'{k}: {v}' for k, v in report['setup'].items()))}</pre>",
            encoding="utf-8",
        )


def check_summary(path: Path) -> None:
    """ValueError: the suffix is neither .html nor .png. RuntimeError: .png without matplotlib."""
    if path.suffix not in SUMMARY_SUFFIXES:
        raise ValueError(f"summary must end in {' or '.join(SUMMARY_SUFFIXES)}, got {str(path)!r}")
    if path.suffix == ".png":
        _figures()


def _figures():
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "a PNG summary needs matplotlib, found none: pip install matplotlib, or use .html"
        ) from error


def _write_png(report, panels, path: Path) -> None:
    figure = _figures().Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    for axis, (title, points) in zip(axes[0], panels):
        axis.plot([x for x, _ in points], [y for _, y in points], ".", alpha=0.6)
        axis.set_title(title, fontsize="small")
        axis.set_ylim(bottom=0)
    for axis in axes[1]:
        axis.axis("off")
    axes[1][0].text(0, 1, format_summary(report), family="monospace", fontsize=7, va="top")
    figure.savefig(path, dpi=120)


def _scatter(points: Sequence[tuple[float, float]], width: int = 640, height: int = 240) -> str:
    if not points:
        return "<p>nothing measured</p>"
    top, right = max(y for _, y in points) or 1, max(x for x, _ in points) or 1
    dots = "".join(
        f"<circle cx='{40 + x / right * (width - 60):.1f}' cy='{height - 20 - y / top * (height - 40):.1f}' r='2'/>"
        for x, y in points
    )
    return (
        f"<svg width='{width}' height='{height}' style='border:1px solid #ccc'>"
        f"<g fill='#1f77b4' fill-opacity='.6'>{dots}</g>"
        f"<text x='2' y='16' font-size='11'>{top:,.2f}</text>"
        f"<text x='{width - 80}' y='{height - 4}' font-size='11'>{right:,.0f}</text></svg>"
    )


_MEASURES = (
    ("ttft_s", "TTFT", 1e3, "ms"),
    ("tpot_s", "TPOT", 1e3, "ms"),
    ("latency_s", "latency", 1e3, "ms"),
    ("prompt_tokens", "input", 1, "tokens"),
    ("output_tokens", "output", 1, "tokens"),
)
