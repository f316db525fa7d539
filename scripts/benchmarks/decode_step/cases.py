"""The cases that are timed, a model's layers, the parts of a step, the bytes that ranks receive. Needs no GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa_dcp.config import DcpConfig
from nsa_dcp.layout import pages_for
from nsa_dcp.planning.dimensions import ModelDims, preset_dims
from nsa_dcp_kernels.kv_format import INDEX_KEY_BYTES, KV_LORA_RANK, LATENT_BYTES, LATENT_DIM, PAGE_SIZE

TP_SIZE = 8
BF16_BYTES = 2
LATENT_PAGE_BYTES = PAGE_SIZE * LATENT_BYTES
INDEX_PAGE_BYTES = PAGE_SIZE * INDEX_KEY_BYTES


@dataclass(frozen=True)
class DecodeCase:
    """One decode step of one rank.

    model: a preset of nsa_dcp.planning.dimensions.
    dcp_size: ranks that share each request's latents; 1 is a TP rank, which holds every token.
    batch: requests, one new token each.
    context: tokens of each request, the new one included.
    """

    model: str
    dcp_size: int
    batch: int
    context: int

    @property
    def mode(self) -> str:
        return "TP" if self.dcp_size == 1 else f"TP-DCP {self.dcp_size}"

    @property
    def latent_pages(self) -> int:
        """Pages of 64 rows that a rank holds of one layer's latents."""
        return self.batch * pages_for(self.context, self.dcp_size)

    @property
    def index_pages(self) -> int:
        """Pages of 64 tokens of one layer's index keys: every rank holds all of them."""
        return self.latent_pages * self.dcp_size


@dataclass(frozen=True)
class Part:
    """A part of one layer's step.

    per_selection: done by the layers that own an indexer, for those that share their selection too.
    indexer: left out by --no-indexer. dcp: done by a DCP rank alone.
    """

    name: str
    per_selection: bool = False
    indexer: bool = False
    dcp: bool = False


PARTS = (
    Part("write latent"),
    Part("write key", per_selection=True, indexer=True),
    Part("select", per_selection=True, indexer=True),
    Part("slots", per_selection=True),
    Part("localise", per_selection=True, dcp=True),
    Part("gather q", dcp=True),
    Part("attend"),
    Part("merge", dcp=True),
)


def parts_of(dcp_size: int, with_indexer: bool) -> tuple[Part, ...]:
    """The parts of a step, in order."""
    return tuple(part for part in PARTS if (with_indexer or not part.indexer) and (dcp_size > 1 or not part.dcp))


def list_cases(
    models: Sequence[str], dcp_sizes: Sequence[int], batches: Sequence[int], contexts: Sequence[int]
) -> list[DecodeCase]:
    """Every combination, a TP rank (dcp_size 1) beside each.

    Raises:
        ValueError: a model is unknown, a size is below 1, or a dcp_size does not divide the 8 TP ranks.
    """
    for name, sizes in (("batches", batches), ("contexts", contexts)):
        for size in sizes:
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
    for model in models:
        preset_dims(model)
    for dcp_size in dcp_sizes:
        DcpConfig(tp_size=TP_SIZE, dcp_size=dcp_size)
    sizes = sorted({1, *dcp_sizes})
    return [
        DecodeCase(model, dcp_size, batch, context)
        for model in models
        for context in contexts
        for batch in batches
        for dcp_size in sizes
    ]


def selection_of_layers(dims: ModelDims) -> tuple[int, ...]:
    """Number of the selection that each layer uses: its own, or the last one before it."""
    owners = set(dims.indexer_layers)
    numbers, number = [], -1
    for layer in range(dims.num_hidden_layers):
        number += layer in owners
        numbers.append(number)
    return tuple(numbers)


def local_heads(dims: ModelDims) -> int:
    """Query heads of one TP rank."""
    return dims.num_attention_heads // TP_SIZE


def received_bytes(case: DecodeCase, dims: ModelDims, row_split: bool) -> dict[str, int]:
    """Bytes that a rank receives from the others in one layer, by part; "select" in layers that own an indexer.

    Args:
        case: the step.
        dims: its model.
        row_split: each rank selects for its share of the rows and gathers the other selections.
    """
    others = case.dcp_size - 1
    row_heads = case.batch * local_heads(dims)
    share = -(-case.batch // case.dcp_size)
    return {
        "gather q": others * row_heads * LATENT_DIM * BF16_BYTES,
        # Outputs in bfloat16, and a float32 lse.
        "merge": others * row_heads * (KV_LORA_RANK * BF16_BYTES + 4),
        "select": others * share * dims.index_topk * 4 if row_split else 0,
    }


def received_per_step(received: Mapping[str, int], dims: ModelDims) -> int:
    """Bytes that a rank receives in one step of the whole model."""
    every_layer = received["gather q"] + received["merge"]
    return dims.num_hidden_layers * every_layer + len(dims.indexer_layers) * received["select"]


def sum_layers(part_us: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of a layer that makes a selection and of one that shares an earlier layer's."""
    shared = sum(part_us[part.name] for part in PARTS if part.name in part_us and not part.per_selection)
    return {"selecting": sum(part_us.values()), "sharing": shared}


def sum_model(layer_us: Mapping[str, float], dims: ModelDims) -> float:
    """Microseconds of all layers."""
    selections = len(dims.indexer_layers)
    return selections * layer_us["selecting"] + (dims.num_hidden_layers - selections) * layer_us["sharing"]


def physical_pages(num_layers: int, layer_pages: int, page_bytes: int, budget_bytes: int) -> int:
    """Pages to allocate for the caches of all layers: enough for each to have its own, or what the budget holds.

    Raises:
        ValueError: the budget does not hold one layer.
    """
    affordable = budget_bytes // page_bytes
    if affordable < layer_pages:
        raise ValueError(
            f"the cache budget must hold one layer, {layer_pages * page_bytes / 2**30:.1f} GiB, got "
            f"{budget_bytes / 2**30:.1f} GiB: --cache-gib"
        )
    return min(num_layers * layer_pages, affordable)


def window_starts(num_layers: int, layer_pages: int, pages: int) -> list[int]:
    """First page of each layer's cache among `pages` physical ones, as far apart as they allow.

    Layers' caches overlap where there is not memory for all of them. Their starts differ, so that layers that share a
    selection still read different memory, and the L2 cache does not hold what a layer reads.
    """
    if num_layers == 1:
        return [0]
    stride = min(layer_pages, (pages - layer_pages) // (num_layers - 1))
    return [layer * stride for layer in range(num_layers)]
