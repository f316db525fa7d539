"""Whatever stands in a checkpoint's config.json or behind a number: ranks are started, or one sentence and status 2."""

import json
import math

import pytest
from checkpoint_edits import check_refused
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.cli import main
from nsa_dcp.hf import generate as generate_module

NUMBERS = st.sampled_from(
    [0, -1, 1, 2, 3, 7, 9, 2**31, 2**63, 10**30, -(10**30), math.nan, math.inf, -math.inf, 0.5, 1e300, -1e300]
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "2", "full", "FFSS", "\n"]), st.text())
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3))
# A model is built in every example.
FUZZED = settings(max_examples=40)
# Fields that a transformers config has beside the model's own.
MORE = (
    *("quantization_config", "compression_config", "text_config", "index_topk_pattern", "index_topk_freq", "dtype"),
    *("num_nextn_predict_layers", "rope_scaling", "return_dict", "torch_dtype", "auto_map", "attn_implementation"),
    *("per_layer_config", "is_encoder_decoder", "output_hidden_states", "transformers_version", "id2label"),
    *("repetition_penalty", "num_experts", "tie_word_embeddings", "use_cache", "transformers_weights"),
)


@pytest.mark.parametrize("name", ["tiny-glm-dsa", "tiny-deepseek-v32"])
@FUZZED
@given(data=st.data())
def test_no_config_ends_in_a_traceback(name, data, tiny_checkpoint, tmp_path_factory, generate):
    source = tiny_checkpoint(name)
    config = json.loads((source / "config.json").read_text())
    changed = data.draw(st.dictionaries(st.sampled_from(sorted([*config, *MORE])), VALUES, min_size=1, max_size=2))
    directory = tmp_path_factory.mktemp("fuzzed")
    for path in source.iterdir():
        (directory / path.name).symlink_to(path)
    for file in data.draw(st.sampled_from([["config.json"], ["config.json", "generation_config.json"]])):
        written = json.loads((source / file).read_text())
        (directory / file).unlink()
        (directory / file).write_text(json.dumps({**written, **changed}))
    status, error, started = generate(directory)
    assert "Traceback" not in error
    if not started:
        own = [line for line in error.splitlines() if line.startswith("nsa-dcp")]
        assert status == 2 and len(own) == 1 and error.rstrip("\n").endswith(own[0]), error
    else:
        assert status == 0


FLAGS = [
    "--max-new-tokens",
    "--chunked-prefill-size",
    "--max-total-tokens",
    "--tp-size",
    "--dcp-size",
    "--timeout",
    "--seed",
]


@FUZZED
@given(words=st.lists(st.tuples(st.sampled_from(FLAGS), NUMBERS), min_size=1, max_size=3))
def test_no_number_on_the_command_line_ends_in_a_traceback(words, tiny_checkpoint, generate, capsys):
    try:
        status, error, started = generate(
            tiny_checkpoint("tiny-glm-dsa"), *(str(word) for pair in words for word in pair)
        )
    except SystemExit as left:  # argparse's own
        assert left.code == 2 and "Traceback" not in capsys.readouterr().err
        return
    assert (status, error.count("\n"), started) in ((0, 0, True), (2, 1, False)), error


@pytest.mark.parametrize("tokens", [10**13, 10**18, 10**30])
def test_a_pool_that_no_memory_holds_is_refused(tokens, tiny_checkpoint, tmp_path, capsys):
    (tmp_path / "prompts.json").write_text("[[5]]")
    words = ["--prompts", str(tmp_path / "prompts.json"), "--max-total-tokens", str(tokens)]
    status = main(["generate", "--model", str(tiny_checkpoint("tiny-glm-dsa")), *words])
    error = capsys.readouterr().err
    assert (status, error.count("\n")) == (2, 1), error
    assert f"max_total_tokens must leave the caches within memory, got {tokens}" in error


def test_a_chunk_larger_than_all_prompts_is_one_that_holds_them(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    jobs = []
    monkeypatch.setattr(
        "nsa_dcp.launcher.run_ranks",
        lambda _, __, args, *rest, **more: jobs.extend(args) or [{"output_ids": [[1], [1]], "usage": {}}],
    )
    (tmp_path / "prompts.json").write_text("[[5, 6], [7]]")
    words = ["--prompts", str(tmp_path / "prompts.json"), "--chunked-prefill-size", str(10**30)]
    assert main(["generate", "--model", str(tiny_checkpoint("tiny-glm-dsa")), *words]) == 0
    assert isinstance(jobs[0], generate_module.GenerateJob) and jobs[0].chunked_prefill_size == 3


def test_a_config_that_is_a_folder_is_refused(copy, generate):
    directory = copy()
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    check_refused(generate(directory), "config.json must be a readable file")
