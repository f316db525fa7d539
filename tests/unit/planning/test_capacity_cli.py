"""`nsa-dcp plan` and `nsa-dcp model` as typed: text, JSON, plots, and one sentence for every mistake."""

import argparse
import json
import subprocess
import sys

import pytest

from nsa_dcp.planning.capacity_cli import add_model_parser, add_plan_parser
from nsa_dcp.planning.dimensions import preset_dims
from nsa_dcp.planning.steps.step_model import DecodeSetup, measured_inputs, predict_step
from nsa_dcp.sglang_plugin.admission.validation import HOPPER, ModelFacts, ServerSettings, find_problems


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
    assert keys == [(dtype, size) for dtype in ("fp8_e4m3", "bfloat16") for size in (1, 2, 4, 8)]
    last_fp8 = report["rows"][3]
    assert last_fp8["bytes_per_token"] == {"latent": 6396.0, "index_keys": 2772.0, "draft": 0.0, "total": 9168.0}
    assert last_fp8["multiple_over_dcp1"] == pytest.approx(5.88, abs=0.005)
    assert last_fp8["tokens_per_node"] == 8 * last_fp8["tokens_per_gpu"] == 4_684_288
    assert set(last_fp8["temporary_buffers"]) == {
        "gathered_q",
        "attention_scratch",
        "exchange",
        "row_exchange",
        "page_gather",
        "dequantised",
    }


def test_plan_of_a_pipeline_says_its_stages_and_counts_the_gpus_of_all_of_them(run):
    pipeline = ("--pp-size", 2, "--pp-layer-partition", "38,40", "--dcp-size", 8, "--kv-cache-dtype", "fp8_e4m3")
    status, out, err = run(*PLAN, *pipeline)
    assert (status, err) == (0, "")
    assert "a pipeline of 38 + 40 layers" in out
    assert "draft" not in out.splitlines()[-1]
    status, out, _ = run(*PLAN, *pipeline, "--json")
    report = json.loads(out)
    assert report["layers_of_stages"] == [38, 40]
    assert report["gpus_per_node"] == 16
    assert report["rows"][0]["tokens_per_node"] == 8 * report["rows"][0]["tokens_per_gpu"] == 9_336_832
    status, out, err = run(*PLAN, *pipeline[:3], "1,1")
    assert (status, out) == (2, "")
    assert err.startswith("nsa-dcp plan: SGLANG_PP_LAYER_PARTITION must be 2 positive counts")


def test_plan_text_shows_the_same(run):
    status, out, _ = run(*PLAN, "--kv-cache-dtype", "fp8_e4m3")
    assert status == 0
    assert "5.88x" in out and "4,684,288" in out and "9,168" in out
    assert "bfloat16" not in out
    assert "add --draft-layers 1" in out


@pytest.mark.parametrize(
    ("preset", "draft_layers", "replicated", "sharded"),
    [
        ("glm-5.2", 0, 5.88, 8.0),
        ("glm-5.2", 1, 5.50, 7.27),
        ("deepseek-v3.2", 0, 3.68, 8.0),
        ("deepseek-v3.2", 1, 3.53, 7.19),
    ],
)
def test_plan_shows_what_the_other_choice_of_index_keys_would_hold(run, preset, draft_layers, replicated, sharded):
    """Capacity over dcp 1 at dcp 8, by either choice, and the same figures whichever was made."""
    command = ("plan", "--preset", preset, "--gpu-memory-gib", "40", "--kv-cache-dtype", "fp8_e4m3")
    command += ("--draft-layers", draft_layers)
    reports = {
        choice: json.loads(run(*command, "--index-keys", choice, "--json")[1]) for choice in ("replicated", "sharded")
    }
    for choice, other, own_multiple, other_multiple in (
        ("replicated", "sharded", replicated, sharded),
        ("sharded", "replicated", sharded, replicated),
    ):
        report = reports[choice]
        last, there = report["rows"][-1], report["other"][-1]
        assert (report["index_keys"], there["index_keys"]) == (choice, other)
        assert (last["dcp_size"], there["dcp_size"]) == (8, 8)
        assert round(last["multiple_over_dcp1"], 2) == own_multiple
        assert round(there["multiple_over_dcp1"], 2) == other_multiple
        assert there["tokens_per_node"] == reports[other]["rows"][-1]["tokens_per_node"]
    assert json.loads(run(*command, "--json")[1]) == reports["replicated"]
    text = run(*command)[1]
    assert f"{sharded:.2f}x" in text and "--index-keys sharded" in text
    assert "sglang servers of this version hold replicated ones" not in text
    assert "sglang servers of this version hold replicated ones" in run(*command, "--index-keys", "sharded")[1]


def test_the_flag_of_the_first_release_still_chooses(run):
    command = ("plan", "--preset", "glm-5.2", "--gpu-memory-gib", "40", "--json")
    for shards, choice in ((1, "replicated"), (8, "sharded"), (64, "sharded")):
        assert run(*command, "--index-shards", shards) == run(*command, "--index-keys", choice)
    two = (*command, "--dcp-size", "2")
    assert run(*two, "--index-shards", "2") == run(*two, "--index-keys", "sharded")
    for shards in (-1, 0, 2, 7):
        status, _, err = run(*command, "--index-shards", shards)
        assert (status, err.count("\n")) == (2, 1)
        assert "--index-keys replicated or sharded says it now" in err


def test_an_odd_group_shards_its_index_keys_over_all_its_ranks(run):
    config = PLAN + ("--tp-size", "4", "--gpus-per-node", "8", "--index-keys", "sharded", "--json")
    rows = json.loads(run(*config)[1])["rows"]
    assert {(row["dcp_size"], row["index_shards"]) for row in rows} == {(1, 1), (2, 2), (4, 4)}


