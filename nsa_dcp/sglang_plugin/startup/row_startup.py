"""Building TP-DCP's backend whose prefills may go by rows: what it relies on beyond the other, checked."""

from __future__ import annotations

import functools
from typing import Any

from nsa_dcp.planning.dimensions import dims_from_config
from nsa_dcp.planning.prefill_ways import LayerSizes, PrefillRule
from nsa_dcp.sglang_plugin import patches
from nsa_dcp.sglang_plugin.compat import require
from nsa_dcp.sglang_plugin.startup.selection_agreement import select_alike_on_every_rank
from nsa_dcp.sglang_plugin.startup.served_sizes import gather_buffer_pages


def check_row_prefill() -> None:
    """Refuse what prefills by rows cannot be combined with, and no command says.

    Raises:
        RuntimeError: selections are broadcast.
    """
    from sglang.srt.environ import envs

    # It would hand the first rank's selections, which are of its own rows alone, to all ranks.
    broadcast = envs.SGLANG_DSA_TOPK_BROADCAST.get()
    require(not broadcast, "selections that are not broadcast with NSA_DCP_PREFILL", "SGLANG_DSA_TOPK_BROADCAST")


def build_row_backend(model_runner: Any, parallel: Any, way: str) -> Any:
    """Return the backend, the model's selections changed as it needs them.

    Args:
        model_runner: sglang's ModelRunner, its model loaded, its pools built and both checked.
        parallel: sglang's parallel context.
        way: "rows" or "auto".

    Raises:
        RuntimeError: what sglang has built or was told does not go with prefills by rows, or the kernel's trial fails.
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    from nsa_dcp.sglang_plugin.attention.row_backend import RowPrefillBackend

    layers = [layer for layer in model_runner.model.modules() if isinstance(layer, DeepseekV2AttentionMLA)]
    for layer in layers:
        kept = layer.num_local_heads
        require(layer.attn_mqa.tp_q_head_num == kept, f"attention with {kept} heads", layer.attn_mqa.tp_q_head_num)
    backend = RowPrefillBackend(
        model_runner,
        parallel.dcp_group,
        functools.partial(patches.tell_layers_of_dcp, layers),
        PrefillRule(_layer_sizes(model_runner, parallel), way),
        gather_buffer_pages(model_runner, parallel),
    )
    # A DCP group that is a part of its attention-TP group attends with all rows, and has selected for some of them:
    # there selections are gathered as ever.
    whole = parallel.attn_tp_size == parallel.attn_dcp_size
    select_alike_on_every_rank(model_runner.model, parallel.attn_tp_group, backend.count_rows if whole else None)
    patches.prepare_idle_steps_quietly(model_runner.model)
    return backend


def _layer_sizes(model_runner: Any, parallel: Any) -> LayerSizes:
    dims = dims_from_config(model_runner.model_config.hf_config.to_dict(), name="served", source="the server")
    return LayerSizes(
        dcp_size=parallel.attn_dcp_size,
        heads=dims.num_attention_heads // parallel.attn_tp_size,
        row_bytes=model_runner.token_to_kv_pool.kv_buffer[0][0].nbytes,
        topk=dims.index_topk,
        # Of the whole model: a pipeline's stages would else decide each for itself.
        layers=dims.num_hidden_layers,
        selecting_layers=len(dims.indexer_layers),
        comm_backend=parallel.dcp_comm_backend,
        # Where several DCP groups share an attention-TP group, every selection is gathered over that, in both ways.
        selections_travel=parallel.attn_tp_size == parallel.attn_dcp_size,
    )
