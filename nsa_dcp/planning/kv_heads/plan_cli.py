"""The part of `nsa-dcp plan` that answers for models with KV heads (GQA, MHA)."""

from __future__ import annotations

import argparse
import json

from nsa_dcp.planning.kv_heads.dims import KV_HEAD_PRESETS, KvHeadDims, kv_head_preset, read_kv_head_config
from nsa_dcp.planning.kv_heads.plan import ITEMSIZES, format_kv_head_plan, plan_kv_heads

# (argument, its flag, what it must be): of DSA models, or of what does not go with DCP for these.
_OTHERS = (
    ("pp_size", "--pp-size", 1),
    ("pp_layer_partition", "--pp-layer-partition", None),
    ("index_keys", "--index-keys", "replicated"),
    ("draft_layers", "--draft-layers", 0),
    ("speculative_num_draft_tokens", "--speculative-num-draft-tokens", None),
    ("max_running_requests", "--max-running-requests", None),
    ("context", "--context", None),
    ("plot", "--plot", None),
)


def kv_head_model(preset: str | None, config: str | None) -> KvHeadDims | None:
    """The model that was asked for, if it is of this family. Errors: as `read_kv_head_config`."""
    if preset is not None:
        return kv_head_preset(preset) if preset in KV_HEAD_PRESETS else None
    return read_kv_head_config(config) if config is not None else None


def answer_for_kv_heads(args: argparse.Namespace, model: KvHeadDims) -> str:
    """The plan of a model with KV heads, as text or JSON. ValueError: an argument is not for such a model."""
    for name, flag, unset in _OTHERS:
        if getattr(args, name) != unset:
            raise ValueError(f"{flag} is for models with sparse attention, and {model.name} has KV heads")
    if args.gpu_memory_gib is None and not (args.mem_fraction_static is None and args.weights_gib is None):
        raise ValueError("--mem-fraction-static and --weights-gib need --gpu-memory-gib, whose parts they are")
    plan = plan_kv_heads(
        model,
        gpu_memory_gib=args.gpu_memory_gib,
        kv_cache_dtypes=tuple(ITEMSIZES) if args.kv_cache_dtype == "both" else (args.kv_cache_dtype,),
        mem_fraction_static=1.0 if args.mem_fraction_static is None else args.mem_fraction_static,
        weights_gib=args.weights_gib or 0.0,
        tp_size=args.tp_size,
        attn_dp_size=args.attn_dp_size,
        gpus_per_node=args.gpus_per_node,
        dcp_sizes=args.dcp_size,
        page_size=args.page_size,
    )
    return json.dumps(plan.as_dict(), indent=2) if args.json else format_kv_head_plan(plan)
