"""What lives from call to call: nothing of a forward outlives it, and no history makes a stale answer."""

import random
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests.sglang import cp_simulation as simulation
from tests.sglang import decode_metadata as decode

pytestmark = pytest.mark.sglang

make_cp_runner, make_cp_backend = simulation.make_cp_runner, simulation.make_cp_backend


def alive(references):
    """What is still held. Nothing is collected: a cycle would keep a table until the collector comes by."""
    return [type(reference()).__name__ for reference in references if reference() is not None]


# --- TP-DCP: a real pool and sglang's own metadata, eager and captured ------------------------------------------------


@pytest.fixture
def tp_backend(make_rank, monkeypatch):
    """One rank's backend: its pool, and metadata as sglang makes them."""
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.layers.attention.dsa import dsa_indexer, utils
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    from nsa_dcp.sglang_plugin.attention.backend import DcpDeepseekSparseAttnBackend

    rank = make_rank(2, 0, "bfloat16")
    for module in (dsa_backend, dsa_indexer, utils):
        monkeypatch.setattr(
            module, "resolve_paged_mqa_logits_metadata_fn", lambda: lambda lengths, *_: torch.zeros(2, 2)
        )
        monkeypatch.setattr(module, "resolve_num_sms", lambda: 132)
    monkeypatch.setattr(dsa_backend, "is_cuda", lambda: True)
    monkeypatch.setattr(dsa_backend, "get_platform", lambda: SimpleNamespace(is_sm100=False))
    monkeypatch.setattr(DcpDeepseekSparseAttnBackend, "_build_topk_v2_plan", lambda *_: None)
    backend = decode.make_metadata_backend(64, 128, 64, DSATopKBackend.TORCH, True, DcpDeepseekSparseAttnBackend)
    backend.token_to_kv_pool = rank.pool
    backend.dcp_size, backend.dcp_rank, backend.num_q_heads, backend.num_dcp_q_heads = 2, 0, 2, 4
    return backend


def attend(backend, layers, num_rows):
    """One step's layers, which all attend to one selection; returns the selection."""
    selection = torch.arange(num_rows * 64, dtype=torch.int32).view(num_rows, 64) % 128
    kv_cache = backend.token_to_kv_pool.get_key_buffer(0)
    for layer_id in layers:
        backend._forward_flashmla_kv(
            torch.zeros(num_rows, 4, 576, dtype=torch.bfloat16),
            kv_cache,
            512,
            0.1,
            simulation.layer(4, layer_id),
            backend.forward_metadata,
            selection,
        )
    return selection


def watch(backend, selection):
    """Weak references to all of a step: its metadata and their largest table, its selection, what was made of it."""
    metadata = backend.forward_metadata
    prepared = selection._nsa_dcp_prepared[2]
    return [
        weakref.ref(held)
        for held in (metadata, metadata.page_table_1, metadata.real_page_table, selection, prepared, prepared.rows)
        if held is not None
    ]


def step(num_rows):
    return torch.arange(num_rows), torch.full((num_rows,), 100, dtype=torch.int32)


@pytest.mark.parametrize("next_step", ["replay", "idle"])
def test_an_eager_steps_metadata_and_selection_are_gone_when_sglang_drops_them(tp_backend, next_step):
    from nsa_dcp.sglang_plugin.selection.row_split_decode import RankRequests

    share = RankRequests(SimpleNamespace(world_size=2, rank_in_group=1))
    decode.prepare_step(tp_backend, *step(64), capturing=True)
    metadata = decode.prepare_step(tp_backend, *step(64), captured=False)
    for layer_id in (0, 3):
        (narrowed,) = share.narrow(metadata, layer_id, [slice(32, 64)])
    references = watch(tp_backend, attend(tp_backend, (0, 1, 2), 64)) + [weakref.ref(narrowed)]
    assert all(reference() is not None for reference in references[:2])
    del metadata, narrowed
    if next_step == "replay":
        decode.prepare_step(tp_backend, *step(64))
    else:
        # sglang's `_execute_idle` for a batch of no requests.
        tp_backend.forward_metadata = None
    assert alive(references) == []


def test_a_selection_is_gone_with_its_forward_though_its_graphs_metadata_stay(tp_backend):
    decode.prepare_step(tp_backend, *step(64), capturing=True)
    metadata, *rest = watch(tp_backend, attend(tp_backend, (0, 1, 2), 64))
    assert metadata() is tp_backend.forward_metadata
    assert alive(rest[-3:]) == []


