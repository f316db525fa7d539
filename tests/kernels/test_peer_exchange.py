"""Exchanges over peer memory: the kernels, interpreted by several processes at once, against their definitions.

On GPUs: tests/distributed/test_wire_on_gpus.py. The protocol alone, in every interleaving: test_peer_protocol.py.
"""

import math
import random
import time

import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close, assert_lse_close
from nsa_dcp.testing.cases import draw_partials
from nsa_dcp_kernels import peer_reference
from nsa_dcp_kernels.peer_exchange import (
    exchange_partials,
    gather_heads_from_peers,
    gather_rows_from_peers,
    holds_partials,
    holds_rows,
)
from nsa_dcp_kernels.peer_memory import (
    PeerChannels,
    describe_fault,
    memory_bytes,
    partial_unit,
    row_unit,
    slot_bytes,
)
from tests.kernels.peer_processes import run_peers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")

CHANNELS = 3


def kernels():
    """What the public functions launch on a GPU."""
    from nsa_dcp_kernels._triton import peer_exchange

    return peer_exchange


def slot_for(num_ranks, tokens, heads, dim, width, itemsize=4):
    units = [
        partial_unit(tokens, heads, dim, itemsize, num_ranks),
        row_unit(tokens, heads * dim),
        row_unit(tokens, width),
    ]
    return slot_bytes(units, CHANNELS)


@pytest.mark.parametrize(("num_ranks", "rounds"), [(2, 12), (3, 8), (4, 5), (8, 2)])
def test_mixed_exchanges_of_ranks_that_dawdle_give_what_is_defined(num_ranks, rounds):
    """Kinds, rows and grids change from one launch to the next; a third of the partials are empty, NaN underneath."""
    heads, dim, width, most = 3, 24, 37, 4

    def body(channels):
        launch, draw, own = kernels(), random.Random(7), random.Random(channels.rank)
        for step in range(rounds):
            torch.manual_seed(step)
            tokens, base_2, kinds = draw.randint(1, most), draw.random() < 0.5, draw.sample(range(3), 3)
            for kind in kinds:
                time.sleep(own.choice([0, 0, 0.01]))
                if kind == 0:
                    outs, lses = draw_partials(num_ranks, tokens, heads * num_ranks, dim, seed=step)
                    cut = draw.randint(0, tokens)
                    ranks = [
                        [(out[:cut], lse[:cut]), (out[cut:], lse[cut:])] if cut else [(out, lse)]
                        for out, lse in zip(outs, lses)
                    ]
                    merged, total = launch.exchange_partials(ranks[channels.rank], channels, base_2)
                    expected = peer_reference.exchange_partials(ranks, channels.rank, base_2)
                    assert_close(merged, expected[0], rms=1e-6)
                    assert_lse_close(total, expected[1], atol=4e-6)
                elif kind == 1:
                    queries = [torch.randn(tokens, heads, dim) for _ in range(num_ranks)]
                    expected = peer_reference.gather_heads(queries)
                    assert_bitwise_equal(launch.gather_heads(queries[channels.rank], channels), expected)
                else:
                    rows = [torch.randint(-1, 2**31 - 1, (tokens, width), dtype=torch.int32) for _ in range(num_ranks)]
                    expected = peer_reference.gather_rows(rows)
                    assert_bitwise_equal(launch.gather_rows(rows[channels.rank], channels), expected)
                assert describe_fault(int(channels.fault)) is None

    run_peers(body, num_ranks, CHANNELS, slot_for(num_ranks, most, heads, dim, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 512), (5, 8), (2, 72)])
def test_merging_is_bit_for_bit_that_of_gathered_partials(dtype, heads, dim):
    """Of three ranks, over queries of which many are empty on some ranks and some on all."""
    num_ranks, tokens = 3, 4

    def body(channels):
        from nsa_dcp_kernels._triton import lse_merge

        out, lse = draw_partials(num_ranks, tokens, heads * num_ranks, dim, dtype)
        lse[:, 1] = torch.tensor([-math.inf, math.inf, math.nan]).view(3, 1)
        own = slice(channels.rank * heads, (channels.rank + 1) * heads)
        expected = lse_merge.merge_partials(out[:, :, own], lse[:, :, own])
        merged, total = kernels().exchange_partials([(out[channels.rank], lse[channels.rank])], channels, False)
        assert_bitwise_equal(merged, expected[0])
        assert_bitwise_equal(total, expected[1])
        assert not merged[1].any() and torch.isneginf(total[1]).all()

    run_peers(body, num_ranks, CHANNELS, slot_for(num_ranks, tokens, heads, dim, 1))


