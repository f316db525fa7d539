"""Every command in README and docs is run, or marked as needing GPUs and checked for flags that exist.

A fenced block tagged `console` holds `$ command` lines, each with lines of output that it must show; others may stand
between them. `console gpu` blocks are not run: their programs, scripts and flags are checked; so are `console make`
blocks, the targets that run this very suite. Shell blocks of another tag are refused, so that no command escapes.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Flags of `sglang.launch_server` that the documents and scripts use; tests/sglang/test_documented_flags.py asks sglang.
_SERVER_FLAGS = """
    --model-path --quantization --disable-shared-experts-fusion --tp --dcp-size --dcp-comm-backend --attn-cp-size
    --enable-prefill-cp --cp-strategy --enable-cp-decode-attn-tp --kv-cache-dtype --reasoning-parser
    --tool-call-parser --chunked-prefill-size --max-running-requests --page-size --mem-fraction-static
    --trust-remote-code --attention-backend --dsa-prefill-backend --dsa-decode-backend --host --port
    --nnodes --node-rank --dist-init-addr
"""
SERVER_FLAGS = frozenset(_SERVER_FLAGS.split())
UNCHECKED_PROGRAMS = ("pip", "git", "curl", "docker")


@dataclass(frozen=True)
class Command:
    """One command of a document, with the output lines that must appear."""

    where: str
    words: tuple[str, ...]
    shown: tuple[str, ...]
    runs_here: bool


def read_blocks(text):
    """Fenced blocks as (line number, info string, body lines). Indented fences, as in lists, count."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = re.match(r"(\s*)```(.*)", lines[at])
        if fence:
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            yield at + 1, fence.group(2).strip(), [line.removeprefix(fence.group(1)) for line in lines[at + 1 : end]]
            at = end
        at += 1


def read_commands(page):
    """Commands of one document."""
    for number, info, body in read_blocks(page.read_text(encoding="utf-8")):
        if not info.startswith("console"):
            continue
        joined = "\n".join(body).replace("\\\n", " ").splitlines()
        for at, line in enumerate(joined):
            if line.startswith("$ "):
                shown = []
                for output in joined[at + 1 :]:
                    if output.startswith("$ "):
                        break
                    if output.strip():
                        shown.append(output.strip())
                yield Command(f"{page.name}:{number}", tuple(shlex.split(line[2:])), tuple(shown), info == "console")


COMMANDS = [command for page in PAGES for command in read_commands(page)]
RUN = [command for command in COMMANDS if command.runs_here]
CHECKED = [command for command in COMMANDS if not command.runs_here]


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A directory with the checkout's folders in it, where `nsa-dcp` and `python3` are this interpreter's."""
    for name in ("scripts", "docs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, command in (("nsa-dcp", "-m nsa_dcp.cli"), ("python3", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def test_documents_are_found():
    assert ROOT / "docs" / "runbook.md" in PAGES
    assert RUN and CHECKED


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_escapes_the_tests(page):
    for number, info, body in read_blocks(page.read_text(encoding="utf-8")):
        where = f"{page.name}:{number}"
        assert info not in ("sh", "bash", "shell", "zsh", "shell-session"), (
            f"{where}: tag it `console` or `console gpu`"
        )
        if info.startswith("console"):
            assert info in ("console", "console gpu", "console make"), f"{where}: {info!r}"
            assert any(line.startswith("$ ") for line in body), f"{where}: no `$ command`"
        else:
            assert not any(line.startswith("$ ") for line in body), f"{where}: a command outside a `console` block"


@pytest.mark.parametrize("command", RUN, ids=lambda command: f"{command.where} {' '.join(command.words[:3])}")
def test_a_documented_command_runs_and_shows_what_is_shown(command, workspace):
    done = subprocess.run(
        list(command.words), capture_output=True, text=True, cwd=workspace, timeout=900, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    output = iter([line.strip() for line in (done.stdout + done.stderr).splitlines()])
    for line in command.shown:
        assert any(line in printed for printed in output), f"{line!r} is not in the output, or not in this order"


@pytest.mark.parametrize("command", CHECKED, ids=lambda command: f"{command.where} {' '.join(command.words[:3])}")
def test_a_command_that_is_not_run_names_what_exists(command, workspace):
    words = [word for word in command.words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    flags = {word.split("=")[0] for word in words if word.startswith("--") and word != "--"}
    program = words[0]
    if program in UNCHECKED_PROGRAMS:
        return
    if program == "make":
        assert re.search(rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif "sglang.launch_server" in words or words[:2] == ["sglang", "serve"]:
        assert flags <= SERVER_FLAGS
    elif program.endswith(".sh"):
        text = (ROOT / program).read_text()
        known = (
            SERVER_FLAGS | {"--dry-run"} if "launch_checked.sh" in text else set(re.findall(r"--[a-z][a-z0-9-]*", text))
        )
        assert flags <= known
        assert subprocess.run(["bash", "-n", ROOT / program]).returncode == 0
    elif words[:3] == ["python3", "-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[3:] if not word.startswith("-"))
    else:
        as_module = words[:2] == ["python3", "-m"]
        entry = words[: 3 if as_module else 2 if program in ("nsa-dcp", "python3") else 1]
        named = f"{entry[2].replace('.', '/')}.py" if as_module else entry[-1]
        assert program != "python3" or (ROOT / named).is_file(), entry
        done = subprocess.run([*entry, "--help"], capture_output=True, text=True, cwd=workspace, timeout=900)
        assert done.returncode == 0, done.stderr
        assert flags <= set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))


def test_the_runbook_has_every_refusal():
    from nsa_dcp.sglang_plugin.admission import validation

    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    hostile = validation.ServerSettings(
        dcp_size=8,
        tp_size=8,
        attn_cp_size=8,
        enable_prefill_cp=True,
        prefill_attention_backend="fa3",
        dsa_prefill_backend="tilelang",
        dsa_decode_backend="trtllm",
        kv_cache_dtype="fp8_e5m2",
        page_size=32,
        dcp_comm_backend="fi_a2a",
        prefill_cuda_graph="full",
        speculative_algorithm="NGRAM",
        speculative_eagle_topk=4,
        disaggregation_mode="decode",
        enable_hisparse=True,
        enable_hierarchical_cache=True,
        enable_lmcache=True,
        enable_unified_memory=True,
        enable_two_batch_overlap=True,
        enable_pdmux=True,
    )
    model = validation.ModelFacts(is_dsa=True, architecture="GlmMoeDsaForCausalLM", num_attention_heads=64)
    problems = validation.find_problems(hostile, model, validation.HOPPER)
    flags = {flag for problem in problems for flag in re.findall(r"--[a-z-]+", problem.asked)}
    assert len(flags) >= 14
    assert sorted(flag for flag in flags if flag not in text) == []
