"""Everything in sglang that nsa-dcp relies on, and the check that it is there and has the shape it was written against.

No other module decides by version. docs/upstream.md has a row for each entry, with what would make it unnecessary.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from typing import Any

from nsa_dcp.sglang_plugin.lifetime_symbols import LIFETIME_SYMBOLS, Symbol
from nsa_dcp.sglang_plugin.topk_symbols import TOPK_SYMBOLS

SGLANG_VERSION = "0.5.23"


_ATTENTION = "sglang.srt.layers.attention"
_FORWARD: tuple[str, ...]
_FORWARD = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "q_rope", "k_rope", "topk_indices")
_FORWARD += ("cos_sin_cache", "is_neox", "llama_4_scaling", "attn_sink")
_METADATA: tuple[str, ...]
_METADATA = ("page_size", "cache_seqlens_int32", "max_seq_len_q", "max_seq_len_k", "cu_seqlens_q", "cu_seqlens_k")
_METADATA += ("page_table_1", "real_page_table", "dsa_cache_seqlens_int32", "dsa_cu_seqlens_q", "dsa_cu_seqlens_k")
_METADATA += ("dsa_extend_seq_lens_list", "dsa_seqlens_expanded", "dsa_max_seqlen_q", "flashmla_metadata")
_METADATA += ("paged_mqa_schedule_metadata", "paged_mqa_ctx_lens_2d", "topk_v2_plan", "seq_lens_sum")
_METADATA += ("page_table_1_flattened", "topk_indices_offset", "indexer_k_start_end", "indexer_logical_page_table")
_METADATA += ("indexer_seq_lens_cpu", "indexer_seq_lens", "token_to_batch_idx", "pooled_index_kpool")
_METADATA += ("pooled_cache_seqlens_int32", "pooled_real_page_table", "pooled_paged_mqa_schedule_metadata")
_METADATA += ("pooled_topk_v2_plan", "kpool_extend_plan", "kpool_write_plan")

SYMBOLS = (
    Symbol(f"{_ATTENTION}.attention_registry:ATTENTION_BACKENDS", "our factory stands at its keys `nsa` and `dsa`"),
    Symbol(f"{_ATTENTION}.attention_registry:register_attention_backend", "how it gets there", ("name",)),
    Symbol("sglang.srt.arg_groups.resolution_hooks:register_resolution_hook", "how commands are checked", ("name",)),
    Symbol("sglang.srt.arg_groups.resolution_hooks:_HOOKS", "whether our hooks took hold"),
    Symbol("sglang.srt.arg_groups.overrides:resolving_view", "reading half-resolved arguments", ("server_args",)),
    Symbol(
        "sglang.srt.arg_groups.overrides:declare_resolution",
        "choosing flashmla_kv where nothing was asked for",
        ("server_args", "source", "fields"),
    ),
    Symbol("sglang.srt.arg_groups.overrides:attention_backends_of", "which backends were asked for", ("cfg",)),
    Symbol("sglang.srt.arg_groups.overrides:model_config_of", "the checkpoint's config", ("server_args",)),
    Symbol(
        "sglang.srt.arg_groups.model_overrides.deepseek_v2:_dsa_dcp_overrides",
        "it fills only sparse backends that are still unset",
        ("cfg",),
    ),
    Symbol("sglang.srt.configs.model_config:is_deepseek_dsa", "which models are ours", ("config",)),
    Symbol("sglang.srt.configs.model_config:AttentionArch", "which models cache keys and values by head"),
    Symbol(
        "sglang.srt.configs.model_config:ModelConfig.get_total_num_kv_heads",
        "which DCP sizes keep a group to one KV head",
        ("self",),
    ),
    Symbol(
        "sglang.srt.configs.model_config:dsa_layer_skips_topk",
        "pipeline stages start at layers that select",
        ("config", "layer_id"),
    ),
    Symbol("sglang.srt.configs.model_config:get_dsa_index_kpool", "pooled index keys are refused", ("config",)),
    Symbol("sglang.srt.connector:ConnectorType", "a checkpoint in another server's memory has no config to read"),
    Symbol("sglang.srt.utils.common:parse_connector_type", "the same", ("url",)),
    Symbol("sglang.srt.runtime_context:get_parallel", "DCP size, rank and groups", ()),
    Symbol("sglang.srt.runtime_context:get_exec", "the resolved sparse backends", ()),
    Symbol(
        f"{_ATTENTION}.dsa.dsa_indexer:Indexer.forward_cuda",
        "where it takes its selections from: the two methods below, or rows that need no agreement",
        ("self", "x", "q_lora", "positions", "forward_batch", "layer_id", "return_indices", "use_cuda_graph"),
    ),
    Symbol(
        f"{_ATTENTION}.dsa.dsa_indexer:_broadcast_indexer_topk_from_rank0_impl",
        "one selection for all ranks of the attention-TP group where it is not split by rows, captured",
        ("topk_indices",),
    ),
    Symbol(
        f"{_ATTENTION}.dsa.dsa_indexer:Indexer._get_topk_ragged",
        "the selection of prefill, which we split by rows over the attention-TP group",
        ("self", "enable_dual_stream", "forward_batch", "layer_id", "q_fp8", "weights", "metadata", "topk_result"),
    ),
    Symbol(
        f"{_ATTENTION}.dsa.dsa_indexer:Indexer._get_topk_paged",
        "the selection of decode and verify, which we split likewise from 64 rows; under context parallelism over the "
        "DCP group",
        ("self", "forward_batch", "layer_id", "q_fp8", "weights", "metadata"),
    ),
    Symbol(
        "sglang.srt.model_executor.forward_batch_info:ForwardMode.is_decode",
        "decode and verify steps are split, draft-extend is not",
        ("self",),
    ),
    Symbol("sglang.srt.model_executor.forward_batch_info:ForwardMode.is_target_verify", "the same", ("self",)),
    Symbol(
        f"{_ATTENTION}.dsa.utils:resolve_paged_mqa_logits_metadata_fn",
        "the scoring kernel's schedule, made for a rank's rows of a step",
        (),
    ),
    Symbol(f"{_ATTENTION}.dsa.utils:resolve_num_sms", "the same", ()),
    Symbol(
        "sglang.kernels.ops.attention.dsv4.topk:plan_topk_v2",
        "the top-k kernel's plan, made for a rank's rows of a step",
        ("seq_lens", "static_threshold", "out"),
    ),
    *TOPK_SYMBOLS,
    Symbol(
        f"{_ATTENTION}.dsa.dsa_indexer_metadata:DSAIndexerMetadata",
        "narrowed to a rank's rows for that: a field that we do not know would stay the whole batch's",
        (
            "attn_metadata",
            "topk_transform_method",
            "topk_backend",
            "paged_mqa_schedule_metadata",
            "paged_mqa_ctx_lens_2d",
            "force_unfused_topk",
        ),
    ),
    Symbol(f"{_ATTENTION}.dsa_backend:DSAMetadata", "the same", _METADATA),
    Symbol(
        f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend",
        "the class that our backend extends",
        (
            "model_runner",
            "skip_prefill",
            "speculative_step_id",
            "topk",
            "speculative_num_steps",
            "seed_dsa_topk_from_draft_extend",
        ),
    ),
    Symbol(
        f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend._forward_flashmla_kv",
        "the kernel call that we replace: its arguments and what its callers do with the result",
        ("self", "q_all", "kv_cache", "v_head_dim", "sm_scale", "layer", "metadata", "page_table_1"),
    ),
    Symbol(
        f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend._compute_flashmla_metadata",
        "it plans the stock kernel's launches once a step, which we leave out",
        ("self", "cache_seqlens", "seq_len_q"),
    ),
    Symbol(
        f"{_ATTENTION}.dsa.dsa_metadata_manager:DSAMetadataManagementMixin._init_kpool_metadata_fusion",
        "it sets _fused_decode_metadata, which we wrap",
        ("self",),
    ),
    Symbol(
        "sglang.kernels.ops.attention.dsa.metadata:fused_dsa_decode_metadata",
        "what it sets: launched for no tokens it writes lengths alone, and we fill the page table",
        (
            "seq_lens",
            "req_pool_indices",
            "req_to_token",
            "cache_seqlens",
            "cu_seqlens_k",
            "page_table_1",
            "dsa_cache_seqlens",
            "dsa_cu_seqlens_k",
            "real_page_table",
            "bs",
            "max_len",
            "dsa_index_topk",
            "physical_page_size",
        ),
    ),
    Symbol(
        f"{_ATTENTION}.dsa_backend:DSAFlashMLAMetadata",
        "that plan: ours has its methods and not its tensors, which the replaced method alone reads",
        ("flashmla_metadata", "num_splits"),
    ),
    Symbol(
        f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend.forward_decode",
        "it returns what _forward_flashmla_kv returns",
        _FORWARD,
    ),
    Symbol(f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend.forward_extend", "the same", _FORWARD),
    Symbol(
        f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend.get_topk_transform_method",
        "with flashmla_kv it is PAGED in every phase: selections are slots of the widened pool",
        ("self", "forward_mode"),
    ),
    Symbol("sglang.srt.mem_cache.memory_pool:DSATokenToKVPool", "the cache that is read and its span"),
    Symbol(
        "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool.set_mla_kv_buffer",
        "it writes the rows that this rank owns, quantised once",
        ("self", "layer", "loc_info", "cache_k_nope", "cache_k_rope", "layer_id_override"),
    ),
    Symbol("sglang.srt.mem_cache.memory_pool:DSATokenToKVPool.get_key_buffer", "the rows", ("self", "layer_id")),
    Symbol(
        "sglang.srt.mem_cache.index_key_cache:IndexKeyCache.get_k_and_scale",
        "a prefill's index keys, which we gather with offsets of 64 bits",
        ("self", "layer_id", "seq_len_tensor", "page_indices", "seq_len_sum", "max_seq_len"),
    ),
    Symbol(
        "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool.get_index_k_scale_buffer",
        "the indexer's door to it",
        ("self", "layer_id", "seq_len_tensor", "page_indices", "seq_len_sum", "max_seq_len"),
    ),
    Symbol("sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA", "it gathers heads and merges: dcp_size, head count"),
    Symbol(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla:is_mla_dcp_lse_base_on_e",
        "it says base 2 for `nsa` and `dsa`, so that is what we return",
        ("attention_backend",),
    ),
    Symbol(
        "sglang.srt.model_executor.model_runner_components.weight_updater:_unsupported_derived_weight_cache_error",
        "every online weight update asks it first, and it reads our attention layers' _derived_weight_cache_error",
        ("model",),
    ),
    Symbol(
        "sglang.srt.layers.dcp.comm:dcp_a2a_lse_reduce",
        "the a2a merge",
        ("cp_attn_out", "cp_attn_lse", "cp_group", "is_lse_base_on_e", "cuda_graph_buffers", "comm_backend"),
    ),
    Symbol(
        "sglang.srt.layers.dcp.comm:cp_lse_ag_out_rs_mla",
        "the ag_rs merge",
        ("cp_attn_out", "cp_attn_lse", "cp_group", "ctx", "is_lse_base_on_e"),
    ),
    # CP-DCP.
    Symbol(
        "sglang.srt.arg_groups.parallel_hook:handle_decode_context_parallelism",
        "the step that refuses DCP with prefill CP: for CP-DCP our hook stands in its place",
        ("server_args",),
    ),
    Symbol(
        "sglang.srt.arg_groups.overrides:run_post_process_pass",
        "what is left of that step: choosing the exchange between ranks",
        ("server_args", "fn"),
    ),
    Symbol("sglang.srt.arg_groups.overrides:_dcp_comm_backend_default", "that choice", ("view",)),
    Symbol(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla:"
        "DeepseekMLAForwardMixin.is_dcp_mla_decode_phase",
        "false for a layer whose dcp_size we set to 1, and then attn_mqa runs and nothing is gathered or merged",
        ("self", "forward_batch"),
    ),
    Symbol(
        "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA.maybe_use_decode_attn_tp",
        "with --enable-cp-decode-attn-tp, steps that are not spread run this rank's slice of the heads",
        ("self", "forward_batch"),
    ),
    Symbol(
        "sglang.srt.layers.cp.cp_decode_attn_tp:CP_DECODE_ATTN_TP_SUPPORTED_ARCHS",
        "whose attention weights are sliced; others are refused",
    ),
    Symbol(
        "sglang.srt.layers.cp.cp_decode_attn_tp:CpDecodeAttnTpContext._get_linear_attrs",
        "it slices weight and weight_scale_inv of a layer, so both must be stored row by row",
        ("self", "linear_instance"),
    ),
    Symbol("sglang.srt.layers.quantization.fp8:Fp8LinearMethod", "they are, in blocks of 128 and not for Marlin"),
    Symbol("sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod", "they are"),
    Symbol("sglang.srt.layers.cp.base:get_cp_strategy", "how a prompt's tokens are dealt out", ()),
    Symbol("sglang.srt.layers.cp.base:is_zigzag", "whether by blocks", ()),
    Symbol("sglang.srt.layers.cp.utils:is_cp_active", "whether this forward is spread", ("forward_batch",)),
    Symbol(
        "sglang.srt.layers.cp.utils:prepare_cp_forward",
        "it says how, in attn_cp_metadata, before the backend's metadata is made",
        ("forward_batch",),
    ),
    Symbol(
        f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend.init_forward_metadata",
        "we list the forward's pages after it, and reorder what it made where the forward is spread by zigzag",
        ("self", "forward_batch"),
    ),
    Symbol(
        f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend._cal_indexer_k_start_end",
        "metadata have key ranges where `_get_topk_ragged` selects: a chunk's selection, which the ranks must agree on",
        ("self", "forward_batch", "bs_idx"),
    ),
    Symbol(
        f"{_ATTENTION}.dsa_backend:prepare_kv_for_attention",
        "it unpacks what a strategy's materialize_full_mla_kv returns, and the cache write gets the whole chunk",
        ("attn_mla", "forward_batch", "k_nope", "k_pe", "defer_materialization"),
    ),
    Symbol("sglang.srt.layers.cp.interleave:InterleaveCPStrategy", "one of the two strategies"),
    Symbol(
        "sglang.srt.layers.cp.interleave:InterleaveCPStrategy.materialize_full_mla_kv",
        "it returns the chunk's latents and writes nothing",
        ("self", "forward_batch", "layer", "k_nope", "k_rope"),
    ),
    Symbol("sglang.srt.layers.cp.zigzag:ZigzagCPStrategy", "the other, whose object gets the two doors below"),
    Symbol(
        "sglang.srt.layers.cp.base:ContextParallelStrategy.materialize_full_mla_kv",
        "the door for latents: for zigzag ours returns them, the class's writes them for FlashAttention",
        ("self", "forward_batch", "layer", "k_nope", "k_rope"),
    ),
    Symbol(
        "sglang.srt.layers.cp.base:ContextParallelStrategy.materialize_full_indexer_k_cache",
        "the door for index keys, which zigzag does not have",
        ("self", "key", "forward_batch"),
    ),
    Symbol(
        "sglang.srt.layers.cp.zigzag:ZigzagCPStrategy.gather_kv_cache",
        "what both doors call: the ranks' rows in the order of the batch's tokens",
        ("self", "x", "forward_batch", "stream"),
    ),
    Symbol(
        "sglang.srt.layers.cp.zigzag:ZigzagCPStrategy.local_q_indices",
        "which tokens a rank has, in its order",
        ("self", "num_tokens", "forward_batch"),
    ),
    Symbol("sglang.srt.layers.cp.zigzag:ZigzagContextParallelMetadata", "the lengths of a rank's blocks"),
    Symbol(
        "sglang.srt.distributed.parallel_state:GroupCoordinator.all_gather_into_tensor",
        "gathering pages over the DCP group, and selections over the group that shares them, captured",
        ("self", "output", "input"),
    ),
    Symbol(
        "sglang.srt.distributed.parallel_state:GroupCoordinator.all_gather",
        "gathering heads over the DCP group, captured",
        ("self", "input_", "dim", "output_tensor_list"),
    ),
    Symbol(
        "sglang.srt.distributed.parallel_state:GroupCoordinator.broadcast",
        "one selection for all ranks of the DCP group where it is not split by rows, captured",
        ("self", "input_", "src"),
    ),
    Symbol("sglang.srt.runtime_context:get_schedule", "the largest prefill chunk, for the start-up line", ()),
    Symbol("sglang.srt.runtime_context:get_spec", "the rows of a verify step, for the same", ()),
    *LIFETIME_SYMBOLS,
)


def check_version() -> None:
    """Raise unless the installed sglang is the one that nsa-dcp was written against.

    Raises:
        RuntimeError: it is another version, or there is none.
    """
    found = installed_version()
    # A local version, as of a wheel for another CUDA, is the same release.
    if found is None or found.partition("+")[0] != SGLANG_VERSION:
        raise RuntimeError(
            f"nsa-dcp needs sglang {SGLANG_VERSION}, found {found or 'none'}: pip install sglang=={SGLANG_VERSION}"
        )


def installed_version() -> str | None:
    """Return the version of the installed sglang; None without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_symbols() -> None:
    """Raise unless every symbol is there with the parameters it was written against. Imports all of their modules.

    Raises:
        RuntimeError: names every symbol that differs.
    """
    differences = [difference for symbol in SYMBOLS if (difference := _difference(symbol))]
    if differences:
        raise RuntimeError(
            f"this sglang says {SGLANG_VERSION} but is not the released one, so nsa-dcp cannot serve with it "
            f"(pip install --force-reinstall sglang=={SGLANG_VERSION}): {'; '.join(differences)}"
        )


def require(condition: bool, needed: str, found: object) -> None:
    """Raise unless a condition holds, in one sentence; raised in the factory it stops the server.

    Args:
        condition: what was checked.
        needed, found: what nsa-dcp needs, and what is there.

    Raises:
        RuntimeError: the condition does not hold.
    """
    if not condition:
        raise RuntimeError(f"nsa-dcp needs {needed}, found {found}; serve without --dcp-size, or report this")


def _difference(symbol: Symbol) -> str | None:
    module, _, name = symbol.path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return f"{symbol.path} is missing ({error})"
    if symbol.parameters is None:
        return None
    parameters = tuple(inspect.signature(found).parameters)
    if parameters != symbol.parameters:
        return f"{symbol.path} takes ({', '.join(parameters)}), not ({', '.join(symbol.parameters)})"
    return None
