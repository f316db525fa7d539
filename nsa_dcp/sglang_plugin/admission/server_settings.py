"""What decides whether a command can be served, and the sentence that refuses it. Pure: neither torch nor sglang."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nsa_dcp.planning.served_format import PAGE_SIZE

# By queries, as long as servers by rows have not run on a GPU: nsa_dcp.planning.prefill_ways.
PREFILL_VARIABLE = "NSA_DCP_PREFILL"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The part of sglang's server arguments that decides whether nsa-dcp can serve them.

    Fields carry sglang's names, but for `DERIVED`. None means "not given": sglang or nsa-dcp will choose, which is
    never a problem, but for `grammar_backend`: sglang then always chooses one. `prefill_cuda_graph` and
    `decode_cuda_graph` are the graph backends asked for; None or "disabled" when none was. `foreign_draft`: drafts come
    from another checkpoint. `pp_layer_partition`: the value of `nsa_dcp.planning.pipelines.PARTITION_VARIABLE`.
    `prefill_way`: of `PREFILL_VARIABLE`, one of `nsa_dcp.choices.PREFILL_WAYS`; None or empty means "queries".
    `wire`: that of `nsa_dcp.choices.WIRE_VARIABLE`.
    `index_keys`: the value of `nsa_dcp.planning.index_key_choice.INDEX_KEYS_VARIABLE`; None or empty is replicated.
    `chunk_is_divided`: sglang has divided `chunked_prefill_size` by `attn_dp_size` already.
    """

    DERIVED: ClassVar[frozenset[str]] = frozenset(
        (
            "prefill_attention_backend",
            "decode_attention_backend",
            "prefill_cuda_graph",
            "decode_cuda_graph",
            "foreign_draft",
            "pp_layer_partition",
            "prefill_way",
            "wire",
            "index_keys",
            "chunk_is_divided",
        )
    )

    dcp_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    nnodes: int = 1
    pp_size: int = 1
    pp_layer_partition: str | None = None
    prefill_way: str | None = None
    wire: str | None = None
    pp_async_batch_depth: int = 0
    attn_dp_size: int = 1
    attn_cp_size: int = 1
    enable_prefill_cp: bool = False
    cp_strategy: str | None = None
    enable_cp_decode_attn_tp: bool = False
    enable_dsa_cache_layer_split: bool = False
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    dsa_prefill_backend: str | None = None
    dsa_decode_backend: str | None = None
    kv_cache_dtype: str = "auto"
    page_size: int | None = None
    chunked_prefill_size: int | None = None
    chunk_is_divided: bool = False
    max_prefill_tokens: int = 16_384
    context_length: int | None = None
    max_running_requests: int | None = None
    enable_dynamic_chunking: bool = False
    dcp_comm_backend: str | None = None
    dcp_replicate_q_proj: bool | None = None
    dsa_topk_backend: str = "sgl-kernel"
    prefill_cuda_graph: str | None = None
    decode_cuda_graph: str | None = None
    debug_cuda_graph: bool = False
    enable_torch_compile: bool = False
    enable_deterministic_inference: bool = False
    rl_on_policy_target: str | None = None
    grammar_backend: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    cpu_offload_gb: int = 0
    enable_lora: bool = False
    lora_paths: object = None
    checkpoint_engine_wait_weights_before_ready: bool = False
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False
    elastic_ep_backend: str | None = None
    speculative_algorithm: str | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_steps: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_adaptive: bool = False
    enable_multi_layer_eagle: bool = False
    foreign_draft: bool = False
    disaggregation_mode: str = "null"
    enable_hisparse: bool = False
    enable_hierarchical_cache: bool = False
    enable_lmcache: bool = False
    enable_flexkv: bool = False
    radix_cache_backend: str | None = None
    enable_unified_cache_external_linker: bool = False
    enable_unified_memory: bool = False
    enable_two_batch_overlap: bool = False
    enable_pdmux: bool = False
    enable_return_routed_experts: bool = False
    enable_return_indexer_topk: bool = False
    moe_dense_tp_size: int | None = None
    served_model_name: str | None = None
    index_keys: str | None = None

    @property
    def copies_weights(self) -> bool:
        """Whether decode reads copies of attention weights, which an update of the weights does not reach."""
        replicated = self.dcp_replicate_q_proj
        if replicated is None:
            # What sglang makes of "not given" for a DSA model.
            replicated = not self.enable_prefill_cp and self.dcp_comm_backend in (None, "a2a")
        return bool(replicated or self.enable_cp_decode_attn_tp)

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share a prompt's tokens, as sglang resolves it for DSA models; 1 without prefill CP."""
        if not self.enable_prefill_cp:
            return self.attn_cp_size
        if self.cp_strategy == "interleave" and self.attn_cp_size > 1:
            return self.attn_cp_size
        return self.tp_size // self.attn_dp_size


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The part of a checkpoint's config that decides whether nsa-dcp can serve it.

    `is_dsa`: the model has DeepSeek Sparse Attention. `has_kv_heads`: it caches keys and values by head, as GQA and MHA
    models do; `num_key_value_heads` is 0 where that is not known. `indexer_layers`: the layers that select, ascending.
    `projection_format`: as `weight_rules.projection_format` returns it. `context_length`: the longest prompt that it
    was made for, in tokens; 0 where that is not known, as for `hidden_size`. The other fields carry the config's names.
    """

    is_dsa: bool
    has_kv_heads: bool = False
    num_key_value_heads: int = 0
    architecture: str = ""
    num_attention_heads: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    index_topk: int = 0
    index_kpool: int = 1
    num_hidden_layers: int = 0
    hidden_size: int = 0
    context_length: int = 0
    indexer_layers: tuple[int, ...] = ()
    projection_format: str | None = None


@dataclass(frozen=True)
class Problem:
    """One reason why a command cannot be served: what was asked, why not, and what would work.

    `instead` is an `advice.Advice` where following it can be done by a program.
    """

    asked: str
    reason: str
    instead: str

    def __str__(self) -> str:
        return f"{self.asked}: {self.reason}; {self.instead}."


def settle_typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """What sglang makes of fields as typed where the typed value does not matter, for a DSA model with DCP.

    `--dp-size N --enable-dp-attention` is the old spelling of `--attn-dp-size N`, and with prefill context parallelism
    `--dp-size N` alone means the same. A page has 64 tokens whatever was asked. On Hopper `flashmla_auto` is
    flashmla_kv over an FP8 cache, so it counts as not given.

    Args:
        values: by sglang's names; `dp_size` and `attn_dp_size` among them.
    """
    settled = dict(values)
    if (settled.get("page_size") or 0) > 0:
        settled["page_size"] = PAGE_SIZE
    for field in ("dsa_prefill_backend", "dsa_decode_backend"):
        if settled.get(field) == "flashmla_auto" and settled.get("kv_cache_dtype") == "fp8_e4m3":
            settled[field] = None
    dp_size = settled["dp_size"]
    widened = settled.get("enable_dp_attention") or (settled.get("enable_prefill_cp") and dp_size > 1)
    if widened and settled["attn_dp_size"] == 1:
        # A size below 1 stays where it is, to be refused by name.
        settled.update(attn_dp_size=dp_size, dp_size=min(dp_size, 1))
    return settled


def is_foreign_draft(draft_path: str | None, model_path: str | None) -> bool:
    """Whether drafts come from another checkpoint. A path is the same in whatever spelling: `/m/x/` is `/m/x`."""
    if draft_path is None or draft_path == model_path:
        return False
    return model_path is None or not draft_path or os.path.realpath(draft_path) != os.path.realpath(model_path)
