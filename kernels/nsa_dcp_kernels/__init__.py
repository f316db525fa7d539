"""Everything that runs on one GPU and knows no process group. CPU tensors run `reference`, CUDA tensors the kernels."""

from nsa_dcp_kernels.index_logits import score_index
from nsa_dcp_kernels.index_page_gather import gather_index_pages, join_index_pages
from nsa_dcp_kernels.kv_pack import (
    gather_index_keys,
    pack_latent,
    scatter_index_keys_,
    scatter_latent_,
    unpack_latent,
)
from nsa_dcp_kernels.kv_scatter import round_kv, scatter_kv_
from nsa_dcp_kernels.localize import localize_topk
from nsa_dcp_kernels.lse_merge import merge_partials
from nsa_dcp_kernels.page_gather import gather_pages, remap_to_gathered
from nsa_dcp_kernels.page_table import fill_page_table_, look_up_slots
from nsa_dcp_kernels.paged_attention import attend_chunk, attend_pages
from nsa_dcp_kernels.partial_pack import merge_packed, pack_partials, unpack_partials
from nsa_dcp_kernels.peer_exchange import exchange_partials, gather_heads_from_peers, gather_rows_from_peers
from nsa_dcp_kernels.peer_memory import PeerChannels
from nsa_dcp_kernels.schedule import SparsePlan, plan_sparse
from nsa_dcp_kernels.selection import LocalSelection, attend_selection, localize_selection
from nsa_dcp_kernels.sharded_selection import find_threshold, localize_contexts, select_candidates, take_own
from nsa_dcp_kernels.slot_selection import select_slots
from nsa_dcp_kernels.sparse_mla import attend_sparse
from nsa_dcp_kernels.topk import select_topk

__all__ = [
    "LocalSelection",
    "PeerChannels",
    "SparsePlan",
    "attend_chunk",
    "attend_pages",
    "attend_selection",
    "attend_sparse",
    "exchange_partials",
    "fill_page_table_",
    "find_threshold",
    "gather_heads_from_peers",
    "gather_index_keys",
    "gather_index_pages",
    "gather_pages",
    "gather_rows_from_peers",
    "join_index_pages",
    "localize_contexts",
    "localize_selection",
    "localize_topk",
    "look_up_slots",
    "merge_packed",
    "merge_partials",
    "pack_latent",
    "pack_partials",
    "plan_sparse",
    "remap_to_gathered",
    "round_kv",
    "scatter_index_keys_",
    "scatter_kv_",
    "scatter_latent_",
    "score_index",
    "select_candidates",
    "select_slots",
    "select_topk",
    "take_own",
    "unpack_latent",
    "unpack_partials",
]
