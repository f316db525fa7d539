"""Models and settings that are served, from which the validation tests depart."""

import dataclasses

from nsa_dcp.sglang_plugin.admission.validation import ModelFacts, ServerSettings

HOPPER = (9, 0)
GLM = ModelFacts(
    is_dsa=True,
    architecture="GlmMoeDsaForCausalLM",
    num_attention_heads=64,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_topk=2048,
    num_hidden_layers=78,
    indexer_layers=(0, 1, *range(2, 78, 4)),
)
DEEPSEEK = dataclasses.replace(
    GLM,
    architecture="DeepseekV32ForCausalLM",
    num_attention_heads=128,
    num_hidden_layers=61,
    indexer_layers=tuple(range(61)),
)
TP_DCP = ServerSettings(
    dcp_size=8,
    tp_size=8,
    prefill_attention_backend="nsa",
    decode_attention_backend="nsa",
    dsa_prefill_backend="flashmla_kv",
    dsa_decode_backend="flashmla_kv",
    kv_cache_dtype="fp8_e4m3",
)
CP_DCP = dataclasses.replace(TP_DCP, attn_cp_size=8, enable_prefill_cp=True, cp_strategy="interleave")
