"""Mapping peer memory where it cannot be had: every rank is told, none waits, and collectives serve. Gloo ranks."""

import os

import torch

from nsa_dcp import comm
from nsa_dcp.config import DcpConfig
from nsa_dcp.hf.ranks import join_groups, lay_wire
from nsa_dcp.launcher import run_ranks


def test_ranks_agree_only_where_all_of_them_hold():
    run_ranks(agree_on_rank, 3)


def agree_on_rank(rank, _send):
    group = comm.contiguous_group(3)
    cpu = torch.device("cpu")
    assert comm.agree(True, group, cpu)
    assert not comm.agree(rank != 1, group, cpu)
    assert comm.agree(True, None, cpu) and not comm.agree(False, None, cpu)


def test_one_rank_without_memory_leaves_all_without(monkeypatch):
    run_ranks(map_on_rank, 3)


def map_on_rank(rank, _send):
    """One rank's memory fails; the others' does not, and they must not go on to map it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    group, mapped = comm.contiguous_group(3), []

    def empty(size, dtype, device):
        if rank == 1:
            raise RuntimeError("out of memory\nand a trace")
        return torch.empty(size, dtype=dtype)

    symmetric_memory.empty = empty
    symmetric_memory.rendezvous = lambda *given: mapped.append(given)
    torch.cuda.synchronize = lambda device: None
    told = comm.map_peer_memory(64, group, torch.device("cpu"))
    assert told == ("out of memory" if rank == 1 else "another rank could not set memory aside"), told
    assert not mapped


def test_one_rank_that_cannot_map_leaves_all_without():
    run_ranks(fail_to_map_on_rank, 3)


def fail_to_map_on_rank(rank, _send):
    import torch.distributed._symmetric_memory as symmetric_memory

    group = comm.contiguous_group(3)

    class Handle:
        buffer_ptrs = (1, 2, 3)

    def rendezvous(tensor, over):
        assert not tensor.any() and over is group
        if rank == 2:
            raise RuntimeError("peer access is not supported")
        return Handle()

    symmetric_memory.empty = lambda size, dtype, device: torch.full((size,), 7, dtype=dtype)
    symmetric_memory.rendezvous = rendezvous
    torch.cuda.synchronize = lambda device: None
    told = comm.map_peer_memory(64, group, torch.device("cpu"))
    assert told == ("peer access is not supported" if rank == 2 else "another rank could not map it"), told


def test_where_all_can_the_addresses_are_in_rank_order():
    run_ranks(map_all_on_rank, 2)


def map_all_on_rank(rank, _send):
    import torch.distributed._symmetric_memory as symmetric_memory

    class Handle:
        buffer_ptrs = (4096, 8192)

    symmetric_memory.empty = lambda size, dtype, device: torch.full((size,), 7, dtype=dtype)
    symmetric_memory.rendezvous = lambda tensor, group: Handle()
    torch.cuda.synchronize = lambda device: None
    memory = comm.map_peer_memory(64, comm.contiguous_group(2), torch.device("cpu"))
    assert memory.addresses == [4096, 8192] and not memory.local.any()


def test_an_engine_without_gpus_says_why_and_goes_on():
    run_ranks(lay_on_rank, 2)


def lay_on_rank(rank, _send):
    ranks = join_groups(DcpConfig(tp_size=2, dcp_size=2), rank)
    os.environ["NSA_DCP_WIRE"] = "nccl"
    assert lay_wire(ranks, 8, 4, torch.device("cpu")) is ranks
    os.environ["NSA_DCP_WIRE"] = "peer"
    assert lay_wire(ranks, 8, 4, torch.device("cpu")).wire is None
    os.environ["NSA_DCP_WIRE"] = "carrier pigeon"
    try:
        lay_wire(ranks, 8, 4, torch.device("cpu"))
    except ValueError as error:
        assert "NSA_DCP_WIRE must be one of nccl, peer" in str(error)
    else:
        raise AssertionError("a wrong word was taken")
