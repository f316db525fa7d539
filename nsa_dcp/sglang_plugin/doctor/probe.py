"""What doctor asks of packages that may be broken or slow, in processes of their own: both sides of the question.

`python -m nsa_dcp.sglang_plugin.doctor.probe LIMIT_S STEP... [-- ARGUMENT...]` answers its steps one after the other,
so that steps that need the same imports pay for them once; each answer is a line of JSON on stdout, written when it is
known. A package that raises, exits, crashes or hangs takes only its process with it. `Trials` starts such processes,
all at once, and reads their answers.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_dcp.sglang_plugin.admission.reading.server_command import read_with_sglang

DEFAULT_TIMEOUT_S = 180.0
_POLL_S, _KILL_GRACE_S, _ORPHAN_GRACE_S = 0.02, 2.0, 10.0


@dataclass(frozen=True)
class Unanswered:
    """Why a step has no answer, and what helps where that is not mending the package: it was slow, or not reached."""

    reason: str
    fix: str = ""


Ask = Callable[[str], "dict[str, Any] | Unanswered"]


class BoundedProcess:
    """A process that can always be given up: its output goes to files, and nothing here waits without a limit.

    `subprocess.run(timeout=...)` waits for the process that it has killed, and a process inside a driver call that does
    not return cannot be killed.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.killed = False
        with contextlib.ExitStack() as files:
            self._stdout, self._stderr = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._stdout, stderr=self._stderr
            )
            self._files = files.pop_all()

    def __enter__(self) -> BoundedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._files.close()

    def poll(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def stdout(self) -> str:
        """What it has written so far."""
        return _written(self._stdout)

    def stderr(self) -> str:
        """What it has written so far."""
        return _written(self._stderr)

    def kill(self) -> None:
        """Kill it if it runs, once, and wait no more than two seconds for its end."""
        if self.poll() is None and not self.killed:
            self.killed = True
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_GRACE_S)


class Trials:
    """Processes that answer steps, started together and killed on leaving the `with` block.

    Args:
        steps: the steps of each process, in order.
        arguments: the server's arguments, for the step `command`.
        timeout_s: seconds after which steps without an answer are given up, counted from the start of them all.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        steps: Sequence[Sequence[str]],
        arguments: Sequence[str] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s, self._clock = timeout_s, clock
        self._deadline = clock() + timeout_s
        launcher = [sys.executable, "-m", "nsa_dcp.sglang_plugin.doctor.probe", str(timeout_s + _ORPHAN_GRACE_S)]
        with contextlib.ExitStack() as processes:
            self._processes = [
                (processes.enter_context(BoundedProcess([*launcher, *of_one, "--", *arguments])), of_one)
                for of_one in steps
            ]
            self._running = processes.pop_all()

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def ask(self, step: str) -> dict[str, Any] | Unanswered:
        """Wait for the answer to a step, until the time of all trials is over."""
        process, steps = next((process, steps) for process, steps in self._processes if step in steps)
        while True:
            # In this order: whatever a process wrote before its end is then there to be read.
            status = process.poll()
            answers = _read_answers(process.stdout())
            if step in answers:
                return answers[step]
            if self._clock() >= self._deadline:
                process.kill()
            if status is not None or process.killed:
                break
            time.sleep(_POLL_S)
        failed = next(step for step in steps if step not in answers)
        if failed != step:
            return Unanswered(f"not reached: `{failed.replace(':', ' ')}` did not succeed", "see above")
        if process.killed:
            return Unanswered(
                f"no answer within {self.timeout_s:g} s",
                "run doctor again, now that the files are cached, or give it more --timeout",
            )
        if status is not None and status < 0:
            return Unanswered(f"its process was killed by signal {-status}")
        return Unanswered(_first_and_last_error(process.stderr()) or f"its process exited with status {status}")


def list_trials(*, with_command: bool) -> list[tuple[str, ...]]:
    """The steps of each process that tries a machine.

    Reading a command and loading the plugin need what `import sglang` imports, so one process does all three; the
    command comes before the plugin, so that a plugin that breaks leaves it readable.
    """
    return [
        ("import:torch", "cuda"),
        ("import:triton",),
        ("import:flash_mla",),
        ("import:deep_gemm",),
        ("import:sglang", *(("command",) if with_command else ()), "plugin"),
    ]


def probe_import(module: str) -> dict[str, object]:
    """Import one module."""
    found = importlib.import_module(module)
    return {"version": str(getattr(found, "__version__", "")), "file": getattr(found, "__file__", None) or ""}


def probe_cuda() -> dict[str, object]:
    """What torch sees of the GPUs."""
    import torch

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if devices else None,
        "devices": [{"name": device.name, "sms": device.multi_processor_count} for device in devices],
    }


def probe_plugin() -> dict[str, object]:
    """Load sglang's plugins as a server does, then look for our factories and hooks and check the symbols."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from nsa_dcp.sglang_plugin.compat import check_symbols
    from nsa_dcp.sglang_plugin.patches import BACKEND_NAMES
    from nsa_dcp.sglang_plugin.plugin import BackendFactory
    from nsa_dcp.sglang_plugin.resolution import missing_hooks

    missing = [
        f"attention backend {name}"
        for name in BACKEND_NAMES
        if not isinstance(ATTENTION_BACKENDS.get(name), BackendFactory)
    ]
    missing += [f"hook {step}" for step, _ in missing_hooks()]
    check_symbols()
    return {"missing": missing}


def probe_command(arguments: Sequence[str]) -> dict[str, object]:
    """Read a command with sglang's parser: {"fields": ...}, or {"refused": sglang's message} when it is not one."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return {"fields": read_with_sglang(arguments)}
    except SystemExit as stop:
        # argparse exits; the steps after this one are still to be answered.
        return {"refused": _first_and_last_error(said.getvalue()) or f"its parser exited with status {stop.code}"}
    except (ValueError, AssertionError) as error:
        return {"refused": str(error)}


def main(argv: list[str]) -> int:
    """Answer steps in turn: `import:MODULE`, `cuda`, `plugin`, or `command`, which reads the words after `--`."""
    at = argv.index("--")
    limit_s, *steps = argv[:at]
    # Doctor kills a slow process; this ends one whose doctor was itself killed.
    signal.setitimer(signal.ITIMER_REAL, float(limit_s))
    # What packages print goes to stderr: only answers reach stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for step in steps:
        kind, _, module = step.partition(":")
        if kind == "import":
            answer = probe_import(module)
        elif kind == "cuda":
            answer = probe_cuda()
        elif kind == "plugin":
            answer = probe_plugin()
        elif kind == "command":
            answer = probe_command(argv[at + 1 :])
        else:
            raise ValueError(f"step must be import:MODULE, cuda, plugin or command, got {step!r}")
        print(json.dumps([step, answer]), file=answers, flush=True)
    return 0


def _read_answers(stdout: str) -> dict[str, dict[str, object]]:
    """Answers by step; a line that is still being written does not count."""
    return dict(json.loads(line) for line in stdout.split("\n")[:-1])


def _written(file: io.BufferedRandom) -> str:
    # pread leaves the offset alone, which the process shares.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _first_and_last_error(stderr: str) -> str:
    """The last line and the first error: a wrapper's own message often hides which library is missing."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return "; from ".join(dict.fromkeys([*lines[-1:], *errors[:1]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
