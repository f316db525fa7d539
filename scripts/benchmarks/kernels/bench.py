"""Time every GPU op of nsa_dcp_kernels beside what it replaces, on one Hopper GPU.

    python -m scripts.benchmarks.kernels.bench --json kernels.json

Every number is the median over replays of a captured graph; low and high are the 10th and 90th percentile. Inputs
rotate and the L2 cache is overwritten before each replay. Nothing is printed unless the ops' own GPU tests pass first.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from nsa_dcp.command_line import check_output_file
from scripts.benchmarks.environment import describe_environment, run_tests
from scripts.benchmarks.kernels import attention, cache, indexer
from scripts.benchmarks.timing import Record, measure_ceilings

SECTIONS = {
    "attention": attention.bench_all,
    "cache": cache.bench_all,
    "indexer": indexer.bench_all,
}


def format_record(row: dict[str, object]) -> str:
    rate = ""
    if "gb_per_s" in row:
        rate += f" {row['gb_per_s']:7.0f} GB/s {100 * row['share_of_copy']:3.0f}% of copy"
    if "tflop_per_s" in row:
        rate += f" {row['tflop_per_s']:6.1f} TFLOP/s {100 * row['share_of_bf16_matmul']:3.0f}% of bf16"
    return f"{row['op']:<44} {row['case']:<38} {row['us']:9.2f} us ({row['low']:.2f}-{row['high']:.2f}){rate}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the records here")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="a few cases of each op")
    parser.add_argument("--tests-report", type=Path, help="JUnit report of `pytest -m gpu tests/kernels` on this tree")
    args = parser.parse_args()
    try:
        check_output_file("--json", args.json)
    except ValueError as error:
        sys.exit(f"benchmarks.kernels: {error}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("benchmarks.kernels needs a Hopper GPU")
    run_tests(args.tests_report)
    environment, ceilings = describe_environment(), measure_ceilings()
    rows: list[dict[str, object]] = []
    for section in args.sections:
        for record in SECTIONS[section](args.quick):
            rows.append(report(record, ceilings))
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"environment": environment, "ceilings": ceilings, "records": rows}, indent=1))
    print(json.dumps(environment | ceilings), f"{time.process_time():.0f} s")


def report(record: Record, ceilings: dict[str, float]) -> dict[str, object]:
    row = record.as_dict(ceilings)
    print(format_record(row), flush=True)
    return row


if __name__ == "__main__":
    main()
