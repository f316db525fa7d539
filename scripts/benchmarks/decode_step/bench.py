"""Time one rank's decode step by batch, context and DCP size: one layer's parts, and a model's layers in one graph.

    python -m scripts.benchmarks.decode_step.bench --json decode.json

Communication is measured for the DCP sizes that this machine has GPUs for, and counted as bytes for the others. Nothing
is printed unless the ops' own GPU tests pass first. One case that fails does not lose the others.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from nsa_dcp.command_line import check_output_file
from nsa_dcp.launcher import run_ranks
from nsa_dcp.planning.dimensions import PRESETS
from scripts.benchmarks.decode_step.cases import DecodeCase, list_cases
from scripts.benchmarks.decode_step.rank import RankSettings, bench_cases
from scripts.benchmarks.decode_step.report import describe_case, format_report
from scripts.benchmarks.environment import describe_environment, run_tests

# Each failure costs a start of new processes; after so many in one world the rest is not tried.
_MAX_FAILURES = 4
_COLLECTIVE_TIMEOUT_S = 120.0
# After a world's time, for the case that is running; then its ranks are ended.
_GRACE_S = 30


def plan_worlds(cases: Sequence[DecodeCase], num_gpus: int) -> dict[int, list[DecodeCase]]:
    """Cases by the ranks to start for them: one, or all of a DCP group where each has a GPU of its own."""
    worlds: dict[int, list[DecodeCase]] = {}
    for case in cases:
        world_size = case.dcp_size if case.dcp_size <= num_gpus else 1
        worlds.setdefault(world_size, []).append(case)
    return dict(sorted(worlds.items()))


def run_world(
    world_size: int,
    cases: Sequence[DecodeCase],
    settings: RankSettings,
    keep: Callable[[DecodeCase, dict[str, object]], None],
) -> list[dict[str, str]]:
    """Time cases in a world of ranks; when one fails, go on after it in new processes, as its GPU context may be lost.

    Args:
        world_size: ranks.
        cases: what to time, in order.
        settings: for all of them.
        keep: called with each result as it comes.

    Returns:
        {"case", "error"} of each that failed.
    """
    left = list(cases)
    failures: list[dict[str, str]] = []

    def on_message(message: tuple[DecodeCase, dict[str, object]]) -> None:
        case, result = message
        left.remove(case)
        keep(case, result)

    signal.signal(signal.SIGALRM, _end_world)
    while left and len(failures) < _MAX_FAILURES and time.time() < settings.deadline:
        signal.alarm(int(settings.deadline - time.time()) + _GRACE_S)
        try:
            run_ranks(
                bench_cases, world_size, (tuple(left), settings), "cuda", _COLLECTIVE_TIMEOUT_S, on_message=on_message
            )
        except (RuntimeError, ValueError) as error:
            failed = left.pop(0)
            failures.append({"case": describe_case(failed), "error": str(error)})
            print(f"{describe_case(failed)} failed: {str(error).strip().splitlines()[-1]}", file=sys.stderr, flush=True)
        else:
            break
        finally:
            signal.alarm(0)
    return failures


def _end_world(*_: object) -> None:
    raise RuntimeError(f"not done {_GRACE_S} s after the time limit: its processes were ended")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--dcp-sizes", nargs="+", type=int, default=[2, 4, 8], help="beside a TP rank, always timed")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 128, 32, 256, 8, 1], help="in this order")
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768, 4096, 131072], help="tokens, in this order")
    parser.add_argument("--no-indexer", action="store_true", help="random selections: no scoring, no index keys")
    parser.add_argument("--selection", choices=("row_split", "replicated"), default="row_split")
    parser.add_argument("--quick", action="store_true", help="glm-5.2, batch 64, 32K tokens, dcp 2 and 8")
    parser.add_argument("--cache-gib", type=float, default=48.0, help="budget of latents; index keys: half of it more")
    parser.add_argument("--time-limit", type=float, default=480.0, help="seconds after which no case is started")
    parser.add_argument("--json", type=Path, help="also write the results here, after every case")
    parser.add_argument("--tests-report", type=Path, help="JUnit report of `pytest -m gpu tests/kernels` on this tree")
    args = parser.parse_args(argv)
    if args.quick:
        args.models, args.dcp_sizes, args.batches, args.contexts = ["glm-5.2"], [2, 8], [64], [32768]
    return args


def main() -> None:
    args = parse_args()
    try:
        check_output_file("--json", args.json)
        cases = list_cases(args.models, args.dcp_sizes, args.batches, args.contexts)
    except ValueError as error:
        sys.exit(f"benchmarks.decode_step: {error}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("benchmarks.decode_step needs a Hopper GPU")
    run_tests(args.tests_report)
    started = time.time()
    environment = describe_environment() | {
        "gpus": str(torch.cuda.device_count()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "selection": args.selection,
        "indexer": str(not args.no_indexer),
        "cache_gib": str(args.cache_gib),
    }
    settings = RankSettings(
        dcp_size=1,
        cache_bytes=int(args.cache_gib * 2**30),
        row_split=args.selection == "row_split",
        with_indexer=not args.no_indexer,
        deadline=started + args.time_limit,
    )
    results: dict[DecodeCase, dict[str, object]] = {}
    failures: list[dict[str, str]] = []

    def write_json() -> None:
        if args.json:
            records = [asdict(case) | {"mode": case.mode} | result for case, result in results.items()]
            args.json.write_text(
                json.dumps({"environment": environment, "records": records, "failures": failures}, indent=1)
            )

    def keep(case: DecodeCase, result: dict[str, object]) -> None:
        results[case] = result
        write_json()
        print(f"{time.time() - started:5.0f} s  {describe_case(case)}", file=sys.stderr, flush=True)

    worlds = plan_worlds(cases, torch.cuda.device_count())
    left = len(cases)
    for world_size, chosen in worlds.items():
        # A world that takes long leaves the others their share of the time.
        share = (settings.deadline - time.time()) * len(chosen) / left
        left -= len(chosen)
        failures += run_world(
            world_size, chosen, replace(settings, dcp_size=world_size, deadline=time.time() + share), keep
        )
        write_json()
    failed = {failure["case"] for failure in failures}
    not_run = [case for case in cases if case not in results and describe_case(case) not in failed]
    print(format_report(results, failures, not_run))
    print(json.dumps(environment), f"{time.time() - started:.0f} s")
    if not results:
        sys.exit(1)


if __name__ == "__main__":
    main()
