"""Reading a checkpoint's dimensions: indexer ownership, presets, and what is said about a broken config."""

import json

import pytest

from nsa_dcp.planning.dimensions import PRESETS, dims_from_config, indexer_layers, preset_dims, read_config

CONFIG = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "max_position_embeddings": 65536,
}


def test_presets_are_the_published_models():
    assert PRESETS == ("glm-5.2", "deepseek-v3.2")
    glm, deepseek = preset_dims("glm-5.2"), preset_dims("deepseek-v3.2")
    assert (glm.num_hidden_layers, len(glm.indexer_layers), glm.num_attention_heads) == (78, 21, 64)
    assert glm.indexer_layers[:5] == (0, 1, 2, 6, 10)
    assert (deepseek.num_hidden_layers, len(deepseek.indexer_layers), deepseek.num_attention_heads) == (61, 61, 128)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, (0, 1, 2, 3), id="nothing said: every layer"),
        pytest.param({"indexer_types": ["full", "shared", "shared", "full"]}, (0, 3), id="indexer_types"),
        pytest.param(
            {"indexer_types": ["full", "shared", "shared", "full"], "index_topk_freq": 1, "index_topk_pattern": "FFFF"},
            (0, 3),
            id="indexer_types before the rest",
        ),
        pytest.param({"index_topk_pattern": "FSSF", "index_topk_freq": 1}, (0, 3), id="pattern before freq"),
        pytest.param({"index_topk_pattern": ["full", "full", "shared", "shared"]}, (0, 1), id="pattern as a list"),
        pytest.param({"index_topk_freq": 2}, (0, 1, 3), id="freq with the default offset"),
        pytest.param({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 2), id="freq and offset"),
        pytest.param({"index_topk_pattern": "FFS"}, (0, 1, 3), id="a short pattern: sglang computes in the rest"),
        pytest.param({"indexer_types": ["full", "shared"]}, (0, 2, 3), id="short indexer_types: as sglang"),
        pytest.param({"index_topk_pattern": "FFSSFFFF"}, (0, 1), id="a longer pattern: the rest is not read"),
        pytest.param(
            {"architectures": ["DeepseekV32ForCausalLM"], "index_topk_pattern": ["F", "S"]}, (0, 2, 3), id="DeepSeek's"
        ),
        pytest.param({"index_topk_freq": None, "indexer_types": None}, (0, 1, 2, 3), id="null is absent"),
    ],
)
def test_indexer_layers_follow_the_config(fields, expected):
    assert indexer_layers({**CONFIG, **fields}) == expected


def test_read_config_takes_a_file_or_a_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    dims = read_config(tmp_path)
    assert dims == read_config(tmp_path / "config.json")
    assert (dims.name, dims.max_context, dims.draft_layers_in_checkpoint) == ("glm_moe_dsa", 65536, 0)


def test_a_multimodal_wrapper_is_read_through():
    assert dims_from_config({"text_config": CONFIG}, name="x").num_hidden_layers == 4


@pytest.mark.parametrize("wrapped", [[], [CONFIG], "text", 7])
def test_a_wrapper_around_nothing_is_refused(wrapped):
    with pytest.raises(ValueError, match="text_config must be an object, got"):
        dims_from_config({"text_config": wrapped}, name="x")


@pytest.mark.parametrize("field", [name for name in CONFIG if name != "model_type"])
def test_a_missing_field_is_named(field):
    with pytest.raises(ValueError, match=rf"config must have .*{field}"):
        dims_from_config({name: value for name, value in CONFIG.items() if name != field}, name="x")


def test_a_dense_model_is_called_that():
    with pytest.raises(ValueError, match="without index_topk it is not a DSA model"):
        dims_from_config({"num_hidden_layers": 2}, name="x")


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [64]])
@pytest.mark.parametrize("field", ["num_hidden_layers", "kv_lora_rank", "num_attention_heads", "index_topk"])
def test_an_unusable_field_is_named_with_its_value(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be a positive integer, got"):
        dims_from_config({**CONFIG, field: value}, name="x")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["full", ["shared"], "full", "full"]}, r"'shared' alone, got \['shared'\]"),
        ({"indexer_types": ["F", "S", "S", "F"]}, "must hold 'full' and 'shared' alone, got 'F', 'S'"),
        ({"indexer_types": "FSSF"}, "must hold 'full' and 'shared' alone, got 'F', 'S'"),
        ({"architectures": ["DeepseekV32ForCausalLM"], "index_topk_pattern": ["full", "shared"]}, "'F' and 'S' alone"),
        ({"index_topk_freq": "2"}, "index_topk_freq must be a positive integer, got '2'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, got 1000000000"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings must be at most 9007199254740991, got 1000"),
        ({"architectures": "GlmMoeDsaForCausalLM"}, "architectures must be a list of names, got 'GlmMoeDsa"),
        ({"architectures": 7}, "architectures must be a list of names, got 7"),
        ({"architectures": [None]}, r"architectures must be a list of names, got \[None\]"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, "must begin with a full indexer"),
        ({"indexer_types": ["full", "none", "full", "full"]}, "must hold 'full' and 'shared' alone, got 'none'"),
        ({"index_topk_pattern": "FXFF"}, "index_topk_pattern must hold"),
        ({"indexer_types": 7}, "indexer_types must be a list"),
        ({"index_topk_freq": 0}, "index_topk_freq must be a positive integer, got 0"),
        ({"index_skip_topk_offset": -1}, "index_skip_topk_offset must be a positive integer, got -1"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be an integer of 0 or more, got -1"),
    ],
)
def test_a_broken_indexer_layout_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dims_from_config({**CONFIG, **fields}, name="x")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_head_dim": 64}, "index_head_dim must be 128, got 64"),
        ({"index_kpool": 4}, "index_kpool must be 1, got 4"),
        ({"kv_lora_rank": 500}, "kv_lora_rank must be a multiple of the tile 128, got 500"),
    ],
)
def test_a_valid_model_of_another_shape_is_not_implemented(fields, message):
    with pytest.raises(NotImplementedError, match=message):
        dims_from_config({**CONFIG, **fields}, name="x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config must be JSON"),
        (b"\xff\xfe", "config must be JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b"{}", "config must have num_hidden_layers"),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_a_missing_file_and_an_unknown_preset_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config must be a config\.json or a directory"):
        read_config(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"preset must be one of glm-5.2, deepseek-v3.2, got 'glm-9'"):
        preset_dims("glm-9")
