"""The tables of the reports: every config beside the first one."""

from collections.abc import Mapping, Sequence

_EXPLANATION = """\
Step: what the server logged for a full batch that only decodes, median over samples of ten steps (10th to 90th
percentile); in brackets the first config's step over this one's. Every rank's pool has the same bytes, weights are
random."""


def format_report(reports: Sequence[Mapping]) -> str:
    """Markdown of all configs; what is missing, skipped or failed is said."""
    if not reports:
        return "No config has a report.\n"
    lines = [*_format_setup(reports), "", "## Decode step, ms", "", _EXPLANATION, "", *_format_steps(reports)]
    lines += ["", "## Output tokens per second at the largest batch of each pool", "", *_format_largest(reports)]
    lines += ["", "## Prefill of one prompt, tokens per second", "", *_format_prefill(reports)]
    return "\n".join([*lines, *_format_gaps(reports), ""])


def _format_setup(reports: Sequence[Mapping]) -> list[str]:
    host = reports[0]["host"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    lines = [
        f"{host['date']}, {len(host['gpus'])} GPUs: {'; '.join(sorted(set(host['gpus']))) or 'unknown'}. {versions}.",
        "",
        *_table(["config", "pool rows a rank", "tokens", "bytes a token and rank", "ready, s", "resolved"]),
    ]
    for report in reports:
        pool = report["pool"]
        resolved = {name: value for name, value in report.get("resolved", {}).items() if value not in (None, False)}
        cells = [report["config"], f"{pool['rows_per_rank']:,}", f"{pool['tokens']:,}"]
        cells += [f"{pool['bytes_per_token_and_rank']:,.0f}", f"{report.get('ready_s', float('nan')):.0f}"]
        lines.append(_row([*cells, ", ".join(f"{name}={value}" for name, value in resolved.items())]))
    limited = sorted(name for name in host["environment"] if name.startswith("NCCL_MAX_"))
    if limited:
        lines += ["", f"NCCL's channels were limited ({', '.join(limited)}): collectives are slower than they can be."]
    unfilled = [report["config"] for report in reports if not report.get("random_weights", True)]
    if unfilled:
        lines += ["", f"With sglang's own dummy weights, near zero: {', '.join(unfilled)}."]
    return lines


def _format_steps(reports: Sequence[Mapping]) -> list[str]:
    found = [{(one["context"], one["concurrency"]): one for one in report["decode"]} for report in reports]
    lines = _table(["context", "concurrency", *(report["config"] for report in reports)])
    for case in sorted({case for cases in found for case in cases}):
        cells = [f"{case[0]:,}", str(case[1])]
        for cases in found:
            one, first = cases.get(case), found[0].get(case)
            cells.append("-" if one is None else _format_step(one, first if cases is not found[0] else None))
        lines.append(_row(cells))
    return lines


def _format_step(one: Mapping, first: Mapping | None) -> str:
    text = f"{one['step_us'] / 1e3:.2f} ({one['low_us'] / 1e3:.2f}-{one['high_us'] / 1e3:.2f})"
    if first is not None and first["running"] == one["running"]:
        text += f" [{first['step_us'] / one['step_us']:.2f}x]"
    if one["running"] != one["concurrency"]:
        text += f", {one['running']} ran"
    return text + ("" if one["graph"] else ", no graph")


def _format_largest(reports: Sequence[Mapping]) -> list[str]:
    lines = _table(["context", "config", "running", "step, ms", "tokens/s", "over the first config"])
    contexts = sorted({one["context"] for report in reports for one in report["decode"]})
    for context in contexts:
        base = None
        for report in reports:
            chosen = [one for one in report["decode"] if one["context"] == context]
            if not chosen:
                continue
            best = max(chosen, key=lambda one: one["running"])
            rate = best["tokens_per_s"]
            if report is reports[0]:
                base = rate
            ratio = f"{rate / base:.2f}x" if base else "-"
            cells = [f"{context:,}", report["config"], str(best["running"]), f"{best['step_us'] / 1e3:.2f}"]
            note = "" if best["largest"] else " (the pool holds more)"
            lines.append(_row([*cells, f"{rate:,.0f}{note}", ratio]))
    return lines


def _format_prefill(reports: Sequence[Mapping]) -> list[str]:
    found = [{one["tokens"]: one for one in report["prefill"]} for report in reports]
    lines = _table(["tokens", *(report["config"] for report in reports)])
    for length in sorted({length for lengths in found for length in lengths}):
        cells = [f"{length:,}"]
        for lengths in found:
            one, first = lengths.get(length), found[0].get(length)
            text = "-" if one is None else f"{one['tokens_per_s']:,.0f}"
            if one is not None and first is not None and lengths is not found[0]:
                text += f" [{one['tokens_per_s'] / first['tokens_per_s']:.2f}x]"
            cells.append(text)
        lines.append(_row(cells))
    return lines


def _format_gaps(reports: Sequence[Mapping]) -> list[str]:
    lines = []
    for report in reports:
        for kind in ("skipped", "failures"):
            for one in report[kind]:
                name = one.get("case") or f"{one['context']}x{one['concurrency']}"
                told = (one.get("reason") or one.get("error", "")).strip().splitlines() or [""]
                lines.append(f"- {report['config']}: {name} {'failed' if kind == 'failures' else kind}: {told[-1]}")
        if not report["complete"]:
            lines.append(f"- {report['config']}: not complete")
    return ["", "## Not measured", "", *lines] if lines else []


def _table(names: Sequence[str]) -> list[str]:
    return [_row(names), "|" + "---|" * len(names)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