# --- CP-DCP -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["interleave", "zigzag"])
def test_a_spread_prefills_metadata_pages_and_selection_are_gone_when_sglang_drops_them(
    make_cp_backend, strategy, monkeypatch
):
    from nsa_dcp.sglang_plugin.attention import cp_backend

    backend = make_cp_backend(simulation.RelayedGroup(2).rank(0), strategy)
    references = []

    def prepare_once(slots, layer_id, metadata, make):
        prepared = prepare(slots, layer_id, metadata, make)
        references.extend(map(weakref.ref, (slots, metadata, metadata.page_table_1, prepared)))
        references.extend(weakref.ref(part) for part in metadata._nsa_dcp_parts)
        return prepared

    prepare = cp_backend.prepare_once
    monkeypatch.setattr(cp_backend, "prepare_once", prepare_once)
    batch = simulation.CpBatch(2, [130, 64], [19, 40])
    simulation.run_rank(backend, batch, layers=(1, 2, 3))
    assert len(references) == 15
    backend.forward_metadata = None
    del batch
    assert alive(references) == []


# --- histories --------------------------------------------------------------------------------------------------------


class Made:
    """What was made, of which forward's selection."""

    def __init__(self, content):
        self.content = content


class Server:
    """A process that runs forwards on `prepare_once` and `RankRequests` as sglang runs them: eager steps on metadata of
    their own; warm-ups, captures and recaptures on a captured size's; some die in a layer. Objects are reused wherever
    sglang may: metadata by size, and selections, in the worst case, all in one tensor.
    """

    def __init__(self, draw, monkeypatch):
        from nsa_dcp.sglang_plugin.selection import row_split_decode

        self.draw = draw
        self.layers = range(draw.choice([0, 5]), 12)
        self.selects = sorted({self.layers[0], *draw.sample(self.layers, draw.randint(0, 6))})
        self.share = row_split_decode.RankRequests(SimpleNamespace(world_size=2, rank_in_group=0))
        self.static = torch.zeros(2, 4, dtype=torch.int32) if draw.random() < 0.5 else None
        self.by_size, self.clock = {}, 0
        monkeypatch.setattr(row_split_decode, "narrow_metadata", lambda metadata, _: Made(metadata.attn_metadata.time))

    def run(self):
        from nsa_dcp.sglang_plugin.attention.backend import prepare_once

        self.clock += 1
        size = self.draw.choice([None, 64, 128])
        if size is None or size not in self.by_size or self.draw.random() < 0.1:
            metadata = SimpleNamespace(attn_metadata=SimpleNamespace(time=0))
            if size is not None:
                self.by_size[size] = metadata
        metadata = metadata if size is None else self.by_size[size]
        metadata.attn_metadata.time = self.clock
        dies_in = self.draw.choice(self.layers) if self.draw.random() < 0.2 else None
        slots = content = None
        for layer_id in self.layers:
            if layer_id in self.selects:
                (narrowed,) = self.share.narrow(metadata, layer_id, [slice(0, 1)])
                assert narrowed.content == self.clock, "narrowed metadata of another forward"
                content = (self.clock, layer_id)
                slots = self.static if self.static is not None else torch.zeros(2, 4, dtype=torch.int32)
            if layer_id == dies_in:
                return
            now = content
            made = prepare_once(slots, layer_id, metadata.attn_metadata, lambda _, now=now: Made(now))
            # In one tensor rewritten in place a later selecting layer of a forward would be taken for the one before:
            # every producer makes a new tensor, so the static one stands for a single selection.
            if self.static is None or layer_id < (self.selects + [99])[1]:
                assert made.content == content, "a selection of another forward, or of another layer"


@pytest.mark.parametrize("seed", range(40))
def test_no_history_of_forwards_makes_a_stale_answer(monkeypatch, seed):
    draw = random.Random(seed)
    for _ in range(10):
        server = Server(draw, monkeypatch)
        for _ in range(draw.randint(2, 30)):
            server.run()


def test_the_histories_would_show_a_selection_that_is_shared_across_forwards(monkeypatch):
    """Sharing by the tensor alone, without the layers' order, is what they catch."""
    from nsa_dcp.sglang_plugin.attention import backend

    def prepare_by_tensor(slots, layer_id, metadata, make):
        if not hasattr(slots, "made"):
            slots.made = make(slots)
        return slots.made

    monkeypatch.setattr(backend, "prepare_once", prepare_by_tensor)
    with pytest.raises(AssertionError, match="a selection of another forward"):
        for seed in range(40):
            test_no_history_of_forwards_makes_a_stale_answer(monkeypatch, seed)
