"""The planner agrees with the pool that sglang 0.5.23 sizes and builds: to the token, and to the byte."""

import json
from types import SimpleNamespace

import pytest
import torch

from nsa_dcp.planning.capacity import GIB, plan
from nsa_dcp.planning.dimensions import read_config
from nsa_dcp.sglang_plugin.startup.startup_line import pool_facts
from tests.sglang.served_parts import make_pool

pytestmark = pytest.mark.sglang

GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 1048576,
}
GLM_TYPES = {
    **{name: value for name, value in GLM.items() if name not in ("index_topk_freq", "index_skip_topk_offset")},
    "num_hidden_layers": 6,
    "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
}
GLM_PATTERN = {**GLM_TYPES, "indexer_types": None, "index_topk_pattern": "FSFSSS"}
DEEPSEEK = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "max_position_embeddings": 163840,
}
DTYPES = {"fp8_e4m3": (torch.float8_e4m3fn, "fp8_e4m3"), "bfloat16": (torch.bfloat16, "bfloat16")}


@pytest.fixture
def sglang_server(tmp_path, monkeypatch):
    """Resolve a server's arguments as on a Hopper node; returns what sglang's configurator reads of it."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import reset_context
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.test.parallel_groups import publish

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def _server(config, dcp_size, kv_cache_dtype, draft_layers, stage=None):
        (tmp_path / "config.json").write_text(json.dumps(config))
        dtype, name = DTYPES[kv_cache_dtype]
        args = ServerArgs(
            model_path=str(tmp_path),
            device="cuda",
            tp_size=8,
            dcp_size=dcp_size,
            kv_cache_dtype=name,
            page_size=64,
            attention_backend="nsa",
            dsa_prefill_backend="flashmla_kv",
            dsa_decode_backend="flashmla_kv",
        )
        publish(args, role="scheduler")
        layers = stage or range(config["num_hidden_layers"])
        return SimpleNamespace(
            server_args=args,
            model_config=ModelConfig(str(tmp_path)),
            kv_cache_dtype=dtype,
            kv_cache_dtype_str=name,
            is_draft_worker=False,
            use_mla_backend=True,
            is_hybrid_swa=False,
            pp_size=1 if stage is None else 2,
            mambaish_config=None,
            spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE" if draft_layers else None),
            spec_aux_config=SimpleNamespace(eagle_draft_num_layers=draft_layers or None),
            layer_info=SimpleNamespace(
                num_effective_layers=len(layers), start_layer=layers.start, end_layer=layers.stop
            ),
            fused_entry_bytes=lambda _: None,
        )

    yield _server
    reset_context()


@pytest.mark.parametrize("draft_layers", [0, 1], ids=["no draft", "one draft layer"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8], ids=lambda size: f"dcp {size}")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GLM, id="glm-5.2"),
        pytest.param(GLM_TYPES, id="glm with indexer_types"),
        pytest.param(GLM_PATTERN, id="glm with index_topk_pattern"),
        pytest.param(DEEPSEEK, id="deepseek-v3.2"),
    ],
)
def test_the_planned_pool_is_the_one_that_sglang_sizes(
    sglang_server, tmp_path, config, dcp_size, kv_cache_dtype, draft_layers
):
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    server = sglang_server(config, dcp_size, kv_cache_dtype, draft_layers)
    configurator = create_memory_pool_configurator(server)
    # An awkward number of bytes: rounding to whole rows and pages has to agree too.
    budget = 40 * GIB + 12_345_677
    (row,) = plan(
        read_config(tmp_path),
        gpu_memory_gib=budget / GIB,
        kv_cache_dtypes=(kv_cache_dtype,),
        dcp_sizes=(dcp_size,),
        draft_layers=draft_layers,
    ).rows
    assert row.bytes_per_token.total * dcp_size == configurator._cell_size
    assert row.tokens_per_gpu == configurator.calculate_pool_sizes(budget, 64).max_total_num_tokens


@pytest.mark.parametrize("dcp_size", [1, 8], ids=lambda size: f"dcp {size}")
@pytest.mark.parametrize(("config", "partition"), [(GLM, "38,40"), (GLM, "6,72"), (GLM, None), (DEEPSEEK, None)])
def test_the_planned_pool_of_a_pipeline_is_the_smallest_that_sglang_sizes(
    sglang_server, tmp_path, set_layer_partition, config, partition, dcp_size
):
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    set_layer_partition(partition)
    budget = 40 * GIB + 12_345_677
    sized = []
    for rank in range(2):
        stage = range(*get_pp_indices(config["num_hidden_layers"], rank, 2))
        configurator = create_memory_pool_configurator(sglang_server(config, dcp_size, "fp8_e4m3", 0, stage))
        sized.append(configurator.calculate_pool_sizes(budget, 64).max_total_num_tokens)
    (row,) = plan(
        read_config(tmp_path),
        gpu_memory_gib=budget / GIB,
        kv_cache_dtypes=("fp8_e4m3",),
        dcp_sizes=(dcp_size,),
        pp_size=2,
        pp_layer_partition=partition,
        gpus_per_node=16,
    ).rows
    # sglang takes the smallest of all ranks.
    assert row.tokens_per_gpu == min(sized)
    assert row.tokens_per_node == dcp_size * row.tokens_per_gpu
    # 6 layers and 72: the stages differ.
    assert (partition == "6,72") == (max(sized) > 2 * min(sized))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize("dcp_size", [1, 2, 8], ids=lambda size: f"dcp {size}")
def test_the_pool_that_sglang_builds_holds_the_planned_bytes_and_one_reserved_page(
    sglang_server, tmp_path, dcp_size, kv_cache_dtype
):
    sglang_server(GLM_TYPES, dcp_size, kv_cache_dtype, 0)
    dims = read_config(tmp_path)
    (row,) = plan(dims, gpu_memory_gib=0.02, kv_cache_dtypes=(kv_cache_dtype,), dcp_sizes=(dcp_size,)).rows
    pool = make_pool(
        row.tokens_per_gpu,
        dims.num_hidden_layers,
        "fp8" if kv_cache_dtype == "fp8_e4m3" else "bf16",
        skip_topk_layers=[layer not in dims.indexer_layers for layer in range(dims.num_hidden_layers)],
    )
    latent = sum(buffer.nbytes for buffer in pool.kv_buffer)
    index_keys = sum(buffer.nbytes for buffer in pool.index_k_with_scale_buffer)
    tokens = row.tokens_per_gpu * dcp_size + 64 * dcp_size
    assert latent == row.bytes_per_token.latent * tokens
    assert index_keys == row.bytes_per_token.index_keys * tokens
    assert latent + index_keys == row.bytes_per_token.total * row.tokens_per_gpu * dcp_size + row.reserved_bytes
    facts = pool_facts(pool, dcp_size)
    assert facts["latent_bytes_per_token"] == row.bytes_per_token.latent
    assert facts["index_key_bytes_per_token"] == row.bytes_per_token.index_keys


def test_sharded_index_keys_are_not_what_sglang_builds(sglang_server, tmp_path):
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    configurator = create_memory_pool_configurator(sglang_server(GLM, 8, "fp8_e4m3", 0))
    (row,) = plan(
        read_config(tmp_path), gpu_memory_gib=40, kv_cache_dtypes=("fp8_e4m3",), dcp_sizes=(8,), index_shards=8
    ).rows
    assert row.bytes_per_token.total * 8 < configurator._cell_size
