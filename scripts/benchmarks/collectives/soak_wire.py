"""Replay exchanges over peer memory a great many times, ranks delayed at random, every result compared bit for bit.

    python -m scripts.benchmarks.collectives.soak_wire [--ranks 2] [--replays 100000] [--heads 64]
        [--kill 1 | --stop 1] [--wait-limit 10]

A graph of an odd number of exchanges is replayed; on the device, each result is compared with what was captured of
partials that nobody exchanged, and the differences are summed, so that no replay waits for the host. --kill and --stop
end (SIGKILL) or halt (SIGSTOP) a rank halfway: the others must say so in one sentence within the limit, return nothing,
and leave no process behind; the exit status is then 0 if they did.
"""

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

from nsa_dcp import comm
from nsa_dcp.launcher import run_ranks
from nsa_dcp.testing.cases import draw_partials
from nsa_dcp.wire import WireLoad, end_process, open_wire
from nsa_dcp_kernels import merge_partials, peer_reference

_LONGEST_DELAY_CYCLES = 400_000  # a few hundred microseconds
_ROWS, _TOPK = (1, 16, 64), 2048


def soak_rank(rank: int, send: Callable[[object], None], args: argparse.Namespace) -> int:
    """Return how many values differed; rank 0 sends its progress."""
    device = torch.device("cuda", torch.cuda.current_device())
    load = WireLoad(max(_ROWS), args.heads, _TOPK)
    wire = open_wire(comm.contiguous_group(args.ranks), device, load, end_process, wait_limit_s=args.wait_limit)
    if isinstance(wire, str):
        raise RuntimeError(f"no peer memory: {wire}")
    differing = torch.zeros(1, dtype=torch.int64, device=device)
    graphs = [_capture(wire, rows, args.heads, rank, args.ranks, differing, device) for rows in _ROWS]
    if rank == args.kill:
        _signal_later(signal.SIGKILL, args.halfway_s)
    if rank == args.stop:
        _signal_later(signal.SIGSTOP, args.halfway_s)
    order, own, started = random.Random(11), random.Random(rank), time.time()
    for replay in range(args.replays):
        if own.random() < 0.05:
            torch.cuda._sleep(own.randrange(_LONGEST_DELAY_CYCLES))
        graphs[order.randrange(len(graphs))].replay()
        if replay % 1000 == 999:
            torch.cuda.synchronize()
            if rank == 0:
                send((replay + 1, int(differing), time.time() - started))
    torch.cuda.synchronize()
    return int(differing)


def _capture(
    wire, rows: int, heads: int, rank: int, ranks: int, differing: torch.Tensor, device: torch.device
) -> torch.cuda.CUDAGraph:
    """Exchanges of inputs that change with every replay, alike on every rank, and their comparison."""
    outs, lses = (tensor.to(device) for tensor in draw_partials(ranks, rows, heads, 512, torch.bfloat16, seed=rows))
    queries = torch.randn(ranks, rows, heads // ranks, 576, generator=torch.Generator().manual_seed(rows))
    queries = queries.to(device, torch.bfloat16)
    share = -(-rows // ranks)
    selections = torch.arange(ranks * share * _TOPK, dtype=torch.int32, device=device).view(ranks, share, _TOPK)
    own = slice(rank * heads // ranks, (rank + 1) * heads // ranks)

    def step() -> None:
        # Rows move on, and integers grow: what a slot held before is never right.
        outs.copy_(outs.roll(1, dims=-1))
        lses.copy_(lses.roll(1, dims=-1))
        queries.copy_(queries.roll(1, dims=-1))
        selections.add_(1)
        for got, expected in (
            (wire.merge_heads([(outs[rank], lses[rank])]), merge_partials(outs[:, :, own], lses[:, :, own])[0]),
            (wire.gather_heads(queries[rank]), peer_reference.gather_heads(list(queries))),
            (wire.gather_rows(selections[rank]), peer_reference.gather_rows(list(selections))),
        ):
            differing.add_((got != expected).sum())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _signal_later(number: int, after_s: float) -> None:
    def send_signal() -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), number)

    threading.Thread(target=send_signal, daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=64, help="of the whole group")
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--kill", type=int, metavar="RANK", help="end this rank (SIGKILL) while it replays")
    parser.add_argument("--stop", type=int, metavar="RANK", help="halt this rank (SIGSTOP) while it replays")
    parser.add_argument("--halfway-s", type=float, default=5.0, help="seconds before that")
    parser.add_argument("--wait-limit", type=float, default=10.0, help="seconds that an exchange waits for a rank")
    args = parser.parse_args(argv)
    if args.heads % args.ranks:
        parser.error(f"--heads must be a multiple of --ranks, got {args.heads} and {args.ranks}")
    if args.kill is not None and args.stop is not None:
        parser.error("--kill and --stop: one of them")
    ends_early = args.kill is not None or args.stop is not None
    try:
        differing = run_ranks(soak_rank, args.ranks, (args,), "cuda", on_message=lambda told: print(*told, flush=True))
    except RuntimeError as error:
        print(f"ended: {error}", file=sys.stderr)
        return 0 if ends_early else 1
    print(f"{args.replays} replays on {args.ranks} ranks, values that differ by rank: {differing}")
    return 1 if ends_early or any(differing) else 0


if __name__ == "__main__":
    sys.exit(main())
