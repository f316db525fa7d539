"""The step's collectives over gloo ranks: head order, and both merges against one process that holds every partial."""

import math

import pytest
import torch

from nsa_dcp import comm
from nsa_dcp.choices import COMM_BACKENDS
from nsa_dcp.launcher import RankError, run_ranks
from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close
from nsa_dcp.testing.cases import draw_partials
from nsa_dcp.testing.oracle import merge_dense
from nsa_dcp.testing.poisoned_memory import poisoned_allocations

WORLDS = [pytest.param(size, id=f"dcp{size}") for size in (2, 3, 4)]
# What one rounding to the dtype, and sums of a few terms in its accumulator, leave.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3}
MARKERS = (-math.inf, math.inf, math.nan)


@pytest.mark.parametrize("world_size", [*WORLDS, pytest.param(8, id="dcp8")])
def test_heads_are_gathered_in_rank_order(world_size):
    """Rank r's are the r-th block, unpadded. Sources: sgl-project/sglang 32858, 34161; vllm-project/vllm 44573."""
    run_ranks(gather_on_rank, world_size, (world_size,))


@poisoned_allocations()
def gather_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    assert (comm.size_of(group), comm.rank_in(group)) == (world_size, rank)
    for tokens, heads, dtype in [
        (3, 2, torch.bfloat16),
        (1, 1, torch.float32),
        (0, 2, torch.float32),
        (2, 3, torch.float64),
    ]:
        whole = torch.arange(tokens * world_size * heads * 4).view(tokens, world_size * heads, 4).to(dtype)
        own = whole[:, rank * heads : (rank + 1) * heads]
        assert_bitwise_equal(comm.gather_heads(own, group), whole)
    # Any shape, any dtype, views too.
    bytes_of = torch.arange(256, dtype=torch.uint8).view(16, 16).T[:, 2 * rank : 2 * rank + 2]
    gathered = comm.all_gather(bytes_of, group)
    for other in range(world_size):
        assert_bitwise_equal(
            gathered[other], torch.arange(256, dtype=torch.uint8).view(16, 16).T[:, 2 * other : 2 * other + 2]
        )
    assert comm.all_gather(torch.tensor(rank), group).tolist() == list(range(world_size))
    assert comm.all_reduce(torch.tensor([float(rank)]), group).tolist() == [sum(range(world_size))]
    assert comm.broadcast(torch.tensor([rank + 5]), group).tolist() == [5]
    # Part n goes to rank n, whatever its shape and dtype, and from a view.
    parts = torch.arange(world_size * 6).view(6, world_size).T.to(torch.uint8) + 10 * rank
    received = comm.exchange(parts, group)
    for other in range(world_size):
        assert_bitwise_equal(received[other], torch.arange(world_size * 6).view(6, -1)[:, rank].byte() + 10 * other)
    assert comm.exchange(parts[:, :0], group).shape == (world_size, 0)
    comm.barrier()


def test_groups_of_a_larger_world_are_apart():
    run_ranks(gather_in_groups, 4)


