"""The cases that are timed, the bytes a rank receives, sums over a layer, crossovers. Needs no GPU."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa_dcp.choices import COMM_BACKENDS
from nsa_dcp.layout import pages_for
from nsa_dcp.planning.capacity import plan
from nsa_dcp.planning.dimensions import INDEX_HEAD_DIM, ModelDims
from nsa_dcp.planning.steps.step_inputs import StepInput, measured_inputs
from nsa_dcp_kernels.kv_format import LATENT_BYTES, PAGE_SIZE

MODES = {"tp_dcp": "TP-DCP", "cp_dcp": "CP-DCP"}
# Parts and messages of the layers that own an indexer; the others reuse what these made.
PER_SELECTION = frozenset({"select", "localise", "selections", "index keys"})
_BF16_BYTES = 2
_FLOAT32_BYTES = 4
_INDEX_BYTES = 4


@dataclass(frozen=True)
class PrefillCase:
    """One prefill chunk of one request, on N ranks that are one TP and one DCP group, as CP-DCP requires.

    model: a preset of nsa_dcp.planning.dimensions.
    dcp_size: N.
    chunk: new tokens. prefix: tokens before them, already in the cache.
    """

    model: str
    dcp_size: int
    chunk: int
    prefix: int

    @property
    def context(self) -> int:
        return self.prefix + self.chunk

    @property
    def rank_tokens(self) -> int:
        """Query tokens that a CP rank works on, and that a TP rank selects for."""
        return self.chunk // self.dcp_size

    @property
    def pages(self) -> int:
        """Pages of 64 rows that each rank holds of the request."""
        return pages_for(self.context, self.dcp_size)


@dataclass(frozen=True)
class Crossover:
    """Prefix from which on CP-DCP takes no less than TP-DCP.

    extrapolated: past the largest measured prefix, on the slope of the last two.
    """

    prefix: float
    extrapolated: bool


def list_cases(
    dims: ModelDims, dcp_sizes: Sequence[int], chunks: Sequence[int], prefixes: Sequence[int]
) -> list[PrefillCase]:
    """Every combination; the prefixes of a dcp size and chunk, ascending, beside each other.

    Raises:
        ValueError: a size is out of range, does not divide, or makes the request longer than the model's context.
    """
    for dcp_size in dcp_sizes:
        if dcp_size < 2 or dims.num_attention_heads % dcp_size:
            raise ValueError(f"dcp_sizes must be 2 or more and divide {dims.num_attention_heads} heads, got {dcp_size}")
        for chunk in chunks:
            if chunk < 1 or chunk % dcp_size:
                raise ValueError(f"chunks must be multiples of every dcp size, got {chunk} and {dcp_size}")
    longest = dims.max_context - max(chunks)
    for prefix in prefixes:
        if not 0 <= prefix <= longest:
            raise ValueError(f"prefixes must be 0 to {longest} with {dims.name} and these chunks, got {prefix}")
    return [
        PrefillCase(dims.name, dcp_size, chunk, prefix)
        for dcp_size in dcp_sizes
        for chunk in chunks
        for prefix in sorted(set(prefixes))
    ]


def pool_pages(dims: ModelDims, dcp_size: int, pool_gib: float) -> int:
    """Pages of 64 rows of one layer's packed cache on a GPU whose pools get `pool_gib` GiB."""
    (row,) = plan(
        dims,
        gpu_memory_gib=pool_gib,
        kv_cache_dtypes=("fp8_e4m3",),
        tp_size=dcp_size,
        gpus_per_node=dcp_size,
        dcp_sizes=(dcp_size,),
    ).rows
    return row.tokens_per_gpu // PAGE_SIZE


def received_bytes(case: PrefillCase, dims: ModelDims, comm_backend: str = "a2a") -> dict[str, dict[str, int]]:
    """Bytes that a rank receives from the others in one layer, by mode and message.

    Args:
        case: the chunk.
        dims: its model.
        comm_backend: TP-DCP's exchange, `a2a` (bfloat16 outputs and float32 lse in one message) or `ag_rs` (lse
            gathered, float32 outputs reduce-scattered).

    Raises:
        ValueError: the backend is unknown.
    """
    if comm_backend not in COMM_BACKENDS:
        raise ValueError(f"comm_backend must be one of {', '.join(COMM_BACKENDS)}, got {comm_backend!r}")
    others = case.dcp_size - 1
    row_heads = case.chunk * dims.num_attention_heads // case.dcp_size
    if comm_backend == "a2a":
        exchange = row_heads * (dims.kv_lora_rank * _BF16_BYTES + _FLOAT32_BYTES)
    else:
        exchange = row_heads * (dims.kv_lora_rank + case.dcp_size) * _FLOAT32_BYTES
    selection = case.rank_tokens * dims.index_topk * _INDEX_BYTES
    return {
        "tp_dcp": {
            "queries": others * row_heads * dims.latent_dim * _BF16_BYTES,
            "partials": others * exchange,
            "selections": others * selection,
        },
        "cp_dcp": {
            "pages": others * case.pages * PAGE_SIZE * LATENT_BYTES,
            "latents": others * case.rank_tokens * dims.latent_dim * _BF16_BYTES,
            # Of the chunk: those of the prefix are on every rank.
            "index keys": others * case.rank_tokens * INDEX_HEAD_DIM * _BF16_BYTES,
        },
    }


def measured_link(dims: ModelDims) -> tuple[float, StepInput]:
    """GB/s that a GPU receives in the largest all-gather that was measured, and the table it is from."""
    table = measured_inputs(dims)["all_gather"]
    size, microseconds = max(table.value.items())
    return size / microseconds / 1e3, table


def sum_layers(values: Mapping[str, float], dims: ModelDims) -> dict[str, float]:
    """Parts or messages of a layer that selects, of one that shares a selection, and of the model's mean layer."""
    selects = sum(values.values())
    shares = sum(value for name, value in values.items() if name not in PER_SELECTION)
    share = len(dims.indexer_layers) / dims.num_hidden_layers
    return {"selects": selects, "shares": shares, "mean": share * selects + (1 - share) * shares}


def predict_layers(
    kernel_us: Mapping[str, float], received: Mapping[str, int], dims: ModelDims, link_gbs: float
) -> dict[str, float]:
    """Microseconds by kind of layer: measured kernels and transfers of the counted bytes, one after the other."""
    kernels, moved = sum_layers(kernel_us, dims), sum_layers(received, dims)
    return {kind: kernels[kind] + moved[kind] / link_gbs / 1e3 for kind in kernels}


def find_crossover(prefixes: Sequence[int], tp_dcp: Sequence[float], cp_dcp: Sequence[float]) -> Crossover | None:
    """Find the prefix from which on CP-DCP takes no less than TP-DCP: times are taken for linear between prefixes.

    Args:
        prefixes: ascending.
        tp_dcp, cp_dcp: what a layer takes at each.

    Returns:
        The first crossing; None where there is none, also beyond the last prefix.
    """
    gaps = [cp - tp for tp, cp in zip(tp_dcp, cp_dcp)]
    if gaps[0] >= 0:
        return Crossover(prefixes[0], extrapolated=False)
    points = list(itertools.pairwise(zip(prefixes, gaps)))
    for (start, low), (end, high) in points:
        if high >= 0:
            return Crossover(start - low * (end - start) / (high - low), extrapolated=False)
    if not points or high <= low:
        return None
    return Crossover(start - low * (end - start) / (high - low), extrapolated=True)