def test_views_are_taken_as_they_are():
    """Real heads of a padded output, log-sum-exps that lie by head, queries that lie by head, every other row."""

    def body(channels):
        torch.manual_seed(1)
        out, lse = torch.randn(2, 3, 8, 32), torch.randn(2, 4, 3)
        views = [[(one[:, :4, :16], sums.T)] for one, sums in zip(out, lse)]
        got = kernels().exchange_partials(views[channels.rank], channels, False)
        expected = peer_reference.exchange_partials(views, channels.rank)
        assert_close(got[0], expected[0], rms=1e-6)
        for dtype in (torch.float32, torch.bfloat16):
            queries = torch.randn(2, 2, 3, 16).to(dtype).transpose(1, 2)
            gathered = kernels().gather_heads(queries[channels.rank], channels)
            assert_bitwise_equal(gathered, peer_reference.gather_heads(list(queries)))
            # No whole words from here: copied first.
            odd = torch.randn(2, 3, 2, 33).to(dtype)[..., 1:]
            assert_bitwise_equal(kernels().gather_heads(odd[channels.rank], channels), torch.cat(list(odd), dim=1))
        rows = torch.arange(2 * 6 * 5, dtype=torch.int32).view(2, 6, 5)[:, ::2]
        assert_bitwise_equal(kernels().gather_rows(rows[channels.rank], channels), torch.cat(list(rows)))

    run_peers(body, 2, CHANNELS, slot_for(2, 3, 2, 32, 5))


@pytest.mark.parametrize("first_epoch", [2**31 - 2, 2**32 - 1, 2**46])
def test_epochs_past_32_bits_go_on(first_epoch):
    def body(channels):
        for step in range(3):
            rows = [torch.full((4, 8), 10 * step + rank, dtype=torch.int32) for rank in range(2)]
            assert_bitwise_equal(kernels().gather_rows(rows[channels.rank], channels), torch.cat(rows))
        assert not channels.fault.item()
        assert channels.epochs[0].tolist() == [first_epoch + 3] * CHANNELS

    run_peers(body, 2, CHANNELS, slot_for(2, 4, 1, 8, 8), first_epoch=first_epoch)


def test_a_rank_that_does_not_come_is_named_and_waited_for_no_longer_than_the_limit():
    def body(channels):
        if channels.rank == 1:
            return
        kernels().gather_rows(torch.zeros(1, 8, dtype=torch.int32), channels)
        told = describe_fault(int(channels.fault))
        assert told == "the selections of rank 1 did not arrive in time (exchange 1 of channel 0)", told

    run_peers(body, 3, CHANNELS, slot_for(3, 1, 1, 8, 8), wait_limit=20)


@pytest.mark.parametrize("other", ["rows", "kind"])
def test_ranks_that_exchange_different_things_fail_rather_than_use_them(other):
    def body(channels):
        if channels.rank == 0 or other == "rows":
            kernels().gather_rows(torch.zeros(1 + channels.rank, 8, dtype=torch.int32), channels)
        else:
            kernels().gather_heads(torch.zeros(1, 1, 8), channels)
        told = describe_fault(int(channels.fault))
        kind = "selections" if channels.rank == 0 or other == "rows" else "queries"
        assert told and told.startswith(f"the {kind} of rank {1 - channels.rank} are not what this rank exchanges"), (
            told
        )

    # One of two rows' programs has no partner.
    run_peers(body, 2, CHANNELS, slot_for(2, 2, 1, 8, 8), wait_limit=2000)


