"""Doctor without sglang: what it finds, what it says about broken packages, and how it judges a command."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_dcp.cli import main
from nsa_dcp.sglang_plugin.admission.reading.server_command import read_model_facts, read_without_sglang, strip_launcher
from nsa_dcp.sglang_plugin.doctor import doctor, machine_checks
from nsa_dcp.sglang_plugin.doctor.machine_checks import Check, check_gpus, parse_topology

ROOT = Path(__file__).parents[3]
COMMAND_LINE = (
    "python -m sglang.launch_server --model-path GLM-5.2 --tp 8 --dcp-size 8 --kv-cache-dtype fp8_e4m3 --page-size 64 "
    "--attention-backend nsa --dsa-decode-backend flashmla_kv --dsa-prefill-backend flashmla_kv"
)
COMMAND = COMMAND_LINE.split()
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47
GPU1\tNV18\t X \tNV18\tSYS\t0-47
GPU2\tSYS\tNV18\t X \tSYS\t0-47
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


@pytest.fixture
def run(capsys, monkeypatch):
    """Run `doctor`; returns (exit status, stdout, stderr). sglang counts as absent."""
    installed = machine_checks.installed_version
    monkeypatch.setattr(machine_checks, "installed_version", lambda name: None if name == "sglang" else installed(name))

    def _run(*argv):
        parser = argparse.ArgumentParser(prog="nsa-dcp")
        doctor.add_doctor_parser(parser.add_subparsers(required=True))
        args = parser.parse_args(["doctor", *map(str, argv)])
        status = args.run(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return _run


def judge(run, *more, preset="glm-5.2"):
    status, out, _ = run("--command-only", "--json", "--preset", preset, "--", *COMMAND, *more)
    return status, json.loads(out)["command"]


def test_a_good_command_passes_and_says_what_would_run(run):
    status, verdict = judge(run)
    assert (status, verdict["refused"], verdict["served_by"]) == (0, False, "nsa-dcp")
    facts = " | ".join(verdict["facts"])
    assert "TP-DCP, 1 DCP group(s) of 8 GPUs" in facts
    assert "8 per rank, 64 gathered, in FlashMLA's 64-head kernel" in facts
    assert "128-head kernel" in " ".join(judge(run, preset="deepseek-v3.2")[1]["facts"])


def test_every_reason_of_a_bad_command_is_given_at_once(run):
    status, verdict = judge(run, "--kv-cache-dtype", "fp8_e5m2", "--enable-hisparse", "--dcp-comm-backend", "fi_a2a")
    assert (status, verdict["refused"]) == (1, True)
    assert [problem["asked"] for problem in verdict["problems"]] == [
        "--dcp-comm-backend fi_a2a",
        "--kv-cache-dtype fp8_e5m2",
        "--enable-hisparse",
    ]
    assert all(problem["reason"] and problem["instead"] for problem in verdict["problems"])


def test_a_command_without_dcp_is_left_to_sglang(run):
    status, verdict = judge(run, "--dcp-size", "1")
    assert (status, verdict["served_by"]) == (0, "sglang")


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        (["--tp", "0"], ["--tp-size 0"]),
        (["--tp", "-8"], ["--tp-size -8"]),
        (["--attn-dp-size", "0"], ["--attn-dp-size 0"]),
        (["--attn-cp-size", "-1"], ["--attn-cp-size -1"]),
        (["--pp-size", "0"], ["--pp-size 0"]),
        (["--page-size", "-64"], ["--page-size -64"]),
        (["--dcp-size", "0"], ["--dcp-size 0"]),
        (["--dcp-size", "-2"], ["--dcp-size -2"]),
        (["--dcp-size", "1", "--tp", "0"], ["--tp-size 0"]),
        (["--dp-size", "0", "--enable-dp-attention"], ["--dp-size 0", "--attn-dp-size 0"]),
    ],
    ids=lambda value: " ".join(value) if value[0] in ("--tp", "--dcp-size") else "",
)
def test_a_size_below_1_is_refused_by_name(run, flags, asked):
    status, verdict = judge(run, *flags)
    assert (status, [problem["asked"] for problem in verdict["problems"]]) == (1, asked)


@pytest.mark.parametrize(
    "flags",
    [
        ["--enable-dsa-cache-layer-split"],
        ["--dcp-size", "1", "--enable-dsa-cache-layer-split"],
        ["--dcp-size", "1", "--dcp-comm-backend", "a2a"],
        ["--dcp-size", "4", "--attn-dp-size", "2", "--dp-size", "2"],
    ],
    ids=" ".join,
)
def test_what_sglang_itself_refuses_would_not_start(run, flags):
    status, verdict = judge(run, *flags)
    assert (status, verdict["refused"], len(verdict["problems"])) == (1, True, 1)


def test_a_command_that_would_start_says_what_was_not_checked(run):
    for flags in ([], ["--dcp-size", "1"]):
        assert "sglang's own checks of its other flags" in judge(run, *flags)[1]["notes"][-1]


def test_attention_dp_narrows_the_dcp_group(run):
    status, verdict = judge(run, "--dp-size", "2", "--enable-dp-attention")
    assert status == 1
    assert "inside one attention-DP shard" in verdict["problems"][0]["reason"]
    assert judge(run, "--dp-size", "2")[0] == 0


def test_what_only_sglang_can_judge_is_said_and_the_command_is_not_called_good(run):
    status, verdict = judge(run, "--enable-eplb", "--context-length", "9000000")
    assert (status, verdict["refused"], verdict["outcome"]) == (0, False, "undecided")
    assert verdict["unjudged"] == ["--context-length", "--enable-eplb"]
    text = run("--command-only", "--preset", "glm-5.2", "--", *COMMAND, "--enable-eplb")[1]
    assert "would start" not in text
    assert "which only sglang can say of --enable-eplb" in text


@pytest.mark.parametrize(("flags", "outcome"), [([], "starts"), (["--dcp-size", "1"], "left to sglang")])
def test_a_command_that_is_left_to_sglang_is_not_called_good(run, flags, outcome):
    assert judge(run, *flags)[1]["outcome"] == outcome
    text = run("--command-only", "--preset", "glm-5.2", "--", *COMMAND, *flags)[1]
    assert ("would start" in text) == (outcome == "starts")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--command-only"], "--command-only must be followed by -- and a launch_server command"),
        (["--command-only", "--", *COMMAND], "give doctor --config or --preset"),
        (["--command-only", "--preset", "glm-9", "--", *COMMAND], "preset must be one of"),
        (
            ["--command-only", "--preset", "glm-5.2", "--", *COMMAND, "--page-size", "x"],
            "the command could not be read",
        ),
        (["--command-only", "--preset", "glm-5.2", "--", "vllm", "serve"], "the command must begin with"),
        (["--command-only", "--", "--dcp-size", "2"], "must name a model with --model-path"),
        (["--preset", "glm-9", "--", *COMMAND], "preset must be one of"),
        (["--", "vllm", "serve"], "the command must begin with"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--timeout", "nan"], "--timeout must be above 0"),
    ],
)
def test_misuse_is_one_sentence_and_status_2(run, argv, message):
    status, out, err = run(*argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_machine_without_gpu_and_sglang_fails_and_says_how_to_mend_it(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, out, _ = run("--no-imports", "--json")
    report = json.loads(out)
    assert (status, report["ok"]) == (1, False)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["gpu"]["status"] == "failed"
    assert checks["sglang"] == {
        "name": "sglang",
        "status": "failed",
        "found": "not installed",
        "fix": "pip install sglang==0.5.23",
    }
    text = run("--no-imports")[1]
    assert "fix: pip install sglang==0.5.23" in text


def test_what_a_checkout_installs_is_said_beside_the_index(monkeypatch):
    monkeypatch.setattr(machine_checks.importlib.metadata, "entry_points", lambda **_: [])
    assert machine_checks.check_entry_point().fix == (
        "in sglang's environment: pip install nsa-dcp, or from a checkout: pip install '.[sglang]'"
    )


def test_gpus_of_another_kind_are_refused():
    assert next(check_gpus(_smi("NVIDIA B200, 10.0, 183359, 580.1"))).status == "failed"
    assert next(check_gpus(_smi("NVIDIA H200, 9.0, 143771, 580.1"))) == Check(
        "gpu", "ok", "1 x NVIDIA H200, 143771 MiB each, driver 580.1"
    )
    mixed = next(check_gpus(_smi("NVIDIA H200, 9.0, 143771, 580.1\nNVIDIA H20, 9.0, 97871, 580.1")))
    assert (mixed.status, "GPUs of one kind" in mixed.fix) == ("warning", True)


@pytest.mark.parametrize(
    ("run_smi", "found"),
    [
        pytest.param(lambda *_, **__: _done(9, stderr="NVML: Driver mismatch"), "NVML: Driver mismatch", id="error"),
        pytest.param(lambda *_, **__: _done(0, stdout="\n"), "no GPU", id="empty"),
        pytest.param(lambda *_, **__: _done(0, stdout="what"), "nvidia-smi answered ['what']", id="garbage"),
    ],
)
def test_a_broken_nvidia_smi_is_a_finding_not_a_crash(run_smi, found):
    (check,) = check_gpus(run_smi)
    assert check.status == "failed"
    assert found in check.found


def test_pairs_without_nvlink_are_named():
    assert parse_topology(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NV18"}
    three = "\n".join(["NVIDIA H200, 9.0, 143771, 580.1"] * 3)
    _, link = check_gpus(_smi(three, TOPOLOGY))
    assert (link.status, link.found) == ("warning", "1 of 3 pairs have no NVLink: GPU0-GPU2 SYS")
    assert [check.status for check in check_gpus(_smi(three, TOPOLOGY.replace("SYS", "NV18")))] == ["ok", "ok"]
    assert [check.found for check in check_gpus(_smi(three, ""))][1] == "nvidia-smi topo -m gave no matrix"


def test_an_nvidia_smi_that_hangs_is_a_finding():
    def hang(command, timeout_s):
        return machine_checks.run_bounded(["sleep", "600"], timeout_s=0.1)  # runs out on purpose

    (check,) = check_gpus(hang)
    assert (check.status, check.found) == ("failed", "nvidia-smi did not answer within 60 s")


@pytest.mark.parametrize(
    ("versions", "status", "fix"),
    [
        ({"torch": "2.14.1", "sgl-deep-gemm": "0.2.3.post2"}, "ok", ""),
        ({"torch": "2.11.0", "sgl-deep-gemm": "0.2.3.post2"}, "warning", "pip install sgl-deep-gemm==0.1.4.post1"),
        ({"torch": "2.13.0", "sgl-deep-gemm": "0.2.3.post2"}, "warning", "install torch 2.14"),
        ({"torch": "2.14.1"}, "failed", "pip install 'nsa-dcp[cuda]', or from a checkout: pip install '.[cuda]'"),
    ],
)
def test_deep_gemm_must_fit_the_torch_it_was_built_for(monkeypatch, versions, status, fix):
    monkeypatch.setattr(machine_checks, "installed_version", versions.get)
    check = next(check for check in machine_checks.check_packages() if check.name == "sgl-deep-gemm")
    assert (check.status, check.fix) == (status, fix)


def test_an_unrelated_wheel_of_the_same_name_is_a_failure(monkeypatch):
    monkeypatch.setattr(machine_checks, "installed_version", {"flash-mla": "0.0.1"}.get)
    check = next(check for check in machine_checks.check_packages() if check.name == "flash-mla")
    assert check.status == "failed" and "shadows sgl-flash-mla" in check.found


def test_a_whitelist_without_us_is_found(monkeypatch):
    entry = argparse.Namespace(name="nsa_dcp", value="nsa_dcp.sglang_plugin.plugin:register")
    monkeypatch.setattr(machine_checks.importlib.metadata, "entry_points", lambda group: [entry])
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert machine_checks.check_entry_point().found == "excluded by SGLANG_PLUGINS=other"
    monkeypatch.setenv("SGLANG_PLUGINS", "other, nsa_dcp")
    assert machine_checks.check_entry_point().status == "ok"


def test_a_plugin_that_did_not_take_hold_is_a_failure():
    check = machine_checks.check_plugin(lambda step: {"missing": ["attention backend nsa"]})
    assert (check.status, check.found) == ("failed", "did not take hold: attention backend nsa")
    assert machine_checks.check_plugin(lambda step: {"missing": []}).status == "ok"


@pytest.mark.parametrize(
    "words",
    [
        ["python3", "-m", "sglang.launch_server", "--tp", "8"],
        ["/usr/bin/sglang", "serve", "--tp", "8"],
        ["NCCL_DEBUG=INFO", "python", "-m", "sglang.launch_server", "--tp", "8"],
        ["--tp", "8"],
    ],
)
def test_any_launcher_is_stripped(words):
    assert strip_launcher(words) == ["--tp", "8"]


def test_both_backends_follow_the_common_flag_unless_given_apart():
    settings = read_without_sglang(["--attention-backend", "nsa", "--decode-attention-backend", "fa3"]).settings
    assert (settings.prefill_attention_backend, settings.decode_attention_backend) == ("nsa", "fa3")


def test_model_facts_come_from_a_config(tmp_path):
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "index_topk": 2048,
        "num_attention_heads": 64,
        "num_hidden_layers": 6,
        "index_topk_freq": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_model_facts(tmp_path)
    assert (facts.is_dsa, facts.architecture, facts.num_attention_heads) == (True, "GlmMoeDsaForCausalLM", 64)
    assert (facts.num_hidden_layers, facts.indexer_layers) == (6, (0, 1, 3, 5))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert not read_model_facts(tmp_path).is_dsa
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": "512"}))
    with pytest.raises(ValueError, match="kv_lora_rank must be a positive integer, got '512'"):
        read_model_facts(tmp_path)


def test_doctor_imports_neither_torch_nor_sglang():
    code = "import sys, nsa_dcp.sglang_plugin.doctor.doctor; print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def _done(code, stdout="", stderr=""):
    return subprocess.CompletedProcess([], code, stdout, stderr)


def _smi(gpus, topology=""):
    return lambda command, **_: _done(0, topology if "topo" in command else gpus)


def test_a_preset_with_kv_heads_is_judged_by_its_heads(capsys):
    words = "doctor --no-imports --command-only --preset qwen3-235b-a22b -- --tp 8 --dcp-size 4"
    assert main(words.split()) == 1
    printed = capsys.readouterr().out
    assert "nsa-dcp does not serve models with KV heads yet" in printed
    assert "use --dcp-size 2: it must divide tp / KV heads" in printed
