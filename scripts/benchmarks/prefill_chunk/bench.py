"""Time one rank's prefill chunk in TP-DCP, by queries and by rows, and in CP-DCP; count what each moves, and find the
prefixes where they cross.

    python -m scripts.benchmarks.prefill_chunk.bench --json prefill.json

Kernels are measured, a layer's parts one by one, on one Hopper GPU. Bytes between ranks are counted, and their transfer
is predicted from a bandwidth. Nothing is printed unless the ops' own GPU tests pass first.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from nsa_dcp.command_line import check_output_file
from nsa_dcp.planning.dimensions import PRESETS, ModelDims, preset_dims
from scripts.benchmarks.environment import describe_environment, run_tests
from scripts.benchmarks.prefill_chunk.cases import (
    MODES,
    PrefillCase,
    find_crossover,
    list_cases,
    measured_link,
    pool_pages,
    predict_layers,
    received_bytes,
    sum_layers,
)
from scripts.benchmarks.prefill_chunk.rank import bench_case

_PARTS = ("select", "localise", "arrange", "pack pages", "attend", "merge")
_KINDS = {"selects": "layer that selects", "shares": "layer that shares", "mean": "mean layer"}
_CROSSING = {"cp_dcp": "", "tp_dcp_rows": " by rows"}
_EXPLANATION = """\
One layer of the last of N ranks, tp = dcp = N, one request; kernels measured (medians of CUDA-graph replays, us).
TP-DCP: all rows, gathered heads, this rank's part of the selection, over its pool; merged by a2a; selects for a block
of rows. by rows: TP-DCP's other way, that block of rows with all heads, whole selection, over the gathered pages.
CP-DCP: every N-th row, all heads, whole selection, over the gathered pages; selects for its own rows.
select: scored and selected by this package's kernels. arrange: received queries by head; by rows results by rank too;
or received latents by token.
attend: a, dequantised to bf16 first; b, planned FP8 launches. MB: bytes received from other ranks, counted.
wire: those bytes over the link, predicted. layer: kernels + wire, nothing overlaps.
"selects" is a layer with an indexer, "shares" one that reuses a selection; "mean" weighs them as the model does.
Projections, experts, TP all-reduces, the cache write and the look-up of slots are in no mode."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=PRESETS, default="glm-5.2")
    parser.add_argument("--dcp-sizes", nargs="+", type=int, default=[8, 2, 4], help="N, in this order")
    parser.add_argument("--chunks", nargs="+", type=int, default=[8192], help="new tokens")
    parser.add_argument("--prefixes", nargs="+", type=int, default=[0, 32768, 131072], help="tokens before the chunk")
    parser.add_argument(
        "--pool-gib", type=float, default=40.0, help="a GPU's pools: TP-DCP dequantises a layer's cache"
    )
    parser.add_argument("--link-gbs", type=float, help="GB/s a GPU receives; default: the largest measured all-gather")
    parser.add_argument("--time-limit", type=float, default=75.0, help="seconds after which no case is started")
    parser.add_argument("--json", type=Path, help="also write the results here, after every case")
    parser.add_argument("--tests-report", type=Path, help="JUnit report of `pytest -m gpu tests/kernels` on this tree")
    args = parser.parse_args(argv)
    if args.link_gbs is not None and args.link_gbs <= 0:
        parser.error("--link-gbs must be more than 0")
    return args


def describe_link(dims: ModelDims, link_gbs: float | None) -> tuple[float, str]:
    """GB/s received per GPU, and where the figure is from."""
    if link_gbs is not None:
        return link_gbs, f"{link_gbs:.0f} GB/s received per GPU, given with --link-gbs"
    measured, table = measured_link(dims)
    return measured, f"{measured:.0f} GB/s received per GPU: the largest all-gather, {table.source}; no latency"


def make_record(case: PrefillCase, dims: ModelDims, timed: Mapping[str, object], link_gbs: float) -> dict[str, object]:
    """A case's result for the table and for JSON: measured, counted and predicted, each by name."""
    received = received_bytes(case, dims)
    kernel_us = {mode: {name: part["us"] for name, part in timed["parts"][mode].items()} for mode in MODES}
    return asdict(case) | {
        "measured": timed,
        "counted_bytes": received,
        "counted_bytes_ag_rs": received_bytes(case, dims, "ag_rs"),
        "layer": {
            mode: {
                "kernel_us": sum_layers(kernel_us[mode], dims),
                "received_bytes": sum_layers(received[mode], dims),
                "predicted_us": predict_layers(kernel_us[mode], received[mode], dims, link_gbs),
            }
            for mode in MODES
        },
    }


