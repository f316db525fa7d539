"""Time every GPU op of nsa_dcp_kernels beside what it replaces, on one Hopper GPU.

    python scripts/bench_kernels.py --json kernels.json

Every number is the median over replays of a captured graph; low and high are the 10th and 90th percentile. Inputs
rotate and the L2 cache is overwritten before each replay. Nothing is printed unless the ops' own GPU tests pass first.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import kernel_bench_attention
import kernel_bench_cache
import kernel_bench_indexer
import torch
from kernel_timing import Record, measure_ceilings

from nsa_dcp.command_line import check_output_file

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {
    "attention": kernel_bench_attention.bench_all,
    "cache": kernel_bench_cache.bench_all,
    "indexer": kernel_bench_indexer.bench_all,
}


def run_tests(report: Path | None) -> None:
    """Run the ops' GPU tests, or read the JUnit report of a run of this tree.

    Raises:
        SystemExit: a test failed, or none ran.
    """
    if report is None:
        report = ROOT / "build" / "kernel_tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/kernels", f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    import xml.etree.ElementTree

    suites = list(xml.etree.ElementTree.parse(report).getroot().iter("testsuite"))
    ran, bad, skipped = (
        sum(int(suite.get(name)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    if bad or ran == skipped:
        sys.exit(f"no numbers: {bad} of {ran} GPU tests failed, {skipped} were skipped ({report})")


def describe_environment() -> dict[str, str]:
    versions = {}
    for package in ("torch", "triton", "sgl-flash-mla", "sgl-deep-gemm", "apache-tvm-ffi", "sglang"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return versions | {
        "device": f"{properties.name}, {properties.multi_processor_count} SMs",
        "driver": driver.stdout.strip().split("\n")[0],
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
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
        sys.exit(f"bench_kernels: {error}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("bench_kernels needs a Hopper GPU")
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
