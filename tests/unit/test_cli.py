"""The command as a whole: what every subcommand shares."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_dcp.cli import build_parser, main

ROOT = Path(__file__).parents[2]


def test_every_subcommand_says_what_it_does():
    listed = build_parser().format_help()
    for name in ("generate", "plan", "model", "doctor"):
        assert name in listed


def test_a_refusal_goes_to_standard_error_without_a_traceback(capsys):
    assert main(["plan", "--preset", "glm-5.2", "--gpu-memory-gib", "-1"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "gpu_memory_gib must be" in printed.err and "Traceback" not in printed.err


def test_the_command_says_what_it_is_for():
    description = build_parser().description
    assert "Decode context parallelism" in description and description.endswith(".") and description.count(".") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--preset", "glm-9", "--gpu-memory-gib", "1"],
        ["model", "--preset", "glm-9"],
        ["doctor", "--command-only"],
        ["generate", "--model", "tiny-glm-dsa", "--prompts", "/nowhere"],
    ],
    ids=lambda words: words[0],
)
def test_every_refusal_begins_with_the_command(words, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nsa-dcp {words[0]}: ") and error.count("\n") == 1


def test_a_file_that_cannot_be_read_is_one_sentence(capsys, monkeypatch):
    def fail(_):
        raise PermissionError(13, "Permission denied", "secret.json")

    monkeypatch.setattr("nsa_dcp.planning.capacity_cli.run_plan", fail)
    assert main(["plan", "--preset", "glm-5.2", "--gpu-memory-gib", "1"]) == 2
    assert capsys.readouterr().err == "nsa-dcp plan: [Errno 13] Permission denied: 'secret.json'\n"


def test_a_reader_that_leaves_early_is_no_error():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "nsa_dcp.cli", "plan", "--preset", "glm-5.2", "--gpu-memory-gib", "60", "--json"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=ROOT, text=True
    )
    running.stdout.close()
    errors = running.stderr.read()
    assert running.wait(timeout=900) == 0
    assert "Traceback" not in errors and "BrokenPipeError" not in errors


BROKEN = {
    "absent": "raise ModuleNotFoundError('No module named broken torch')",
    "without CUDA": "raise OSError('libcudart.so.12: cannot open shared object file: a broken torch was imported')",
}


def run_without_torch(tmp_path, words, torch):
    (tmp_path / "torch.py").write_text(BROKEN[torch])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "nsa_dcp.cli", *words]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["plan", "--preset", "glm-5.2", "--gpu-memory-gib", "60"],
        ["model", "--preset", "glm-5.2", "--batch", "8", "--context", "4096"],
        ["doctor", "--no-imports"],
        *([command, "--help"] for command in ("plan", "model", "doctor", "generate")),
    ],
    ids=" ".join,
)
def test_what_needs_no_torch_runs_without_it(words, tmp_path):
    done = run_without_torch(tmp_path, words, "absent")
    assert done.stdout and "Traceback" not in done.stderr and "broken torch" not in done.stderr
    # Doctor has something to find on a machine like this one.
    assert done.returncode == 0 or words[0] == "doctor"


def test_doctor_tries_a_broken_torch_and_says_so(tmp_path):
    done = run_without_torch(tmp_path, ["doctor"], "without CUDA")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "a broken torch was imported" in done.stdout


@pytest.mark.parametrize("torch", BROKEN)
def test_what_needs_torch_says_so_in_one_sentence(torch, tmp_path):
    done = run_without_torch(tmp_path, ["generate", "--model", "tiny-glm-dsa", "--prompts", "p.json"], torch)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("nsa-dcp generate: generate needs torch, which cannot be imported here: ")
    assert "broken torch" in done.stderr and "nsa-dcp doctor" in done.stderr and done.stderr.count("\n") == 1
