"""What a wire takes, when there is none, and how a fault ends a process. What travels: tests/kernels, and on GPUs."""

import threading

import pytest
import torch

from nsa_dcp import tp_dcp, wire
from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.transport import chosen_transport
from nsa_dcp.wire import FaultWatch, PeerWire, WireLoad, open_wire
from nsa_dcp_kernels import PeerChannels, localize_selection
from nsa_dcp_kernels.peer_memory import CHANNEL_BITS, EPOCH_BITS, KIND_BITS, KIND_CODES, LATE, RANK_BITS


def make_wire(rows=16, heads=8, topk=64, num_ranks=4, count=5):
    load = WireLoad(rows, heads, topk)
    size = load.bytes_of_slot(num_ranks, count)
    channels = PeerChannels(
        torch.zeros(num_ranks + 1, dtype=torch.int64),
        torch.zeros(2, count, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        0,
        count,
        size,
        1,
    )
    return PeerWire(channels, load.memory_bytes(num_ranks, count))


def partials(rows, heads=8, dtype=torch.bfloat16):
    return torch.zeros(rows, heads, 512, dtype=dtype), torch.zeros(rows, heads)


def test_a_user_chooses_the_transport_and_a_wrong_word_is_refused():
    assert chosen_transport({}) == "nccl"
    assert chosen_transport({"NSA_DCP_WIRE": "peer"}) == "peer"
    with pytest.raises(ValueError, match="NSA_DCP_WIRE must be one of nccl, peer, got 'Peer'"):
        chosen_transport({"NSA_DCP_WIRE": "Peer"})


def test_a_wire_takes_every_step_up_to_its_load_and_leaves_larger_ones():
    """The decision rests on shapes alone, which all ranks have in common."""
    one = make_wire()
    for rows in range(17):
        assert one.takes_queries(torch.zeros(rows, 2, 576, dtype=torch.bfloat16)), rows
        assert one.takes_partials([partials(rows)]), rows
        assert one.takes_rows(torch.zeros(-(-rows // 4), 64, dtype=torch.int32)), rows
    # Cut into pieces as launches return them.
    assert one.takes_partials([partials(8), partials(8)])
    assert not one.takes_partials([partials(4)] * 5)
    assert not one.takes_queries(torch.zeros(200, 2, 576, dtype=torch.bfloat16))
    assert not one.takes_partials([partials(200)])
    assert not one.takes_partials([partials(100), partials(100)])
    assert not one.takes_rows(torch.zeros(400, 64, dtype=torch.int32))


def test_what_it_was_not_sized_for_is_left_to_collectives():
    one = make_wire()
    assert not one.takes_queries(torch.zeros(1, 2, 576))
    assert not one.takes_partials([partials(1, dtype=torch.float32)])
    assert not one.takes_rows(torch.zeros(1, 64, dtype=torch.int64))


def test_the_memory_of_a_node_is_what_was_counted():
    """GLM-5.2 at dcp 8, 256 rows: 64 heads, selections of 2,048. Two slots of queries for each of eight ranks."""
    size = WireLoad(256, 64, 2048).memory_bytes(8, 264)
    queries = 2 * 8 * 256 * 8 * 576 * 2
    assert queries <= size <= 1.2 * queries


def test_ranks_without_gpus_have_none():
    told = open_wire(None, torch.device("cpu"), WireLoad(1, 8), pytest.fail)
    assert told == "ranks without GPUs have no peer memory"


def test_a_single_rank_has_nobody_to_share_a_wire_with():
    told = open_wire(None, torch.device("cuda", 0), WireLoad(1, 8), pytest.fail)
    assert told == "1 ranks of 8 heads do not share a wire of 2 to 8 ranks"


class Recorded:
    """Stands for a wire: takes steps of up to some rows, and returns what one rank alone would have."""

    def __init__(self, most):
        self.most, self.calls = most, []

    def takes_queries(self, q):
        return q.shape[0] <= self.most

    def takes_partials(self, pieces):
        return pieces[0][0].shape[0] <= self.most

    def gather_heads(self, q):
        self.calls.append("gather_heads")
        return q

    def merge_heads(self, pieces):
        self.calls.append("merge_heads")
        return pieces[0][0]


@pytest.mark.parametrize(("rows", "calls"), [(2, ["gather_heads", "merge_heads"]), (3, [])], ids=["taken", "larger"])
def test_attention_goes_over_the_wire_where_it_takes_the_step_and_over_collectives_else(rows, calls):
    q, cache = torch.randn(rows, 2, 576), torch.randn(70, 576)
    selection = localize_selection(torch.randint(-1, 70, (rows, 9), dtype=torch.int32), 1, 0)
    recorded = Recorded(2)
    out = tp_dcp.attend_sharded(q, cache, selection, 0.05, None, "a2a", recorded)
    assert recorded.calls == calls
    assert_bitwise_equal(out, tp_dcp.attend_sharded(q, cache, selection, 0.05, None, "a2a"))


def fault_word(source, channel=3, epoch=9):
    word = (((LATE << KIND_BITS) + KIND_CODES["partials"]) << RANK_BITS) + source
    return (((word << CHANNEL_BITS) + channel) << EPOCH_BITS) + epoch


def test_a_fault_ends_the_process_with_one_sentence(monkeypatch):
    monkeypatch.setattr(wire, "_LOOK_EVERY_S", 0.001)
    fault, said, ended = torch.zeros(1, dtype=torch.int64), [], threading.Event()

    def end(sentence):
        said.append(sentence)
        ended.set()

    watch = FaultWatch(fault, end)
    watch.start()
    assert not said
    fault[0] = fault_word(source=6)
    ended.wait()
    watch.join()
    assert said == [
        "nsa-dcp's exchange over peer memory failed: the partials of rank 6 did not arrive in time "
        "(exchange 9 of channel 3); nothing of this step is answered"
    ]


def test_a_watch_that_is_stopped_says_nothing(monkeypatch):
    monkeypatch.setattr(wire, "_LOOK_EVERY_S", 0.001)
    fault = torch.zeros(1, dtype=torch.int64)
    watch = FaultWatch(fault, pytest.fail)
    watch.start()
    watch.stop()
    watch.join()
    fault[0] = fault_word(source=1)


def test_the_default_end_is_loud_and_final(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(wire.os, "_exit", codes.append)
    wire.end_process("what happened")
    assert codes == [wire.FAULT_EXIT_CODE] and capsys.readouterr().err == "what happened\n"
