"""Models with KV heads: which DCP sizes gain, what a plan says, and which configs it refuses."""

import json

import pytest

from nsa_dcp.cli import main
from nsa_dcp.planning.kv_heads.dims import KV_HEAD_PRESETS, kv_head_dims_from_config, kv_head_preset
from nsa_dcp.planning.kv_heads.plan import plan_kv_heads
from nsa_dcp.planning.kv_heads.sizes import (
    copies_of_a_kv_head,
    gain,
    kv_head_of,
    smallest_useful_tp_size,
    useful_dcp_sizes,
)

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 6, 8, 12, 16, 24, 32])
def test_a_useful_group_holds_one_head_and_any_other_holds_several(tp_size, num_kv_heads):
    """From what each rank holds, rank by rank: no formula of the module but `kv_head_of`."""
    if tp_size % num_kv_heads and num_kv_heads % tp_size:
        with pytest.raises(ValueError, match="must divide num_key_value_heads or be a multiple"):
            useful_dcp_sizes(tp_size, num_kv_heads)
        return
    held = [
        {head for head in range(num_kv_heads) if head * tp_size // num_kv_heads == rank}
        or {kv_head_of(rank, tp_size, num_kv_heads)}
        for rank in range(tp_size)
    ]
    assert set().union(*held) == set(range(num_kv_heads))
    for dcp_size in (size for size in range(2, tp_size + 1) if tp_size % size == 0):
        groups = [held[start : start + dcp_size] for start in range(0, tp_size, dcp_size)]
        alike = all(heads == group[0] for group in groups for heads in group)
        assert (dcp_size in useful_dcp_sizes(tp_size, num_kv_heads)) == alike
        if alike:
            assert gain(dcp_size, tp_size, num_kv_heads) == dcp_size
    copies = min(sum(head in heads for heads in held) for head in range(num_kv_heads))
    assert copies_of_a_kv_head(tp_size, num_kv_heads) == copies


def test_the_smallest_size_that_gains_divides_the_heads():
    assert smallest_useful_tp_size(8, 64) == 16
    assert smallest_useful_tp_size(2, 24) == 4
    assert smallest_useful_tp_size(8, 24) == 24
    assert smallest_useful_tp_size(32, 32) is None


@pytest.mark.parametrize(
    ("name", "tp_size", "sizes", "bytes_per_token"),
    [
        ("qwen3-235b-a22b", 8, (2,), 48_128),
        ("qwen3-30b-a3b", 8, (2,), 24_576),
        ("qwen3-32b", 8, (), 32_768),
        ("qwen3-32b", 16, (2,), 32_768),
        ("llama-3.3-70b", 8, (), 40_960),
        ("glm-4.6", 8, (), 47_104),
        ("glm-4.6", 16, (2,), 47_104),
        ("minimax-m2", 8, (), 31_744),
        ("minimax-m2", 16, (2,), 31_744),
    ],
)
def test_published_models_gain_what_their_heads_allow(name, tp_size, sizes, bytes_per_token):
    """Bytes counted by hand: 2 layers-times-heads-times-dim-times-2, a KV head a rank."""
    plan = plan_kv_heads(kv_head_preset(name), gpu_memory_gib=60, tp_size=tp_size, kv_cache_dtypes=("bfloat16",))
    assert plan.useful_dcp_sizes == sizes
    assert plan.rows[0].bytes_per_token == bytes_per_token
    for row in plan.rows[1:]:
        assert (row.refusal == "") == (row.dcp_size in sizes)
        assert row.gain == (row.dcp_size if sizes else 1)
        assert row.bytes_per_token == bytes_per_token / row.gain
    assert ("gains nothing" in plan.advice) == (not sizes)


def test_a_plan_that_gains_nothing_says_so_and_where_it_would(capsys):
    assert main(["plan", "--preset", "llama-3.3-70b"]) == 0
    printed = capsys.readouterr().out
    assert "DCP gains nothing here: 8 KV heads on 8 ranks" in printed
    assert "gains from --tp-size 16 on" in printed
    assert "dcp 2: refused" in printed


@pytest.mark.parametrize("preset", KV_HEAD_PRESETS)
def test_every_preset_is_planned_and_is_not_called_served(preset, capsys):
    assert main(["plan", "--preset", preset, "--gpu-memory-gib", "60", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["served"] is False
    assert plan["rows"][0]["tokens_per_gpu"] % 64 == 0


def test_a_config_is_planned_like_a_preset(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["plan", "--config", str(tmp_path), "--gpu-memory-gib", "1", "--json", "--dcp-size", "2"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"][:1]
    assert (row["dcp_size"], row["gain"], row["kv_heads_per_rank"]) == (2, 2, 1)
    assert row["tokens_per_gpu"] == (1 << 30) // (2 * 4 * 128) // 64 * 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sliding_window": 4096}, "sliding_window must be null"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must hold full_attention alone"),
        ({"v_head_dim": 64}, "v_head_dim must be head_dim 128, got 64"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must divide num_attention_heads 32, got 5"),
        ({"num_key_value_heads": None}, "config must have num_key_value_heads"),
        ({"num_key_value_heads": "4"}, "num_key_value_heads must be a positive integer"),
        ({"head_dim": None, "hidden_size": 1000}, "hidden_size must be a multiple"),
        ({"head_dim": 0}, "head_dim must be a positive integer"),
    ],
)
def test_a_config_of_another_shape_is_refused_in_a_sentence(tmp_path, capsys, change, said):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    assert main(["plan", "--config", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_an_unused_window_is_no_window():
    config = CONFIG | {"sliding_window": 4096, "use_sliding_window": False}
    assert kv_head_dims_from_config(config, name="x", source="test").head_dim == 128


@pytest.mark.parametrize(
    "words",
    [
        "--index-keys sharded",
        "--draft-layers 1",
        "--pp-size 2",
        "--context 4096",
        "--plot a.svg",
        "--weights-gib 3",
        "--tp-size 6",
        "--tp-size 64",
        "--dcp-size 3",
        "--attn-dp-size 3",
        "--gpu-memory-gib 0.0001",
    ],
)
def test_what_does_not_go_with_these_models_is_refused_in_a_sentence(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--preset", "qwen3-235b-a22b", *words.split()]) == (0 if words == "--tp-size 64" else 2)
    assert capsys.readouterr().err.count("\n") == (0 if words == "--tp-size 64" else 1)
