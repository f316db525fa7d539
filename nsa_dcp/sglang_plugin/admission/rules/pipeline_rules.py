"""Pipelines (`--pp-size` above 1) that go with DCP, and what to change about the others. Part of
`validation.find_problems`.

Pipelines were served whose stages start at layers that select. A stage that starts at a layer which reuses a selection
receives it from the stage before; no such server was run.
"""

from __future__ import annotations

from nsa_dcp.planning.pipelines import PARTITION_VARIABLE, describe_waiting_stage, split_layers, suggest_partition
from nsa_dcp.sglang_plugin.admission.advice import Advice, advise, drop, use
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, Problem, ServerSettings

_FEWER_STAGES = advise(use("--pp-size 1", said="use fewer stages"))
_UNSET = advise(drop(PARTITION_VARIABLE, said="correct it, or unset it"))
_DROPPED_WITH = {
    "--speculative-algorithm": (
        "--speculative-num-steps",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
    ),
    "--attn-dp-size": ("--enable-dp-attention", "--dp-size"),
}


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
        Problem(f"--pp-size {settings.pp_size} with {flag}", "the two were not run together", _drop_one(flag))
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
            return [Problem(asked, str(error), _FEWER_STAGES)]
        return [Problem(f"{PARTITION_VARIABLE}={settings.pp_layer_partition}", str(error), _UNSET)]
    waiting = describe_waiting_stage(stages, model.indexer_layers)
    if not waiting:
        return []
    partition = suggest_partition(stages, model.indexer_layers)
    instead = advise(use(f"{PARTITION_VARIABLE}={partition}")) if partition else _FEWER_STAGES
    return [Problem(asked, f"{waiting}; no such server was run", instead)]


def _drop_one(flag: str) -> Advice:
    name, *_ = flag.split(" ")
    if name == "--cp-strategy":
        return advise(use("--cp-strategy interleave"), drop("--pp-size"))
    return advise(drop(name, *_DROPPED_WITH.get(name, ())), drop("--pp-size"))
