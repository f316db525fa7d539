"""Doctor's trial imports: at once, in processes of their own, told in order as they end, never waited for forever."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_dcp.sglang_plugin.doctor import doctor, machine_checks, probe
from nsa_dcp.sglang_plugin.doctor.probe import Trials, list_trials

ROOT = Path(__file__).parents[3]
TORCH = """\
__version__ = "2"
class version: cuda = "13"
class cuda:
    device_count = staticmethod(lambda: 0)
"""
DOCTOR = [
    sys.executable,
    "-c",
    "import argparse, sys\n"
    "from nsa_dcp.sglang_plugin.doctor.doctor import add_doctor_parser\n"
    "parser = argparse.ArgumentParser()\n"
    "add_doctor_parser(parser.add_subparsers())\n"
    "args = parser.parse_args()\n"
    "sys.exit(args.run(args))",
]
ENDLESS = "import time\ntime.sleep(600)\n"
# Waits for the file `go` beside it; after 15,000 looks it leaves `tired` there and goes on.
WAITS_FOR_GO = """\
import pathlib, time
here = pathlib.Path(__file__).parent
for _ in range(15000):
    if (here / "go").exists():
        break
    time.sleep(0.01)
else:
    (here / "tired").touch()
"""
ORDER = [
    "import torch",
    "torch and CUDA",
    "import triton",
    "import flash_mla",
    "import deep_gemm",
    "import sglang",
    "plugin",
]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of stand-in packages that trial processes find first; returns a function that writes one."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{ROOT / 'kernels'}")

    def _write(name, source=""):
        (tmp_path / f"{name}.py").write_text(source)
        return tmp_path

    _write("torch", TORCH)
    for name in ("triton", "flash_mla", "deep_gemm", "sglang"):
        _write(name)
    return _write


class Clock:
    """A clock that stands still until it is moved."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param("raise RuntimeError('broken wheel')", "RuntimeError: broken wheel", id="raises"),
        pytest.param(
            "try:\n    raise OSError('libcuda.so.1: no such file')\nexcept OSError as error:\n"
            "    raise ImportError('x') from error",
            "ImportError: x; from OSError: libcuda.so.1: no such file",
            id="raises from a cause",
        ),
        pytest.param("import os; os.abort()", "its process was killed by signal 6", id="aborts"),
        pytest.param("import sys; sys.exit(3)", "its process exited with status 3", id="exits"),
        pytest.param("import os; os._exit(0)", "its process exited with status 0", id="exits as if all were well"),
    ],
)
def test_a_package_that_breaks_on_import_is_named_and_the_others_are_still_tried(packages, source, said):
    packages("flash_mla", source)
    with Trials(list_trials(with_command=False)) as trials:
        checks = {check.name: check for check in machine_checks.check_imports(trials.ask)}
    assert (checks["import flash_mla"].status, checks["import flash_mla"].found) == ("failed", said)
    assert "sgl-flash-mla" in checks["import flash_mla"].fix
    assert {name for name, check in checks.items() if check.status == "ok"} == {
        "import torch",
        "import triton",
        "import deep_gemm",
        "import sglang",
    }


def test_findings_come_in_one_order_whichever_ends_first(packages):
    packages("torch", "import time\ntime.sleep(0.5)\n" + TORCH)
    with Trials(list_trials(with_command=False)) as trials:
        assert [check.name for check in doctor.examine_imports(trials.ask)] == ORDER


def test_a_slow_import_is_given_up_and_the_others_are_not_held_up(packages):
    packages("torch", ENDLESS)
    clock = Clock()
    with Trials(list_trials(with_command=False), timeout_s=100, clock=clock) as trials:  # runs out on purpose
        # The clock stands still: these answers came while torch was still hanging.
        for module in ("triton", "flash_mla", "deep_gemm", "sglang"):
            assert "file" in trials.ask(f"import:{module}")
        clock.now = 101
        checks = {check.name: check for check in machine_checks.check_imports(trials.ask)}
    slow = checks["import torch"]
    assert (slow.status, slow.found) == ("failed", "no answer within 100 s")
    assert "--timeout" in slow.fix
    after = checks["torch and CUDA"]
    assert (after.status, after.found) == ("failed", "not reached: `import torch` did not succeed")
    # An answer given in time counts, however late it is read.
    assert checks["import sglang"].status == "ok"


