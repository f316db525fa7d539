"""Put the step model's prediction beside every decode step that benchmarks/servers timed.

    python -m scripts.benchmarks.servers.compare_step_model MODEL OUT/bench.json [--tables tables.json]
        [--set NAME=VALUE ...] [--json out.json]

The model predicts attention, selection, merging, collectives, and reading weights once. It does not predict norms,
RoPE, routing, what matrix products take beyond reading weights, sampling, launches, or the host. So there are two
comparisons: the plain one; and one in which what is not predicted is taken from the first config, the measured
step less the predicted one, at the same context and batch (or the closest batch, marked ~). The second tests what the
model says about the difference between modes.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nsa_dcp.command_line import check_output_file
from nsa_dcp.planning.dimensions import PRESETS, ModelDims, preset_dims, read_config
from nsa_dcp.planning.steps.step_inputs import StepInput, measured_inputs, override_inputs
from nsa_dcp.planning.steps.step_model import MAX_BATCH, predict_step
from scripts.benchmarks.served_setup import setup_of

TOLERANCE = 0.15


def compare(model: ModelDims, inputs: Mapping[str, StepInput], reports: Sequence[Mapping]) -> list[dict[str, object]]:
    """One entry for each measured step.

    Returns:
        Plain data: config, context, batch; measured and predicted microseconds; `terms` of the prediction;
        `unpredicted`, measured less predicted; `calibrated`, predicted plus what the first config leaves unpredicted,
        with `calibrated_from` the batch that it is from, both None for the first config itself.
    """
    rows: list[dict[str, object]] = []
    for report in reports:
        mode, setup = setup_of(report)
        for step in report["decode"]:
            if step["running"] > MAX_BATCH:
                continue
            terms = predict_step(model, setup, inputs, mode, step["running"], step["context"])
            predicted = terms.pop("total")
            row = {
                "config": report["config"],
                "context": step["context"],
                "batch": step["running"],
                "measured": step["step_us"],
                "predicted": predicted,
                "terms": terms,
                "unpredicted": step["step_us"] - predicted,
                "calibrated": None,
                "calibrated_from": None,
            }
            base = [one for one in rows if one["config"] == reports[0]["config"] and one["context"] == step["context"]]
            if report is not reports[0] and base:
                closest = min(base, key=lambda one: abs(one["batch"] - row["batch"]))
                row["calibrated"] = predicted + closest["unpredicted"]
                row["calibrated_from"] = closest["batch"]
            rows.append(row)
    return rows


def format_comparison(rows: Sequence[Mapping], inputs: Mapping[str, StepInput], model: ModelDims) -> str:
    """Two markdown tables: the steps and their ratios; the terms."""
    if not rows:
        return "no measured step"
    lines = [
        __doc__.split("\n\n")[2].strip(),
        "",
        f"Model: {model.num_hidden_layers} layers, {model.dense_bytes:g} bytes a weight.",
        "",
        "| config | context | batch | measured, ms | predicted, ms | predicted / measured | with the rest of "
        f"{rows[0]['config']}, ms | / measured | not predicted, us a layer |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    within = {"predicted": [], "calibrated": []}
    for row in rows:
        cells = [f"{row['measured'] / 1e3:.2f}"]
        for name in ("predicted", "calibrated"):
            if row[name] is None:
                cells += ["-", "-"]
                continue
            ratio = row[name] / row["measured"]
            within[name].append(abs(ratio - 1) <= TOLERANCE)
            far = "~" if name == "calibrated" and row["calibrated_from"] != row["batch"] else ""
            cells += [f"{far}{row[name] / 1e3:.2f}", f"{ratio:.2f}"]
        cells.append(f"{row['unpredicted'] / model.num_hidden_layers:.1f}")
        lines.append(f"| {row['config']} | {row['context']:,} | {row['batch']} | " + " | ".join(cells) + " |")
    lines.append("")
    for name, told in (("predicted", "Predicted alone"), ("calibrated", "With the first config's rest")):
        lines.append(f"{told}: {sum(within[name])} of {len(within[name])} within {TOLERANCE:.0%}.")
    names = list(rows[0]["terms"])
    lines += ["", "Terms, us a step:", "", f"| config | context | batch | {' | '.join(names)} |"]
    lines.append("|---|---:|---:|" + "---:|" * len(names))
    for row in rows:
        terms = " | ".join(f"{row['terms'][name]:.0f}" for name in names)
        lines.append(f"| {row['config']} | {row['context']:,} | {row['batch']} | {terms} |")
    changed = {name: entry.source for name, entry in inputs.items() if "given" in entry.source}
    lines += ["", "Inputs replaced: " + ("; ".join(f"{name}: {source}" for name, source in changed.items()) or "none")]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a config.json, or a preset")
    parser.add_argument("bench", type=Path)
    parser.add_argument("--tables", type=Path, help="of benchmarks/collectives")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--weight-bytes", type=float, default=2.0, help="of every weight; default 2, bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    try:
        check_output_file("--json", args.json)
        dims = preset_dims(args.model) if args.model in PRESETS else read_config(args.model)
        dims = dataclasses.replace(dims, expert_bytes=args.weight_bytes, dense_bytes=args.weight_bytes)
        inputs = override_inputs(measured_inputs(dims), args.set, args.tables)
        rows = compare(dims, inputs, json.loads(args.bench.read_text())["reports"])
    except (ValueError, NotImplementedError, OSError) as error:
        sys.exit(f"compare_step_model: {error}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    print(format_comparison(rows, inputs, dims))


if __name__ == "__main__":
    main()
