"""Everything that the plugin changes in sglang: a function a change, in the order in which they are made.

No file, module or class of sglang is changed. The first two put ours into two registries of sglang's, in every process
of it, as it loads its plugins (`plugin.register`). The others change single objects of a scheduler that nsa-dcp serves,
once it has loaded its model and built its pools, and before it runs a forward. `startup.build_backend` makes them where
what they rely on has been checked:

1. every process: `put_backend_factories`, `put_resolution_hooks`
2. a target, and a draft, whose index keys have the target's slots: `gather_index_keys_past_2_gib`; where weights cannot
   be updated: `give_reason_against_updates` (target), `replace_weight_updater`
3. CP-DCP, and TP-DCP over a wire: `hide_dcp_from_layers`
4. TP-DCP: `split_rows`; both: `split_decode_rows`; TP-DCP: `prepare_idle_steps_quietly`
5. CP-DCP with zigzag: `patch_zigzag_strategy`
6. the backend that sglang's constructor and ours have made: `fill_page_tables_by_page`, `use_exact_topk`

Each may be made more than once. docs/upstream.md has a row for each, with what would make it unnecessary. Beside these
our backends override methods of sglang's class (`attention.backend`, `attention.cp_backend`), open arguments are chosen
through sglang's own `declare_resolution` (`resolution`), and what a forward prepares is carried by its own tensors and
metadata, as attributes `_nsa_dcp_*` that go with them.

What stands in sglang's places is imported where it is put there: every process of sglang loads this module, and would
go on without the plugin where an import fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nsa_dcp.sglang_plugin.compat import require

BACKEND_NAMES = ("nsa", "dsa")


def put_backend_factories(factory: type) -> None:
    """Put a factory of ours in the place of sglang's for each name of its DSA backend.

    Args:
        factory: made with the factory that was there, or None; called with a model runner.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    for name in BACKEND_NAMES:
        stock = ATTENTION_BACKENDS.get(name)
        if not isinstance(stock, factory):
            register_attention_backend(name)(factory(stock))


def put_resolution_hooks() -> None:
    """Stand around two steps of the resolution of arguments: commands are refused there, and unset backends chosen."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from nsa_dcp.sglang_plugin.resolution import missing_hooks

    for step, hook in missing_hooks():
        register_resolution_hook(step)(hook)


def gather_index_keys_past_2_gib(pool: Any) -> None:
    """Let a pool gather a prefill's index keys by our kernel, whose offsets have 64 bits.

    Args:
        pool: sglang's DSATokenToKVPool, the target's or a draft's.

    Raises:
        RuntimeError: its index keys are not laid out as the kernel reads them.
    """
    from nsa_dcp.sglang_plugin.selection.index_key_gather import WideIndexKeyGather, check_index_keys

    cache = pool.index_key_cache
    check_index_keys(pool)
    if not isinstance(cache.get_k_and_scale, WideIndexKeyGather):
        cache.get_k_and_scale = WideIndexKeyGather(cache)


def give_reason_against_updates(model: Any, reason: str) -> None:
    """Say in a model's attention layers, where sglang's weight updater looks, why the weights cannot be updated.

    Args:
        model: a loaded DSA model, the target.
        reason: what an update is answered with.
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    for layer in model.modules():
        if isinstance(layer, DeepseekV2AttentionMLA):
            layer._derived_weight_cache_error = reason


def replace_weight_updater(model_runner: Any, updater: Any) -> None:
    """Let updates of a server that refuses them begin with the first load that is accepted.

    Args:
        model_runner: sglang's ModelRunner, the target's or a draft's.
        updater: `startup.weight_updates.LoadingUpdater` of the one that is there.
    """
    model_runner.weight_updater = updater


