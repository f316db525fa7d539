"""Exchanges over peer memory between GPUs, eagerly and replayed, and what happens when a rank does not come.

A GPU per rank; or several ranks on one, under MPS with NCCL_MULTI_RANK_GPU_ENABLE=1 and, for the memory,
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. Longer: `python -m scripts.benchmarks.collectives.soak_wire`.
"""

import random
import time

import pytest
import torch

from nsa_dcp import comm
from nsa_dcp.launcher import RankError, run_ranks
from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close
from nsa_dcp.testing.cases import draw_partials
from nsa_dcp.wire import WireLoad, end_process, open_wire
from nsa_dcp_kernels import merge_partials, peer_reference

pytestmark = pytest.mark.gpu
WORLDS = [pytest.param(n, marks=pytest.mark.multi_gpu(n)) for n in (2, 4, 8)]
HEADS_A_RANK, ROWS, TOPK = 8, 64, 2048


def lay(world_size, wait_limit_s=60.0):
    device = torch.device("cuda", torch.cuda.current_device())
    load = WireLoad(ROWS, HEADS_A_RANK * world_size, TOPK)
    wire = open_wire(comm.contiguous_group(world_size), device, load, end_process, wait_limit_s=wait_limit_s)
    assert not isinstance(wire, str), wire
    return wire, device


def draw(step, rows, world_size, device):
    """Every rank's partial results, a third of them empty, queries and selections; the same on every rank."""
    outs, lses = draw_partials(world_size, rows, HEADS_A_RANK * world_size, 512, torch.bfloat16, seed=step)
    generator = torch.Generator().manual_seed(step)
    queries = torch.randn(world_size, rows, HEADS_A_RANK, 576, generator=generator).to(device, torch.bfloat16)
    share = -(-rows // world_size)
    selections = torch.randint(-1, 1 << 30, (world_size, share, TOPK), generator=generator, dtype=torch.int32)
    return outs.to(device), lses.to(device), queries, selections.to(device)


def check_step(wire, inputs, label):
    outs, lses, queries, selections = inputs
    rank, heads = wire.channels.rank, HEADS_A_RANK
    own = slice(rank * heads, (rank + 1) * heads)
    cut = outs.shape[1] // 2
    pieces = (
        [(outs[rank], lses[rank])]
        if not cut
        else [(outs[rank, :cut], lses[rank, :cut]), (outs[rank, cut:], lses[rank, cut:])]
    )
    merged = wire.merge_heads(pieces)
    # The same kernel arithmetic over partials that nobody exchanged; and the definition.
    assert_bitwise_equal(merged, merge_partials(outs[:, :, own], lses[:, :, own])[0], label)
    ranks = [[(out, lse)] for out, lse in zip(outs, lses)]
    assert_close(merged, peer_reference.exchange_partials(ranks, rank)[0], rms=4e-3, label=label)
    assert_bitwise_equal(wire.gather_heads(queries[rank]), peer_reference.gather_heads(list(queries)), label)
    assert_bitwise_equal(wire.gather_rows(selections[rank]), peer_reference.gather_rows(list(selections)), label)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_was_sent_arrives_however_late_a_rank_is(world_size):
    run_ranks(exchange_on_rank, world_size, (world_size,), "cuda")


def exchange_on_rank(rank, _send, world_size):
    wire, device = lay(world_size)
    shapes, own = random.Random(3), random.Random(rank)
    for step in range(60):
        rows = shapes.choice([1, 2, 3, 8, 17, 63, ROWS])
        time.sleep(own.choice([0, 0, 0, 0.02]))
        check_step(wire, draw(step, rows, world_size, device), f"step {step}, {rows} rows")
    assert not int(wire.channels.fault)


@pytest.mark.parametrize("world_size", WORLDS)
def test_replays_and_eager_steps_follow_each_other(world_size):
    """Two graphs of other grids, replayed in any order with eager steps and NCCL's collectives between."""
    run_ranks(replay_on_rank, world_size, (world_size,), "cuda")


def replay_on_rank(rank, _send, world_size):
    wire, device = lay(world_size)
    group, own = comm.contiguous_group(world_size), random.Random(rank)
    captured = []
    for rows in (1, ROWS):
        inputs = draw(rows, rows, world_size, device)
        outs, lses, queries, selections = inputs
        check_step(wire, inputs, "warm-up")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # An odd number of exchanges: a replay begins with the other slot than the one before.
            got = (
                wire.merge_heads([(outs[rank], lses[rank])]),
                wire.gather_heads(queries[rank]),
                wire.gather_rows(selections[rank]),
            )
        captured.append((graph, inputs, got))
    order = random.Random(5)
    for step in range(80):
        kind = order.choice(["replay", "replay", "replay", "eager", "nccl"])
        if own.random() < 0.1:
            torch.cuda._sleep(own.randrange(20_000_000))
        if kind == "eager":
            check_step(wire, draw(step, order.choice([1, 5, ROWS]), world_size, device), f"eager {step}")
        elif kind == "nccl":
            comm.all_gather(torch.full((1 << 20,), float(rank), device=device), group)
        else:
            graph, inputs, got = captured[order.randrange(2)]
            fresh = draw(1000 + step, inputs[0].shape[1], world_size, device)
            for tensor, values in zip(inputs, fresh):
                tensor.copy_(values)
            graph.replay()
            outs, lses, queries, selections = inputs
            mine = slice(rank * HEADS_A_RANK, (rank + 1) * HEADS_A_RANK)
            assert_bitwise_equal(got[0], merge_partials(outs[:, :, mine], lses[:, :, mine])[0], f"replay {step}")
            assert_bitwise_equal(got[1], peer_reference.gather_heads(list(queries)), f"replay {step}")
            assert_bitwise_equal(got[2], peer_reference.gather_rows(list(selections)), f"replay {step}")
    assert not int(wire.channels.fault)


@pytest.mark.parametrize("world_size", WORLDS[:1])
@pytest.mark.parametrize("fault", ["absent", "other-rows"])
def test_a_rank_that_does_not_come_ends_the_others_with_a_sentence(world_size, fault, capfd):
    """Not a hang, and nothing is returned: the GPU's context ends with the exchange."""
    with pytest.raises(RankError):
        run_ranks(fail_on_rank, world_size, (world_size, fault), "cuda")
    told = capfd.readouterr().err
    assert "nsa-dcp's exchange over peer memory failed: the selections of rank 1" in told
    assert ("did not arrive in time" if fault == "absent" else "are not what this rank exchanges") in told
    assert "a result came back" not in told


def fail_on_rank(rank, _send, world_size, fault):
    wire, device = lay(world_size, wait_limit_s=2.0)
    if rank and fault == "absent":
        time.sleep(60)
    rows = torch.zeros(1 + rank * (fault == "other-rows"), TOPK, dtype=torch.int32, device=device)
    wire.gather_rows(rows)
    torch.cuda.synchronize()
    raise AssertionError("a result came back")
