"""Print predicted layers of prefill chunks, TP-DCP by queries and by rows, and CP-DCP. Needs no GPU; times nothing.

python -m scripts.benchmarks.prefill_chunk.modelled
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from nsa_dcp.command_line import check_output_file
from nsa_dcp.planning.dimensions import ModelDims, preset_dims
from nsa_dcp.planning.prefill_ways import PrefillRule, widened_pages
from nsa_dcp.planning.steps.prefill_model import (
    KERNELS_SOURCE,
    MODES,
    layer_sizes,
    mean_received,
    measured_link,
    predict_chunk,
)

_MODEL = "glm-5.2"
_PREFIXES = (0, 32768, 131072, 524288, 1040384)
_CHUNKS = (256, 1024, 4096, 8192, 32768)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dcp-sizes", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--chunks", nargs="+", type=int, default=_CHUNKS, help="new tokens")
    parser.add_argument("--prefixes", nargs="+", type=int, default=_PREFIXES, help="tokens before the chunk")
    parser.add_argument("--link-gbs", type=float, help="GB/s a GPU receives; default: the largest measured all-gather")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args(argv)
    if args.link_gbs is not None and args.link_gbs <= 0:
        parser.error("--link-gbs must be more than 0")
    return args


def predict_all(
    dims: ModelDims,
    dcp_sizes: Sequence[int],
    chunks: Sequence[int],
    prefixes: Sequence[int],
    link_gbs: float | None = None,
) -> list[dict[str, object]]:
    """A record per dcp size, chunk and prefix: predicted microseconds, counted bytes, and the way of "auto".

    ValueError: a combination cannot be predicted. One longer than the model's context is left out.
    """
    return [
        {
            "dcp_size": dcp_size,
            "chunk": chunk,
            "prefix": prefix,
            "predicted_us": predict_chunk(dims, dcp_size, chunk, prefix, link_gbs),
            "received_bytes": mean_received(dims, dcp_size, chunk, prefix),
            "auto": "rows"
            if PrefillRule(layer_sizes(dims, dcp_size)).moves_less(chunk, widened_pages(prefix + chunk, dcp_size))
            else "queries",
        }
        for dcp_size in dcp_sizes
        for chunk in chunks
        for prefix in prefixes
        if prefix + chunk <= dims.max_context
    ]


def format_records(records: Sequence[dict], link_gbs: float) -> str:
    """The records as a table."""
    lines = [
        f"{_MODEL}, mean layer of the rank with most rows; MODELLED: kernels linear in rows from {KERNELS_SOURCE};",
        f"bytes counted, over {link_gbs:.0f} GB/s; no overlap, no latency. by rows was never timed.",
        "dcp   chunk     prefix |    ms: queries     rows   CP-DCP |    MB: queries     rows   CP-DCP | auto",
    ]
    for record in records:
        times = "".join(f" {record['predicted_us'][mode] / 1e3:>8.2f}" for mode in MODES)
        moved = "".join(f" {record['received_bytes'][mode] / 1e6:>8.1f}" for mode in MODES)
        lines.append(
            f"{record['dcp_size']:>3} {record['chunk']:>7,} {record['prefix']:>10,} |      {times} |      {moved} | "
            f"{record['auto']}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    dims = preset_dims(_MODEL)
    try:
        check_output_file("--json", args.json)
        records = predict_all(dims, args.dcp_sizes, args.chunks, args.prefixes, args.link_gbs)
    except ValueError as error:
        raise SystemExit(f"benchmarks.prefill_chunk.modelled: {error}") from None
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))
    print(format_records(records, args.link_gbs or measured_link(dims)))


if __name__ == "__main__":
    main()
