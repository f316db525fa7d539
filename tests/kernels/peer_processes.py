"""Ranks as processes that share memory, each running the interpreted kernels against the others' channels."""

import multiprocessing
import os
import traceback
from collections.abc import Callable

import torch

from nsa_dcp_kernels.peer_memory import PeerChannels, memory_bytes

# Interpreted polls, each some ten microseconds at least: what no other rank takes, however busy the machine is.
PATIENCE = 1_000_000


def run_peers(
    body: Callable[[PeerChannels], None],
    num_ranks: int,
    count: int,
    bytes_of_slot: int,
    *,
    first_epoch: int = 0,
    wait_limit: int = PATIENCE,
) -> None:
    """Run `body` in a process for each rank; fail with what failed in one.

    Peers' memory is handed to the kernels as addresses alone: the interpreter writes back every tensor it is given.
    `first_epoch`: launches that every channel is said to have seen.
    """
    size = memory_bytes(num_ranks, count, bytes_of_slot)
    memories = []
    for _ in range(num_ranks):
        # Nothing that lies in a slot before it is written may be used; flags begin at 0.
        memory = torch.full((size,), 0xFF, dtype=torch.uint8).share_memory_()
        memory[: memory_bytes(num_ranks, count, 0)] = 0
        memories.append(memory)
    if first_epoch:
        for memory in memories:
            memory[: num_ranks * count * 8].view(torch.int64).fill_(first_epoch << 16)
    context = multiprocessing.get_context("fork")
    reports = context.SimpleQueue()

    def run(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            fault = torch.zeros(1, dtype=torch.int64)
            addresses = torch.tensor([memory.data_ptr() for memory in memories] + [fault.data_ptr()])
            epochs = torch.full((2, count), first_epoch)
            body(PeerChannels(addresses, epochs, fault, rank, count, bytes_of_slot, wait_limit))
            reports.put((rank, None))
        except BaseException:
            reports.put((rank, traceback.format_exc()))
        finally:
            # Not the test session's own exit handlers.
            os._exit(0)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    told = dict(reports.get() for _ in processes)
    for process in processes:
        process.join()
    failed = {rank: report for rank, report in told.items() if report}
    assert not failed, "\n".join(f"rank {rank}: {report}" for rank, report in sorted(failed.items()))
