"""Whatever stands in a config.json or behind a numeric flag: an answer, or one sentence and exit status 2."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.cli import main

GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 2,
    "index_topk_pattern": None,
    "indexer_types": None,
    "index_kpool": 1,
    "cli_factor": None,
    "max_position_embeddings": 65536,
    "num_nextn_predict_layers": 1,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "vocab_size": 154880,
    "text_config": None,
}
COMMAND = ["python", "-m", "sglang.launch_server", "--tp", "8", "--dcp-size", "8", "--kv-cache-dtype", "fp8_e4m3"]
COMMAND += ["--attention-backend", "nsa", "--page-size", "64"]
READERS = {
    "plan": lambda path: ["plan", "--config", path, "--gpu-memory-gib", "60"],
    "model": lambda path: ["model", "--config", path, "--gpu-memory-gib", "60", "--batch", "1", "--context", "4096"],
    "doctor": lambda path: ["doctor", "--command-only", "--no-imports", "--config", path, "--", *COMMAND],
}
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 3, 7, 63, 2**31, 2**63, 10**30, 10**400, -(10**400)]),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 0.5, 1e-300, 1e300, -1e300, 2.0]),
    st.integers(-(2**70), 2**70),
    st.floats(),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "2", "full", "F", "FFSS", "nan", "é", "\n"]), st.text()
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3))
FUZZED = settings(max_examples=150)


def check_answer(capsys, words: list[str]) -> tuple[int, str]:
    """Run a command in this process; returns its status and what it wrote to standard error."""
    try:
        status = main(words)
    except SystemExit as left:  # argparse's own refusals, after a line of usage
        status = left.code
        assert status == 2
    captured = capsys.readouterr()
    assert status in (0, 1, 2)
    assert "Traceback" not in captured.err
    if status == 2:
        last = captured.err.rstrip("\n").splitlines()[-1]
        assert last.startswith("nsa-dcp") and (captured.err.count("\n") == 1 or captured.err.startswith("usage:"))
    return status, captured.err


@pytest.mark.parametrize("command", READERS)
@FUZZED
@given(
    changes=st.dictionaries(st.sampled_from(sorted(GLM)), VALUES, min_size=1, max_size=3),
    removed=st.sets(st.sampled_from(sorted(GLM)), max_size=1),
)
def test_no_config_ends_in_a_traceback(command, changes, removed, tmp_path, capsys):
    path = tmp_path / "config.json"
    config = {name: value for name, value in {**GLM, **changes}.items() if name not in removed}
    path.write_text(json.dumps(config))
    check_answer(capsys, READERS[command](str(path)))


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    "text", ["", "null", "[]", "7", "NaN", '"x"', "{", "[" * 100_000, '{"a":' * 5000, "9" * 5000, "\ufeff{}"]
)
def test_no_file_ends_in_a_traceback(command, text, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert check_answer(capsys, READERS[command](str(path)))[0] == 2
    assert check_answer(capsys, READERS[command](str(tmp_path / "none.json")))[0] == 2


FLAGS = {
    "plan": (
        ["--gpu-memory-gib", "60"],
        *(["--gpu-memory-gib", "--weights-gib", "--mem-fraction-static", "--dcp-size", "--tp-size", "--attn-dp-size"]),
        *(["--pp-size", "--pp-layer-partition", "--gpus-per-node", "--draft-layers", "--page-size"]),
        *(["--context", "--chunked-prefill-size", "--sm-count", "--kv-cache-dtype"]),
    ),
    "model": (
        ["--batch", "8", "--context", "4096"],
        *(["--tp-size", "--dcp-size", "--batch", "--context", "--gpu-memory-gib", "--kv-cache-dtype", "--set"]),
    ),
    "doctor": (["--command-only", "--no-imports"], "--timeout"),
}
SERVER_FLAGS = [
    "--tp",
    "--dp",
    "--pp-size",
    "--dcp-size",
    "--attn-dp-size",
    "--attn-cp-size",
    "--page-size",
    "--chunked-prefill-size",
    "--speculative-eagle-topk",
    "--pp-async-batch-depth",
    "--cpu-offload-gb",
]


@pytest.mark.parametrize("command", FLAGS)
@FUZZED
@given(data=st.data())
def test_no_number_on_the_command_line_ends_in_a_traceback(command, data, capsys):
    given_words, *flags = FLAGS[command]
    words = [command, "--preset", data.draw(st.sampled_from(["glm-5.2", "deepseek-v3.2"])), *given_words]
    for flag in data.draw(st.lists(st.sampled_from(flags), min_size=1, max_size=3)):
        value = str(data.draw(NUMBERS))
        words += [flag, f"memory_bandwidth_gbs={value}" if flag == "--set" else value]
    if command == "doctor":
        words += ["--", *COMMAND]
        for flag in data.draw(st.lists(st.sampled_from(SERVER_FLAGS), max_size=3)):
            words += [flag, str(data.draw(NUMBERS))]
    check_answer(capsys, words)
