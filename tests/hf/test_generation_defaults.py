"""`generation_config.json` counts as in transformers, and `--check` says whose logits are not finite."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_edits import check_refused, write_json

from nsa_dcp.cli import main
from nsa_dcp.hf import unmodified as unmodified_module
from nsa_dcp.hf.checkpoint import load_model
from nsa_dcp.hf.generation_defaults import read_eos_ids
from nsa_dcp.hf.unmodified import generate_unmodified

CPU = torch.device("cpu")
PROMPT = [5, 6, 7]
NEW = 6


@pytest.fixture
def run(tmp_path, capsys):
    """A function that runs `generate` as it is, on one rank in float32; returns status, report and standard error."""

    def run(directory: Path, *words: str, prompts: object = (PROMPT,)) -> tuple[int, dict, str]:
        (tmp_path / "prompts.json").write_text(json.dumps(prompts))
        words = ["--prompts", str(tmp_path / "prompts.json"), "--max-new-tokens", str(NEW), *words]
        status = main(["generate", "--model", str(directory), "--kv-cache-dtype", "float32", *words])
        captured = capsys.readouterr()
        return status, json.loads(captured.out) if captured.out else {}, captured.err

    return run


@pytest.fixture(scope="module")
def free(tiny_checkpoint):
    """What the tiny model answers where nothing stops it."""
    return generate_unmodified(load_model(tiny_checkpoint("tiny-glm-dsa"), "float32", CPU), PROMPT, NEW)


def transformers_answers(directory: Path) -> list[int]:
    model = load_model(directory, "float32", CPU)
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    return output[0, len(PROMPT) :].tolist()


# What generation_config.json and config.json say, and where an answer ends: after the first of these tokens.
ENDS = {
    "a list": ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, [1, 2]),
    "a number": ({"eos_token_id": 2}, {"eos_token_id": 1}, [2]),
    "the config's without the file": (None, {"eos_token_id": [3, 1]}, [1, 3]),
    "none in the file": ({}, {"eos_token_id": 1}, []),
    "null in the file": ({"eos_token_id": None}, {"eos_token_id": 1}, []),
    "with sampling": ({"eos_token_id": 2, "do_sample": True, "temperature": 0.7, "top_p": 0.95}, {}, [2]),
    "with a padding id": ({"eos_token_id": [2], "pad_token_id": 0, "bos_token_id": 0}, {}, [2]),
}


@pytest.mark.parametrize("defaults, fields, ends", ENDS.values(), ids=ENDS)
def test_an_answer_ends_where_transformers_ends_it(defaults, fields, ends, copy, free, run):
    def place(ids: object) -> object:
        """The tests' small numbers are places in the free answer."""
        return [free[n] for n in ids] if isinstance(ids, list) else ids if ids is None else free[ids]

    fields = {**fields, "eos_token_id": place(fields.get("eos_token_id"))}
    directory = copy(**fields)
    (directory / "generation_config.json").unlink()
    if defaults is not None:
        defaults = {
            **defaults,
            **({"eos_token_id": place(defaults["eos_token_id"])} if "eos_token_id" in defaults else {}),
        }
        (directory / "generation_config.json").write_text(json.dumps(defaults))
    expected = transformers_answers(directory)
    assert read_eos_ids(directory) == frozenset(place(ends))
    status, report, error = run(directory, "--check")
    assert (status, report["prompts"][0]["output_ids"]) == (0, expected), error


CHANGED = {
    "repetition_penalty": 1.1,
    "suppress_tokens": [7],
    "begin_suppress_tokens": [7],
    "min_new_tokens": 3,
    "min_length": 9,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[7]],
    "sequence_bias": [[[7], -1.0]],
    "forced_eos_token_id": 3,
    "num_beams": 4,
    "stop_strings": ["."],
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "exponential_decay_length_penalty": [1, 1.1],
}


@pytest.mark.parametrize("field", CHANGED)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_what_would_change_greedy_tokens_is_refused_by_its_field(field, file, copy, generate):
    directory = copy()
    if file == "config.json":
        (directory / "generation_config.json").unlink()
    write_json(directory / file, **{field: CHANGED[field]})
    check_refused(generate(directory), f"{file} must leave {field} alone")


