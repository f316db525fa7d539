"""Parts of a server that several tests build: a rank's pool, and an attention layer as a backend sees it."""

import inspect
from types import SimpleNamespace

import torch


def record_patches(monkeypatch):
    """The names of the changes that are made from now on, as they are made, in a list that grows; and all in order."""
    from nsa_dcp.sglang_plugin import patches

    made = []

    def recording(name, function):
        def record(*args, **kwargs):
            made.append(name)
            return function(*args, **kwargs)

        return record

    functions = {
        name: function
        for name, function in vars(patches).items()
        if inspect.isfunction(function) and function.__module__ == patches.__name__
    }
    for name, function in functions.items():
        monkeypatch.setattr(patches, name, recording(name, function))
    return made, list(functions)


def make_pool(rows, num_layers, kv_format="fp8", **more):
    """sglang's own pool for one rank, on the CPU."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    return DSATokenToKVPool(
        rows,
        page_size=64,
        kv_lora_rank=512,
        dtype=torch.float8_e4m3fn if kv_format == "fp8" else torch.bfloat16,
        qk_rope_head_dim=64,
        layer_num=num_layers,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=656 if kv_format == "fp8" else 576,
        **more,
    )


def make_layer(layer_id, heads, sm_scale):
    """What a backend reads of sglang's RadixAttention."""
    return SimpleNamespace(
        layer_id=layer_id,
        tp_q_head_num=heads,
        head_dim=576,
        v_head_dim=512,
        scaling=sm_scale,
        is_cross_attention=False,
    )


def make_weight_updater(get_model):
    """sglang's own updater of the model that a function returns, on the CPU."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    return WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=SimpleNamespace(dtype=torch.bfloat16, model_path=None),
        custom_weight_loaders={},
        get_model=get_model,
        update_model_fields=lambda *_, **__: None,
        recapture_cuda_graph=None,
        get_model_runner=None,
    )
