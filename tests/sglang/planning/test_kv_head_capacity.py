"""The planner agrees, to the token, with the pool that sglang 0.5.23 sizes for models with KV heads."""

import json
from types import SimpleNamespace

import pytest
import torch

from nsa_dcp.planning.budget import GIB
from nsa_dcp.planning.kv_heads.dims import KV_HEAD_PRESETS, kv_head_preset, read_kv_head_config
from nsa_dcp.planning.kv_heads.plan import plan_kv_heads

pytestmark = pytest.mark.sglang

MODEL_TYPES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
    "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
}
DTYPES = {"fp8_e4m3": (torch.float8_e4m3fn, "fp8_e4m3"), "bfloat16": (torch.bfloat16, "bfloat16")}


def config_of(preset):
    model = kv_head_preset(preset)
    return {
        "architectures": [model.architecture],
        "model_type": MODEL_TYPES[model.architecture],
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "hidden_size": 4096,
        "max_position_embeddings": model.max_context,
    }


@pytest.fixture
def configurator(tmp_path, monkeypatch):
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.srt.runtime_context import reset_context
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.test.parallel_groups import publish

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def make(config, tp_size, dcp_size, kv_cache_dtype):
        (tmp_path / "config.json").write_text(json.dumps(config))
        dtype, name = DTYPES[kv_cache_dtype]
        args = ServerArgs(
            model_path=str(tmp_path),
            device="cuda",
            tp_size=tp_size,
            dcp_size=dcp_size,
            kv_cache_dtype=name,
            page_size=64,
            attention_backend="triton",
        )
        publish(args, role="scheduler")
        layers = config["num_hidden_layers"]
        return create_memory_pool_configurator(
            SimpleNamespace(
                server_args=args,
                model_config=ModelConfig(str(tmp_path)),
                kv_cache_dtype=dtype,
                kv_cache_dtype_str=name,
                is_draft_worker=False,
                use_mla_backend=False,
                is_hybrid_swa=False,
                pp_size=1,
                mambaish_config=None,
                spec_algorithm=SpeculativeAlgorithm.from_string(None),
                spec_aux_config=SimpleNamespace(eagle_draft_num_layers=None),
                layer_info=SimpleNamespace(num_effective_layers=layers, start_layer=0, end_layer=layers),
                fused_entry_bytes=lambda _: None,
            )
        )

    yield make
    reset_context()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize(("tp_size", "dcp_size"), [(8, 1), (8, 2), (8, 4), (16, 2), (16, 4), (4, 2)])
@pytest.mark.parametrize("preset", KV_HEAD_PRESETS)
def test_the_planned_pool_is_the_one_that_sglang_sizes(
    configurator, tmp_path, preset, tp_size, dcp_size, kv_cache_dtype
):
    """Useful sizes and refused ones alike: what a refused one would take is said too."""
    sized = configurator(config_of(preset), tp_size, dcp_size, kv_cache_dtype)
    budget = 40 * GIB + 12_345_677
    (row,) = plan_kv_heads(
        read_kv_head_config(tmp_path),
        gpu_memory_gib=budget / GIB,
        kv_cache_dtypes=(kv_cache_dtype,),
        tp_size=tp_size,
        dcp_sizes=(dcp_size,),
    ).rows
    assert row.bytes_per_token * dcp_size == sized._cell_size
    assert row.tokens_per_gpu == sized.calculate_pool_sizes(budget, 64).max_total_num_tokens