def test_values_that_change_nothing_are_not_refused(copy, generate):
    directory = copy()
    neutral = {
        "repetition_penalty": 1.0,
        "suppress_tokens": [],
        "min_new_tokens": 0,
        "num_beams": 1,
        "min_length": None,
    }
    write_json(directory / "generation_config.json", **neutral, max_length=20, do_sample=True, top_k=50)
    assert generate(directory)[2]


@pytest.mark.parametrize("eos", ["</s>", 1.5, [[1]], [1, "2"], True, {}, [None]], ids=str)
def test_ids_that_are_none_are_refused(eos, copy, generate):
    directory = copy()
    write_json(directory / "generation_config.json", eos_token_id=eos)
    check_refused(generate(directory), "eos_token_id must be a token id or a list of them, got")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"temperature": "x", "do_sample": []}'])
def test_a_file_that_is_none_is_one_sentence_or_read_as_transformers_does(text, copy, generate):
    directory = copy()
    (directory / "generation_config.json").write_text(text)
    status, error, started = generate(directory)
    assert (status == 0 and started) or (status == 2 and error.count("\n") == 1 and "generation_config.json" in error)


def overflow(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"][:] = 3e38


def test_logits_that_are_not_finite_are_said_and_blamed_on_nobody(copy, run):
    directory = copy(overflow)
    status, report, error = run(directory)
    assert (status, report) == (2, {})
    assert "the logits of generated token 0 of prompt 0 are not finite, so its tokens would mean nothing" in error
    status, report, error = run(directory, "--check")
    assert (status, report) == (2, {})
    assert (
        "of the unmodified model the logits of generated token 0 of prompt 0 are not finite, nor are nsa-dcp's" in error
    )


def test_logits_that_are_finite_on_one_side_alone_are_told_apart(copy, run, monkeypatch):
    honest = unmodified_module.generate_unmodified

    def answer(spoilt: bool):
        def generate(model, prompt_ids, *args, on_logits, **kwargs):
            model.lm_head.weight.data.fill_(3e38 if spoilt else 1e-3)
            return honest(model, prompt_ids, *args, on_logits=on_logits, **kwargs)

        return generate

    monkeypatch.setattr(unmodified_module, "generate_unmodified", answer(spoilt=False))
    status, report, error = run(copy(overflow), "--check")
    assert status == 1 and report["check"]["identical"] is False
    assert "the logits of generated token 0 of prompt 0 are not finite, the unmodified model's are" in error
    monkeypatch.setattr(unmodified_module, "generate_unmodified", answer(spoilt=True))
    status, report, error = run(copy(into="sound"), "--check")
    assert (status, report) == (2, {})
    assert "are not finite, nsa-dcp's are: there is nothing to compare with" in error


def test_a_crash_is_not_a_difference(copy, run, monkeypatch):
    def crash(*_, **__):
        raise KeyError("model.norm")

    monkeypatch.setattr(unmodified_module, "generate_unmodified", crash)
    status, report, error = run(copy(), "--check")
    assert (status, report) == (2, {})
    assert error.splitlines()[-1].startswith("nsa-dcp generate: ended by a fault of nsa-dcp's own, KeyError")


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "bfloat16", "float32"])
def test_a_token_whose_latent_is_zero_is_cached_counted_and_answered_right(kv_cache_dtype, copy, run):
    """Token 2 is the padding token, whose embedding is zero; its FP8 tiles have no largest value to divide by."""
    words = ["--check", "--dcp-size", "2", "--kv-cache-dtype", kv_cache_dtype]
    status, report, error = run(copy(), *words, prompts=[[2, 5, 6, 7], [2, 2, 2]])
    assert (status, report["check"]["identical"]) == (0, True), error
    tokens = sum(prompt["prompt_tokens"] + len(prompt["output_ids"]) - 1 for prompt in report["prompts"])
    assert sum(rank["latent_rows"] for rank in report["ranks"]) == tokens
    assert [rank["index_tokens"] for rank in report["ranks"]] == [tokens, tokens]


def test_deepseek_with_indexer_types_that_it_does_not_read_is_served(copy, run):
    directory = copy(name="tiny-deepseek-v32", indexer_types=["full", "shared", "full", "shared"])
    assert run(directory, "--check", "--dcp-size", "2")[0] == 0
