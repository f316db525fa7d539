"""Pipelines (`--pp-size` above 1) that go with DCP, and what to change about the others. Part of
`validation.find_problems`.

Pipelines were served whose stages start at layers that select. A stage that starts at a layer which reuses a selection
receives it from the stage before; no such server was run.
"""

from __future__ import annotations

from nsa_dcp.planning.pipelines import PARTITION_VARIABLE, describe_waiting_stage, split_layers, suggest_partition
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, Problem, ServerSettings


def find_pipeline_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    """Return why a pipeline cannot be served; empty when it can, or when there is none.

    Args:
        settings, model: as in `validation.find_problems`.
    """
    if settings.pp_size <= 1:
        return []
    # (Dynamic chunks also grow past the --chunked-prefill-size that `validation` bounds.)
    unchecked = {
        f"--speculative-algorithm {settings.speculative_algorithm}": settings.speculative_algorithm is not None,
        "--cp-strategy zigzag": settings.enable_prefill_cp and settings.cp_strategy == "zigzag",
        f"--attn-dp-size {settings.attn_dp_size}": settings.attn_dp_size > 1,
        f"--pp-async-batch-depth {settings.pp_async_batch_depth}": settings.pp_async_batch_depth > 0,
        "--enable-dynamic-chunking": settings.enable_dynamic_chunking,
    }
    problems = [
        Problem(f"--pp-size {settings.pp_size} with {flag}", "the two were not run together", "drop one of them")
        for flag, asked in unchecked.items()
        if asked
    ]
    return problems + _stage_problems(settings, model)


def _stage_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    asked = f"--pp-size {settings.pp_size}"
    try:
        stages = split_layers(model.num_hidden_layers, settings.pp_size, settings.pp_layer_partition)
    except ValueError as error:
        if settings.pp_layer_partition is None:
            return [Problem(asked, str(error), "use fewer stages")]
        return [Problem(f"{PARTITION_VARIABLE}={settings.pp_layer_partition}", str(error), "correct it, or unset it")]
    waiting = describe_waiting_stage(stages, model.indexer_layers)
    if not waiting:
        return []
    partition = suggest_partition(stages, model.indexer_layers)
    instead = f"set {PARTITION_VARIABLE}={partition}" if partition else "use fewer stages"
    return [Problem(asked, f"{waiting}; no such server was run", instead)]
