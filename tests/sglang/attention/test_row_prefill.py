"""TP-DCP prefill by rows through sglang's own metadata and pools: each rank in turn, its heads of all rows complete."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch

from nsa_dcp.planning.prefill_ways import LayerSizes, PrefillRule, block_of_rows
from tests.sglang import cp_simulation as simulation

pytestmark = pytest.mark.sglang

make_cp_runner = simulation.make_cp_runner
HEADS, TOPK = simulation.HEADS, simulation.TOPK
# (tokens of each request before the chunk, and in it). A page of the allocator is 64 * dcp_size tokens.
MIXES = {
    "one-request": ([0], [37]),
    "prefixes": ([130, 0, 64, 257], [19, 40, 17, 64]),
    "one-token-requests-among-long-ones": ([0, 300, 1, 63, 200], [1, 40, 1, 1, 33]),
    "fewer-rows-than-ranks": ([100], [3]),
    "one-row": ([70], [1]),
}


@pytest.fixture
def make_backend(make_cp_runner):
    """A function that builds one rank's backend and the layers that it tells."""
    from nsa_dcp.sglang_plugin import patches
    from nsa_dcp.sglang_plugin.attention.row_backend import RowPrefillBackend

    def build(group, way="rows", kv_format="fp8", buffer_pages=64, least_rows=1, rows=640):
        runner = make_cp_runner(group, kv_format=kv_format, context_parallel=False, rows=rows)
        sizes = LayerSizes(
            dcp_size=group.world_size,
            heads=HEADS // group.world_size,
            row_bytes=656,
            topk=TOPK,
            layers=4,
            selecting_layers=2,
        )
        layers = [SimpleNamespace(dcp_size=group.world_size) for _ in range(3)]
        rule = PrefillRule(sizes, way, least_rows=least_rows)
        tell = functools.partial(patches.tell_layers_of_dcp, layers)
        return RowPrefillBackend(runner, group, tell, rule, buffer_pages), layers

    return build


def start(backend, batch, mode=None):
    """The forward's metadata, as the runner has them made."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend.req_to_token_pool.req_to_token = batch.req_to_token()
    forward = batch.make_forward()
    if mode is not None:
        forward.forward_mode = ForwardMode[mode]
    backend.init_forward_metadata(forward)
    return forward


def write_prefixes(backend, batch, layers):
    prefix = torch.cat([slots[:length] for slots, length in zip(batch.slots, batch.prefixes)])
    latents = batch.latents[prefix].unsqueeze(1)
    for layer_id in layers if len(prefix) else ():
        backend.token_to_kv_pool.set_mla_kv_buffer(
            simulation.layer(1, layer_id), prefix, latents[..., :512], latents[..., 512:]
        )


def attend(backend, forward, batch, heads, selection, layer_id):
    """[T, H, 512] of some heads in one layer, through sglang's `forward_extend`."""
    chunk = batch.latents[batch.chunk].unsqueeze(1)
    q = batch.q[:, heads]
    return backend.forward_extend(
        q[..., :512].clone(),
        chunk[..., :512],
        chunk[..., :512],
        simulation.layer(q.shape[1], layer_id),
        forward,
        q_rope=q[..., 512:].clone(),
        k_rope=chunk[..., 512:],
        topk_indices=selection,
    )


def run_rank(build, batch, layers, **settings):
    """One rank's heads of every row in each layer; its selection is of its own rows alone."""
    backend, told = build(**settings)
    write_prefixes(backend, batch, layers)
    forward = start(backend, batch)
    assert [layer.dcp_size for layer in told] == [1, 1, 1]
    size, rank, rows = backend.dcp_size, backend.dcp_rank, len(batch.q)
    assert backend.count_rows(backend.forward_metadata) == rows
    selection = torch.full_like(batch.selection, -1)
    own = slice(*block_of_rows(rows, size, rank))
    selection[own] = batch.selection[own]
    local = HEADS // size
    heads = slice(rank * local, (rank + 1) * local)
    return [attend(backend, forward, batch, heads, selection, layer).view(rows, local, 512) for layer in layers], heads


def run_ranks(make_backend, batch, layers=(simulation.LAYER,), **settings):
    relayed, rounds = simulation.RelayedGroup(batch.cp_size), None
    while rounds is None or relayed.rounds < rounds:
        relayed.rounds += 1
        results = [
            run_rank(functools.partial(make_backend, relayed.rank(rank)), batch, layers, **settings)
            for rank in range(batch.cp_size)
        ]
        rounds = len(relayed.sent[0]) + 1
    return results, relayed


