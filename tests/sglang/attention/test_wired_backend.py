"""Servers with a wire: TP-DCP and CP-DCP steps on real pools, the wire relayed between ranks that run in turn.

What a wire carries on GPUs: tests/kernels/test_peer_exchange.py, tests/distributed/test_wire_on_gpus.py.
"""

import logging
from types import SimpleNamespace

import pytest
import torch

from nsa_dcp_kernels import attend_sparse, peer_reference
from tests.sglang import cp_simulation as simulation
from tests.sglang.attention import test_backend as tensor_parallel
from tests.sglang.attention.test_cp_decode import STEPS, assert_right, step_rank

pytestmark = pytest.mark.sglang

make_cp_runner, make_cp_backend = simulation.make_cp_runner, simulation.make_cp_backend
make_backend = tensor_parallel.make_backend
HEADS, LAYER = tensor_parallel.HEADS, tensor_parallel.LAYER


class RelayedWire:
    """A wire by its definition, over a relayed group whose calls are recorded under other names."""

    def __init__(self, group, most, used):
        self.group, self.most, self.used = group, most, used

    def takes_queries(self, q):
        return q.shape[0] <= self.most

    def takes_partials(self, pieces):
        return sum(out.shape[0] for out, _ in pieces) <= self.most

    def gather_heads(self, q):
        self.used.append("queries")
        return self.group.all_gather(q.contiguous(), dim=1)

    def merge_heads(self, pieces):
        self.used.append("partials")
        (out, lse) = pieces[0]
        outs = self.group.all_gather(out.contiguous(), dim=0).chunk(self.group.world_size)
        lses = self.group.all_gather(lse.contiguous(), dim=0).chunk(self.group.world_size)
        return peer_reference.exchange_partials([[pair] for pair in zip(outs, lses)], self.group.rank_in_group)[0]


@pytest.fixture
def make_wired(make_backend):
    """A function that makes one rank's backend over a wire that takes steps of up to `most` rows."""
    from nsa_dcp.sglang_plugin.attention.wired_backend import WiredSparseAttnBackend

    def build(group, most, used, kv_format="fp8"):
        backend = make_backend(group.world_size, group.rank_in_group, kv_format)
        backend.__class__ = WiredSparseAttnBackend
        backend._start(group, "a2a", RelayedWire(group, most, used))
        return backend

    return build


def attend(backend, mode, heads, problem):
    slots, k_nope, k_rope, q, selection = problem
    forward = backend.forward_decode if mode == "DECODE" else backend.forward_extend
    own = slice(backend.dcp_rank * heads, (backend.dcp_rank + 1) * heads)
    # The views of a projection that lies by head.
    q_nope, q_rope = q[:, own].transpose(0, 1).contiguous().transpose(0, 1).split([512, 64], dim=-1)
    out = forward(
        q_nope,
        k_nope.unsqueeze(1),
        k_nope.unsqueeze(1),
        tensor_parallel.layer(LAYER, heads),
        tensor_parallel.batch(mode, slots),
        q_rope=q_rope,
        k_rope=k_rope.unsqueeze(1),
        topk_indices=selection.clone(),
    )
    return out.view(-1, heads, 512)


@pytest.mark.parametrize(
    ("mode", "kv_format"),
    [("DECODE", "fp8"), ("EXTEND", "bfloat16"), ("TARGET_VERIFY", "fp8")],
    ids=lambda value: value,
)
@pytest.mark.parametrize(("dcp_size", "most"), [(2, 5), (4, 5), (2, 4)], ids=["dcp2", "dcp4", "larger-than-taken"])
def test_a_ranks_heads_come_back_complete(make_wired, dcp_size, most, mode, kv_format):
    """Over all tokens; and a step that the wire does not take goes over collectives, to the same end."""
    problem = tensor_parallel.problem(dcp_size, 5)
    slots, k_nope, k_rope, q, selection = problem
    whole = torch.full((int(slots.max()) + 1, 576), float("nan"))
    whole[slots] = torch.cat([k_nope, k_rope], dim=-1).float()
    expected = attend_sparse(q.float(), whole, selection, None, tensor_parallel.SM_SCALE)[0]
    heads, relayed, used = HEADS // dcp_size, simulation.RelayedGroup(dcp_size), []
    for _ in range(5):
        outs, used = [], []
        for rank in range(dcp_size):
            backend = make_wired(relayed.rank(rank), most, used, kv_format)
            backend.token_to_kv_pool.kv_buffer[LAYER].view(torch.uint8).fill_(0xFF)
            outs.append(attend(backend, mode, heads, problem))
    for rank, out in enumerate(outs):
        own = slice(rank * heads, (rank + 1) * heads)
        assert torch.allclose(out.float(), expected[:, own], atol=0.02, rtol=0.01)
        assert not out[1].any()
    assert used == ([] if most < 5 else ["queries", "partials"] * dcp_size)