def test_a_plugin_that_breaks_leaves_sglang_and_the_command_answered(packages):
    packages(
        "sglang",
        "import sys, types\n"
        "args = types.ModuleType('args')\n"
        "class ServerArgs:\n"
        "    add_cli_args = staticmethod(lambda parser: parser.add_argument('--tp', dest='tp_size', type=int))\n"
        "args.ServerArgs = ServerArgs\n"
        "sys.modules.update({'sglang.srt': types.ModuleType('srt'), 'sglang.srt.server_args': args})\n"
        "print('noise that is no answer', flush=True)\n",
    )
    steps = [("import:sglang", "command", "plugin")]
    with Trials(steps, ["--tp", "8"]) as trials:
        assert trials.ask("import:sglang")["file"]
        assert trials.ask("command")["fields"]["tp_size"] == 8
        assert "sglang.srt.plugins" in trials.ask("plugin").reason
    with Trials(steps, ["--pt", "8"]) as trials:
        assert "unrecognized arguments: --pt 8" in trials.ask("command")["refused"]
        # A refused command does not keep the plugin from being tried.
        assert "sglang.srt.plugins" in trials.ask("plugin").reason


def test_no_process_outlives_its_trials(packages):
    packages(
        "triton", "import os, pathlib\npathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n" + ENDLESS
    )
    folder = packages("deep_gemm", WAITS_FOR_GO.replace('"go"', '"pid"'))
    with Trials([("import:triton",), ("import:deep_gemm",)]) as trials:
        assert "file" in trials.ask("import:deep_gemm")
        while not (pid := (folder / "pid").read_text()):
            pass
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_probe_ends_by_itself_when_its_doctor_is_gone(packages):
    packages("triton", ENDLESS)
    done = subprocess.run(
        [sys.executable, "-m", "nsa_dcp.sglang_plugin.doctor.probe", "1", "import:triton", "--"], timeout=900
    )
    assert done.returncode == -14


def test_lines_are_printed_as_they_come_in(packages, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    folder = packages("sglang", WAITS_FOR_GO)
    with subprocess.Popen([*DOCTOR, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "import deep_gemm" in line:
                break
        assert not (folder / "tired").exists()
        (folder / "go").touch()
        rest, stderr = process.communicate()
    assert seen[0].startswith("ok       python ")
    told = [line[9:].split("  ")[0] for line in seen if not line.startswith(" ")]
    assert told[-5:] == ORDER[:5]
    assert "import sglang" in rest and "import sglang" not in "".join(seen)
    assert "waiting for imports, 180 s at most" in stderr


def test_json_is_one_document_printed_at_the_end(packages):
    packages("sglang", "raise RuntimeError('broken wheel')")
    done = subprocess.run([*DOCTOR, "doctor", "--json"], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], done.stderr) == (1, False, "")
    assert [check["name"] for check in report["checks"]][-len(ORDER) :] == ORDER


def test_a_reader_that_leaves_is_not_taken_for_misuse(monkeypatch):
    class Closed:
        def write(self, _text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    parser = argparse.ArgumentParser()
    doctor.add_doctor_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor", "--no-imports"])
    with pytest.raises(BrokenPipeError):
        args.run(args)


@pytest.mark.parametrize("alone", [True, False], ids=["command only", "with the machine"])
def test_sglang_that_does_not_get_to_read_the_command_is_told(packages, monkeypatch, capsys, alone):
    packages("sglang", "raise RuntimeError('broken wheel')")
    monkeypatch.setattr(machine_checks, "installed_version", lambda name: "1")
    parser = argparse.ArgumentParser()
    doctor.add_doctor_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor", "--json", *(["--command-only"] if alone else []), "--", "--tp", "8"])
    status = args.run(args)
    out, err = capsys.readouterr()
    if alone:
        assert (status, out) == (2, "")
        assert "sglang could not read the command: RuntimeError: broken wheel" in err
    else:
        *_, last = json.loads(out)["checks"]
        assert (status, last["name"], last["status"]) == (1, "command", "failed")
        assert last["found"] == "sglang could not read the command: not reached: `import sglang` did not succeed"


def test_an_answer_that_is_still_being_written_is_not_read():
    assert probe._read_answers('["cuda", {"devices": []}]\n["plugin", {"mis') == {"cuda": {"devices": []}}
