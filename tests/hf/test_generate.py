"""The `generate` command as a user types it: its report, its check, its refusals, and that it leaves nothing behind."""

import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa_dcp.cli import build_parser, main
from nsa_dcp.hf import generate, unmodified
from nsa_dcp.hf.checkpoint import resolve_checkpoint


@pytest.fixture
def prompts_file(tmp_path):
    """A function that writes a prompts file and returns its name."""

    def write(content: object) -> str:
        path = tmp_path / "prompts.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


@pytest.fixture
def checkpoint(tiny_checkpoint):
    return str(tiny_checkpoint("tiny-glm-dsa"))


def run(*words: str) -> int:
    return main(["generate", *words])


@pytest.mark.parametrize("index_keys", [None, "replicated", "sharded"])
def test_the_report_has_tokens_and_what_each_rank_holds(index_keys, checkpoint, prompts_file, tmp_path):
    report_file = tmp_path / "out.json"
    prompts = prompts_file(["Licensed under the Apache License", [5, 6, 7]])
    options = ["--max-new-tokens", "3", "--dcp-size", "2", "--ignore-eos", "--check", "--json", str(report_file)]
    options += ["--index-keys", index_keys] if index_keys else []
    assert run("--model", checkpoint, "--prompts", prompts, *options) == 0
    report = json.loads(report_file.read_text())
    assert [len(prompt["output_ids"]) for prompt in report["prompts"]] == [3, 3]
    assert report["check"] == {"identical": True, "first_difference": None}
    tokens = sum(prompt["prompt_tokens"] + 2 for prompt in report["prompts"])
    assert sum(rank["latent_rows"] for rank in report["ranks"]) == tokens
    assert report["index_keys"] == (index_keys or "replicated")
    for rank in report["ranks"]:
        assert rank["latent_bytes"] == rank["latent_rows"] * 656 * 4
        held = rank["latent_rows"] if index_keys == "sharded" else tokens
        assert rank["index_key_bytes"] == held * 132 * 2  # layers 0 and 2 own an indexer
        # Pages for the rows that the latents have, or for both ranks'.
        pages = rank["index_pool_bytes"] // (64 * 132 * 2)
        assert pages * 64 * 656 * 4 == rank["latent_pool_bytes"] * (1 if index_keys == "sharded" else 2)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--json", "/nowhere/x.json"], "--json must be a file that can be written, got /nowhere/x.json: there is no"),
        (["--json", "/"], "--json must be a file that can be written, got /: that is a directory"),
        (["--timeout", "0"], "timeout must be above 0 and at most 86400, got 0"),
        (["--timeout", "-1"], "timeout must be above 0"),
        (["--timeout", "nan"], "timeout must be above 0"),
        (["--timeout", "inf"], "timeout must be above 0"),
        (["--max-new-tokens", "16385"], "prompts must fit the model's context of 16384 tokens, got 1 tokens and up to"),
        (
            ["--device", "cuda", "--kv-cache-dtype", "float32"],
            "kv_cache_dtype must be bfloat16 or fp8_e4m3 on cuda, the",
        ),
        (["--device", "cuda", "--dtype", "float64"], "dtype must be bfloat16 or float32 on cuda, got float64"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_before_the_run(checkpoint, prompts_file, monkeypatch, capsys, options, refusal):
    def no_run(*_, **__):
        raise AssertionError("the ranks were started")

    monkeypatch.setattr("nsa_dcp.launcher.run_ranks", no_run)
    assert run("--model", checkpoint, "--prompts", prompts_file([[5]]), *options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nsa-dcp generate: {refusal}") and error.count("\n") == 1


def test_a_missing_transformers_is_said_with_the_command_that_brings_it(prompts_file, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    assert run("--model", "tiny-glm-dsa", "--prompts", prompts_file([[5]])) == 2
    error = capsys.readouterr().err
    assert error.startswith("nsa-dcp generate: generate needs transformers, found none: pip install 'nsa-dcp[hf]', or")
    assert error.count("\n") == 1


def test_a_result_that_can_no_longer_be_written_is_one_sentence(
    checkpoint, prompts_file, tmp_path, monkeypatch, capsys
):
    def lose_the_folder(*_, **__):
        (tmp_path / "results").rmdir()
        return [{"output_ids": [[1]], "usage": {}}]

    (tmp_path / "results").mkdir()
    monkeypatch.setattr("nsa_dcp.launcher.run_ranks", lose_the_folder)
    path = tmp_path / "results" / "x.json"
    assert run("--model", checkpoint, "--prompts", prompts_file([[5]]), "--json", str(path)) == 2
    error = capsys.readouterr().err
    assert f"--json needs a file that can be written, found {path}: No such file" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--kv-cache-dtype", "--dtype"])
def test_sglangs_spelling_of_a_dtype_is_understood(option):
    words = ["generate", "--model", "m", "--prompts", "p", option]
    ours, theirs = (build_parser("generate").parse_args([*words, spelling]) for spelling in ("bf16", "bfloat16"))
    ours.run = theirs.run = None
    assert ours == theirs


def test_check_fails_and_names_the_first_difference(checkpoint, prompts_file, monkeypatch, capsys):
    honest = unmodified.generate_unmodified

    def off_by_one_token(model, prompt_ids, *args, **kwargs):
        output = honest(model, prompt_ids, *args, **kwargs)
        return output if len(prompt_ids) == 3 else [output[0], (output[1] + 1) % 1024, *output[2:]]

    monkeypatch.setattr(unmodified, "generate_unmodified", off_by_one_token)
    prompts = prompts_file([[5, 6, 7], [8, 9]])
    assert run("--model", checkpoint, "--prompts", prompts, "--max-new-tokens", "3", "--check") == 1
    assert "prompt 1 (2 tokens): generated token 1 is" in capsys.readouterr().err


def test_generation_stops_at_the_end_of_sequence_id_unless_told_to_ignore_it(
    checkpoint, prompts_file, tmp_path, tiny_checkpoint
):
    report_file = tmp_path / "out.json"
    prompts = prompts_file([[5, 6, 7], [8, 9]])
    words = ["--prompts", prompts, "--max-new-tokens", "4", "--kv-cache-dtype", "float32", "--json", str(report_file)]
    assert run("--model", checkpoint, "--ignore-eos", *words) == 0
    free = [prompt["output_ids"] for prompt in json.loads(report_file.read_text())["prompts"]]
    # A checkpoint whose end-of-sequence id is what the first prompt generates second.
    stopping = tiny_checkpoint("tiny-glm-dsa", eos_token_id=free[0][1])
    assert run("--model", str(stopping), "--check", *words) == 0
    stopped = [prompt["output_ids"] for prompt in json.loads(report_file.read_text())["prompts"]]
    assert stopped[0] == free[0][: free[0].index(free[0][1]) + 1]
    assert len(stopped[0]) <= 2


@pytest.mark.parametrize("dcp_size", [1, 2])
def test_prompts_wait_for_pages_where_the_pool_is_small(dcp_size, checkpoint, prompts_file, tmp_path):
    """Requests that do not fit at once are served in turn, in reused pages, with the same tokens."""
    report_file = tmp_path / "out.json"
    generator = torch.Generator().manual_seed(3)
    prompts = prompts_file([torch.randint(3, 1024, (n,), generator=generator).tolist() for n in (100, 90, 120, 5)])
    pool = ["--max-total-tokens", "256", "--chunked-prefill-size", "64", "--dcp-size", str(dcp_size)]
    words = ["--prompts", prompts, "--max-new-tokens", "3", "--json", str(report_file), "--check", *pool]
    assert run("--model", checkpoint, *words) == 0


REFUSALS = {
    "heads": (["--tp-size", "3"], "tp_size must divide the model's 8 attention heads, got 3; 1, 2, 4, 8 would work"),
    "groups": (["--tp-size", "4", "--dcp-size", "3"], "dcp_size must divide tp_size.*1, 2, 4 would work"),
    "cp": (["--tp-size", "4", "--dcp-size", "2", "--mode", "cp"], "dcp_size must equal the context-parallel size"),
    "new tokens": (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
    "chunk": (["--chunked-prefill-size", "0"], "chunked_prefill_size must be at least 1, got 0"),
    "pool": (["--max-total-tokens", "64", "--max-new-tokens", "90"], "prompt must fit the pool of 64 tokens"),
    "no pool": (["--max-total-tokens", "0"], "max_total_tokens must be at least 1, got 0"),
    "dcp": (["--tp-size", "1", "--dcp-size", "0"], "dcp_size must be at least 1, got 0"),
}


@pytest.mark.parametrize("words, message", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_is_one_sentence_and_exit_status_two(words, message, checkpoint, prompts_file, capsys):
    assert run("--model", checkpoint, "--prompts", prompts_file([[5, 6, 7]]), *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("nsa-dcp generate: ") and "Traceback" not in error
    assert error.count("\n") == 1
    assert re.search(message, error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(checkpoint, prompts_file, capsys):
    assert run("--model", checkpoint, "--prompts", prompts_file([[5]]), "--device", "cuda") == 2
    assert capsys.readouterr().err == "nsa-dcp generate: device cuda needs a Hopper GPU, found none: use --device cpu\n"


PROMPT_FILES = {
    "not json": ("[1, 2", "prompts must be a JSON file"),
    "not a list": ({"a": 1}, "prompts must be a non-empty JSON list, got dict"),
    "empty list": ([], "prompts must be a non-empty JSON list"),
    "empty prompt": ([[5], []], "as number 1"),
    "empty string": ([""], "non-empty string"),
    "floats": ([[1.5]], "list of token ids"),
    "booleans": ([[True]], "list of token ids"),
    "nested": ([[[1]]], "list of token ids"),
    "outside the vocabulary": ([[5], [1024]], r"token ids in \[0, 1024\), got 1024 in number 1"),
    "negative": ([[-1]], r"token ids in \[0, 1024\), got -1"),
    "half a character": ([[5], "a\ud800"], "prompts must be Unicode text, got a lone surrogate in number 1"),
    "nested too deeply": ("[" * 100_000, "prompts must be a JSON file"),
    "a number of too many digits": ("[[" + "9" * 5000 + "]]", "prompts must be a JSON file"),
    "longer than the context": ([[5], [5] * 16_370], r"context of 16384 tokens, got 16370 tokens and .* in number 1"),
}


@pytest.mark.parametrize("content, message", PROMPT_FILES.values(), ids=PROMPT_FILES)
def test_a_prompts_file_that_is_not_one_is_refused(content, message, checkpoint, prompts_file, capsys):
    assert run("--model", checkpoint, "--prompts", prompts_file(content)) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_prompts_file_is_refused(checkpoint, capsys):
    assert run("--model", checkpoint, "--prompts", "/does/not/exist.json") == 2
    assert "prompts must be a readable file" in capsys.readouterr().err


def copy_checkpoint(source: str, target: Path) -> Path:
    target.mkdir()
    for path in Path(source).iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def break_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def remove_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def remove_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def truncate_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def truncate_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def name_a_missing_shard(directory: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def index_no_weights(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": ["model.safetensors"]}))


def write_a_header_without_numbers(directory: Path) -> None:
    header = json.dumps({"lm_head.weight": {"data_offsets": ["0", "8"]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def change_architecture(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"]}))


DAMAGE = {
    break_config: "config.json must be JSON",
    remove_config: "must be a checkpoint directory with config.json",
    remove_weights: "must hold \\*.safetensors weights",
    truncate_weights: "it is truncated or damaged",
    truncate_header: "less than its header",
    name_a_missing_shard: "must exist, since the index names it",
    index_no_weights: "index.json must map weights to file names",
    write_a_header_without_numbers: "must be in safetensors format",
    change_architecture: "architecture MistralForCausalLM is not supported.*GlmMoeDsaForCausalLM",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused_before_any_rank_starts(
    damage, checkpoint, prompts_file, tmp_path, monkeypatch
):
    directory = copy_checkpoint(checkpoint, tmp_path / "checkpoint")
    damage(directory)
    monkeypatch.setattr("nsa_dcp.launcher.run_ranks", lambda *_, **__: pytest.fail("a rank was started"))
    arguments = build_parser().parse_args(["generate", "--model", str(directory), "--prompts", prompts_file([[5]])])
    with pytest.raises((ValueError, NotImplementedError), match=DAMAGE[damage]):
        generate.run_generate(arguments)


def test_a_directory_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="model must be a checkpoint directory or one of tiny-glm-dsa"):
        resolve_checkpoint("/does/not/exist", 0)


def test_strings_need_a_tokenizer(checkpoint, prompts_file, tmp_path, capsys):
    directory = copy_checkpoint(checkpoint, tmp_path / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    assert run("--model", str(directory), "--prompts", prompts_file(["text"])) == 2
    assert "prompts must be lists of token ids for a checkpoint without a tokenizer" in capsys.readouterr().err


_LEFT_BEHIND = """
import os, sys
from pathlib import Path
from nsa_dcp.cli import main

status = main(sys.argv[1:])
parents = {}
for stat in Path("/proc").glob("[0-9]*/stat"):
    fields = stat.read_text().rpartition(")")[2].split()
    if fields[0] != "Z":
        parents[int(stat.parent.name)] = int(fields[1])
# Our own children are multiprocessing's two helpers; ranks are children of one of them.
helpers = {pid for pid, parent in parents.items() if parent == os.getpid()}
print("HELPERS", len(helpers), "RANKS", sum(parent in helpers for parent in parents.values()))
sys.exit(status)
"""


def test_a_refused_run_leaves_no_process_behind(checkpoint, prompts_file):
    """The ranks refuse: that a prompt does not fit the pool is found when it is admitted."""
    words = ["generate", "--model", checkpoint, "--prompts", prompts_file([[5] * 100]), "--dcp-size", "2"]
    words += ["--max-total-tokens", "64", "--max-new-tokens", "60"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'kernels'}"}
    command = [sys.executable, "-c", _LEFT_BEHIND, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 2, done.stderr
    assert "prompt must fit the pool of 128 tokens" in done.stderr
    assert "HELPERS 2 RANKS 0" in done.stdout


def test_progress_is_shown_on_a_long_run(capsys, monkeypatch):
    monkeypatch.setattr(generate, "_PROGRESS_EVERY_S", 0.0)
    generate._Progress().show((100, 2000, 3))
    assert "prompt tokens 100/2000, generated 3" in capsys.readouterr().err
