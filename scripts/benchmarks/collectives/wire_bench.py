"""Time exchanges over peer memory beside NCCL's, and FlashInfer's where it is installed, in one run: captured graphs.

    python -m scripts.benchmarks.collectives.wire_bench --json wire.json [--ranks 2] [--heads 64] [--topk 2048]

Partial results (packed, exchanged, merged), query heads (gathered and arranged by head), selections; 1 to 256 rows.
"""

import argparse
import datetime
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from nsa_dcp import comm
from nsa_dcp.command_line import check_output_file
from nsa_dcp.launcher import run_ranks
from nsa_dcp.wire import PeerWire, WireLoad, end_process, open_wire
from scripts.benchmarks.timing import time_calls

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CALLS, _REPLAYS = 8, 25
Call = Callable[[], object]


def bench_rank(rank: int, send: Callable[[object], None], heads: int, topk: int, ranks: int) -> None:
    """Time every case; rank 0 sends a record for each."""
    device = torch.device("cuda", torch.cuda.current_device())
    group = dist.group.WORLD
    wire = open_wire(group, device, WireLoad(max(ROWS), heads, topk), end_process)
    if isinstance(wire, str):
        raise RuntimeError(f"no peer memory: {wire}")
    for rows in ROWS:
        for name, transport, calls in list_cases(wire, group, rows, heads, topk, rank, ranks, device):
            dist.barrier()
            timing = time_calls(calls, _REPLAYS)
            if rank == 0:
                send({"ranks": ranks, "rows": rows, "exchange": name, "over": transport, **asdict(timing)})


def list_cases(
    wire: PeerWire,
    group: comm.Group,
    rows: int,
    heads: int,
    topk: int,
    rank: int,
    ranks: int,
    device: torch.device,
) -> Iterator[tuple[str, str, list[Call]]]:
    """What is exchanged, over what, and calls over inputs of their own."""

    def inputs(make: Callable[[], tuple]) -> list[tuple]:
        return [make() for _ in range(_CALLS)]

    partials = inputs(
        lambda: (
            torch.randn(rows, heads, 512, device=device).bfloat16(),
            3 * torch.randn(rows, heads, device=device),
        )
    )
    yield "partials", "nccl", [lambda p=pair: comm.merge_heads(*p, group, "a2a") for pair in partials]
    yield "partials", "peer", [lambda p=pair: wire.merge_heads([p]) for pair in partials]
    fused = flashinfer_exchange(rows, heads, rank, ranks, group)
    if fused is not None:
        yield "partials", "flashinfer", [lambda p=pair: fused(*p) for pair in partials]
    queries = inputs(lambda: (torch.randn(rows, heads // ranks, 576, device=device).bfloat16(),))
    yield "queries", "nccl", [lambda q=q: comm.gather_heads(q, group).contiguous() for (q,) in queries]
    yield "queries", "peer", [lambda q=q: wire.gather_heads(q) for (q,) in queries]
    share = -(-rows // ranks)
    selections = inputs(lambda: (torch.zeros(share, topk, dtype=torch.int32, device=device),))
    yield "selections", "nccl", [lambda s=s: comm.all_gather(s, group) for (s,) in selections]
    yield "selections", "peer", [lambda s=s: wire.gather_rows(s) for (s,) in selections]


def flashinfer_exchange(
    rows: int, heads: int, rank: int, ranks: int, group: comm.Group
) -> Callable[[torch.Tensor, torch.Tensor], object] | None:
    """FlashInfer's fused op on a message in the layout that it wants; None where it is not installed."""
    try:
        from flashinfer.comm.dcp_lse_reduce import (
            decode_cp_a2a_lse_reduce,
            decode_cp_a2a_lse_reduce_create_workspace,
        )
    except ImportError:
        return None
    local = heads // ranks
    workspace = decode_cp_a2a_lse_reduce_create_workspace(rows, local, ranks, 512, torch.bfloat16, group)

    def run(out: torch.Tensor, lse: torch.Tensor) -> object:
        by_peer = out.view(rows, ranks, local, 512).transpose(1, 2).contiguous()
        sums = lse.view(rows, ranks, local).transpose(1, 2).contiguous()
        return decode_cp_a2a_lse_reduce(by_peer, sums, workspace, rank, ranks, "basee")

    return run


def format_table(records: Sequence[dict]) -> list[str]:
    """A row for each exchange and number of rows: microseconds over each transport, and peer memory's over NCCL's."""
    times: dict[tuple[int, str, int], dict[str, float]] = {}
    for one in records:
        times.setdefault((one["ranks"], one["exchange"], one["rows"]), {})[one["over"]] = one["us"]
    lines = [
        "| ranks | exchange | rows | NCCL, us | FlashInfer, us | peer memory, us | peer / NCCL |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for (ranks, exchange, rows), by in sorted(times.items()):
        cells = [f"{by[over]:.1f}" if over in by else "-" for over in ("nccl", "flashinfer", "peer")]
        ratio = f"{by['peer'] / by['nccl']:.2f}" if {"peer", "nccl"} <= set(by) else "-"
        lines.append(f"| {ranks} | {exchange} | {rows} | {' | '.join(cells)} | {ratio} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=64, help="of the whole group")
    parser.add_argument("--topk", type=int, default=2048)
    args = parser.parse_args(argv)
    try:
        check_output_file("--json", args.json)
        if args.heads % args.ranks:
            raise ValueError(f"--heads must be a multiple of --ranks = {args.ranks}, got {args.heads}")
    except ValueError as error:
        sys.exit(f"benchmarks.collectives: {error}")
    records: list[dict] = []
    environment = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())],
    }

    def keep(record: object) -> None:
        records.append(record)
        args.json.write_text(json.dumps({"environment": environment, "records": records}, indent=1))

    run_ranks(bench_rank, args.ranks, (args.heads, args.topk, args.ranks), "cuda", on_message=keep)
    print("\n".join(format_table(records)))


if __name__ == "__main__":
    main()
