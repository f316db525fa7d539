"""Pipelines (`--pp-size` above 1) that go with DCP, and what to change about the others. Part of
`validation.find_problems`.

Pipelines were served whose stages start at layers that select. A stage that starts at a layer which reuses a selection
receives it from the stage before; no such server was run.
"""

from __future__ import annotations

from itertools import accumulate

from nsa_dcp.sglang_plugin.server_settings import ModelFacts, Problem, ServerSettings

PARTITION_VARIABLE = "SGLANG_PP_LAYER_PARTITION"


def find_pipeline_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    """Return why a pipeline cannot be served; empty when it can, or when there is none.

    Args:
        settings, model: as in `validation.find_problems`.
    """
    if settings.pp_size <= 1:
        return []
    unchecked = {
        f"--speculative-algorithm {settings.speculative_algorithm}": settings.speculative_algorithm is not None,
        "--cp-strategy zigzag": settings.enable_prefill_cp and settings.cp_strategy == "zigzag",
        f"--attn-dp-size {settings.attn_dp_size}": settings.attn_dp_size > 1,
    }
    problems = [
        Problem(f"--pp-size {settings.pp_size} with {flag}", "the two were not run together", "drop one of them")
        for flag, asked in unchecked.items()
        if asked
    ]
    return problems + _stage_problems(settings, model)


def split_layers(num_layers: int, pp_size: int) -> list[int]:
    """Layers of each stage as sglang 0.5.23 deals them: evenly, and one more to each of the last stages."""
    each, more = divmod(num_layers, pp_size)
    return [each + (stage >= pp_size - more) for stage in range(pp_size)]


def _stage_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    given = settings.pp_layer_partition
    counts = split_layers(model.num_hidden_layers, settings.pp_size) if given is None else _parse(given)
    if len(counts) != settings.pp_size or sum(counts) != model.num_hidden_layers or min(counts) < 1:
        what = f"{settings.pp_size} positive counts that add up to the model's {model.num_hidden_layers} layers"
        if given is None:
            return [Problem(f"--pp-size {settings.pp_size}", f"stages must be {what}", "use a smaller --pp-size")]
        return [Problem(f"{PARTITION_VARIABLE}={given}", f"it must be {what}", "correct it, or unset it")]
    starts = list(accumulate(counts[:-1]))
    sharing = [start for start in starts if start not in model.indexer_layers]
    if not sharing:
        return []
    moved = [0, *(max(layer for layer in model.indexer_layers if layer <= start) for start in starts)]
    ends = [*moved[1:], model.num_hidden_layers]
    partition = ",".join(str(end - start) for start, end in zip(moved, ends))
    instead = f"set {PARTITION_VARIABLE}={partition}" if len(set(moved)) == len(moved) else "use a smaller --pp-size"
    return [
        Problem(
            f"--pp-size {settings.pp_size}",
            f"a stage would start at layer {sharing[0]}, which attends to a selection made in the stage before, and no "
            "such server was run",
            instead,
        )
    ]


def _parse(partition: str) -> list[int]:
    """The counts that a partition lists; empty when it is not a list of integers."""
    try:
        return [int(count) for count in partition.split(",")]
    except ValueError:
        return []
