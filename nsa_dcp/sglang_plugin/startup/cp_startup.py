"""Building the CP-DCP backend in a scheduler: what it relies on beyond TP-DCP, checked, and the model told to leave DCP
to it.
"""

from __future__ import annotations

from typing import Any

from nsa_dcp.planning.served_format import PAGE_SIZE
from nsa_dcp.sglang_plugin import patches
from nsa_dcp.sglang_plugin.compat import require
from nsa_dcp.sglang_plugin.startup.selection_agreement import select_alike_in_decode
from nsa_dcp.sglang_plugin.startup.served_sizes import gather_buffer_pages
from nsa_dcp.sglang_plugin.startup.weight_layout import check_sliced_weights
from nsa_dcp.wire import PeerWire


def build_context_parallel_backend(model_runner: Any, parallel: Any, wire: PeerWire | None = None) -> Any:
    """Check groups, model and strategy, change the latter two as CP-DCP needs them, and return the backend.

    Args:
        model_runner: sglang's ModelRunner, its model loaded and its pools built and checked.
        parallel: sglang's parallel context.
        wire: the DCP group's, if it has one.

    Raises:
        RuntimeError: what sglang has built is not what nsa-dcp was written against, or the kernel's trial fails.
    """
    check_groups(parallel)
    check_strategy(parallel)
    if parallel.enable_cp_decode_attn_tp:
        check_sliced_weights(model_runner.model)
    rows = model_runner.token_to_kv_pool.kv_buffer[0].shape[0]
    require(rows % PAGE_SIZE == 0, f"a cache of whole pages of {PAGE_SIZE} rows", f"{rows} rows")
    patches.hide_dcp_from_layers(model_runner.model, model_runner.model_config.num_attention_heads)
    select_alike_in_decode(model_runner.model, parallel.dcp_group)

    from sglang.srt.layers.cp.base import get_cp_strategy, is_zigzag

    from nsa_dcp.sglang_plugin.attention.cp_backend import CpDcpSparseAttnBackend

    if is_zigzag():
        patches.patch_zigzag_strategy(get_cp_strategy())
    pages = gather_buffer_pages(model_runner, parallel)
    return CpDcpSparseAttnBackend(model_runner, parallel.dcp_group, parallel.dcp_comm_backend, pages, wire)


def check_groups(parallel: Any) -> None:
    """Raise unless the DCP group is the attention-CP group, in its order, and each rank has all the heads.

    Args:
        parallel: sglang's parallel context.
    """
    require(parallel.attn_tp_size == 1, "an attention-TP size of 1 under context parallelism", parallel.attn_tp_size)
    ranks = list(parallel.attn_cp_group.ranks)
    require(
        list(parallel.dcp_group.ranks) == ranks,
        f"the DCP group to be the attention-CP group {ranks}",
        list(parallel.dcp_group.ranks),
    )
    dcp_rank = parallel.attn_dcp_rank
    require(parallel.attn_cp_rank == dcp_rank, f"attention-CP rank {dcp_rank}", parallel.attn_cp_rank)
    require(not parallel.dcp_replicate_q_proj, "query projections that are not gathered", "--dcp-replicate-q-proj")


def check_strategy(parallel: Any) -> None:
    """Raise unless sglang's CP strategy is one of the two that the backend was written for.

    Args:
        parallel: sglang's parallel context.
    """
    from sglang.srt.layers.cp.base import get_cp_strategy
    from sglang.srt.layers.cp.interleave import InterleaveCPStrategy
    from sglang.srt.layers.cp.zigzag import ZigzagCPStrategy

    strategy = get_cp_strategy()
    require(
        type(strategy) in (InterleaveCPStrategy, ZigzagCPStrategy),
        "sglang's interleave or zigzag strategy",
        type(strategy).__name__,
    )
    require(
        strategy.cp_size == parallel.attn_dcp_size, f"a strategy for {parallel.attn_dcp_size} ranks", strategy.cp_size
    )
