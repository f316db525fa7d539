"""Time every collective of a decode step and of a prefill chunk, captured in CUDA graphs, with a GPU per rank.

    python -m scripts.benchmarks.collectives.bench MODEL --json collectives.json [--ranks 2]
        [--steps OUT/bench.json] [--tables tables.json]

MODEL is a folder with a config.json, or a preset. --steps adds each part's share of the steps that benchmarks/servers
timed.
--tables writes what `nsa-dcp model --tables` reads. Through torch.distributed; a server's all-reduce up to a few MB is
another kernel (its times are in a trace: summarise_trace.py). No torchrun; the results are written after every case.
"""

import argparse
import datetime
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from nsa_dcp import comm
from nsa_dcp.command_line import check_output_file
from nsa_dcp.launcher import run_ranks
from nsa_dcp.planning.dimensions import PRESETS, ModelDims, preset_dims, read_config
from scripts.benchmarks.collectives.cases import (
    Collective,
    count_per_step,
    list_collectives,
    model_tables,
    share_of_step,
)
from scripts.benchmarks.served_setup import setup_of
from scripts.benchmarks.timing import Timing, time_calls

_CALLS, _REPLAYS, _COLLECTIVE_TIMEOUT_S = 8, 15, 60.0
_DTYPES = {"uint8": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32}


def bench_rank(
    rank: int, send: Callable[[object], None], cases: Sequence[Collective], device: str, deadline: float
) -> None:
    """Time the cases in order until the deadline; rank 0 sends (case, Timing) for each."""
    group = dist.group.WORLD
    for case in cases:
        past = torch.tensor(int(time.time() > deadline), device=device)
        if int(comm.broadcast(past, group)):
            return
        calls = [make_call(case, group, device) for _ in range(_CALLS)]
        timing = time_calls(calls, _REPLAYS) if device == "cuda" else time_on_cpu(calls)
        if rank == 0:
            send((case, timing))


