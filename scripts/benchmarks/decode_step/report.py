"""The tables of the results. Needs no GPU."""

from collections.abc import Mapping, Sequence

from nsa_dcp.planning.dimensions import preset_dims
from scripts.benchmarks.decode_step.cases import PARTS, TP_SIZE, DecodeCase, local_heads

_EXPLANATION = f"""\
Microseconds of one rank of {TP_SIZE}, medians of CUDA-graph replays; the model's step in milliseconds with the 10th and
90th percentile. TP: heads padded to 64, all selected tokens, FlashMLA's own schedule made once outside. TP-DCP N:
gathered heads, this rank's share of the selection, localised and planned once per selection, partial results merged.
"slots" maps selected positions to cache slots. Projections, norms, RoPE, experts and TP all-reduces are in neither.
"layer" adds up the parts: a layer that selects, and one that shares an earlier layer's selection.
"model" is every layer in one graph, with the model's own pattern of shared selections; nothing overlaps.
Received: bytes from other ranks. "measured": NCCL, one GPU per rank, inside the times. "counted": in no time here, so
that "vs TP" is before communication; the other ranks' messages are buffers drawn beforehand, and what this rank does to
them is timed.
Caches have the size that batch and context ask for. Each layer has memory of its own, unless said so below."""


def format_report(
    results: Mapping[DecodeCase, Mapping[str, object]],
    failures: Sequence[Mapping[str, str]],
    not_run: Sequence[DecodeCase],
) -> str:
    """One table per model and context, then how the caches were held, what failed and what was not run."""
    lines = [_EXPLANATION]
    for model, context in dict.fromkeys((case.model, case.context) for case in results):
        chosen = {case: row for case, row in results.items() if (case.model, case.context) == (model, context)}
        lines += ["", *_format_table(model, context, chosen)]
    shared = {}
    for case, row in results.items():
        share = min(row["latent_memory_share"], row["index_memory_share"] or 1)
        if share < 1:
            shared[case] = share
    if shared:
        lines += [
            "",
            f"In {len(shared)} of {len(results)} cases the budget does not hold the caches of all layers: they overlap "
            "in memory, each layer's starting elsewhere. The memory they have, in percent of what all layers' take:",
            "  " + "; ".join(f"{describe_case(case)}: {100 * share:.0f}%" for case, share in shared.items()),
        ]
    if failures:
        lines += ["", f"{len(failures)} cases failed:"]
        lines += [f"  {failure['case']}: {failure['error'].strip().splitlines()[-1]}" for failure in failures]
    if not_run:
        lines += ["", f"{len(not_run)} cases were not run: " + "; ".join(map(describe_case, not_run))]
    return "\n".join(lines)


def describe_case(case: DecodeCase) -> str:
    return f"{case.model} {case.mode} b={case.batch} context={case.context}"


def _format_table(model: str, context: int, results: Mapping[DecodeCase, Mapping[str, object]]) -> list[str]:
    dims = preset_dims(model)
    names = [part.name for part in PARTS if any(part.name in row["parts"] for row in results.values())]
    header = f"{'batch':>5} {'mode':<8}" + "".join(f" {name:>{_width(name)}}" for name in names)
    header += f" | {'selects':>8} {'shares':>8} | {'model ms':>9} {'(low-high)':>17} {'vs TP':>6} | received"
    lines = [
        f"{model}, {context:,} tokens a request; {dims.num_hidden_layers} layers, {len(dims.indexer_layers)} "
        f"selections, {local_heads(dims)} heads a TP rank, {dims.index_n_heads} index heads",
        header,
    ]
    for case in sorted(results, key=lambda case: (case.batch, case.dcp_size)):
        row = results[case]
        line = f"{case.batch:>5} {case.mode:<8}"
        for name in names:
            timing = row["parts"].get(name)
            line += f" {'-' if timing is None else format(timing['us'], '.1f'):>{_width(name)}}"
        layer, step = row["layer_us"], row["model"]
        spread = f"({step['low'] / 1e3:.3f}-{step['high'] / 1e3:.3f})"
        line += f" | {layer['selecting']:>8.1f} {layer['sharing']:>8.1f} | {step['us'] / 1e3:>9.3f} {spread:>17}"
        line += f" {_format_ratio(case, results):>6} |{_format_received(row)}"
        lines.append(line)
    return lines


def _format_ratio(case: DecodeCase, results: Mapping[DecodeCase, Mapping[str, object]]) -> str:
    """A TP rank's time over this one's; nothing for the TP rank, or where it was not measured."""
    tp = results.get(DecodeCase(case.model, 1, case.batch, case.context))
    if case.dcp_size == 1 or tp is None:
        return "-"
    return f"{tp['model']['us'] / results[case]['model']['us']:.2f}x"


def _format_received(row: Mapping[str, object]) -> str:
    if row["communication"] == "none":
        return " -"
    per_layer = row["received_bytes_per_layer"]
    layer = (per_layer["gather q"] + per_layer["merge"]) / 1e6
    return f" {layer:.2f} MB a layer, {row['received_bytes_per_step'] / 1e6:.0f} MB a step, {row['communication']}"


def _width(name: str) -> int:
    return max(8, len(name))
