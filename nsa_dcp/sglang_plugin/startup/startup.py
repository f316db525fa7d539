"""Building the attention backend in a scheduler, after everything that it relies on was found to be as expected.

sglang swallows what goes wrong while plugins load, so this is where nsa-dcp fails closed: each check raises one
sentence, and raising here stops the server before it has answered anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nsa_dcp.planning.capacity import temporary_buffers
from nsa_dcp.planning.dimensions import dims_from_config
from nsa_dcp.sglang_plugin import resolution
from nsa_dcp.sglang_plugin.admission.rules.pool_limits import find_pool_problems, find_step_problems
from nsa_dcp.sglang_plugin.admission.server_shape import shape_of
from nsa_dcp.sglang_plugin.admission.validation import (
    PAGE_SIZE,
    SPARSE_BACKEND,
    describe_problems,
    head_bucket,
    is_served_here,
)
from nsa_dcp.sglang_plugin.attention.idle_steps import prepare_idle_steps_quietly
from nsa_dcp.sglang_plugin.compat import check_symbols, check_version, require
from nsa_dcp.sglang_plugin.selection.exact_topk import use_exact_topk
from nsa_dcp.sglang_plugin.selection.index_key_gather import gather_index_keys_past_2_gib
from nsa_dcp.sglang_plugin.selection.selection_agreement import select_alike_on_every_rank
from nsa_dcp.sglang_plugin.startup.agreement import check_agreement
from nsa_dcp.sglang_plugin.startup.served_sizes import captured_requests, count_held_memory, read_sizes
from nsa_dcp.sglang_plugin.startup.startup_line import startup_line
from nsa_dcp.sglang_plugin.startup.weight_updates import refuse_weight_updates

logger = logging.getLogger(__name__)

# Bytes of one cache row: 512 FP8 values, 4 scales and 64 bfloat16 values; or 576 bfloat16 values.
_ROW_BYTES = {"fp8": 656, "bfloat16": 1152}


def build_backend(model_runner: Any, stock: Callable[[Any], Any] | None) -> Any:
    """Return nsa-dcp's backend where DCP runs on flashmla_kv, and sglang's own everywhere else.

    Args:
        model_runner: sglang's ModelRunner, its model loaded and its pools built.
        stock: sglang's own factory for this backend name.

    Raises:
        ValueError: the command cannot be served.
        RuntimeError: sglang, the GPU or what sglang has built is not what nsa-dcp was written against.
    """
    from sglang.srt.runtime_context import get_exec, get_parallel

    if get_parallel().attn_dcp_size == 1:
        return _stock_backend(model_runner, stock)
    kernel = get_exec().kernel
    settings, model, capability = resolution.read_command(model_runner.server_args)
    if not is_served_here(settings, model, capability):
        if SPARSE_BACKEND in (kernel.dsa_prefill_backend, kernel.dsa_decode_backend):
            raise RuntimeError(
                "nsa-dcp could not read this server's arguments: DCP runs on flashmla_kv here, and they say it does not"
            )
        return _stock_backend(model_runner, stock)
    if model_runner.is_draft_worker:
        refuse_weight_updates(model_runner, settings)
        # Its index keys have the target's slots.
        gather_index_keys_past_2_gib(model_runner.token_to_kv_pool)
        return _stock_backend(model_runner, stock)
    resolution.check_command(settings, model, capability)
    require(
        (kernel.dsa_prefill_backend, kernel.dsa_decode_backend) == (SPARSE_BACKEND, SPARSE_BACKEND),
        "both DSA backends to be flashmla_kv",
        f"{kernel.dsa_prefill_backend} for prefill and {kernel.dsa_decode_backend} for decode",
    )
    check_version()
    check_symbols()
    _check_hooks()
    parallel = get_parallel()
    _check_topology(parallel)
    _check_pool(model_runner, parallel.attn_dcp_size)
    _check_reach(model_runner, parallel)
    gather_index_keys_past_2_gib(model_runner.token_to_kv_pool)
    _check_model(model_runner, parallel.attn_dcp_size)
    if parallel.attn_cp_size == 1:
        _check_tensor_parallel(model_runner, parallel)
    check_agreement(model_runner, parallel, settings, model)
    refuse_weight_updates(model_runner, settings)
    if parallel.attn_cp_size > 1:
        from nsa_dcp.sglang_plugin.startup.cp_startup import (
            build_context_parallel_backend,
            describe_context_parallel_server,
        )

        backend = build_context_parallel_backend(model_runner, parallel)
        logger.info(describe_context_parallel_server(model_runner, parallel, use_exact_topk(backend)))
        return backend

    from nsa_dcp.sglang_plugin.attention.backend import DcpDeepseekSparseAttnBackend

    select_alike_on_every_rank(model_runner.model, parallel.attn_tp_group)
    prepare_idle_steps_quietly(model_runner.model)
    backend = DcpDeepseekSparseAttnBackend(model_runner)
    logger.info(describe_server(model_runner, parallel, use_exact_topk(backend)))
    return backend


def describe_server(model_runner: Any, parallel: Any, topk: str) -> str:
    """Return the log line of what is served: group, heads, bytes per token, buffers of the largest prefill chunk.

    Args:
        model_runner: sglang's ModelRunner.
        parallel: sglang's parallel context.
        topk: what selects, of `use_exact_topk`.
    """
    from sglang.srt.runtime_context import get_schedule

    pool, dcp_size = model_runner.token_to_kv_pool, parallel.attn_dcp_size
    dims = dims_from_config(model_runner.model_config.hf_config.to_dict(), name="served", source="the server")
    shape = shape_of(
        num_attention_heads=model_runner.model_config.num_attention_heads,
        attn_tp_size=parallel.attn_tp_size,
        dcp_size=dcp_size,
        cp_strategy=None,
    )
    chunk = get_schedule().chunked_prefill_size
    buffers = temporary_buffers(
        dims,
        "fp8_e4m3" if pool.dsa_kv_cache_store_fp8 else "bf16",
        dcp_size,
        local_heads=shape.kept_heads,
        rows=chunk if chunk and chunk > 0 else get_schedule().max_prefill_tokens,
        # Nothing is gathered but queries: each rank attends to its own part of the context.
        context=0,
        pool_rows=pool.size + pool.page_size,
    )
    return startup_line(
        **shape.line_fields(),
        group_ranks=parallel.dcp_group.ranks,
        comm_backend=parallel.dcp_comm_backend,
        pool=pool,
        buffers=buffers,
        held=count_held_memory(model_runner, parallel),
        topk=topk,
    )


def _stock_backend(model_runner: Any, stock: Callable[[Any], Any] | None) -> Any:
    require(stock is not None, "a DSA attention backend in sglang's registry", "none")
    assert stock is not None
    return stock(model_runner)


def _check_hooks() -> None:
    steps = ", ".join(step for step, _ in resolution.missing_hooks())
    require(not steps, f"its hook around {steps}", "it missing, so the command went unchecked")


def _check_topology(parallel: Any) -> None:
    dcp_size = parallel.attn_dcp_size
    group = parallel.dcp_group
    require(group.world_size == dcp_size, f"a DCP group of {dcp_size} ranks", group.world_size)
    require(group.rank_in_group == parallel.attn_dcp_rank, f"DCP rank {parallel.attn_dcp_rank}", group.rank_in_group)


def _check_tensor_parallel(model_runner: Any, parallel: Any) -> None:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    group = parallel.dcp_group
    shard = set(parallel.attn_tp_group.ranks)
    require(
        set(group.ranks) <= shard,
        f"the DCP group {sorted(group.ranks)} inside one attention-TP group",
        f"the group {sorted(shard)}",
    )
    for layer in model_runner.model.modules():
        if isinstance(layer, DeepseekV2AttentionMLA):
            head_bucket(layer.attn_mqa_for_dcp_decode.tp_q_head_num)


def _check_pool(model_runner: Any, dcp_size: int) -> None:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    pool, allocator = model_runner.token_to_kv_pool, model_runner.token_to_kv_pool_allocator
    require(type(pool) is DSATokenToKVPool, "a DSATokenToKVPool", type(pool).__name__)
    require(pool.page_size == PAGE_SIZE, f"pages of {PAGE_SIZE} rows", pool.page_size)
    layout = "fp8" if pool.dsa_kv_cache_store_fp8 else "bfloat16"
    rows = pool.kv_buffer[0]
    require(
        rows[0].nbytes == _ROW_BYTES[layout],
        f"{layout} cache rows of {_ROW_BYTES[layout]} bytes",
        f"{rows[0].nbytes} of dtype {rows.dtype}",
    )
    require(
        allocator.page_size == PAGE_SIZE * dcp_size and allocator.size == pool.size * dcp_size,
        f"an allocator of {pool.size * dcp_size} slots in pages of {PAGE_SIZE * dcp_size}",
        f"{allocator.size} in pages of {allocator.page_size}",
    )
    slots = (pool.size + pool.page_size) * dcp_size
    require(rows.shape[0] * dcp_size >= slots, f"cache rows for {slots} slots", rows.shape[0] * dcp_size)
    for layer, pages in enumerate(pool.index_k_with_scale_buffer):
        # A layer that reuses the previous layer's selection keeps no index keys.
        if not pool.skip_topk_layers[layer]:
            require(
                pages.shape[0] * PAGE_SIZE >= slots,
                f"index keys for {slots} slots in layer {layer}",
                pages.shape[0] * PAGE_SIZE,
            )


def _check_reach(model_runner: Any, parallel: Any) -> None:
    """Refuse a pool or a step that a kernel would not reach with 32 bits."""
    sizes = read_sizes(model_runner, parallel)
    problems = [
        *find_pool_problems(sizes.pool_tokens, sizes.dcp_size),
        *find_step_problems(sizes, captured_requests(model_runner)),
    ]
    if problems:
        raise ValueError(describe_problems(problems, sizes.dcp_size))


def _check_model(model_runner: Any, dcp_size: int) -> None:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import is_mla_dcp_lse_base_on_e
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    for name in (model_runner.prefill_attention_backend_str, model_runner.decode_attention_backend_str):
        require(not is_mla_dcp_lse_base_on_e(name), f"base-2 log-sum-exps to be merged for {name}", "base e")
    layers = [module for module in model_runner.model.modules() if isinstance(module, DeepseekV2AttentionMLA)]
    require(bool(layers), "DeepseekV2AttentionMLA layers in the model", "none")
    for layer in layers:
        require(layer.dcp_size == dcp_size, f"layers that run DCP over {dcp_size} ranks", layer.dcp_size)
