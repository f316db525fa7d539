"""What every benchmark of ours does first: run the ops' own tests, and write down what it runs on."""

import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


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
