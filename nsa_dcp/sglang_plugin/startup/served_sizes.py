"""The sizes of a server that has been built: what its steps multiply, and what lies beside its pools."""

from __future__ import annotations

from typing import Any

from nsa_dcp.planning.held_memory import HeldMemory, held_memory
from nsa_dcp.planning.limits import Sizes
from nsa_dcp.sglang_plugin.admission.server_shape import ServerShape, shape_of
from nsa_dcp.sglang_plugin.attention.cp_pages import buffer_pages


def read_shape(model_runner: Any, parallel: Any) -> ServerShape:
    """Read mode, group and heads.

    Args:
        model_runner: sglang's ModelRunner, its model loaded.
        parallel: sglang's parallel context.
    """
    return shape_of(
        num_attention_heads=model_runner.model_config.num_attention_heads,
        attn_tp_size=parallel.attn_tp_size,
        dcp_size=parallel.attn_dcp_size,
        cp_strategy=parallel.cp_strategy if parallel.attn_cp_size > 1 else None,
    )


def read_sizes(model_runner: Any, parallel: Any) -> Sizes:
    """Read what the kernels of a server's steps are given.

    Args:
        model_runner: sglang's ModelRunner, its pools built.
        parallel: sglang's parallel context.
    """
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_schedule, get_spec

    spread = parallel.attn_cp_size > 1
    shape = read_shape(model_runner, parallel)
    chunk, drafts = get_schedule().chunked_prefill_size, get_spec().speculative_num_draft_tokens
    hf_config = model_runner.model_config.hf_config
    return Sizes(
        rows=chunk if chunk and chunk > 0 else get_schedule().max_prefill_tokens,
        local_heads=shape.local_heads,
        attended_heads=shape.gathered_heads,
        dcp_size=parallel.attn_dcp_size,
        spread=spread,
        zigzag=spread and parallel.cp_strategy == "zigzag",
        draft=drafts is not None,
        hidden_size=hf_config.hidden_size,
        index_topk=hf_config.index_topk,
        pool_tokens=model_runner.token_to_kv_pool.size * parallel.attn_dcp_size,
        context=model_runner.req_to_token_pool.req_to_token.shape[1],
        requests=model_runner.max_running_requests,
        rows_per_request=drafts or 1,
        unfused_topk=not envs.SGLANG_DSA_FUSE_TOPK.get(),
    )


def gather_buffer_pages(model_runner: Any, parallel: Any) -> int:
    """Pages of each rank that CP-DCP's gather buffer holds. Args: as above."""
    return buffer_pages(
        model_runner.model_config.context_len, model_runner.token_to_kv_pool.size, parallel.attn_dcp_size
    )


def served_dtype(pool: Any) -> str:
    """The dtype of a pool's rows, as the planner and `--kv-cache-dtype` have it. `pool`: sglang's DSATokenToKVPool."""
    return "fp8_e4m3" if pool.dsa_kv_cache_store_fp8 else "bfloat16"


def captured_requests(model_runner: Any) -> int:
    """Requests of the largest decode graph; 0 without graphs. Args: as above."""
    from sglang.srt.arg_groups.overrides import resolving_view

    graphs = resolving_view(model_runner.server_args).cuda_graph_config.decode
    return (graphs.max_bs or 0) if graphs.backend != "disabled" else 0


def count_held_memory(model_runner: Any, parallel: Any) -> HeldMemory:
    """Bytes of this GPU beside the pools. Args: as above."""
    sizes = read_sizes(model_runner, parallel)
    return held_memory(
        sizes,
        longest=min(sizes.pool_tokens, model_runner.model_config.context_len),
        captured=captured_requests(model_runner),
        draft_tokens=sizes.rows_per_request if sizes.draft else 0,
    )
