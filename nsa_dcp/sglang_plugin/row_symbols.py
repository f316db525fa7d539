"""What nsa-dcp relies on in sglang where prefills go by rows. Part of `compat.SYMBOLS`."""

from __future__ import annotations

from nsa_dcp.sglang_plugin.lifetime_symbols import Symbol

ROW_SYMBOLS = (
    Symbol(
        "sglang.srt.distributed.parallel_state:GroupCoordinator.all_to_all_single",
        "heads exchanged for rows over the DCP group, and back",
        ("self", "output", "input"),
    ),
    Symbol(
        "sglang.srt.layers.attention.dsa_backend:DeepseekSparseAttnBackend.init_forward_metadata_out_graph",
        "it precedes each capture and replay of a graph, whose layers gather heads: ours tells them so before it",
        ("self", "forward_batch", "in_capture"),
    ),
    Symbol(
        "sglang.srt.model_executor.forward_batch_info:ForwardMode.is_context_parallel_extend",
        "EXTEND and MIXED, the forwards that may go by rows",
        ("self", "include_draft_extend_v2"),
    ),
    Symbol(
        "sglang.srt.layers.logits_processor:get_in_autotune_dummy_run",
        "an autotuner's dummy prefill goes by queries, whose exchange sglang leaves out then",
        (),
    ),
)
