"""What nsa-dcp relies on in sglang over a server's life: weights that are updated, ranks that are compared, idle steps.

Part of `compat.SYMBOLS`, which is checked as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symbol:
    """One name in sglang that nsa-dcp uses.

    Args:
        path: `module:name` or `module:Class.name`.
        why: what nsa-dcp does with it.
        parameters: the parameters it must have, in order, of a dataclass its fields; None when it is not called,
            overridden or copied with changes by us.
    """

    path: str
    why: str
    parameters: tuple[str, ...] | None = None


_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
_PREPARE: tuple[str, ...] = ("self", "positions", "hidden_states", "forward_batch", "zero_allocator", "llama_4_scaling")
_PREPARE += ("prev_topk_indices",)

LIFETIME_SYMBOLS = (
    Symbol(
        f"{_UPDATER}.begin_weight_update",
        "it undoes a quantisation's processing: done before the first load that is accepted",
        ("self",),
    ),
    Symbol(
        f"{_UPDATER}.end_weight_update",
        "it repeats that processing: done where something was loaded",
        ("self", "run_post_load"),
    ),
    Symbol(
        f"{_UPDATER}.update_weights_from_tensor",
        "one of the two loads of a session",
        ("self", "named_tensors", "load_format"),
    ),
    Symbol(f"{_UPDATER}.load_weights_from_distributed", "the other", ("self", "named_tensors")),
    Symbol("sglang.srt.managers.mm_utils:tensor_hash", "whether weights were written remotely", ("tensor_list",)),
    Symbol(
        "sglang.srt.distributed.parallel_state:GroupCoordinator.all_gather_object",
        "ranks compare what they must have in common, over the CPU",
        ("self", "obj"),
    ),
    Symbol("sglang.srt.environ:envs", "the switches that they compare, as sglang reads them"),
    Symbol(
        "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA.forward_absorb_prepare",
        "it warns of an idle step under DCP in every layer",
        _PREPARE,
    ),
)