@poisoned_allocations()
def gather_in_groups(rank, _send):
    pairs = comm.contiguous_group(2)
    assert comm.all_gather(torch.tensor(rank), pairs).tolist() == ([0, 1] if rank < 2 else [2, 3])
    assert comm.broadcast(torch.tensor([rank]), pairs).tolist() == [rank // 2 * 2]
    assert comm.contiguous_group(1) is None
    taken = comm.exchange_heads_for_rows(torch.full((2, 1, 4), float(rank)), [2, 0], pairs)
    assert taken[:, :, 0].tolist() == [[[0.0, 1.0], [2.0, 3.0]][rank // 2]] * 2 * (rank % 2 == 0)
    out, lse = torch.full((1, 2, 4), float(rank)), torch.zeros(1, 2)
    for backend in COMM_BACKENDS:
        merged = comm.merge_heads(out, lse, pairs, backend)
        assert_close(merged, torch.full((1, 1, 4), 0.5 if rank < 2 else 2.5), rms=1e-6, label=backend)


# Rows of each rank of a group, by its size: ragged, and ranks without any.
COUNTS = {2: [(3, 2), (0, 4), (1, 0), (0, 0)], 3: [(2, 2, 1), (0, 3, 0), (0, 0, 0)], 4: [(5, 0, 1, 2), (0, 0, 0, 1)]}
COUNTS[8] = [(2, 2, 2, 2, 2, 1, 1, 1), (1, 0, 0, 0, 0, 0, 0, 0), (0, 3, 0, 1, 0, 0, 7, 0), (0,) * 8]


@pytest.mark.parametrize("world_size", [*WORLDS, pytest.param(8, id="dcp8")])
def test_heads_are_exchanged_for_rows_and_back(world_size):
    """Each value arrives where it belongs and nowhere else, in any dtype, also where some or all ranks have no row."""
    run_ranks(exchange_on_rank, world_size, (world_size,))


@poisoned_allocations()
def exchange_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    for counts in map(list, COUNTS[world_size]):
        rows, first = sum(counts), sum(counts[:rank])
        mine = slice(first, first + counts[rank])
        for heads, dtype in [(1, torch.float64), (3, torch.bfloat16), (2, torch.float32), (2, torch.uint8)]:
            label = f"{counts} {dtype} of {heads} heads"
            # Every (row, head, value) is another byte, as far as bytes go.
            whole = (torch.arange(rows * world_size * heads * 2) % 251).view(rows, world_size * heads, 2).to(dtype)
            own = whole[:, rank * heads : (rank + 1) * heads]
            taken = comm.exchange_heads_for_rows(own, counts, group)
            assert_bitwise_equal(taken, whole[mine], label)
            # A view, as attention returns one.
            padded = torch.cat([taken, taken], dim=1)[:, : world_size * heads]
            assert_bitwise_equal(comm.exchange_rows_for_heads(padded, counts, group), own, label)


def test_exchanges_refuse_counts_that_are_not_of_the_rows():
    """Before anything is sent: a rank that sent less than its peer waits for would hang both."""
    run_ranks(exchange_wrong_counts_on_rank, 2)


@poisoned_allocations()
def exchange_wrong_counts_on_rank(_rank, _send):
    group = comm.contiguous_group(2)
    for counts in ([3], [1, 1, 1], [4, -1]):
        for exchange in (comm.exchange_heads_for_rows, comm.exchange_rows_for_heads):
            with pytest.raises(ValueError, match=r"^counts must be of 2 ranks, each 0 or more, got \["):
                exchange(torch.zeros(3, 2, 4), counts, group)
    with pytest.raises(ValueError, match=r"^q must have the 4 rows of counts, got 3$"):
        comm.exchange_heads_for_rows(torch.zeros(3, 1, 4), [2, 2], group)
    with pytest.raises(ValueError, match=r"^out must have this rank's 2 rows, got 3$"):
        comm.exchange_rows_for_heads(torch.zeros(3, 2, 4), [2, 2], group)


@pytest.mark.parametrize("world_size", [*WORLDS, pytest.param(8, id="dcp8")])
def test_both_merges_give_what_one_process_merges(world_size):
    """With a third of the partials empty, spelled -inf, +inf or NaN over NaN outputs, per token and head.

    Sources: vllm-project/vllm 38416, 46076, 49054; flashinfer-ai/flashinfer 4975, 4452; Dao-AILab/flash-attention 2573;
    sgl-project/sglang 37487.
    """
    run_ranks(merge_on_rank, world_size, (world_size,))


@poisoned_allocations()
def merge_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    for dtype, tolerance in TOLERANCE.items():
        for tokens, heads, dim in [(5, 1, 512), (3, 3, 16), (1, 2, 512)]:
            out, lse = draw_partials(world_size, tokens, heads * world_size, dim, dtype, seed=tokens)
            own = slice(rank * heads, (rank + 1) * heads)
            expected = merge_dense(out, lse)[:, own]
            for backend in COMM_BACKENDS:
                label = f"{backend} {dtype} T={tokens}"
                sent = out[rank].clone(), lse[rank].clone()
                merged = comm.merge_heads(*sent, group, backend)
                assert merged.dtype == dtype, label
                assert_close(merged, expected, rms=tolerance, label=label)
                # Nothing of what is merged is overwritten: the caller may still hold it.
                assert_bitwise_equal(sent[0], out[rank], label)
                assert_bitwise_equal(sent[1], lse[rank], label)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_nobody_holds_is_zero_and_an_empty_step_is_empty(world_size):
    """Never NaN, however each rank spells "empty". Sources: vllm-project/vllm 49054, vllm-project/vllm 46076."""
    run_ranks(merge_nothing_on_rank, world_size, (world_size,))


@poisoned_allocations()
def merge_nothing_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    for backend in COMM_BACKENDS:
        for dtype in TOLERANCE:
            acc = torch.float64 if dtype == torch.float64 else torch.float32
            zeros = torch.zeros(3, 2, 8, dtype=dtype)
            for first in range(len(MARKERS)):
                marker = MARKERS[(first + rank) % len(MARKERS)]
                for content in (math.nan, math.inf, -math.inf):
                    out = torch.full((3, 2 * world_size, 8), content, dtype=dtype)
                    lse = torch.full((3, 2 * world_size), marker, dtype=acc)
                    assert_bitwise_equal(comm.merge_heads(out, lse, group, backend), zeros, f"{backend} {marker}")
            none = comm.merge_heads(
                zeros.repeat(1, world_size, 1)[:0], torch.zeros(0, 2 * world_size, dtype=acc), group, backend
            )
            assert none.shape == (0, 2, 8)
            assert none.dtype == dtype


@pytest.mark.parametrize("world_size", WORLDS)
def test_one_holder_among_empty_ranks_is_returned_as_it_is(world_size):
    """The neutral element is neutral: what one rank alone holds is not rescaled, up to one rounding."""
    run_ranks(merge_one_holder_on_rank, world_size, (world_size,))


@poisoned_allocations()
def merge_one_holder_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    whole = torch.randn(world_size, world_size, 8, generator=torch.Generator().manual_seed(3))
    for backend in COMM_BACKENDS:
        # Token t is held by rank t alone.
        out = torch.full_like(whole, math.nan)
        lse = torch.full((world_size, world_size), MARKERS[rank % 3])
        out[rank], lse[rank] = whole[rank], 7.0
        merged = comm.merge_heads(out, lse, group, backend)
        assert_close(merged, whole[:, rank : rank + 1], rms=1e-6, label=backend)


@pytest.mark.parametrize("world_size", WORLDS)
def test_lse_of_any_magnitude_neither_overflows_nor_vanishes(world_size):
    """Source: vllm-project/vllm 49054 (differences of large values, not the values, are exponentiated)."""
    run_ranks(merge_extremes_on_rank, world_size, (world_size,))


@poisoned_allocations()
def merge_extremes_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    generator = torch.Generator().manual_seed(5)
    out = torch.randn(world_size, 4, world_size, 8, generator=generator)
    spread = torch.randn(world_size, 4, world_size, generator=generator)
    # Large, small, one rank far below the others, and ranks that differ by more than float32's exponents hold.
    base = torch.tensor([8192.0, -8192.0, 0.0, 0.0]).view(4, 1)
    lse = base + spread
    lse[:, 3] = 200.0 * torch.arange(world_size).view(-1, 1)
    lse[-1, 2] = -1e30
    expected = merge_dense(out, lse)[:, rank : rank + 1]
    for backend in COMM_BACKENDS:
        # float32 holds an lse of 8192 to 5e-4.
        assert_close(comm.merge_heads(out[rank], lse[rank], group, backend), expected, rms=2e-3, label=backend)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("backend", [pytest.param(backend, id=backend) for backend in COMM_BACKENDS])
def test_an_lse_of_base_2_does_not_pass_for_a_natural_one(world_size, backend):
    """The checks above would notice it. Sources: sgl-project/sglang 40903, vllm-project/vllm 52796."""
    with pytest.raises(RankError, match=r"AssertionError: base 2: vector \d+ of \d+ differs by 0\.\d+ relative RMS"):
        run_ranks(merge_base_2_on_rank, world_size, (world_size, backend))


@poisoned_allocations()
def merge_base_2_on_rank(rank, _send, world_size, backend):
    group = comm.contiguous_group(world_size)
    generator = torch.Generator().manual_seed(5)
    out = torch.randn(world_size, 3, world_size, 64, generator=generator)
    lse = 4 * torch.randn(world_size, 3, world_size, generator=generator)
    merged = comm.merge_heads(out[rank], lse[rank] * math.log2(math.e), group, backend)
    assert_close(merged, merge_dense(out, lse)[:, rank : rank + 1], rms=1e-2, label="base 2")