def assert_right(batch, results):
    expected = batch.expected()
    for outs, heads in results:
        for out in outs:
            assert torch.allclose(out.float(), expected[:, heads], atol=0.02, rtol=0.01)


@pytest.mark.parametrize("kv_format", ["fp8", "bfloat16"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dcp_size", [2, 4])
def test_a_ranks_heads_are_attention_over_all_tokens(make_backend, dcp_size, mix, kv_format):
    """Also where a rank has no row: it joins, and lends its pages."""
    batch = simulation.CpBatch(dcp_size, *MIXES[mix])
    results, relayed = run_ranks(make_backend, batch, kv_format=kv_format)
    assert_right(batch, results)
    kinds = [kind for kind, _ in relayed.sent[0]]
    assert kinds == ["all_to_all", "all_gather", "all_to_all"]
    assert all([kind for kind, _ in relayed.sent[rank]] == kinds for rank in range(dcp_size))


def test_eight_ranks_of_which_some_have_no_row(make_backend):
    batch = simulation.CpBatch(8, [0, 511], [1, 8])
    results, _ = run_ranks(make_backend, batch)
    assert_right(batch, results)


def test_a_mixed_batch_goes_by_rows_too(make_backend):
    batch = simulation.CpBatch(2, [300, 64, 129], [1, 30, 1], mode="MIXED")
    results, _ = run_ranks(make_backend, batch)
    assert_right(batch, results)


@pytest.mark.parametrize(("pages", "gathers"), [(1, 7), (3, 3), (7, 1)])
def test_pages_that_the_buffer_does_not_hold_are_gathered_in_parts(make_backend, pages, gathers):
    batch = simulation.CpBatch(2, *MIXES["prefixes"])
    results, relayed = run_ranks(make_backend, batch, buffer_pages=pages)
    assert_right(batch, results)
    sent = [size for kind, size in relayed.sent[0] if kind == "all_gather"]
    assert len(sent) == gathers and sum(sent) == 7 * 656 * 64 and max(sent) <= pages * 656 * 64


def test_what_travels_is_what_the_way_is_chosen_by(make_backend):
    """Shared pages once; blocks filled up to the largest, since sglang's all-to-all splits evenly."""
    batch = simulation.CpBatch(4, [512, 512, 520], [16, 20, 8], shared_pages=2)
    results, relayed = run_ranks(make_backend, batch)
    assert_right(batch, results)
    sizes = LayerSizes(dcp_size=4, heads=HEADS // 4, row_bytes=656, topk=TOPK, layers=4, selecting_layers=2)
    pages = len({int(slot) // 256 for slots in batch.slots for slot in slots})
    counted = sizes.received_by_rows(44, 11, pages)
    # Of four blocks that a rank sends, three go to others; of the gathered pages three quarters come from others.
    (_, queries), (_, own_pages), (_, outs) = relayed.sent[0]
    assert counted == {"queries": queries * 3 // 4, "pages": own_pages * 3, "results": outs * 3 // 4}


def test_layers_that_share_a_selection_share_its_place_in_the_buffer(make_backend, monkeypatch):
    from nsa_dcp.sglang_plugin.attention import cp_prefill

    made, honest = [], cp_prefill.localize_gathered
    monkeypatch.setattr(cp_prefill, "localize_gathered", lambda *args: made.append(args[0].shape[0]) or honest(*args))
    batch = simulation.CpBatch(2, *MIXES["one-request"])
    results, relayed = run_ranks(make_backend, batch, layers=(0, 1, 2))
    assert_right(batch, results)
    assert made == [19, 18] * relayed.rounds


def test_heads_or_rows_that_were_not_planned_for_are_refused(make_backend):
    """A layer that was not told, and a batch that grew."""
    group = simulation.RelayedGroup(2).rank(0)
    batch = simulation.CpBatch(2, [130, 70], [6, 3])
    backend, _ = make_backend(group)
    write_prefixes(backend, batch, (simulation.LAYER,))
    forward = start(backend, batch)
    with pytest.raises(RuntimeError, match=r"with 8 heads, 9 rows and 9 selections in a prefill by rows of 4"):
        attend(backend, forward, batch, slice(None), batch.selection, simulation.LAYER)
    shorter = dataclasses.replace(batch)
    shorter.q, shorter.chunk = batch.q[:8], batch.chunk[:8]
    forward.out_cache_loc = shorter.chunk
    with pytest.raises(RuntimeError, match=r"4 heads, 8 rows and 8 selections in a prefill by rows of 4 heads and 9"):
        attend(backend, forward, shorter, slice(4), batch.selection[:8], simulation.LAYER)


def test_a_layer_told_one_in_a_forward_by_queries_is_refused(make_backend):
    backend, _ = make_backend(simulation.RelayedGroup(2).rank(0), way="queries")
    batch = simulation.CpBatch(2, [130, 70], [6, 3])
    forward = start(backend, batch)
    with pytest.raises(RuntimeError, match="attends with 4 heads where DCP gathers 8"):
        attend(backend, forward, batch, slice(4), batch.selection, simulation.LAYER)


# --- which forwards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_every_other_phase_is_left_to_sglangs_layers(make_backend, monkeypatch, mode):
    """Also after a prefill by rows, whose layers were told 1."""
    from nsa_dcp.sglang_plugin.attention.backend import DcpDeepseekSparseAttnBackend

    backend, told = make_backend(simulation.RelayedGroup(2).rank(0))
    start(backend, simulation.CpBatch(2, [130, 70], [6, 3]))
    assert {layer.dcp_size for layer in told} == {1}
    # Their metadata need a GPU; what is asked here is the phase.
    plain = SimpleNamespace()
    monkeypatch.setattr(
        DcpDeepseekSparseAttnBackend, "init_forward_metadata", lambda self, _: setattr(self, "forward_metadata", plain)
    )
    start(backend, simulation.CpBatch(2, [130, 70], [1, 1]), mode)
    assert {layer.dcp_size for layer in told} == {2}
    assert backend.count_rows(backend.forward_metadata) is None


def test_a_graph_is_captured_and_replayed_with_layers_that_gather(make_backend, monkeypatch):
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    backend, told = make_backend(simulation.RelayedGroup(2).rank(0))
    start(backend, simulation.CpBatch(2, [130, 70], [6, 3]))
    seen = []
    monkeypatch.setattr(
        DeepseekSparseAttnBackend,
        "init_forward_metadata_out_graph",
        lambda self, forward, in_capture=False: seen.append((in_capture, told[0].dcp_size)),
    )
    backend.init_forward_metadata_out_graph(None, in_capture=True)
    backend.init_forward_metadata_out_graph(None)
    assert seen == [(True, 2), (False, 2)]


def test_an_autotuners_dummy_prefill_goes_by_queries(make_backend, monkeypatch):
    from sglang.srt.layers import logits_processor

    monkeypatch.setattr(logits_processor, "get_in_autotune_dummy_run", lambda: True)
    backend, told = make_backend(simulation.RelayedGroup(2).rank(0))
    start(backend, simulation.CpBatch(2, [130, 70], [6, 3]))
    assert {layer.dcp_size for layer in told} == {2}


@pytest.mark.parametrize(
    ("prefixes", "extends", "by_rows"),
    [([0], [60], True), ([0], [59], False), ([1000], [60], False), ([200, 200], [100, 100], True)],
    ids=["enough-rows", "too-few", "behind-a-long-prefix", "two-requests"],
)
def test_auto_decides_by_the_batch_and_alike_on_every_rank(make_backend, prefixes, extends, by_rows):
    relayed = simulation.RelayedGroup(2)
    batch = simulation.CpBatch(2, prefixes, extends, rows=1280)
    for rank in range(2):
        backend, told = make_backend(relayed.rank(rank), way="auto", least_rows=60, rows=1280)
        start(backend, batch)
        assert {layer.dcp_size for layer in told} == {1 if by_rows else 2}
        assert not relayed.sent[rank], "nothing is asked of other ranks"


def test_auto_counts_pages_that_requests_share_once(make_backend):
    """Four requests behind one prefix of 3 pages: 16 pages by sum, 7 in truth."""
    relayed = simulation.RelayedGroup(2)
    ways = []
    for shared in (3, 0):
        batch = simulation.CpBatch(2, [384] * 4, [30] * 4, shared_pages=shared, rows=1280)
        backend, told = make_backend(relayed.rank(0), way="auto", rows=1280)
        backend._rule = dataclasses.replace(backend._rule, page_weight=(1, 1))
        start(backend, batch)
        ways.append(told[0].dcp_size)
        if shared:
            (part,) = backend.forward_metadata._nsa_dcp_rows.parts
            assert part.pages.shape[0] == 7
    assert ways == [1, 2]
