"""Building the attention backend in a scheduler, after everything that it relies on was found to be as expected.

sglang swallows what goes wrong while plugins load, so this is where nsa-dcp fails closed: each check raises one
sentence, and raising here stops the server before it has answered anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nsa_dcp.planning.served_format import PAGE_SIZE, head_bucket, row_bytes
from nsa_dcp.sglang_plugin import patches, resolution
from nsa_dcp.sglang_plugin.admission.rules.pool_limits import find_pool_problems, find_step_problems
from nsa_dcp.sglang_plugin.admission.untried import list_untried
from nsa_dcp.sglang_plugin.admission.validation import (
    SPARSE_BACKEND,
    describe_problems,
    is_served_here,
)
from nsa_dcp.sglang_plugin.compat import check_symbols, check_version, require
from nsa_dcp.sglang_plugin.startup.agreement import check_agreement
from nsa_dcp.sglang_plugin.startup.cp_startup import build_context_parallel_backend
from nsa_dcp.sglang_plugin.startup.row_startup import build_row_backend, check_row_prefill
from nsa_dcp.sglang_plugin.startup.selection_agreement import select_alike_on_every_rank
from nsa_dcp.sglang_plugin.startup.served_sizes import captured_requests, read_sizes, served_dtype
from nsa_dcp.sglang_plugin.startup.server_description import describe_server
from nsa_dcp.sglang_plugin.startup.server_wire import open_server_wire
from nsa_dcp.sglang_plugin.startup.weight_updates import refuse_weight_updates
from nsa_dcp.wire import PeerWire

logger = logging.getLogger(__name__)


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
        # Its index keys have the target's slots.
        patches.gather_index_keys_past_2_gib(model_runner.token_to_kv_pool)
        refuse_weight_updates(model_runner, settings)
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
    _check_model(model_runner, parallel.attn_dcp_size)
    if parallel.attn_cp_size == 1:
        _check_tensor_parallel(model_runner, parallel)
    check_agreement(model_runner, parallel, settings, model)
    patches.gather_index_keys_past_2_gib(model_runner.token_to_kv_pool)
    refuse_weight_updates(model_runner, settings)
    for sentence in list_untried(settings):
        logger.warning("nsa-dcp: %s", sentence)
    way = settings.prefill_way or "queries"
    if way != "queries":
        check_row_prefill()
    wire = open_server_wire(model_runner, parallel)
    if parallel.attn_cp_size > 1:
        backend = build_context_parallel_backend(model_runner, parallel, wire)
    else:
        backend = _build_tensor_parallel_backend(model_runner, parallel, wire, way)
    patches.fill_page_tables_by_page(backend)
    topk = patches.use_exact_topk(backend)
    logger.info(describe_server(model_runner, parallel, topk, wire, None if parallel.attn_cp_size > 1 else way))
    return backend


def _build_tensor_parallel_backend(model_runner: Any, parallel: Any, wire: PeerWire | None, way: str) -> Any:
    from nsa_dcp.sglang_plugin.attention.backend import DcpDeepseekSparseAttnBackend

    if way != "queries":
        return build_row_backend(model_runner, parallel, way)
    select_alike_on_every_rank(model_runner.model, parallel.attn_tp_group)
    patches.prepare_idle_steps_quietly(model_runner.model)
    if wire is not None:
        from nsa_dcp.sglang_plugin.attention.wired_backend import WiredSparseAttnBackend

        local_heads = model_runner.model_config.num_attention_heads // parallel.attn_tp_size
        patches.hide_dcp_from_layers(model_runner.model, local_heads)
        return WiredSparseAttnBackend(model_runner, parallel.dcp_group, parallel.dcp_comm_backend, wire)
    return DcpDeepseekSparseAttnBackend(model_runner)


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
    rows, width = pool.kv_buffer[0], row_bytes(served_dtype(pool))
    require(
        rows[0].nbytes == width,
        f"{layout} cache rows of {width} bytes",
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