def test_nothing_to_exchange_launches_nothing():
    def body(channels):
        launch = kernels()
        merged, total = launch.exchange_partials([(torch.zeros(0, 4, 8), torch.zeros(0, 4))], channels, False)
        assert merged.shape == (0, 2, 8) and total.shape == (0, 2)
        assert launch.gather_heads(torch.zeros(0, 2, 8), channels).shape == (0, 4, 8)
        assert launch.gather_rows(torch.zeros(0, 5, dtype=torch.int32), channels).shape == (0, 5)
        assert not channels.epochs.any()

    run_peers(body, 2, CHANNELS, 128)


def test_the_definition_in_base_2_is_softmax_over_the_union():
    """Against attention over all tokens at once, by its textbook formula."""
    scores, values = torch.randn(2, 4, 9, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    ranks = []
    for part in torch.randperm(9).split([4, 5]):
        weight = scores[..., part].exp()
        ranks.append([(weight @ values[part] / weight.sum(-1, keepdim=True), weight.sum(-1).log2())])
    merged, total = zip(*(peer_reference.exchange_partials(ranks, rank, base_2=True) for rank in range(2)))
    weight = scores.exp()
    assert_close(torch.cat(merged, dim=1), weight @ values / weight.sum(-1, keepdim=True), rms=1e-13)
    assert_lse_close(torch.cat(total, dim=1), weight.sum(-1).log2(), atol=1e-12)


def channels_of(num_ranks=2, count=CHANNELS, size=128, **changed):
    facts = {
        "addresses": torch.zeros(num_ranks + 1, dtype=torch.int64),
        "epochs": torch.zeros(2, count, dtype=torch.int64),
        "fault": torch.zeros(1, dtype=torch.int64),
        "rank": 0,
        "count": count,
        "bytes": size,
        "wait_limit": 1,
    }
    return PeerChannels(**facts | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_ranks": 1}, "addresses must be of 2 to 8 ranks, got 1"),
        ({"num_ranks": 9}, "addresses must be of 2 to 8 ranks, got 9"),
        ({"rank": 2}, r"rank must be in \[0, 2\), got 2"),
        ({"size": 130}, "bytes must be a multiple of 128, got 130"),
        ({"count": 1 << 16}, r"count must be in \[1, 65536\), got 65536"),
        ({"epochs": torch.zeros(1, 3, dtype=torch.int64)}, r"epochs must have shape \[2, 3\], got \[1, 3\]"),
    ],
    ids=str,
)
def test_channels_that_could_not_be_used_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        channels_of(**changed)


def test_a_cpus_tensors_are_refused():
    """Without GPUs ranks exchange by collectives (nsa_dcp.comm); nothing here would wait for anybody."""
    channels = channels_of(size=1 << 20)
    for call in (
        lambda: exchange_partials([(torch.zeros(1, 4, 8), torch.zeros(1, 4))], channels),
        lambda: gather_heads_from_peers(torch.zeros(1, 2, 8), channels),
        lambda: gather_rows_from_peers(torch.zeros(1, 8, dtype=torch.int32), channels),
    ):
        with pytest.raises(ValueError, match="tensors must be on a GPU, the channels' cpu, got cpu"):
            call()


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 3, 132, 256])
def test_a_slot_made_for_the_largest_exchange_holds_every_smaller_one(num_ranks, count):
    """Fewer rows are cut into other units: none of them may need more."""
    heads, rows, words = 64 // num_ranks, 256, 64 // num_ranks * 288
    largest = [partial_unit(rows, heads, 512, 2, num_ranks), row_unit(rows, words), row_unit(rows, 2048)]
    channels = channels_of(num_ranks, count, slot_bytes(largest, count))
    for tokens in range(rows + 1):
        assert holds_partials(channels, tokens, heads * num_ranks, 512, torch.bfloat16), tokens
        assert holds_rows(channels, tokens, words) and holds_rows(channels, tokens, 2048), tokens
    assert not holds_rows(channels, 8 * rows + count, words)


def test_memory_is_flags_and_two_slots_for_each_source():
    assert memory_bytes(2, 3, 256) == 128 + 2 * 2 * 3 * 256
    assert memory_bytes(8, 256, 0) == 8 * 256 * 8


def test_no_fault_says_nothing():
    assert describe_fault(0) is None