def test_a_choice_that_holds_not_one_page_is_shown_as_none(run):
    """DeepSeek-V3.2's replicated keys alone fill what a sharded page takes."""
    command = ("plan", "--preset", "deepseek-v3.2", "--gpu-memory-gib", "0.0045", "--dcp-size", "8")
    status, out, err = run(*command, "--index-keys", "sharded", "--kv-cache-dtype", "fp8_e4m3", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["rows"][0]["tokens_per_gpu"] == 64
    assert json.loads(out)["other"][0]["tokens_per_node"] == 0
    assert run(*command)[0] == 2


def test_the_step_model_follows_the_choice(run):
    report = json.loads(run(*MODEL, "--index-keys", "sharded", "--json")[1])
    assert report["setup"]["index_keys"] == "sharded"
    step = report["predictions"][0]["step_us"]
    assert step["tp_dcp"]["agree_threshold"] > 0 and step["tp_dcp"]["gather_selection"] == 0
    assert step["tp"]["agree_threshold"] == 0
    text = run(*MODEL, "--index-keys", "sharded")[1]
    assert "dcp 8, a2a, wire nccl, replicated q projection on" in text and "slice on, sharded index keys" in text
    assert "row_split_selection must be off" in run(*MODEL, "--index-keys", "sharded", "--row-split-selection")[2]


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
        ((*MODEL[:-1], "99999999"), "context must be at most 1048576, the longest of glm-5.2, got 99999999"),
        ((*PLAN, "--context", "99999999"), "context must be at most 1048576, the longest of glm-5.2, got 99999999"),
        ((*PLAN, "--page-size", "32"), "page_size must be 64"),
        (
            (*PLAN, "--plot", "/nowhere/x.png"),
            "--plot must be a file that can be written, got /nowhere/x.png: there is",
        ),
        (
            (*MODEL, "--plot", "/nowhere/x.png"),
            "--plot must be a file that can be written, got /nowhere/x.png: there is",
        ),
        ((*PLAN, "--plot", "/"), "--plot must be a file that can be written, got /: that is a directory"),
        ((*MODEL, "--set", "x=1"), "set must be NAME=VALUE"),
        (("model", "--preset", "deepseek-v3.2", "--tp-size", "1", "--dcp-size", "1"), "heads per TP rank"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_status_2(run, argv, message):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert err.startswith(f"nsa-dcp {argv[0]}: ") and err.count("\n") == 1
    assert message in err


def test_model_refuses_a_replicated_projection_for_the_plugins_reason(run):
    glm = ModelFacts(
        is_dsa=True,
        architecture="GlmMoeDsaForCausalLM",
        num_attention_heads=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_topk=2048,
    )
    asked = ServerSettings(tp_size=8, dcp_size=8, dcp_comm_backend="ag_rs", dcp_replicate_q_proj=True)
    (problem,) = find_problems(asked, glm, HOPPER)
    status, out, err = run(*MODEL, "--dcp-comm-backend", "ag_rs", "--dcp-replicate-q-proj")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert problem.reason in err


def test_sglangs_spelling_of_a_cache_dtype_is_understood(run):
    assert run(*PLAN, "--kv-cache-dtype", "bfloat16") == run(*PLAN, "--kv-cache-dtype", "bf16")
    limits = (*MODEL, "--gpu-memory-gib", "40")
    assert run(*limits, "--kv-cache-dtype", "bfloat16") == run(*limits, "--kv-cache-dtype", "bf16")


@pytest.mark.parametrize("command", [PLAN, MODEL], ids=["plan", "model"])
def test_an_unknown_cache_dtype_is_refused_with_every_spelling(run, capsys, command):
    with pytest.raises(SystemExit):
        run(*command, "--kv-cache-dtype", "fp8_e5m2")
    refusal = capsys.readouterr().err
    assert "must be one of fp8_e4m3, bfloat16" in refusal and "bf16, got 'fp8_e5m2'" in refusal


def test_model_says_that_a_slice_sglang_does_not_make_is_a_what_if(run):
    deepseek = ("model", "--preset", "deepseek-v3.2", "--batch", "8", "--context", "4096")
    sliced = (*deepseek, "--cp-decode-attn-tp")
    assert "CP-DCP here is a what-if: sglang does not slice DeepseekV32ForCausalLM's" in run(*sliced)[1]
    assert json.loads(run(*sliced, "--json")[1])["notes"]
    assert "what-if" not in run(*sliced, "--dcp-size", "4")[1]
    # What is served is the default.
    assert run(*deepseek)[1] == run(*deepseek, "--no-cp-decode-attn-tp")[1]
    assert "what-if" not in run(*deepseek)[1]
    assert "what-if" not in run(*MODEL)[1]


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


def test_a_setup_replicates_the_q_projection_with_a2a_alone_unless_told_otherwise():
    glm = preset_dims("glm-5.2")

    def step(backend, replicated):
        setup = DecodeSetup(comm_backend=backend, replicate_q_proj=replicated)
        return predict_step(glm, setup, measured_inputs(glm), "tp_dcp", 64, 32768)

    assert step("a2a", None) == step("a2a", True) != step("a2a", False)
    assert step("ag_rs", None) == step("ag_rs", False)
    assert step("ag_rs", None)["gather_q"] > 0 == step("a2a", None)["gather_q"]
    with pytest.raises(ValueError, match="replicate_q_proj must be off with comm_backend ag_rs, got on"):
        step("ag_rs", True)


def test_planning_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys, nsa_dcp.planning.capacity_cli; print(sorted({'torch', 'matplotlib', 'sglang'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
