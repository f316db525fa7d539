"""No test depends on how fast the machine is: no clock is read, no wait is short, and drawn examples have no deadline.

A wait that ends in a failure is bounded all the same, at a length that a busy machine does not reach. One that is meant
to run out says `runs out on purpose` on its line.
"""

import ast
import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SOURCES = [path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)]
# In a string too: what a test has another process run.
CLOCK = re.compile(
    r"\b(?:monotonic|perf_counter|process_time|thread_time)(?:_ns)?\s*\(|\btime\.time(?:_ns)?\s*\(|\btimeit\b"
    r"|\belapsed_time\s*\(|\bdo_bench\b|\b(?:datetime|date)\.(?:now|today|utcnow)\s*\("
    r"|\bfrom time import (?!sleep\b)|\bimport time as\b"
)
ON_PURPOSE = "runs out on purpose"
SHORTEST_WAIT_S = 300
BOUNDS = {"timeout", "timeout_s", "within_s", "timeout_seconds"}
WAITS = {"wait", "join", "wait_until_ready", "wait_for", "communicate", "acquire"}


def find_clocks(text: str) -> list[int]:
    """Lines that read a clock."""
    return [number for number, line in enumerate(text.splitlines(), 1) if CLOCK.search(line)]


def find_short_waits(text: str) -> list[int]:
    """Lines with a bound below SHORTEST_WAIT_S, by position or keyword, that are not meant to run out."""
    lines, found = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        bounds = [keyword.value for keyword in node.keywords if keyword.arg in BOUNDS]
        if isinstance(node.func, ast.Attribute) and node.func.attr in {*WAITS, "timeout"}:
            bounds += node.args[:1]
        for bound in bounds:
            seconds = bound.value if isinstance(bound, ast.Constant) else None
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if is_number and seconds < SHORTEST_WAIT_S and ON_PURPOSE not in lines[bound.lineno - 1]:
                found.append(bound.lineno)
    return sorted(found)


def find_deadlines(text: str) -> list[int]:
    """Lines that set Hypothesis's deadline or its health checks, which tests/conftest.py does for all."""
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] in ("settings", "register_profile", "load_profile")
        and (
            any(keyword.arg in ("deadline", "suppress_health_check") for keyword in node.keywords)
            or ast.unparse(node.func).endswith("_profile")
        )
    )


@pytest.mark.parametrize("find", [find_clocks, find_short_waits, find_deadlines])
def test_no_test_measures_time(find):
    sources = [path for path in SOURCES if find is not find_deadlines or path != TESTS / "conftest.py"]
    assert len(sources) > 50
    found = {str(path.relative_to(ROOT)): lines for path in sources if (lines := find(path.read_text()))}
    assert found == {}


@pytest.mark.parametrize(
    ("find", "line", "expected"),
    [
        (find_clocks, "assert time.monotonic() - started < 5", [1]),
        (find_clocks, "source = 'print(time.time())'", [1]),
        (find_clocks, "from time import perf_counter", [1]),
        (find_clocks, "assert start.elapsed_time(end) < 2", [1]),
        (find_clocks, "time.sleep(0.1)", []),
        (find_short_waits, "done = subprocess.run(command, timeout=60)", [1]),
        (find_short_waits, "assert reached.wait(30)", [1]),
        (find_short_waits, "mark = pytest.mark.timeout(60)", [1]),
        (find_short_waits, "run_ranks(f, timeout_s=5.0)  # runs out on purpose", []),
        (find_deadlines, "@settings(deadline=200)\ndef test(): pass", [1]),
        (find_deadlines, "@hypothesis.settings(max_examples=3)\ndef test(): pass", []),
        (find_short_waits, "' '.join(words); thread.join(); running.wait(timeout=900)", []),
    ],
)
def test_what_measures_time_is_found(find, line, expected):
    assert find(line) == expected


def test_drawn_examples_have_no_deadline_in_any_suite():
    hypothesis = pytest.importorskip("hypothesis")
    assert hypothesis.settings().deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings().suppress_health_check
    assert hypothesis.settings(max_examples=7).deadline is None


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("failing", ["none", "cpu", "sglang", "both"])
def test_make_test_runs_both_halves_and_fails_where_one_does(failing, tmp_path):
    """The Makefile's own recipes, with a Python that notes what it is asked to run."""
    for half in ("cpu", "sglang"):
        (tmp_path / half / "bin").mkdir(parents=True)
        (tmp_path / half / ".installed").touch()
        python = tmp_path / half / "bin" / "python"
        status = int(failing in (half, "both"))
        python.write_text(f'#!/bin/sh\necho {half} "$@" >> "{tmp_path}/ran"\nexit {status}\n')
        python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    folders = [f"VENV={tmp_path / 'cpu'}", f"SGLANG_VENV={tmp_path / 'sglang'}"]
    done = subprocess.run(["make", "test", *folders], cwd=ROOT, env=environment, capture_output=True, text=True)
    ran = (tmp_path / "ran").read_text().splitlines()
    assert [line for line in ran if "pytest" in line] == [
        "cpu -m pytest -n 2 --ignore tests/sglang --cov --cov-report=",
        "sglang -m pytest -n 2 tests/sglang",
    ], done.stderr
    assert (done.returncode == 0) == (failing == "none"), textwrap.indent(done.stdout + done.stderr, "  ")
