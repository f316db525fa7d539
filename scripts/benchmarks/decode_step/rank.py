"""What one rank's process does: draw the caches, time case after case, send the results."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from nsa_dcp import comm
from nsa_dcp.planning.dimensions import preset_dims
from scripts.benchmarks.decode_step.cases import (
    INDEX_PAGE_BYTES,
    LATENT_PAGE_BYTES,
    DecodeCase,
    parts_of,
    physical_pages,
    received_bytes,
    received_per_step,
    sum_layers,
    sum_model,
)
from scripts.benchmarks.decode_step.step import DecodeCaches, RankStep
from scripts.benchmarks.timing import time_calls

# Calls of a part in one graph: enough that the ranks' unequal starts count for little.
_PART_CALLS = 16
# Device time that the replays of one graph may take, and the bounds on their number.
_REPLAYS_US = 1_000_000
_REPLAYS = (5, 25)
_ROUGH_REPLAYS = 3


@dataclass(frozen=True)
class RankSettings:
    """What the cases of one run share.

    dcp_size: ranks of this world, connected by NCCL; 1: one process, communication is counted.
    cache_bytes: for the latents of all layers; index keys take at most half of it more.
    deadline: seconds since the epoch after which no case is started.
    """

    dcp_size: int
    cache_bytes: int
    row_split: bool
    with_indexer: bool
    deadline: float


@torch.inference_mode()
def bench_cases(rank: int, send: Callable[[object], None], cases: Sequence[DecodeCase], settings: RankSettings) -> None:
    """Time cases until the deadline; rank 0 sends (case, result) for each.

    Raises:
        ValueError: one layer's cache of a case is larger than the budget.
    """
    group = comm.contiguous_group(settings.dcp_size)
    caches = _draw_caches(cases, settings)
    for case in cases:
        if _is_past(settings.deadline, group):
            return
        result = bench_case(case, caches, settings, group)
        if rank == 0:
            send((case, result))
        torch.cuda.empty_cache()


def bench_case(case: DecodeCase, caches: DecodeCaches, settings: RankSettings, group: comm.Group) -> dict[str, object]:
    """Time the parts of one layer and the whole model's step. Returns plain data for the table and for JSON."""
    torch.manual_seed(0)
    dims = preset_dims(case.model)
    step = RankStep(case, dims, caches, settings.cache_bytes, settings.row_split, settings.with_indexer, group)
    names = [part.name for part in parts_of(case.dcp_size, settings.with_indexer)]
    calls = step.part_calls(_PART_CALLS)
    # What was drawn is read on another stream next.
    torch.cuda.synchronize()
    parts = {}
    for name in names:
        rough = time_calls(calls[name], _ROUGH_REPLAYS)
        parts[name] = time_calls(calls[name], _count_replays(rough.us * _PART_CALLS, group))
    del calls
    layer_us = sum_layers({name: timing.us for name, timing in parts.items()})
    summed = sum_model(layer_us, dims)
    model = time_calls([step.run_model], _count_replays(summed, group))
    received = received_bytes(case, dims, step.row_split and settings.with_indexer)
    return {
        "communication": "none" if case.dcp_size == 1 else "counted" if group is None else "measured",
        "parts": {name: asdict(timing) for name, timing in parts.items()},
        "layer_us": layer_us,
        "sum_of_parts_us": summed,
        "model": asdict(model),
        "received_bytes_per_layer": received,
        "received_bytes_per_step": received_per_step(received, dims),
        "latent_rows_per_layer": step.latents[0].shape[0],
        "latent_memory_share": step.distinct_share,
        "index_memory_share": step.index_distinct_share,
    }


def _draw_caches(cases: Sequence[DecodeCase], settings: RankSettings) -> DecodeCaches:
    """Memory for the largest of the cases; one whose layer does not fit is refused when its turn comes."""
    latents, index, budget = 0, 0, settings.cache_bytes
    for case in cases:
        dims = preset_dims(case.model)
        if case.latent_pages * LATENT_PAGE_BYTES <= budget:
            needed = physical_pages(dims.num_hidden_layers, case.latent_pages, LATENT_PAGE_BYTES, budget)
            latents = max(latents, needed)
        if settings.with_indexer and case.index_pages * INDEX_PAGE_BYTES <= budget // 2:
            needed = physical_pages(len(dims.indexer_layers), case.index_pages, INDEX_PAGE_BYTES, budget // 2)
            index = max(index, needed)
    return DecodeCaches(latents, index)


def _count_replays(graph_us: float, group: comm.Group) -> int:
    """As many as the budget allows; the first rank decides, since every rank must replay as often."""
    fewest, most = _REPLAYS
    count = int(min(most, max(fewest, _REPLAYS_US // max(1.0, graph_us))))
    return int(comm.broadcast(torch.tensor(count, device="cuda"), group))


def _is_past(deadline: float, group: comm.Group) -> bool:
    return bool(comm.broadcast(torch.tensor(time.time() > deadline, device="cuda").int(), group))
