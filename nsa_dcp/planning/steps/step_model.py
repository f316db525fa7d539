"""Predict one decode step of a rank in TP, TP-DCP and CP-DCP from measured kernel times and counted bytes.

Per layer, a rank reads its weights once, writes its cache and attends, with heads padded to what the kernel takes; in
the DCP modes it gathers queries, exchanges partial results and merges them; layers with an indexer also score and
select, and join the scores where they come in pieces. Once a step the page table is filled. A TP rank is stock
sglang's, a DCP rank the plugin's: it takes its own kernels for padding and for the page table, and from 64 rows on it
selects for its share of them. Times of kernels and collectives come from tables (`step_inputs`), weights from counted
bytes over the measured memory bandwidth. Everything is added up: no overlap is assumed. Collectives are NCCL's; those
of more than two ranks are read from the two-rank tables at equal bytes received per GPU.

The result is a prediction. Its worth is in comparing modes at one load, not in the absolute time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nsa_dcp.choices import COMM_BACKENDS, INDEX_KEYS, WIRES
from nsa_dcp.planning.capacity import plan
from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp.planning.served_format import HEAD_BUCKETS
from nsa_dcp.planning.steps.exchange_times import (
    Values,
    all_reduce_us,
    exchange_on_nccl,
    exchange_on_peers,
    gather_us,
)
from nsa_dcp.planning.steps.step_inputs import StepInput, interpolate, measured_inputs, override_inputs
from nsa_dcp.planning.steps.term_times import (
    agree_us,
    attend_planned_us,
    pad_heads_us,
    select_sharded_us,
    select_us,
)
from nsa_dcp.planning.steps.weight_reads import count_weight_bytes
from nsa_dcp.planning.weight_counts import WeightCounts, count_weights

__all__ = [
    "MAX_BATCH",
    "MODES",
    "DecodeSetup",
    "format_report",
    "measured_inputs",
    "override_inputs",
    "predict_report",
    "predict_step",
]

MODES = ("tp", "tp_dcp", "cp_dcp")
_TERMS = (
    *("attention", "pad_heads", "localize", "gather_q", "arrange_heads", "exchange", "combine"),
    *(
        "selection",
        "join_scores",
        "gather_selection",
        "agree_threshold",
        "cache_writes",
        "page_table",
        "weights",
        "all_reduce",
        "other",
    ),
)
MAX_BATCH = 256  # the largest measured batch
_SCORE_BYTES = 4  # float32
_SPLIT_ROWS = 64  # the plugin's MIN_ROWS (selection/row_split_decode.py), which cannot be imported without torch
_CAPTURED_MULTIPLE = 8  # sglang 0.5.23 captures batches of such multiples above 8, by default


@dataclass(frozen=True)
class DecodeSetup:
    """How the model is spread over GPUs.

    Args:
        tp_size: GPUs of the replica; in CP-DCP also the context-parallel size, and then dcp_size must equal it.
        dcp_size: GPUs that share a request's latent cache.
        comm_backend: `a2a` or `ag_rs`.
        replicate_q_proj: TP-DCP computes the group's queries on every rank, not gathers them. None: with `a2a` alone.
        cp_decode_attn_tp: CP-DCP slices the attention weights by head in decode; else every rank projects all heads.
        row_split_selection: each rank of a DCP group scores and selects for its share of the rows. None, as the plugin
            does: every rank of the replica takes a share, from 64 rows of a captured step on, which has the batch
            padded to a multiple of 8 (sglang's graphs).
        index_keys: `replicated` or `sharded`: each rank of a DCP group scores every row against its own keys, and the
            ranks agree on a threshold.
        wire: `nccl`; or `peer`: queries and partial results over peer memory, one kernel each (NSA_DCP_WIRE).
    """

    tp_size: int = 8
    dcp_size: int = 8
    comm_backend: str = "a2a"
    replicate_q_proj: bool | None = None
    cp_decode_attn_tp: bool = True
    row_split_selection: bool | None = None
    index_keys: str = "replicated"
    wire: str = "nccl"

    @property
    def replicates_q_proj(self) -> bool:
        """`replicate_q_proj` as sglang resolves it."""
        by_default = self.comm_backend == "a2a" and self.wire == "nccl"
        return by_default if self.replicate_q_proj is None else self.replicate_q_proj


def predict_step(
    model: ModelDims,
    setup: DecodeSetup,
    inputs: Mapping[str, StepInput],
    mode: str,
    batch: int,
    context: int,
) -> dict[str, float]:
    """Predicted microseconds of one decode step of a rank, by term, with their sum as `total`.

    Args:
        mode: `tp`, `tp_dcp` or `cp_dcp`.
        batch: requests of the step, 1 to 256 (what was measured); one token each.
        context: tokens of each request.

    Raises:
        ValueError: a size is out of range or does not divide; the message names it.
        NotImplementedError: the head counts are outside what was measured.
    """
    _check(model, setup, mode, batch, context)
    values = Values(
        {name: entry.value for name, entry in inputs.items() if not isinstance(entry.value, dict)},
        {name: entry.value for name, entry in inputs.items() if isinstance(entry.value, dict)},
    )
    counts = count_weights(model)
    n = 1 if mode == "tp" else setup.dcp_size
    layers, selections = model.num_hidden_layers, len(model.indexer_layers)
    local_heads = model.num_attention_heads // setup.tp_size
    sliced = mode != "cp_dcp" or setup.cp_decode_attn_tp
    heads = local_heads * n if sliced else model.num_attention_heads
    dcp = mode != "tp" and n > 1

    terms = dict.fromkeys(_TERMS, 0.0)
    terms["pad_heads"] = layers * pad_heads_us(values.tables["pad_heads_dcp" if dcp else "pad_heads"], heads, batch)
    if dcp:
        valid = min(context, model.index_topk) / n
        terms["attention"] = layers * attend_planned_us(values, heads, batch, valid)
        terms["localize"] = selections * interpolate(values.tables["localize"], batch)
        replicated = mode == "tp_dcp" and setup.replicates_q_proj
        query_bytes = 0 if not sliced or replicated else batch * local_heads * model.latent_dim * 2
        # With all heads on every rank, every rank needs all of them again.
        merged_bytes = 0 if sliced else batch * heads // n * model.kv_lora_rank * 2
        times = exchange_on_peers if setup.wire == "peer" else exchange_on_nccl
        exchanged = times(values, setup.comm_backend, n, batch * heads, model.kv_lora_rank, query_bytes, merged_bytes)
        terms |= {term: layers * us for term, us in exchanged.items()}
    else:
        # The stock schedule walks all 2,048 indices however many are valid.
        terms["attention"] = layers * interpolate(values.tables["attend_stock_64"], batch)
    sharded = dcp and setup.index_keys == "sharded"
    row_split, sharing = dcp and not sharded and setup.row_split_selection, n
    if dcp and not sharded and setup.row_split_selection is None:
        captured_rows, sharing = -(-batch // _CAPTURED_MULTIPLE) * _CAPTURED_MULTIPLE, setup.tp_size
        row_split = captured_rows >= _SPLIT_ROWS and captured_rows % sharing == 0
    rows = -(-batch // sharing) if row_split else batch
    selection = select_us(values, rows, context) + values.numbers["slots_us"]
    if sharded:
        selection = select_sharded_us(values, n, rows, context, model.index_topk)
        terms["agree_threshold"] = selections * agree_us(values, n, rows, model.index_topk)
    elif row_split:
        selection += values.numbers["row_split_us"]
        terms["gather_selection"] = selections * gather_us(values, sharing, rows * model.index_topk * 4)
    terms["selection"] = selections * selection
    if rows > values.numbers["rows_scored_at_once"]:
        # Read and written once more.
        joined_bytes = 2 * rows * values.numbers["context_length"] * _SCORE_BYTES / (n if sharded else 1)
        terms["join_scores"] = selections * joined_bytes / values.numbers["memory_bandwidth_gbs"] / 1e3
    terms["cache_writes"] = (layers + selections) * values.numbers["cache_write_us"]
    if dcp:
        terms["page_table"] = interpolate(values.tables["fill_page_table"], batch * context, extend=True)
    else:
        terms["page_table"] = batch * values.numbers["context_length"] / 128 * values.numbers["page_program_ns"] / 1e3
    terms["weights"] = (
        _weight_bytes(model, counts, setup, values, mode, batch) / values.numbers["memory_bandwidth_gbs"] / 1e3
    )
    terms["all_reduce"] = (
        layers * (2 if sliced else 1) * all_reduce_us(values, setup.tp_size, batch * counts.hidden_size * 2)
    )
    terms["other"] = layers * values.numbers["other_us_per_layer"]
    return {**terms, "total": sum(terms.values())}


def predict_report(
    model: ModelDims,
    setup: DecodeSetup,
    inputs: Mapping[str, StepInput],
    batches: Sequence[int],
    contexts: Sequence[int],
    gpu_memory_gib: float | None = None,
    kv_cache_dtype: str = "fp8_e4m3",
) -> dict[str, Any]:
    """Predictions for a grid of loads, the crossover batch of each context, and what the pools allow.

    Args:
        gpu_memory_gib: pool memory of one GPU, GiB; None leaves out what fits.

    Returns:
        Plain data: `predictions` (microseconds by mode and term), `crossover` (smallest batch, 1 to 256, at which a DCP
        mode's step is not slower than TP's; None if none is), `capacity` (largest batch that fits and tokens per second
        there).
    """
    modes = MODES if setup.dcp_size == setup.tp_size else MODES[:2]
    tokens = None if gpu_memory_gib is None else _pool_tokens(model, setup, gpu_memory_gib, kv_cache_dtype)
    predictions = []
    for context in contexts:
        for batch in batches:
            steps = {mode: predict_step(model, setup, inputs, mode, batch, context) for mode in modes}
            fits = None if tokens is None else {mode: batch * context <= tokens[mode] for mode in modes}
            predictions.append({"batch": batch, "context": context, "step_us": steps, "fits": fits})
    crossover, capacity = [], []
    for context in sorted(set(contexts)):
        crossover.append({"context": context, **_crossover(model, setup, inputs, modes, context)})
        if tokens is not None:
            best = {}
            for mode in modes:
                batch = min(MAX_BATCH, tokens[mode] // context)
                rate = batch / predict_step(model, setup, inputs, mode, batch, context)["total"] * 1e6 if batch else 0.0
                best[mode] = {"batch": batch, "tokens_per_second": rate}
            capacity.append({"context": context, **best})
    return {
        "kind": "predicted",
        "model": model.name,
        "setup": asdict(setup) | {"replicate_q_proj": setup.replicates_q_proj},
        "modes": list(modes),
        "kv_cache_dtype": kv_cache_dtype,
        "pool_tokens": tokens,
        "predictions": predictions,
        "crossover": crossover,
        "capacity": capacity,
        "inputs": {name: asdict(entry) for name, entry in inputs.items()},
    }


def format_report(report: Mapping[str, Any], *, show_inputs: bool = False) -> str:
    """The report as text."""
    modes, names = report["modes"], {"tp": "TP", "tp_dcp": "TP-DCP", "cp_dcp": "CP-DCP"}
    setup, switch = report["setup"], {True: "on", False: "off", None: f"from {_SPLIT_ROWS} rows"}
    selected = f"row-split selection {switch[setup['row_split_selection']]}"
    if setup["index_keys"] == "sharded":
        selected = "sharded index keys"
    lines = [
        f"predicted decode step of {report['model']}, milliseconds (not measured; * does not fit the pool)",
        f"tp {setup['tp_size']}, dcp {setup['dcp_size']}, {setup['comm_backend']}, wire {setup['wire']}, "
        f"replicated q projection {switch[setup['replicate_q_proj']]}, "
        f"decode head slice {switch[setup['cp_decode_attn_tp']]}, {selected}",
        "",
        "context    batch " + "".join(f"{names[mode]:>10}" for mode in modes),
    ]
    for entry in report["predictions"]:
        cells = ""
        for mode in modes:
            star = "*" if entry["fits"] is not None and not entry["fits"][mode] else " "
            cells += f"{entry['step_us'][mode]['total'] / 1e3:>9.2f}{star}"
        lines.append(f"{entry['context']:<10,} {entry['batch']:>5} {cells}")
    lines += ["", "smallest batch (1 to 256) at which the step is predicted not slower than TP's"]
    for entry in report["crossover"]:
        found = ", ".join(f"{names[mode]} {entry[mode] or 'none'}" for mode in modes[1:])
        lines.append(f"context {entry['context']:,}: {found}")
    if report["capacity"]:
        lines += ["", "largest batch that fits (up to 256) and predicted tokens per second there"]
        for entry in report["capacity"]:
            found = ", ".join(
                f"{names[mode]} {entry[mode]['batch']}: {entry[mode]['tokens_per_second']:,.0f}/s" for mode in modes
            )
            lines.append(f"context {entry['context']:,}: {found}")
    if show_inputs:
        lines += ["", "inputs"]
        for name, entry in report["inputs"].items():
            lines.append(f"{name} = {entry['value']} {entry['unit']}: {entry['source']}")
    else:
        lines += ["", "--show-inputs prints every input and where it was measured; --set and --tables replace them"]
    return "\n".join(lines)


def _crossover(
    model: ModelDims, setup: DecodeSetup, inputs: Mapping[str, StepInput], modes: Sequence[str], context: int
) -> dict[str, int | None]:
    found: dict[str, int | None] = dict.fromkeys(modes[1:])
    for batch in range(1, MAX_BATCH + 1):
        if all(found.values()):
            break
        tp = predict_step(model, setup, inputs, "tp", batch, context)["total"]
        for mode in modes[1:]:
            if found[mode] is None and predict_step(model, setup, inputs, mode, batch, context)["total"] <= tp:
                found[mode] = batch
    return found


def _pool_tokens(model: ModelDims, setup: DecodeSetup, gpu_memory_gib: float, kv_cache_dtype: str) -> dict[str, int]:
    rows = plan(
        model,
        gpu_memory_gib=gpu_memory_gib,
        kv_cache_dtypes=(kv_cache_dtype,),
        tp_size=setup.tp_size,
        gpus_per_node=setup.tp_size,
        dcp_sizes=(1, setup.dcp_size),
        index_shards=setup.dcp_size if setup.index_keys == "sharded" else 1,
    ).rows
    return {"tp": rows[0].tokens_per_node, "tp_dcp": rows[-1].tokens_per_node, "cp_dcp": rows[-1].tokens_per_node}


def _weight_bytes(
    model: ModelDims, counts: WeightCounts, setup: DecodeSetup, values: Values, mode: str, batch: int
) -> float:
    q_parts = out_parts = setup.tp_size
    if mode == "cp_dcp" and not setup.cp_decode_attn_tp:
        q_parts = out_parts = 1
    elif mode == "tp_dcp" and setup.replicates_q_proj:
        q_parts = setup.tp_size // setup.dcp_size
    return count_weight_bytes(
        model,
        counts,
        batch,
        tp_size=setup.tp_size,
        q_parts=q_parts,
        out_parts=out_parts,
        dense_bytes=values.numbers["dense_bytes"],
        expert_bytes=values.numbers["expert_bytes"],
    )


def _check(model: ModelDims, setup: DecodeSetup, mode: str, batch: int, context: int) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if setup.index_keys not in INDEX_KEYS:
        raise ValueError(f"index_keys must be one of {', '.join(INDEX_KEYS)}, got {setup.index_keys!r}")
    if setup.comm_backend not in COMM_BACKENDS:
        raise ValueError(f"comm_backend must be one of {', '.join(COMM_BACKENDS)}, got {setup.comm_backend!r}")
    for name, value in (
        ("tp_size", setup.tp_size),
        ("dcp_size", setup.dcp_size),
        ("context", context),
        ("batch", batch),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if setup.wire not in WIRES:
        raise ValueError(f"wire must be one of {', '.join(WIRES)}, got {setup.wire!r}")
    if setup.replicate_q_proj and setup.wire == "peer":
        raise ValueError("replicate_q_proj must be off with wire peer, got on: queries travel through peer memory")
    if setup.replicate_q_proj and setup.comm_backend != "a2a":
        raise ValueError(
            f"replicate_q_proj must be off with comm_backend {setup.comm_backend}, got on: sglang replicates the query "
            "projection for the all-to-all merge alone"
        )
    if batch > MAX_BATCH:
        raise ValueError(f"batch must be at most {MAX_BATCH}, the largest that was measured, got {batch}")
    if setup.tp_size % setup.dcp_size:
        raise ValueError(f"dcp_size must divide tp_size = {setup.tp_size}, got {setup.dcp_size}")
    if model.num_attention_heads % setup.tp_size:
        raise ValueError(f"tp_size must divide num_attention_heads = {model.num_attention_heads}, got {setup.tp_size}")
    if mode == "cp_dcp" and setup.dcp_size != setup.tp_size:
        raise ValueError(
            f"dcp_size must equal the context-parallel size {setup.tp_size} in CP-DCP, got {setup.dcp_size}"
        )
    count_weights(model)
    if context > model.max_context:
        raise ValueError(f"context must be at most {model.max_context}, the longest of {model.name}, got {context}")
    heads = model.num_attention_heads // setup.tp_size
    if heads > HEAD_BUCKETS[0]:
        raise NotImplementedError(
            f"heads per TP rank must be at most {HEAD_BUCKETS[0]}, the measured tables', got {heads}"
        )
    gathered = model.num_attention_heads if mode == "cp_dcp" else heads * setup.dcp_size
    if mode != "tp" and gathered > HEAD_BUCKETS[-1]:
        raise NotImplementedError(
            f"gathered heads must be at most {HEAD_BUCKETS[-1]}, the measured tables', got {gathered}"
        )
