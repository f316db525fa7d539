"""The deployment scripts: what they print, and that doctor has its say first."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("serve_tp.sh", "serve_tp_dcp.sh", "serve_cp_dcp.sh")
# What every mode shares. Source: the baseline command of sgl-project/sglang#36990.
COMMON = {
    "--quantization": "w4afp8",
    "--disable-shared-experts-fusion": None,
    "--tp": "8",
    "--kv-cache-dtype": "fp8_e4m3",
    "--reasoning-parser": "glm45",
    "--tool-call-parser": "glm47",
    "--chunked-prefill-size": "8192",
    "--max-running-requests": "64",
    "--page-size": "64",
    "--mem-fraction-static": "0.70",
    "--trust-remote-code": None,
    "--attention-backend": "nsa",
    "--dsa-prefill-backend": "flashmla_kv",
    "--dsa-decode-backend": "flashmla_kv",
    "--port": "30100",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script with this interpreter as `python3` and this checkout as `nsa-dcp`; returns the finished process."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, command in (("nsa-dcp", "-m nsa_dcp.cli"), ("python3", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")

    def _run(script, *argv):
        command = ["bash", str(ROOT / "scripts" / script), *map(str, argv)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900)

    return _run


def flags_of(line):
    words = shlex.split(line)
    assert words[:3] == ["python3", "-m", "sglang.launch_server"]
    flags = {}
    for word in words[3:]:
        if word.startswith("--"):
            last = word
            flags[last] = None
        else:
            flags[last] = word
    return flags


@pytest.mark.parametrize(
    ("script", "own"),
    [
        ("serve_tp.sh", {}),
        ("serve_tp_dcp.sh", {"--dcp-size": "8", "--dcp-comm-backend": "a2a"}),
        (
            "serve_cp_dcp.sh",
            {
                "--attn-cp-size": "8",
                "--enable-prefill-cp": None,
                "--cp-strategy": "interleave",
                "--enable-cp-decode-attn-tp": None,
                "--dcp-size": "8",
                "--dcp-comm-backend": "a2a",
            },
        ),
    ],
)
def test_a_dry_run_prints_the_mode_s_command(run, script, own):
    done = run(script, "--dry-run")
    assert done.returncode == 0, done.stderr
    flags = flags_of(done.stdout)
    assert {name: flags.get(name, "absent") for name in COMMON} == COMMON
    assert {name: value for name, value in flags.items() if "dcp" in name or "cp-" in name or "-cp" in name} == own
    assert ("this command would start" in done.stderr) == (script != "serve_tp.sh")


@pytest.mark.parametrize(
    ("argv", "refusal"),
    [
        (["--attn-cp-size", "4", "--dcp-size", "4"], "--attn-cp-size 4 with --dcp-size 4"),
        (["--dcp-size", "4"], "--dcp-size 4 with --attn-cp-size 8"),
        (["--cp-strategy", "zigzag", "--speculative-algorithm", "NEXTN"], "--cp-strategy zigzag with --speculative"),
    ],
    ids=["attention-tp", "dcp-below-cp", "zigzag-speculation"],
)
def test_a_cp_dcp_command_that_is_not_served_is_refused(run, argv, refusal):
    done = run("serve_cp_dcp.sh", "--dry-run", *argv)
    assert (done.returncode, done.stdout) == (1, "")
    assert refusal in done.stderr


def test_cp_dcp_says_what_it_is(run):
    done = run("serve_cp_dcp.sh", "--dry-run", "--cp-strategy", "zigzag")
    assert "mode: CP-DCP, 1 DCP group(s) of 8 GPUs" in done.stderr
    assert "64 per rank, 64 gathered" in done.stderr


def test_more_flags_override_the_parameters(run):
    done = run("serve_tp_dcp.sh", "--dry-run", "--dcp-size", "4", "--model-path", "a dir/with space")
    assert done.returncode == 0, done.stderr
    assert flags_of(done.stdout)["--dcp-size"] == "4"
    assert flags_of(done.stdout)["--model-path"] == "a dir/with space"
    assert "2 DCP group(s) of 4 GPUs" in done.stderr


def test_a_refused_command_is_not_printed(run):
    done = run("serve_tp_dcp.sh", "--dry-run", "--enable-hisparse", "--kv-cache-dtype", "fp8_e5m2")
    assert (done.returncode, done.stdout) == (1, "")
    assert "refused, for 2 reason(s)" in done.stderr


def test_a_refused_command_is_not_run_either(run, tmp_path):
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\ntouch started\n")
    assert run("serve_tp_dcp.sh", "--kv-cache-dtype", "fp8_e5m2").returncode == 1
    assert not (tmp_path / "started").exists()
    assert run("serve_tp_dcp.sh").returncode == 0
    assert (tmp_path / "started").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_nsa_dcp_is_one_sentence_that_says_what_to_install(run, tmp_path, script):
    (tmp_path / "bin" / "nsa-dcp").unlink()
    done = run(script, "--dry-run")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (127, "", 1)
    assert done.stderr.startswith(f"{script}: nsa-dcp is not on PATH: ")
    assert "pip install '.[sglang]'" in done.stderr


def test_a_missing_sglang_is_one_sentence_that_says_what_to_install(run, tmp_path):
    # -S: an interpreter without site-packages, so without sglang wherever the tests run.
    (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    done = run("serve_tp_dcp.sh")
    assert done.returncode == 127
    last = done.stderr.splitlines()[-1]
    assert last.startswith("serve_tp_dcp.sh: python3 finds no sglang: ") and "pip install '.[sglang]'" in last


def test_the_scripts_listen_on_the_loopback_interface(run):
    for script in SCRIPTS:
        assert "HOST=127.0.0.1" in (ROOT / "scripts" / script).read_text()
    assert flags_of(run("serve_tp.sh", "--dry-run").stdout)["--host"] == "127.0.0.1"


def test_gsm8k_dry_run_prints_one_command_per_server(run):
    done = run(
        "eval_gsm8k.sh", "--dry-run", "--server", "tp=http://a:1", "--server", "dcp=http://b:2/", "--questions", "50"
    )
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [line[line.index("--base-url") + 1] for line in lines] == ["http://a:1", "http://b:2"]
    assert all(line[:3] == ["python3", "-m", "sglang.test.run_eval"] for line in lines)
    assert all(line[line.index("--num-examples") + 1] == "50" for line in lines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--server NAME=URL must be given at least once"),
        (["--server"], "--server must have a value, got none"),
        (["--server", "http://a:1"], "--server must be NAME=http://host:port, got http://a:1"),
        (["--server", "a=http://a:1", "--questions", "0"], "--questions must be a positive integer, got 0"),
        (["--server", "a=http://a:1", "--data", "/nowhere"], "--data must be a file, got /nowhere"),
        (["--bogus"], "got --bogus"),
        (
            ["--server", "a=http://a:1", "--out", "/nowhere/x.json"],
            "--out must be a file that can be written, got /now",
        ),
        (["--server", "a=http://a:1", "--out", "/"], "--out must be a file that can be written, got /"),
    ],
)
def test_gsm8k_misuse_is_one_sentence(run, argv, message):
    done = run("eval_gsm8k.sh", *argv)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


def test_gsm8k_needs_a_server_that_answers(run):
    done = run("eval_gsm8k.sh", "--server", "tp=http://127.0.0.1:1")
    assert done.returncode == 2
    assert "the server must answer at http://127.0.0.1:1/v1/models" in done.stderr


@pytest.mark.parametrize("script", ["serve_tp_dcp.sh", "serve_cp_dcp.sh"])
def test_the_model_that_is_passed_is_the_one_that_is_judged(run, tmp_path, script):
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}')
    done = run(script, "--dry-run", "--model-path", "qwen")
    assert (done.returncode, done.stdout) == (1, "")
    assert "architecture Qwen3ForCausalLM with DCP" in done.stderr