def list_crossovers(records: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Per dcp size and chunk: where CP-DCP, and TP-DCP by rows, stop being faster than TP-DCP by queries, by kind of
    layer, and by bytes alone."""
    found = []
    for size, chunk in dict.fromkeys((record["dcp_size"], record["chunk"]) for record in records):
        chosen = [record for record in records if (record["dcp_size"], record["chunk"]) == (size, chunk)]
        chosen.sort(key=lambda record: record["prefix"])
        entry: dict[str, object] = {"dcp_size": size, "chunk": chunk}
        for quantity, kinds in (("predicted_us", _KINDS), ("received_bytes", ("mean",))):
            for kind in kinds:
                values = {mode: [record["layer"][mode][quantity][kind] for record in chosen] for mode in MODES}
                for mode, suffix in _CROSSING.items():
                    crossing = find_crossover([record["prefix"] for record in chosen], values["tp_dcp"], values[mode])
                    entry[f"{quantity} {kind}{suffix}"] = None if crossing is None else asdict(crossing)
        found.append(entry)
    return found


def format_report(
    records: Sequence[Mapping[str, object]],
    crossovers: Sequence[Mapping[str, object]],
    dims: ModelDims,
    link: str,
    left_out: Sequence[str],
) -> str:
    """One table per dcp size and chunk, the crossover of each, then what failed or was not run."""
    lines = [_EXPLANATION, f"link: {link}"]
    for entry in crossovers:
        size, chunk = entry["dcp_size"], entry["chunk"]
        lines += ["", f"{dims.name}, {dims.num_attention_heads} heads, dcp {size}, chunk of {chunk:,} tokens"]
        header = f"{'prefix':>9} {'mode':<7}" + "".join(f" {name:>10}" for name in _PARTS)
        lines.append(
            header
            + " | kernels: selects shares | MB: selects shares | wire: selects shares | layer: selects shares   mean"
        )
        for record in records:
            if (record["dcp_size"], record["chunk"]) == (size, chunk):
                lines += [_format_row(record, mode) for mode in MODES]
        for mode, suffix in _CROSSING.items():
            lines.append(f"prefix from which on {MODES[mode]} takes no less than TP-DCP by queries (predicted):")
            for kind, words in _KINDS.items():
                lines.append(f"  {words}: {_format_crossing(entry[f'predicted_us {kind}{suffix}'], dims)}")
            crossing = entry[f"received_bytes mean{suffix}"]
            lines.append(f"  by bytes alone, mean layer: {_format_crossing(crossing, dims)}")
    if left_out:
        lines += ["", f"{len(left_out)} cases have no result:", *(f"  {case}" for case in left_out)]
    return "\n".join(lines)


def _format_row(record: Mapping[str, object], mode: str) -> str:
    measured, layer = record["measured"], record["layer"][mode]
    line = f"{record['prefix']:>9,} {MODES[mode]:<7}"
    for name in _PARTS:
        part = measured["parts"][mode].get(name)
        cell = "-" if part is None else f"{part['us']:.1f}"
        if name == "attend":
            cell += "a" if measured["dequantised"][mode] else "b"
        line += f" {cell:>10}"
    kernels, moved, total = layer["kernel_us"], layer["received_bytes"], layer["predicted_us"]
    line += f" | {kernels['selects']:>16.0f} {kernels['shares']:>6.0f}"
    line += f" | {moved['selects'] / 1e6:>11.1f} {moved['shares'] / 1e6:>6.1f}"
    line += f" | {total['selects'] - kernels['selects']:>13.0f} {total['shares'] - kernels['shares']:>6.0f}"
    return line + f" | {total['selects']:>14.0f} {total['shares']:>6.0f} {total['mean']:>6.0f}"


def _format_crossing(crossing: Mapping[str, object] | None, dims: ModelDims) -> str:
    if crossing is None:
        return "none"
    text = f"{crossing['prefix']:,.0f} tokens"
    if crossing["extrapolated"]:
        text += ", extrapolated past the measured prefixes"
    if crossing["prefix"] > dims.max_context:
        text += f", beyond the model's {dims.max_context:,}"
    return text


def describe_case(case: PrefillCase) -> str:
    return f"{case.model} dcp={case.dcp_size} chunk={case.chunk} prefix={case.prefix}"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    dims = preset_dims(args.model)
    try:
        check_output_file("--json", args.json)
        cases = list_cases(dims, args.dcp_sizes, args.chunks, args.prefixes)
    except ValueError as error:
        sys.exit(f"benchmarks.prefill_chunk: {error}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("benchmarks.prefill_chunk needs a Hopper GPU")
    run_tests(args.tests_report)
    started = time.time()
    link_gbs, link = describe_link(dims, args.link_gbs)
    environment = describe_environment() | {
        "command": shlex.join(sys.argv),
        "pool_gib": str(args.pool_gib),
        "link": link,
    }
    records: list[dict[str, object]] = []
    left_out: list[str] = []

    def write_json() -> None:
        if args.json:
            contents = {"environment": environment, "crossovers": list_crossovers(records), "records": records}
            args.json.write_text(json.dumps(contents | {"left_out": left_out}, indent=1))

    for case in cases:
        if time.time() - started > args.time_limit:
            left_out.append(f"{describe_case(case)}: not run within {args.time_limit:.0f} s")
        else:
            try:
                timed = bench_case(case, dims, pool_pages(dims, case.dcp_size, args.pool_gib))
            except (RuntimeError, ValueError) as error:
                left_out.append(f"{describe_case(case)}: {str(error).strip().splitlines()[0]}")
            else:
                records.append(make_record(case, dims, timed, link_gbs))
            print(f"{time.time() - started:5.0f} s  {describe_case(case)}", file=sys.stderr, flush=True)
        write_json()
    print(format_report(records, list_crossovers(records), dims, link, left_out))
    print(json.dumps(environment), f"{time.time() - started:.0f} s")
    if not records:
        sys.exit(1)


if __name__ == "__main__":
    main()
