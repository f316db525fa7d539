"""Which kind of attention sglang sees in a config that is no DSA model's: a latent, or keys and values by head.

Source: sglang 0.5.23 `ModelConfig._derive_model_shapes` and `get_total_num_kv_heads`; a contract test holds the list to
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from nsa_dcp.sglang_plugin.admission.rules.kv_head_rules import OTHER_ATTENTION
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts

# sglang knows a model with a latent by its architecture alone.
_LATENT = (
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV3ForCausalLMNextN",
    "Glm4MoeLiteForCausalLM",
    "Glm4MoeLiteForCausalLMNextN",
    "GlmMoeDsaForCausalLM",
    "GlmMoeDsaForCausalLMNextN",
    "Glm5NextForConditionalGeneration",
    "Glm5NextForConditionalGenerationNextN",
    "LongcatFlashForCausalLM",
    "LongcatFlashForCausalLMNextN",
    "HYV4ForCausalLM",
    "HYV4ForCausalLMNextN",
    "DotsVLMForCausalLM",
    "Dots3NoteForCausalLM",
    "Dots3NoteForCausalLMNextN",
    "MistralLarge3ForCausalLM",
    "MistralLarge3ForCausalLMEagle",
    "KimiK25ForConditionalGeneration",
    "Eagle3DeepseekV2ForCausalLM",
    "GigaChat35ForCausalLM",
    "GigaChat35ForCausalLMNextN",
    "MiniCPM3ForCausalLM",
    "KimiVLForConditionalGeneration",
    "KimiLinearForCausalLM",
    "KimiK3LinearForCausalLM",
    "KimiK3ForConditionalGeneration",
    "BailingMoeV2_5ForCausalLM",
    "BailingMoeV3ForCausalLM",
    "BailingMoeV3VLForConditionalGeneration",
    "SarvamMLAForCausalLM",
)
# These have one if their config says so.
_LATENT_IF_RANKED = (
    "PixtralForConditionalGeneration",
    "BailingMoeForCausalLMNextN",
)
_LATENT_UNLESS = {"DeepseekVL2ForCausalLM": "use_mla"}
_KV_HEAD_FIELDS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)


def facts_without_selection(text: Mapping[str, object], architecture: str) -> ModelFacts:
    """Facts of a model that selects nothing.

    Args:
        text: fields of its language model.
        architecture: the checkpoint's.
    """
    heads = _size(text.get("num_attention_heads"))
    if _has_latent(text, architecture) or architecture in OTHER_ATTENTION or not architecture or not heads:
        return ModelFacts(is_dsa=False, architecture=architecture)
    given = next((text[field] for field in _KV_HEAD_FIELDS if text.get(field) is not None), heads)
    return ModelFacts(
        is_dsa=False,
        has_kv_heads=True,
        architecture=architecture,
        num_attention_heads=heads,
        num_key_value_heads=_size(given),
    )


def _has_latent(text: Mapping[str, object], architecture: str) -> bool:
    if architecture in _LATENT_IF_RANKED:
        return text.get("kv_lora_rank") is not None
    if architecture in _LATENT_UNLESS:
        return bool(text.get(_LATENT_UNLESS[architecture], True))
    return architecture in _LATENT


def _size(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
