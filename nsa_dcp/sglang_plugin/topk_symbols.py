"""What nsa-dcp relies on in sglang where exact selections stand for its own. Part of `compat.SYMBOLS`."""

from __future__ import annotations

from nsa_dcp.sglang_plugin.lifetime_symbols import Symbol

_ATTENTION = "sglang.srt.layers.attention"

TOPK_SYMBOLS = (
    Symbol(
        f"{_ATTENTION}.dsa.dsa_topk_backend:DSATopKBackend", "what the backend selects by: ours stands for its default"
    ),
    Symbol(
        f"{_ATTENTION}.dsa.dsa_topk_backend:DSATopKBackend.topk_func",
        "the selection of positions",
        ("self", "score", "lengths", "topk", "row_starts"),
    ),
    Symbol(
        f"{_ATTENTION}.dsa.dsa_topk_backend:DSATopKBackend.topk_transform",
        "the selection of slots",
        (
            "self",
            "logits",
            "lengths",
            "topk",
            "topk_transform_method",
            "attn_metadata",
            "cu_seqlens_q_topk",
            "topk_indices_offset",
            "row_starts",
            "batch_idx_list",
            "force_unfused_topk",
        ),
    ),
    Symbol(f"{_ATTENTION}.dsa.dsa_topk_backend:TopkTransformMethod", "selections are PAGED"),
    Symbol(
        f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend.get_indexer_metadata",
        "it hands its dsa_topk_backend to the indexers: ours",
        ("self", "layer_id", "forward_batch"),
    ),
)
