"""Which layers select: the planner and doctor read it from a config as sglang does once it has loaded it."""

import pytest

pytest.importorskip("sglang")

from sglang.srt.configs.model_config import dsa_layer_skips_topk
from transformers import CONFIG_MAPPING

from nsa_dcp.planning.dimensions import indexer_layers

MODELS = {"glm_moe_dsa": "GlmMoeDsaForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM"}
# Eight layers: patterns and lists of other lengths, nulls, and both ways to space selections.
FIELDS = {
    "nothing": {},
    "short pattern": {"index_topk_pattern": "FFSS"},
    "one letter": {"index_topk_pattern": "F"},
    "long pattern": {"index_topk_pattern": "FFSSFSSFSSSS"},
    "empty pattern": {"index_topk_pattern": ""},
    "short types": {"indexer_types": ["full", "shared"]},
    "long types": {"indexer_types": ["full"] + ["shared"] * 11},
    "types before a pattern": {"indexer_types": ["full"] * 8, "index_topk_pattern": "FSSSSSSS"},
    "pattern before freq": {"index_topk_pattern": "FSFS", "index_topk_freq": 8},
    "freq": {"index_topk_freq": 3},
    "freq and offset": {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    "null offset": {"index_topk_freq": 2, "index_skip_topk_offset": None},
    "null freq": {"index_topk_freq": None},
    "words as a pattern": {"index_topk_pattern": ["full", "shared", "shared"]},
    "letters in a list": {"index_topk_pattern": ["F", "S", "S"]},
}
# transformers' GLM config does not take these, or sglang reads none of the words: not a model that anybody serves.
UNREADABLE = {
    ("glm_moe_dsa", "null freq"), ("glm_moe_dsa", "null offset"), ("glm_moe_dsa", "letters in a list"),
    ("deepseek_v32", "words as a pattern"),
}  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("model_type", MODELS)
def test_indexer_layers_are_those_of_sglang(model_type, fields, request):
    name = next(name for name, entry in FIELDS.items() if entry is fields)
    if (model_type, name) in UNREADABLE:
        pytest.skip("not a config that this model has")
    raw = {"model_type": model_type, "architectures": [MODELS[model_type]], "num_hidden_layers": 8, **fields}
    config = CONFIG_MAPPING[model_type](**{key: value for key, value in raw.items() if key != "model_type"})
    expected = tuple(layer for layer in range(8) if not dsa_layer_skips_topk(config, layer))
    assert indexer_layers(raw) == expected
    # The start-up line reads the loaded config.
    assert indexer_layers(config.to_dict()) == expected


def test_what_sglang_and_transformers_read_differently_is_refused():
    glm = {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 8}
    deepseek = {"architectures": ["DeepseekV32ForCausalLM"], "num_hidden_layers": 8}
    for config in (
        {**glm, "index_topk_pattern": ["F", "S", "S"]},
        {**glm, "indexer_types": ["F", "S", "S"]},
        {**deepseek, "index_topk_pattern": ["full", "shared"]},
    ):
        with pytest.raises(ValueError, match="alone, got"):
            indexer_layers(config)
