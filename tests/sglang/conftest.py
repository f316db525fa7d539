"""Fixtures around the real sglang 0.5.23 on a CPU. It is imported inside the fixtures: without it these tests skip."""

import argparse
import dataclasses
import importlib.util
import json
import os
from types import SimpleNamespace

import pytest
import torch

from nsa_dcp.planning.pipelines import PARTITION_VARIABLE

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
if HAS_SGLANG and not torch.cuda.is_available():
    # sglang writes its cache and merges with Triton kernels; the interpreter runs them on CPU tensors. Where there is a
    # GPU, the other tests of this process need the compiler, so what runs on the CPU here is skipped.
    os.environ["TRITON_INTERPRET"] = "1"

NUM_LAYERS = 2
TINY_GLM_DSA = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "first_k_dense_replace": 4,
    "moe_layer_freq": 1,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "rope_theta": 1000000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}


def pytest_collection_modifyitems(items):
    if not HAS_SGLANG:
        reason = "needs sglang 0.5.23: pip install sglang==0.5.23"
    elif torch.cuda.is_available():
        reason = "runs sglang on CPU tensors, in Triton's interpreter: hide the GPU with CUDA_VISIBLE_DEVICES="
    else:
        return
    for item in items:
        if item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def model_path(tmp_path):
    """A function that writes a model's config.json, with changes, and returns its folder."""

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(TINY_GLM_DSA | changes))
        return str(tmp_path)

    return write


@pytest.fixture
def parse_server_args():
    """A function that reads the words of a command line with sglang's own parser, and resolves nothing yet."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return lambda words: ServerArgs.from_cli_args(parser.parse_args(words))


@pytest.fixture
def set_layer_partition(monkeypatch):
    """A function that sets the layers of pipeline stages in the environment; None unsets them."""

    def assign(partition):
        if partition is None:
            monkeypatch.delenv(PARTITION_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(PARTITION_VARIABLE, partition)

    return assign


@pytest.fixture
def on_hopper(monkeypatch):
    """Let sglang's and nsa-dcp's argument resolution believe that this machine has a Hopper GPU."""
    from nsa_dcp.sglang_plugin import resolution

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(resolution, "_gpu_capability", lambda: (9, 0))


@pytest.fixture
def registered():
    """The plugin registered in this process, and sglang's registries restored afterwards."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.layers.attention import attention_registry

    from nsa_dcp.sglang_plugin import plugin

    backends = dict(attention_registry.ATTENTION_BACKENDS)
    hooks = {step: list(wrappers) for step, wrappers in resolution_hooks._HOOKS.items()}
    plugin.register()
    yield plugin
    attention_registry.ATTENTION_BACKENDS.clear()
    attention_registry.ATTENTION_BACKENDS.update(backends)
    resolution_hooks._HOOKS.clear()
    resolution_hooks._HOOKS.update(hooks)


@dataclasses.dataclass
class Rank:
    """One DCP rank's published configuration, pool and allocator."""

    dcp_size: int
    dcp_rank: int
    pool: object
    allocator: object


@pytest.fixture
def publish_rank():
    """A function that publishes a config for one rank of a DCP group, as a scheduler does at its start."""
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    def start(dcp_size, dcp_rank, **settings):
        settings = {"dsa_prefill_backend": "flashmla_kv", "dsa_decode_backend": "flashmla_kv"} | settings
        server_args = ServerArgs(
            model_path="dummy", device="cpu", tp_size=dcp_size, dcp_size=dcp_size, page_size=64, **settings
        )
        reset_context()
        publish(server_args, role="test", ranks=SpawnRanks(world_rank=dcp_rank, dp_rank=None))
        group = SimpleNamespace(
            world_size=dcp_size,
            rank_in_group=dcp_rank,
            ranks=list(range(dcp_size)),
            # The others have whatever this rank has.
            all_gather_object=lambda mine: [mine] * dcp_size,
        )
        alone = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[dcp_rank])
        # With attn_cp_size=dcp_size an attention-TP group is one rank.
        attn_tp_group = group if get_parallel().attn_tp_size == dcp_size else alone
        get_parallel().override_permanently(dcp_group=group, tp_group=group, attn_tp_group=attn_tp_group)
        return get_parallel()

    yield start
    reset_context()


@pytest.fixture
def make_rank(publish_rank):
    """A function that builds sglang's own pool and allocator for one rank of a DCP group."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    from tests.sglang.served_parts import make_pool

    def build(dcp_size, dcp_rank, kv_format="fp8", size=128, skip_topk_layers=None):
        publish_rank(dcp_size, dcp_rank)
        dtype = torch.float8_e4m3fn if kv_format == "fp8" else torch.bfloat16
        pool = make_pool(size, NUM_LAYERS, kv_format, skip_topk_layers=skip_topk_layers)
        allocator = PagedTokenToKVPoolAllocator(
            size * dcp_size, page_size=64 * dcp_size, dtype=dtype, device="cpu", kvcache=pool, need_sort=False
        )
        return Rank(dcp_size, dcp_rank, pool, allocator)

    return build