def make_call(case: Collective, group: comm.Group, device: str) -> Callable[[], object]:
    """The collective over buffers of its own."""
    ranks, dtype = comm.size_of(group), _DTYPES[case.dtype]
    numel = max(ranks, case.sent_bytes // dtype.itemsize // ranks * ranks)
    if case.kind == "all_gather":
        sent = torch.ones(max(1, case.sent_bytes // dtype.itemsize), dtype=dtype, device=device)
        received = sent.new_empty(ranks * sent.numel())
        return lambda: comm._all_gather_single(received, sent, group=group)
    sent = torch.zeros(numel, dtype=dtype, device=device)
    if case.kind == "all_to_all":
        received = torch.empty_like(sent)
        return lambda: dist.all_to_all_single(received, sent, group=group)
    if case.kind == "reduce_scatter":
        received = sent.new_empty(numel // ranks)
        return lambda: comm._reduce_scatter_single(received, sent, group=group)
    return lambda: dist.all_reduce(sent, group=group)


def time_on_cpu(calls: Sequence[Callable[[], object]]) -> Timing:
    """Wall time of a call; to try the script, not to measure."""
    times = []
    for call in calls:
        started = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - started))
    return Timing(statistics.median(times), min(times), max(times))


def run_world(
    num_ranks: int,
    cases: Sequence[Collective],
    device: str,
    time_limit: float,
    keep: Callable[[Collective, Timing], None],
) -> str | None:
    """Time cases in a world of ranks; return what ended it early, if something did."""
    signal.signal(signal.SIGALRM, _end_world)
    signal.alarm(int(time_limit) + 30)
    try:
        run_ranks(
            bench_rank,
            num_ranks,
            (tuple(cases), device, time.time() + time_limit),
            device,
            _COLLECTIVE_TIMEOUT_S,
            on_message=lambda message: keep(*message),
        )
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        signal.alarm(0)
    return None


def _end_world(*_: object) -> None:
    raise RuntimeError("not done 30 s after the time limit: its processes were ended")


def describe(case: Collective, timing: Timing, num_ranks: int) -> dict[str, object]:
    """For JSON and the table."""
    received = case.received_bytes(num_ranks)
    return {
        "ranks": num_ranks,
        **asdict(case),
        "received_bytes": received,
        **asdict(timing),
        "received_gb_per_s": received / timing.us / 1e3,
    }


def format_table(records: Sequence[dict]) -> list[str]:
    lines = [
        "| ranks | part | rows | collective | received, KB | us (10th-90th percentile) | GB/s received |",
        "|---:|---|---:|---|---:|---:|---:|",
    ]
    for one in records:
        size = one["rows"] or f"{one['sent_bytes']:,} B"
        lines.append(
            f"| {one['ranks']} | {one['part']} | {size} | {one['kind']} | {one['received_bytes'] / 1e3:,.1f} | "
            f"{one['us']:.1f} ({one['low']:.1f}-{one['high']:.1f}) | {one['received_gb_per_s']:.1f} |"
        )
    return lines


def format_shares(records: Sequence[dict], reports: Sequence[dict], dims: ModelDims) -> list[str]:
    """Each part's share of the measured steps, as if nothing were hidden."""
    lines = [
        "Share of the measured step, as if nothing of it were hidden (count a step x time / step):",
        "",
        "| config | context | batch | step, ms | all | parts |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for report in reports:
        config = report["config"]
        mode, setup = setup_of(report)
        times: dict[str, dict[int, float]] = {}
        for one in sorted(records, key=lambda one: one["rows"]):
            if one["ranks"] == setup.tp_size:
                times.setdefault(one["part"], {})[one["rows"]] = one["us"]
        replicated = mode == "tp_dcp" and setup.replicates_q_proj
        counts = count_per_step(config, dims, replicated, setup.comm_backend)
        for step in report["decode"]:
            shares = share_of_step(counts, times, step["running"], step["step_us"])
            if shares is None:
                continue
            parts = ", ".join(f"{counts[part]} {part} {100 * share:.1f}%" for part, share in shares.items())
            lines.append(
                f"| {config} | {step['context']:,} | {step['running']} | {step['step_us'] / 1e3:.2f} | "
                f"{100 * sum(shares.values()):.1f}% | {parts or 'none'} |"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo, to try the script")
    parser.add_argument("--steps", type=Path, help="bench.json of benchmarks/servers")
    parser.add_argument("--tables", type=Path, help="write the step model's tables here, from two ranks")
    parser.add_argument("--max-bytes", type=int, default=1 << 30, help="larger messages are left out")
    parser.add_argument("--time-limit", type=float, default=90, help="seconds for each number of ranks")
    parser.add_argument("--shares-only", action="store_true", help="nothing is timed: read --json, print shares")
    args = parser.parse_args(argv)
    try:
        if not args.shares_only:
            check_output_file("--json", args.json)
        check_output_file("--tables", args.tables)
    except ValueError as error:
        sys.exit(f"benchmarks.collectives: {error}")
    dims = preset_dims(args.model) if args.model in PRESETS else read_config(args.model)
    records: list[dict] = json.loads(args.json.read_text())["records"] if args.shares_only else []
    failures: list[str] = []
    environment = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "torch": torch.__version__,
    }
    if args.device == "cuda" and not args.shares_only:
        environment["gpus"] = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
        environment["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))

    def save() -> None:
        args.json.write_text(
            json.dumps({"environment": environment, "records": records, "failures": failures}, indent=1)
        )

    for num_ranks in [] if args.shares_only else args.ranks:
        cases = [case for case in list_collectives(dims, num_ranks) if case.sent_bytes <= args.max_bytes]

        def keep(case: Collective, timing: Timing, num_ranks: int = num_ranks) -> None:
            records.append(describe(case, timing, num_ranks))
            save()

        error = run_world(num_ranks, cases, args.device, args.time_limit, keep)
        done = sum(one["ranks"] == num_ranks for one in records)
        if error or done < len(cases):
            told = error or "the time is up"
            failures.append(f"{num_ranks} ranks: {done} of {len(cases)} cases: {told}")
            print(failures[-1], file=sys.stderr, flush=True)
        save()
    tables = model_tables(records)
    if args.tables and tables:
        args.tables.write_text(json.dumps(tables, indent=1))
    print("\n".join(format_table(records)))
    if args.steps:
        print("\n".join(["", *format_shares(records, json.loads(args.steps.read_text())["reports"], dims)]))
    if not records:
        sys.exit(1)


if __name__ == "__main__":
    main()
