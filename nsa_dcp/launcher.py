"""Start one process per rank, run a function on all of them, and leave none behind, whatever happens."""

import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import torch

from nsa_dcp import comm


class RankError(RuntimeError):
    """A rank failed; the message is that rank's error."""


def run_ranks(
    function: Callable[..., object],
    world_size: int,
    args: tuple = (),
    device_type: str = "cpu",
    timeout_s: float = 600.0,
    on_message: Callable[[Any], None] | None = None,
) -> list[Any]:
    """Run `function(rank, send, *args)` on every rank of a fresh world.

    Args:
        function: importable by name. `send` takes a picklable object to `on_message` here while the rank runs.
        world_size: ranks, each a process of its own.
        args: picklable.
        device_type: "cpu" (gloo) or "cuda" (NCCL, rank r on GPU r; GPUs are shared where NCCL is told to allow it).
        timeout_s: seconds that a collective of all ranks may wait for one. A group that `function` makes has its own.
        on_message: called with what ranks send.

    Returns:
        What each rank returned.

    Raises:
        ValueError, NotImplementedError: a rank raised it; it is raised again here.
        RuntimeError: a rank raised anything else or died, or there are too few GPUs.
    """
    if device_type == "cuda":
        _check_gpus(world_size)
    # Ranks are forked from a process that has imported the heavy packages once, and no thread of this one is copied.
    # With GPUs they start afresh: importing a model's code may touch CUDA, which does not survive a fork.
    context: SpawnContext | ForkServerContext
    if device_type == "cuda":
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "nsa_dcp.comm", "nsa_dcp.hf.engine", "nsa_dcp.hf.preload"])
    with tempfile.TemporaryDirectory(prefix="nsa-dcp-") as meeting_place:
        init_method = f"file://{Path(meeting_place) / 'ranks'}"
        processes, pipes = [], {}
        # Closed when this process ends, even by SIGKILL; the ranks end themselves when it is.
        lifeline, our_end = context.Pipe(duplex=False)
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_rank,
                    args=(function, rank, world_size, args, device_type, timeout_s, init_method, sender, lifeline),
                    daemon=True,
                )
                process.start()
                sender.close()
                processes.append(process)
                pipes[receiver] = rank
            return _collect(processes, pipes, on_message)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            our_end.close()
            lifeline.close()


def _check_gpus(world_size: int) -> None:
    count = torch.cuda.device_count()
    if not count:
        raise RuntimeError("device cuda needs a Hopper GPU, found none: use --device cpu")
    if count < world_size and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        raise RuntimeError(
            f"{world_size} ranks need a GPU each, found {count}: use fewer ranks, or, to check tokens only, NCCL 2.30 "
            "or newer with NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_NCHANNELS=2 NCCL_MAX_P2P_NCHANNELS=2"
        )


def _collect(processes: list, pipes: dict[Connection, int], on_message: Callable[[Any], None] | None) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[int, float, Exception]] = []
    reported: set[int] = set()

    def sweep() -> None:
        for pipe, rank in list(pipes.items()):
            for kind, at, content in _receive(pipe):
                if kind == "message":
                    if on_message:
                        on_message(content)
                    continue
                if kind == "result":
                    results[rank] = content
                elif kind == "refused":
                    failures.append((0, at, content))
                elif kind == "failed":
                    failures.append((2, at, RankError(f"rank {rank} failed:\n{content}")))
                elif rank not in reported:
                    processes[rank].join()
                    died = RankError(f"rank {rank} died with exit status {processes[rank].exitcode}")
                    failures.append((1, at, died))
                if kind == "ended":
                    del pipes[pipe]
                reported.add(rank)

    while len(results) < len(processes):
        wait(list(pipes))
        sweep()
        if failures:
            # When one rank fails, the others fail in their collectives. The cause is a refusal, or a death, or the
            # first failure. It came before what is here, save that a killed rank may still be on its way out.
            time.sleep(0.2)
            sweep()
            raise min(failures, key=lambda failure: failure[:2])[2]
    return [results[rank] for rank in range(len(processes))]


def _receive(pipe: Connection) -> Iterator[tuple[str, float, Any]]:
    """Yield what a rank has sent so far: (kind, when, content), and "ended" once it can send no more."""
    while pipe.poll():
        try:
            yield pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):  # the second in the middle of a message
            yield "ended", 0.0, None
            return


def _run_rank(
    function: Callable[..., object],
    rank: int,
    world_size: int,
    args: tuple,
    device_type: str,
    timeout_s: float,
    init_method: str,
    sender: Connection,
    lifeline: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides; it ends the ranks.
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    # The ranks of one machine share its cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))

    def send(kind: str, content: object) -> None:
        # Plain pickle copies tensors; a pipe's own pickler would share memory that ends with this process.
        sender.send_bytes(pickle.dumps((kind, time.monotonic(), content)))

    try:
        if device_type == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        if world_size > 1:
            # All ranks are on this machine. Otherwise gloo and NCCL listen where the host's name points to.
            loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, loopback)
            comm.connect(init_method, rank, world_size, device_type, timeout_s)
        result = function(rank, lambda content: send("message", content), *args)
        send("result", result)
    except (ValueError, NotImplementedError) as error:
        # A subclass may be built from other arguments, or be unknown to the caller.
        send("refused", (ValueError if isinstance(error, ValueError) else NotImplementedError)(str(error)))
    except BaseException:
        send("failed", traceback.format_exc())
        raise SystemExit(1) from None
    else:
        if world_size > 1:
            comm.disconnect()


def _end_with_parent(lifeline: Connection) -> None:
    wait([lifeline])
    os._exit(1)