def test_a_layer_with_other_heads_than_the_ranks_is_refused(make_wired):
    backend = make_wired(simulation.RelayedGroup(2).rank(0), 8, [])
    layer = tensor_parallel.layer(LAYER, HEADS)
    cache = backend.token_to_kv_pool.get_key_buffer(LAYER)
    with pytest.raises(RuntimeError, match="layer 1 attends with 4 heads where a rank has 2"):
        backend._forward_flashmla_kv(torch.zeros(1, HEADS, 576), cache, 512, 0.1, layer, object(), None)


@pytest.mark.parametrize("sliced", [True, False], ids=["sliced", "all-heads"])
@pytest.mark.parametrize("step", STEPS)
def test_context_parallel_steps_go_over_the_wire(make_cp_backend, step, sliced):
    prefixes, extends, mode = STEPS[step]
    batch = simulation.CpBatch(4, prefixes, extends, mode=mode)
    relayed = simulation.RelayedGroup(4)
    for _ in range(5):
        results, used = [], []
        for rank in range(4):
            backend = make_cp_backend(relayed.rank(rank))
            backend._wire = RelayedWire(backend._group, 64, used)
            results.append(step_rank(backend, batch, sliced))
    assert_right(batch, results)
    assert used == (["queries", "partials"] if sliced else ["partials", "queries"]) * 4


@pytest.fixture(autouse=True)
def _lengths_on_a_cpu(monkeypatch):
    """A verify step's lengths, which sglang expands in a kernel."""
    from sglang.srt.layers.attention import dsa_backend

    def expand(extend_seq_lens, seq_lens, total_len, max_q_len):
        rows = [torch.arange(length - extend + 1, length + 1) for extend, length in zip(extend_seq_lens, seq_lens)]
        return torch.cat(rows).to(torch.int32)

    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", expand)


def test_without_the_variable_there_is_no_wire(monkeypatch):
    from nsa_dcp.sglang_plugin.startup import server_wire

    monkeypatch.delenv("NSA_DCP_WIRE", raising=False)
    monkeypatch.setattr(server_wire, "open_wire", pytest.fail)
    assert server_wire.open_server_wire(None, None) is None


def parallel(**changed):
    group = SimpleNamespace(device_group="the group")
    return SimpleNamespace(**{"dcp_replicate_q_proj": False, "dcp_group": group} | changed)


@pytest.fixture
def asked(monkeypatch):
    """NSA_DCP_WIRE=peer, and what `open_wire` was asked for."""
    from nsa_dcp.sglang_plugin.startup import server_wire

    calls = []
    monkeypatch.setenv("NSA_DCP_WIRE", "peer")
    monkeypatch.setattr(server_wire, "open_wire", lambda *given: calls.append(given) or "no peer memory here")
    monkeypatch.setattr(server_wire, "read_shape", lambda *_: SimpleNamespace(gathered_heads=64))
    monkeypatch.setattr(server_wire, "read_sizes", lambda *_: SimpleNamespace(requests=40, rows_per_request=4))
    monkeypatch.setattr(server_wire, "captured_requests", lambda *_: 32)
    return calls


def test_where_there_is_no_peer_memory_a_line_says_why_and_collectives_serve(asked, caplog):
    from nsa_dcp.sglang_plugin.startup.server_wire import end_server, open_server_wire
    from nsa_dcp.wire import WireLoad

    with caplog.at_level(logging.WARNING):
        assert open_server_wire(SimpleNamespace(device="cuda", gpu_id=3), parallel()) is None
    assert caplog.messages == [
        "nsa-dcp: NSA_DCP_WIRE=peer, but this server exchanges through NCCL: no peer memory here"
    ]
    # Sized for the largest captured step, drafts included.
    assert asked == [("the group", torch.device("cuda", 3), WireLoad(128, 64), end_server)]


def test_query_projections_for_all_ranks_heads_are_refused(asked):
    from nsa_dcp.sglang_plugin.startup.server_wire import open_server_wire

    with pytest.raises(RuntimeError, match="query projections that are not gathered, found --dcp-replicate-q-proj"):
        open_server_wire(SimpleNamespace(device="cuda", gpu_id=0), parallel(dcp_replicate_q_proj=True))
    assert not asked


def test_a_fault_ends_the_server_as_a_failed_scheduler_does(monkeypatch, caplog):
    from nsa_dcp.sglang_plugin.startup import server_wire

    done = []
    monkeypatch.setattr(server_wire.os, "kill", lambda *given: done.append(given))
    monkeypatch.setattr(server_wire.os, "_exit", done.append)
    with caplog.at_level(logging.ERROR):
        server_wire.end_server("what happened")
    assert done == [(server_wire.os.getppid(), server_wire.signal.SIGQUIT), server_wire.FAULT_EXIT_CODE]
    assert caplog.messages == ["what happened"]
