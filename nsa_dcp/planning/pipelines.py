"""Which layers each stage of a pipeline has (`--pp-size`), as sglang 0.5.23's `get_pp_indices` deals them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from nsa_dcp.planning.dimensions import ModelDims

# sglang's environment variable; the layers of each stage, as in "38,40".
PARTITION_VARIABLE = "SGLANG_PP_LAYER_PARTITION"


def split_layers(num_layers: int, pp_size: int, partition: str | None = None) -> list[range]:
    """Return the layers of each stage: evenly, and one more to each of the last stages, unless a partition says.

    Args:
        num_layers: layers of the model.
        pp_size: stages, at least 1.
        partition: the value of PARTITION_VARIABLE; sglang reads it in pipelines alone.

    Raises:
        ValueError: a stage would have no layer, or the partition is not one of these layers over these stages.
    """
    if partition is None or pp_size == 1:
        each, more = divmod(num_layers, pp_size)
        if not each:
            raise ValueError(f"pp_size must be at most the model's {num_layers} layers, got {pp_size}")
        counts = [each + (stage >= pp_size - more) for stage in range(pp_size)]
    else:
        try:
            counts = [int(count) for count in partition.split(",")]
        except ValueError:
            counts = []
        if len(counts) != pp_size or sum(counts) != num_layers or min(counts) < 1:
            raise ValueError(
                f"{PARTITION_VARIABLE} must be {pp_size} positive counts that add up to {num_layers} layers, "
                f"got {partition!r}"
            )
    return [range(end - count, end) for count, end in zip(counts, accumulate(counts))]


def describe_waiting_stage(stages: list[range], indexer_layers: tuple[int, ...]) -> str:
    """Say which layer would start a stage and attend to a selection made in another one; empty where none would.

    Args:
        stages: as `split_layers` returns them.
        indexer_layers: the model's layers that select, ascending.
    """
    for layers in stages:
        if layers.start not in indexer_layers:
            return f"layer {layers.start} would start a stage, but attends to a selection made in another"
    return ""


def suggest_partition(stages: list[range], indexer_layers: tuple[int, ...]) -> str | None:
    """Return a partition near these stages whose every stage starts at a layer that selects; None if there is none.

    Args: as `describe_waiting_stage`. Layer 0 selects.
    """
    starts = [max(layer for layer in indexer_layers if layer <= layers.start) for layers in stages]
    counts = [end - start for start, end in zip(starts, [*starts[1:], stages[-1].stop])]
    return ",".join(map(str, counts)) if min(counts) else None


def stage_dims(model: ModelDims, layers: range) -> ModelDims:
    """Return the dimensions of a model that has these layers of another one, which for its caches a stage is."""
    owned = tuple(layer - layers.start for layer in model.indexer_layers if layer in layers)
    return replace(model, num_hidden_layers=len(layers), indexer_layers=owned)
