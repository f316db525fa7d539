"""How many tokens a node holds at each dcp size, and where the bytes go.

A token costs each GPU of a DCP group

    L * latent / dcp_size  +  L_index * 132 / index_shards  +  L_draft * (latent + 132)      bytes,

with `L` layers, `latent` 656 bytes in packed FP8 or 1,152 in bfloat16, `L_index` layers that own an indexer, and draft
layers that every rank holds in full. Index keys are on every rank, `index_shards` 1, or sharded as latents are, where
it is dcp_size. A pool is a whole number of pages, and one more page of every buffer is reserved for padding.

    rows = (budget // (dcp_size * bytes_per_token)) // page_size * page_size,        tokens = rows * dcp_size

In a pipeline every GPU holds the layers of its stage, and the stage whose pool is full first decides.

Source: sglang 0.5.23 `DefaultPoolConfigurator`, with which this agrees to the token (checked in tests/sglang);
the ratios agree with public measured pools: local-inference-lab/rtx6kpro#35.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from nsa_dcp.planning.budget import GIB, budget_bytes, require_natural, require_positive
from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp.planning.held_memory import HeldMemory, default_requests, held_memory, request_table_columns
from nsa_dcp.planning.limits import Sizes, largest_pool
from nsa_dcp.planning.pipelines import describe_waiting_stage, split_layers, stage_dims, suggest_partition
from nsa_dcp.planning.served_format import (
    HEAD_BUCKETS,
    INDEX_KEY_BYTES,
    KV_CACHE_DTYPES,
    MOST_SMS,
    PAGE_SIZE,
    padded_heads,
    row_bytes,
)

# nsa_dcp_kernels attends to packed rows instead of dequantising more than this.
MOST_DEQUANTISED_BYTES = 1 << 30


@dataclass(frozen=True)
class TokenBytes:
    """Bytes one token of context costs each GPU of a DCP group, by what holds them."""

    latent: float
    index_keys: float
    draft: float

    @property
    def total(self) -> float:
        """Bytes per token per GPU."""
        return self.latent + self.index_keys + self.draft


@dataclass(frozen=True)
class TemporaryBuffers:
    """Bytes that a GPU needs beside its pool while it works, each the largest of its kind.

    Args:
        gathered_q: the chunk's queries of all heads of the DCP group, bfloat16 (TP-DCP, prefill by queries).
        attention_scratch: FlashMLA's split-KV accumulators for one launch.
        exchange: partial outputs with their lse, sent and received.
        row_exchange: the chunk's queries sent, received and by row (TP-DCP, prefill by rows).
        page_gather: the packed prefix and chunk of a layer for `context` tokens (CP-DCP, or by rows); 0 at dcp 1.
        dequantised: the most of a layer's rows, own or gathered, that prefill dequantises; 0 for bfloat16 and at dcp 1.
    """

    gathered_q: int
    attention_scratch: int
    exchange: int
    row_exchange: int
    page_gather: int
    dequantised: int


@dataclass(frozen=True)
class PlanRow:
    """What one dcp size holds with one KV dtype.

    Args:
        index_shards: copies of the index keys are `dcp_size / index_shards`; the asked value, capped by dcp_size.
        bytes_per_token: bytes per token per GPU; of the stage that costs most.
        tokens_per_gpu: rows of the latent pool of one GPU.
        tokens_per_node: tokens of context that the node holds in all.
        multiple_over_dcp1: context held, relative to dcp 1 with the same budget; before rounding to pages.
        largest_context: longest single request, in tokens: the pool, or what the checkpoint was made for.
        reserved_bytes: the padding page of every buffer, per GPU; sglang does not charge it to the budget.
        requests: requests at once that `held` is for.
        held: what lies beside the pools and the temporary buffers, per GPU.
        refusal: why this dcp size is not served; empty when it is.
        cap: what ends the pool where memory would hold more; empty when memory does.
    """

    dcp_size: int
    kv_cache_dtype: str
    index_shards: int
    bytes_per_token: TokenBytes
    tokens_per_gpu: int
    tokens_per_node: int
    multiple_over_dcp1: float
    largest_context: int
    reserved_bytes: int
    temporary_buffers: TemporaryBuffers
    requests: int
    held: HeldMemory
    refusal: str
    cap: str


@dataclass(frozen=True)
class Plan:
    """A capacity plan: the question as understood, and one row per KV dtype and dcp size.

    `left_bytes`: of each GPU, beside pools and weights; 0 where only the pools' share was given.
    """

    model: ModelDims
    budget_bytes: int
    left_bytes: int
    tp_size: int
    attn_dp_size: int
    gpus_per_node: int
    page_size: int
    draft_layers: int
    context: int
    layers_of_stages: tuple[int, ...]
    rows: tuple[PlanRow, ...]

    def as_dict(self) -> dict[str, object]:
        """Plain numbers and strings, for JSON."""
        rows = []
        for row in self.rows:
            entry = asdict(row)
            entry["bytes_per_token"]["total"] = row.bytes_per_token.total
            entry["held"]["total"] = row.held.total
            rows.append(entry)
        return {
            "model": self.model.name,
            "source": self.model.source,
            "num_hidden_layers": self.model.num_hidden_layers,
            "indexer_layers": list(self.model.indexer_layers),
            "num_indexer_layers": len(self.model.indexer_layers),
            "budget_bytes_per_gpu": self.budget_bytes,
            "left_bytes_per_gpu": self.left_bytes,
            "tp_size": self.tp_size,
            "attn_dp_size": self.attn_dp_size,
            "layers_of_stages": list(self.layers_of_stages),
            "gpus_per_node": self.gpus_per_node,
            "page_size": self.page_size,
            "draft_layers": self.draft_layers,
            "context_of_temporary_buffers": self.context,
            "rows": rows,
        }


def bytes_per_token(
    model: ModelDims, kv_cache_dtype: str, dcp_size: int, *, index_shards: int = 1, draft_layers: int = 0
) -> TokenBytes:
    """Bytes one token costs each GPU of a DCP group of `dcp_size`. ValueError: a size is not a positive integer."""
    require_positive(dcp_size=dcp_size, index_shards=index_shards)
    require_natural(draft_layers=draft_layers)
    latent = row_bytes(kv_cache_dtype, model.kv_lora_rank, model.qk_rope_head_dim)
    return TokenBytes(
        latent=model.num_hidden_layers * latent / dcp_size,
        index_keys=len(model.indexer_layers) * INDEX_KEY_BYTES / index_shards,
        draft=float(draft_layers * (latent + INDEX_KEY_BYTES)),
    )


def plan(
    model: ModelDims,
    *,
    gpu_memory_gib: float,
    kv_cache_dtypes: Sequence[str] = KV_CACHE_DTYPES,
    mem_fraction_static: float = 1.0,
    weights_gib: float = 0.0,
    tp_size: int = 8,
    attn_dp_size: int = 1,
    pp_size: int = 1,
    pp_layer_partition: str | None = None,
    gpus_per_node: int = 8,
    dcp_sizes: Sequence[int] | None = None,
    index_shards: int = 1,
    draft_layers: int = 0,
    page_size: int = PAGE_SIZE,
    context: int | None = None,
    chunked_prefill_size: int = 8192,
    sm_count: int = MOST_SMS,
    max_running_requests: int | None = None,
    draft_tokens: int | None = None,
) -> Plan:
    """Plan the KV capacity of a node.

    Args:
        model: from `preset_dims` or `read_config`.
        gpu_memory_gib: memory of one GPU, GiB. The pools get `gpu_memory_gib * mem_fraction_static - weights_gib`, as
            in sglang; with the defaults of those two, `gpu_memory_gib` is what the pools get.
        weights_gib: weights and other static memory of one GPU, GiB.
        tp_size, attn_dp_size: a DCP group lies inside `tp_size / attn_dp_size` GPUs that share their requests.
        pp_size, pp_layer_partition: pipeline stages of `tp_size` GPUs each, and their layers as `split_layers` has it.
        gpus_per_node: a whole number of pipelines; those of all its nodes where a pipeline spans several.
        dcp_sizes: default: the powers of two that divide `tp_size / attn_dp_size`.
        index_shards: parts the index keys are split into, capped by each dcp size; 1 is replicated.
        draft_layers: layers of an MTP draft kept in the pool, held in full by every rank; 0 without speculation.
        page_size: rows of a pool page, per GPU.
        context: tokens of the CP-DCP gather buffer; default: the largest context of each row.
        chunked_prefill_size: query tokens of a prefill chunk.
        sm_count: SMs of the GPU (132 on H100 and H200, 78 on H20).
        max_running_requests: sglang's flag; default: what sglang would choose.
        draft_tokens: rows of a request in a verify step; default: 4 with draft layers, 0 without.

    Raises:
        ValueError: a size is negative, zero, not finite or does not divide; or the budget holds not one page.
    """
    require_positive(
        tp_size=tp_size,
        attn_dp_size=attn_dp_size,
        pp_size=pp_size,
        gpus_per_node=gpus_per_node,
        index_shards=index_shards,
        page_size=page_size,
        chunked_prefill_size=chunked_prefill_size,
        sm_count=sm_count,
    )
    require_natural(draft_layers=draft_layers)
    require_positive(**{"context": context} if context is not None else {})
    require_positive(**{"max_running_requests": max_running_requests} if max_running_requests is not None else {})
    draft_tokens = (4 if draft_layers else 0) if draft_tokens is None else draft_tokens
    require_natural(draft_tokens=draft_tokens)
    budget = budget_bytes(gpu_memory_gib, mem_fraction_static, weights_gib)
    if tp_size % attn_dp_size:
        raise ValueError(f"tp_size must be a multiple of attn_dp_size, got {tp_size} and {attn_dp_size}")
    if gpus_per_node % (tp_size * pp_size):
        pipelines = " * pp_size" if pp_size > 1 else ""
        raise ValueError(
            f"gpus_per_node must be a multiple of tp_size{pipelines}, got {gpus_per_node} and {tp_size * pp_size}"
        )
    if pp_size > 1 and draft_layers:
        raise ValueError(f"draft_layers must be 0 in a pipeline, where sglang runs no drafts, got {draft_layers}")
    layers_of_stages = split_layers(model.num_hidden_layers, pp_size, pp_layer_partition)
    stage_refusal = _refuse_stages(layers_of_stages, model.indexer_layers)
    stages = [stage_dims(model, layers) for layers in layers_of_stages]
    if not kv_cache_dtypes:
        raise ValueError(f"kv_cache_dtypes must name at least one of {', '.join(KV_CACHE_DTYPES)}, got none")
    span = tp_size // attn_dp_size
    if model.num_attention_heads % span:
        raise ValueError(f"num_attention_heads must be a multiple of {span}, got {model.num_attention_heads}")
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if span % size == 0] if dcp_sizes is None else list(dcp_sizes)
    rows = []
    for kv_cache_dtype in kv_cache_dtypes:
        single = _costliest(stages, kv_cache_dtype, 1, draft_layers=draft_layers).total
        for dcp_size in sizes:
            require_positive(dcp_size=dcp_size)
            if span % dcp_size:
                raise ValueError(f"dcp_size must divide tp_size / attn_dp_size = {span}, got {dcp_size}")
            shards = min(index_shards, dcp_size)
            if dcp_size % shards:
                raise ValueError(f"index_shards must divide dcp_size, got {shards} at dcp_size {dcp_size}")
            cost = _costliest(stages, kv_cache_dtype, dcp_size, index_shards=shards, draft_layers=draft_layers)
            most, limit = largest_pool(dcp_size)
            paid_rows = _pool_rows(budget, cost, dcp_size, page_size)
            pool_rows = min(paid_rows, most // dcp_size)
            if pool_rows == 0:
                raise ValueError(
                    f"gpu_memory_gib must leave room for one page of {page_size * dcp_size} tokens "
                    f"({math.ceil(page_size * dcp_size * cost.total):,} bytes), got {budget:,} bytes"
                )
            tokens = pool_rows * dcp_size
            largest, admitted = min(tokens, model.max_context), context or model.max_context
            requests = max_running_requests or default_requests(pool_rows, admitted, draft_tokens)
            local_heads = model.num_attention_heads // span
            rows.append(
                PlanRow(
                    dcp_size=dcp_size,
                    kv_cache_dtype=kv_cache_dtype,
                    index_shards=shards,
                    bytes_per_token=cost,
                    tokens_per_gpu=pool_rows,
                    tokens_per_node=tokens * attn_dp_size * (gpus_per_node // (tp_size * pp_size)),
                    multiple_over_dcp1=single / cost.total,
                    largest_context=largest,
                    reserved_bytes=math.ceil(cost.total * page_size * dcp_size),
                    temporary_buffers=temporary_buffers(
                        model,
                        kv_cache_dtype,
                        dcp_size,
                        local_heads=local_heads,
                        rows=chunked_prefill_size,
                        context=largest if context is None else context,
                        pool_rows=pool_rows + page_size,
                        page_size=page_size,
                        sm_count=sm_count,
                    ),
                    requests=requests,
                    held=held_memory(
                        Sizes(
                            rows=chunked_prefill_size,
                            local_heads=local_heads,
                            attended_heads=local_heads * dcp_size,
                            dcp_size=dcp_size,
                            index_topk=model.index_topk,
                            requests=requests,
                            context=request_table_columns(admitted, dcp_size, draft_tokens),
                        ),
                        longest=min(largest, admitted),
                        draft_tokens=draft_tokens,
                    ),
                    refusal=_refusal(local_heads * dcp_size) or (stage_refusal if dcp_size > 1 else ""),
                    cap=f"{limit.name} of 32 bits" if pool_rows < paid_rows else "",
                )
            )
    return Plan(
        model=model,
        budget_bytes=budget,
        left_bytes=int(gpu_memory_gib * (1 - mem_fraction_static) * GIB),
        tp_size=tp_size,
        attn_dp_size=attn_dp_size,
        gpus_per_node=gpus_per_node,
        page_size=page_size,
        draft_layers=draft_layers,
        context=context or 0,
        layers_of_stages=tuple(map(len, layers_of_stages)),
        rows=tuple(rows),
    )


def temporary_buffers(
    model: ModelDims,
    kv_cache_dtype: str,
    dcp_size: int,
    *,
    local_heads: int,
    rows: int,
    context: int,
    pool_rows: int,
    page_size: int = PAGE_SIZE,
    sm_count: int = MOST_SMS,
) -> TemporaryBuffers:
    """Bytes of one GPU's working buffers for a prefill chunk.

    Args:
        model, kv_cache_dtype, dcp_size, page_size, sm_count: as in `plan`.
        local_heads: query heads of one rank before they are gathered.
        rows: query tokens of the chunk.
        context: tokens that are gathered; 0 where none are.
        pool_rows: rows of a layer's pool on one GPU, to which TP-DCP attends by queries.

    FlashMLA's scratch is `(rows + parts) * heads * 2 KiB` for one launch, and a launch takes at most twice `parts`
    rows, `parts = sm_count // (heads // 64)`: longer chunks run as several launches that reuse it.
    """
    gathered = local_heads * dcp_size
    bucket = max(padded_heads(gathered), gathered)
    parts = max(sm_count // (bucket // HEAD_BUCKETS[0]), 1)
    gathered_rows = math.ceil(context / (page_size * dcp_size)) * page_size * dcp_size
    dequantised = min(max(pool_rows, gathered_rows) * model.latent_dim * 2, MOST_DEQUANTISED_BYTES)
    spread = dcp_size > 1
    bytes_of_row = row_bytes(kv_cache_dtype, model.kv_lora_rank, model.qk_rope_head_dim)
    return TemporaryBuffers(
        gathered_q=rows * gathered * model.latent_dim * 2 if spread else 0,
        attention_scratch=(min(rows, 2 * parts) + parts) * bucket * model.kv_lora_rank * 4,
        exchange=2 * rows * gathered * (model.kv_lora_rank * 2 + 4) if spread else 0,
        row_exchange=3 * math.ceil(rows / dcp_size) * gathered * model.latent_dim * 2 if spread else 0,
        page_gather=gathered_rows * bytes_of_row if spread else 0,
        dequantised=dequantised if spread and kv_cache_dtype == "fp8_e4m3" else 0,
    )


def _pool_rows(budget: int, cost: TokenBytes, dcp_size: int, page_size: int) -> int:
    # sglang counts whole bytes of one local row, which stands for dcp_size tokens.
    row_bytes = math.ceil(round(cost.total * dcp_size, 6))
    return budget // row_bytes // page_size * page_size


def _costliest(
    stages: list[ModelDims], kv_cache_dtype: str, dcp_size: int, *, index_shards: int = 1, draft_layers: int
) -> TokenBytes:
    """`bytes_per_token` of the stage that costs its GPUs most."""
    costs = (
        bytes_per_token(stage, kv_cache_dtype, dcp_size, index_shards=index_shards, draft_layers=draft_layers)
        for stage in stages
    )
    return max(costs, key=lambda cost: cost.total)


def _refusal(gathered_heads: int) -> str:
    if gathered_heads > HEAD_BUCKETS[-1]:
        return f"{gathered_heads} gathered heads exceed FlashMLA's {HEAD_BUCKETS[-1]}"
    return ""


def _refuse_stages(stages: list[range], indexer_layers: tuple[int, ...]) -> str:
    waiting = describe_waiting_stage(stages, indexer_layers)
    if not waiting:
        return ""
    partition = suggest_partition(stages, indexer_layers)
    return f"{waiting}; {f'the layers {partition} would be served' if partition else 'use fewer stages'}"
