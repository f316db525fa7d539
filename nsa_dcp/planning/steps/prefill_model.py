"""Predict one layer of a prefill chunk: TP-DCP by queries and by rows, and CP-DCP. Of by rows no layer was ever timed.

Kernels of by queries and of CP-DCP are measured, in chunks of 8,192 tokens of GLM-5.2, and taken to be linear in the
chunk's rows. By rows runs CP-DCP's kernels on as many rows of its own, and beside them transposes queries and results,
read and written once. Bytes are counted (`prefill_ways`) and divided by a measured bandwidth; nothing overlaps, and
collectives have no latency, which short chunks would notice most.
"""

from __future__ import annotations

from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp.planning.prefill_ways import LayerSizes, most_rows, widened_pages
from nsa_dcp.planning.served_format import INDEX_HEAD_DIM, KV_LORA_RANK, LATENT_DIM, PAGE_SIZE, row_bytes
from nsa_dcp.planning.steps.step_inputs import H200_PAGES, Table, interpolate, measured_inputs

MODES = ("tp_dcp", "tp_dcp_rows", "cp_dcp")
_MEASURED_MODEL, _MEASURED_CHUNK = "glm-5.2", 8192
_PACKED_ROW, _BF16_BYTES = row_bytes("fp8_e4m3"), 2
# Microseconds of a mean layer's kernels by prefix, dcp size -> mode. At 4 and 2 ranks: the layers of
# docs/performance/prefill.md less the wire that is predicted in them.
KERNELS_SOURCE = f"a mean layer of GLM-5.2, 8,192 rows, {H200_PAGES}"
_PREFIXES = (0, 32768, 131072, 524288, 1040384)
_KERNELS: dict[int, dict[str, tuple[int, ...]]] = {
    8: {"tp_dcp": (2190, 2390, 2940, 5670, 10300), "cp_dcp": (480, 730, 1350, 4350, 9030)},
    4: {"tp_dcp": (2640, 3070, 4380, 9120, 19020), "cp_dcp": (900, 1410, 2760, 7640, 17930)},
    2: {"tp_dcp": (3510, 4430, 6990, 15980, 36280), "cp_dcp": (1740, 2760, 5270, 14320, 35590)},
}
# GB/s, read and written, of PyTorch's transposing copy of gathered queries.
_TRANSPOSED_GBS = 1670.0


def predict_chunk(
    model: ModelDims, dcp_size: int, chunk: int, prefix: int, link_gbs: float | None = None
) -> dict[str, float]:
    """Microseconds of the mean layer of a chunk of one request, by mode.

    Args:
        model: GLM-5.2's dimensions, with which kernels were measured.
        dcp_size: 2, 4 or 8 ranks, one TP and one DCP group.
        chunk: new tokens.
        prefix: tokens before them.
        link_gbs: GB/s that a GPU receives; default: of the largest measured all-gather.

    Raises:
        ValueError: kernels of this model or dcp size were not measured, or a number is out of range.
    """
    if model.name != _MEASURED_MODEL or dcp_size not in _KERNELS:
        sizes = ", ".join(map(str, sorted(_KERNELS)))
        raise ValueError(
            f"model and dcp_size must be {_MEASURED_MODEL} and one of {sizes}, whose kernels were measured, got "
            f"{model.name} and {dcp_size}"
        )
    if chunk < 1 or prefix < 0 or prefix + chunk > model.max_context:
        raise ValueError(f"chunk and prefix must make 1 to {model.max_context} tokens, got {chunk} after {prefix}")
    share = chunk / _MEASURED_CHUNK
    kernels = {
        mode: share * interpolate(_by_prefix(values), prefix, extend=True)
        for mode, values in _KERNELS[dcp_size].items()
    }
    own, heads = most_rows(chunk, dcp_size), model.num_attention_heads
    transposed = own * heads * (LATENT_DIM + KV_LORA_RANK) * _BF16_BYTES * 2
    kernels["tp_dcp_rows"] = kernels["cp_dcp"] + transposed / _TRANSPOSED_GBS / 1e3
    link = link_gbs or measured_link(model)
    moved = mean_received(model, dcp_size, chunk, prefix)
    return {mode: kernels[mode] + moved[mode] / link / 1e3 for mode in MODES}


def mean_received(model: ModelDims, dcp_size: int, chunk: int, prefix: int) -> dict[str, float]:
    """Bytes that a rank receives in the mean layer of a chunk, by mode; of the rank with most rows."""
    sizes, own = layer_sizes(model, dcp_size), most_rows(chunk, dcp_size)
    pages = widened_pages(prefix + chunk, dcp_size)
    by_queries, by_rows = sizes.received_by_queries(chunk), sizes.received_by_rows(chunk, own, pages)
    selecting = sizes.selecting_layers / sizes.layers
    others = dcp_size - 1
    return {
        "tp_dcp": by_queries["queries"] + by_queries["partials"] + selecting * by_queries["selections"],
        "tp_dcp_rows": sum(by_rows.values()),
        "cp_dcp": others * pages * PAGE_SIZE * _PACKED_ROW
        + others * own * _BF16_BYTES * (LATENT_DIM + selecting * INDEX_HEAD_DIM),
    }


def layer_sizes(model: ModelDims, dcp_size: int, comm_backend: str = "a2a") -> LayerSizes:
    """What decides the bytes of a TP-DCP chunk where tp = dcp: bfloat16 queries and results, a packed cache."""
    return LayerSizes(
        dcp_size=dcp_size,
        heads=model.num_attention_heads // dcp_size,
        row_bytes=_PACKED_ROW,
        topk=model.index_topk,
        layers=model.num_hidden_layers,
        selecting_layers=len(model.indexer_layers),
        comm_backend=comm_backend,
    )


def measured_link(model: ModelDims) -> float:
    """GB/s that a GPU receives in the largest all-gather that was measured."""
    table = measured_inputs(model)["all_gather"].value
    assert isinstance(table, dict)
    size, microseconds = max(table.items())
    return size / microseconds / 1e3


def _by_prefix(values: tuple[int, ...]) -> Table:
    return dict(zip(_PREFIXES, values, strict=True))
