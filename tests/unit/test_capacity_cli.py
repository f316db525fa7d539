"""`nsa-dcp plan` and `nsa-dcp model` as typed: text, JSON, plots, and one sentence for every mistake."""

import argparse
import json
import subprocess
import sys

import pytest

from nsa_dcp.capacity_cli import add_model_parser, add_plan_parser


@pytest.fixture
def run(capsys):
    """Run a command line; returns (exit status, stdout, stderr)."""

    def _run(*argv):
        parser = argparse.ArgumentParser(prog="nsa-dcp")
        subparsers = parser.add_subparsers(required=True)
        add_plan_parser(subparsers)
        add_model_parser(subparsers)
        args = parser.parse_args([str(word) for word in argv])
        status = args.run(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return _run


PLAN = ("plan", "--preset", "glm-5.2", "--gpu-memory-gib", "40")
MODEL = ("model", "--preset", "glm-5.2", "--batch", "8", "--context", "4096")


def test_plan_json_has_plain_numbers_for_every_dcp_size_and_dtype(run):
    status, out, err = run(*PLAN, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert (report["num_hidden_layers"], report["num_indexer_layers"]) == (78, 21)
    keys = [(row["kv_cache_dtype"], row["dcp_size"]) for row in report["rows"]]
    assert keys == [(dtype, size) for dtype in ("fp8_e4m3", "bf16") for size in (1, 2, 4, 8)]
    last_fp8 = report["rows"][3]
    assert last_fp8["bytes_per_token"] == {"latent": 6396.0, "index_keys": 2772.0, "draft": 0.0, "total": 9168.0}
    assert last_fp8["multiple_over_dcp1"] == pytest.approx(5.88, abs=0.005)
    assert last_fp8["tokens_per_node"] == 8 * last_fp8["tokens_per_gpu"] == 4_684_288
    assert set(last_fp8["temporary_buffers"]) == {
        "gathered_q",
        "attention_scratch",
        "exchange",
        "page_gather",
        "dequantised",
    }


def test_plan_text_shows_the_same(run):
    status, out, _ = run(*PLAN, "--kv-cache-dtype", "fp8_e4m3")
    assert status == 0
    assert "5.88x" in out and "4,684,288" in out and "9,168" in out
    assert "bf16" not in out
    assert "add --draft-layers 1" in out


def test_plan_says_that_sharded_index_keys_are_a_what_if(run):
    assert "what-if" in run(*PLAN, "--index-shards", "4")[1]
    assert "what-if" not in run(*PLAN)[1]


def test_plan_reads_a_config(run, tmp_path):
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        "max_position_embeddings": 4096,
        "indexer_types": ["full", "shared"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, _ = run("plan", "--config", tmp_path, "--gpu-memory-gib", "1", "--json")
    assert json.loads(out)["rows"][0]["bytes_per_token"]["total"] == 2 * 656 + 132


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("plan", "--preset", "glm-9", "--gpu-memory-gib", "1"),
            "preset must be one of glm-5.2, deepseek-v3.2, got 'glm-9'",
        ),
        (("plan", "--config", "/nowhere", "--gpu-memory-gib", "1"), "config must be a config.json"),
        (
            ("plan", "--preset", "glm-5.2", "--gpu-memory-gib", "-3"),
            "gpu_memory_gib must be a positive number, got -3.0",
        ),
        ((*PLAN, "--dcp-size", "0"), "dcp_size must be a positive integer, got 0"),
        ((*PLAN, "--plot", "x.gif"), "plot must end in .png or .svg, got 'x.gif'"),
        ((*MODEL[:-1], "0"), "context must be a positive integer, got 0"),
        ((*MODEL, "--set", "x=1"), "set must be NAME=VALUE"),
        (("model", "--preset", "deepseek-v3.2", "--tp-size", "1", "--dcp-size", "1"), "heads per TP rank"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_status_2(run, argv, message):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert err.startswith(f"nsa-dcp {argv[0]}: ") and err.count("\n") == 1
    assert message in err


def test_config_and_preset_exclude_each_other(run):
    with pytest.raises(SystemExit):
        run(*PLAN, "--config", "config.json")
    with pytest.raises(SystemExit):
        run("plan", "--gpu-memory-gib", "40")


@pytest.mark.parametrize(
    "command", [PLAN, (*MODEL, "--gpu-memory-gib", "40"), MODEL], ids=["plan", "model", "model alone"]
)
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_plots_are_written(run, tmp_path, command, suffix, magic):
    path = tmp_path / f"plot{suffix}"
    assert run(*command, "--plot", path)[0] == 0
    assert path.read_bytes().startswith(magic)


def test_a_missing_matplotlib_is_said_with_the_command_that_brings_it(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = run(*PLAN, "--plot", tmp_path / "plot.png")
    assert status == 2
    assert "plotting needs matplotlib, found none: pip install 'nsa-dcp[plot]'" in err


def test_model_says_predicted_and_json_carries_the_inputs(run):
    status, out, _ = run(*MODEL)
    assert status == 0 and out.startswith("predicted decode step")
    report = json.loads(run(*MODEL, "--json", "--set", "slots_us=7")[1])
    assert report["kind"] == "predicted"
    assert report["inputs"]["slots_us"] == {"value": 7.0, "unit": "us per selection", "source": "given with --set"}


def test_model_replicates_the_q_projection_with_a2a_unless_told_otherwise(run):
    def setup(*more):
        return json.loads(run(*MODEL, "--json", *more)[1])["setup"]["replicate_q_proj"]

    assert setup() is True
    assert setup("--dcp-comm-backend", "ag_rs") is False
    assert setup("--no-dcp-replicate-q-proj") is False


def test_planning_imports_neither_torch_nor_matplotlib():
    code = "import sys, nsa_dcp.capacity_cli; print(sorted({'torch', 'matplotlib', 'sglang'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