def hide_dcp_from_layers(model: Any, num_heads: int) -> None:
    """Tell every attention layer that there is no DCP, before it has run: the backend of CP-DCP, or of a wire, does it.

    Layers read `dcp_size` in each forward, to gather heads and merge; the pools and the groups do not ask the layers.

    Args:
        model: a loaded DSA model.
        num_heads: of a layer: in CP-DCP the model's.

    Raises:
        RuntimeError: the layers are not as expected, or have run.
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    layers = [module for module in model.modules() if isinstance(module, DeepseekV2AttentionMLA)]
    for layer in layers:
        require(layer.current_attention_backend is None, "attention layers that have not run", "one that has")
        require(layer.attn_mqa.tp_q_head_num == num_heads, f"layers of {num_heads} heads", layer.attn_mqa.tp_q_head_num)
        require(layer.w_kc_qrep is None, "query projections that are not gathered", "one that is")
    for layer in layers:
        layer.dcp_size = 1


def split_rows(model: Any, group: Any) -> None:
    """Let every indexer of a model select for this rank's share of the rows in prefill.

    Args:
        model: a loaded DSA model.
        group: sglang's attention-TP group.
    """
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    from nsa_dcp.sglang_plugin.selection.row_split import RowSplitSelection

    for indexer in model.modules():
        if isinstance(indexer, Indexer) and not isinstance(indexer._get_topk_ragged, RowSplitSelection):
            indexer._get_topk_ragged = RowSplitSelection(indexer._get_topk_ragged, indexer.index_topk, group)


def split_decode_rows(model: Any, group: Any, broadcast_selection: Callable[[Any], Any]) -> None:
    """Let every indexer of a model select for this rank's share of a decode or verify step.

    Args:
        model: a loaded DSA model, not a draft.
        group: as in `RankRequests`.
        broadcast_selection: as in `RowSplitDecodeSelection`, over that group.
    """
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    from nsa_dcp.sglang_plugin.selection.row_split_decode import RankRequests, RowSplitDecodeSelection

    share = RankRequests(group)
    for indexer in model.modules():
        if isinstance(indexer, Indexer) and not isinstance(indexer._get_topk_paged, RowSplitDecodeSelection):
            indexer._get_topk_paged = RowSplitDecodeSelection(
                indexer._get_topk_paged, share, broadcast_selection, indexer.sm_count
            )


def prepare_idle_steps_quietly(model: Any) -> None:
    """Stand before `forward_absorb_prepare` of each attention layer of a model, for idle steps.

    Args:
        model: a loaded DSA model, whose layers gather and merge over DCP ranks themselves (TP-DCP).
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    from nsa_dcp.sglang_plugin.attention.idle_steps import prepare_idle_step

    for layer in model.modules():
        if isinstance(layer, DeepseekV2AttentionMLA) and "forward_absorb_prepare" not in vars(layer):
            layer.forward_absorb_prepare = functools.partial(prepare_idle_step, layer, layer.forward_absorb_prepare)


def patch_zigzag_strategy(strategy: Any) -> None:
    """Let a zigzag strategy hand a chunk's index keys and latents to the DSA layers of this process in full.

    The class stays as it is: FlashAttention's layers rely on a `materialize_full_mla_kv` that writes the cache itself
    and returns None, where sglang's DSA layers want the latents and write them.

    Args:
        strategy: sglang's ZigzagCPStrategy of this process.
    """
    from nsa_dcp.sglang_plugin.attention.cp_zigzag import gather_index_keys, gather_latents

    strategy.materialize_full_indexer_k_cache = functools.partial(gather_index_keys, strategy)
    strategy.materialize_full_mla_kv = functools.partial(gather_latents, strategy)


def fill_page_tables_by_page(backend: Any) -> None:
    """Let a backend refresh a decode graph's page table page by page before each replay.

    Args:
        backend: ours, before it has captured a graph.
    """
    from nsa_dcp.sglang_plugin.attention.decode_page_table import PagewiseDecodeMetadata

    if not isinstance(backend._fused_decode_metadata, PagewiseDecodeMetadata):
        backend._fused_decode_metadata = PagewiseDecodeMetadata(backend._fused_decode_metadata)


def use_exact_topk(backend: Any) -> str:
    """Let a backend select exactly, if it would take sglang's default and the environment does not ask for that.

    Args:
        backend: ours, before it has made any metadata.

    Returns:
        What selects from now on, for the start-up line: `exact`, or the name of sglang's top-k backend.

    Raises:
        ValueError: as `exact_topk.read_choice`.
        RuntimeError: the selection, tried once, is not exact.
    """
    import torch

    from nsa_dcp.sglang_plugin.selection import exact_topk

    choice, stock = exact_topk.read_choice(), backend.dsa_topk_backend
    if isinstance(stock, exact_topk.ExactTopK):
        return exact_topk.EXACT
    # Those that a user names are exact, as far as sglang hands them whole rows: they stay.
    if choice == exact_topk.STOCK or not stock.is_sgl_kernel():
        return stock.value
    exact_topk.check_selection(torch.device(backend.device), backend.dsa_index_topk)
    backend.dsa_topk_backend = exact_topk.ExactTopK(stock)
    return exact_topk.EXACT
