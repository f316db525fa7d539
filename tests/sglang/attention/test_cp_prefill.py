"""CP-DCP prefill through sglang's own strategies, metadata and pools: a rank's rows are attention over all tokens."""

import dataclasses
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.sglang_plugin.attention.cp_pages import buffer_bytes, buffer_pages, plan_parts
from tests.sglang import cp_simulation as simulation

pytestmark = pytest.mark.sglang

make_cp_runner, make_cp_backend = simulation.make_cp_runner, simulation.make_cp_backend

# (tokens of each request before the chunk, and in it). A page of the allocator is 64 * cp_size tokens.
MIXES = {
    "one-request": ([0], [37]),
    "prefixes": ([130, 0, 64, 257], [19, 40, 17, 64]),
    "one-token-requests-among-long-ones": ([0, 300, 1, 63, 200], [1, 40, 1, 1, 33]),
    "as-many-tokens-as-ranks": ([100, 7], [1, 3]),
}
ZIGZAG = ["one-request", "prefixes"]


def assert_right(batch, results, layers=1):
    """Every row of the batch belongs to one rank, and is attention over all tokens in one piece."""
    expected = batch.expected()
    assert sorted(row for rows, _ in results for row in rows.tolist()) == list(range(len(batch.q)))
    for rows, outs in results:
        assert len(outs) == layers
        for out in outs:
            assert torch.allclose(out.float(), expected[rows], atol=0.02, rtol=0.01)


@pytest.mark.parametrize("kv_format", ["fp8", "bfloat16"])
@pytest.mark.parametrize(
    ("strategy", "mix"),
    [*(("interleave", mix) for mix in MIXES), *(("zigzag", mix) for mix in ZIGZAG)],
    ids=lambda value: value,
)
@pytest.mark.parametrize("cp_size", [2, 4])
def test_each_ranks_rows_are_attention_over_all_tokens(make_cp_backend, cp_size, strategy, mix, kv_format):
    batch = simulation.CpBatch(cp_size, *MIXES[mix])
    results, _ = simulation.run_ranks(make_cp_backend, batch, strategy, kv_format=kv_format)
    assert_right(batch, results)


def test_eight_ranks_of_which_some_have_no_token_of_a_request(make_cp_backend):
    batch = simulation.CpBatch(8, [0, 511, 1, 0, 100], [1, 9, 1, 2, 5])
    results, _ = simulation.run_ranks(make_cp_backend, batch, "interleave")
    assert_right(batch, results)


@pytest.mark.parametrize("strategy", ["interleave", "zigzag"])
def test_a_mixed_batch_is_spread_too(make_cp_backend, strategy):
    """Decode tokens are one-token extends: interleave deals them out, zigzag then splits nothing at all."""
    batch = simulation.CpBatch(2, [300, 64, 129], [1, 30, 1], mode="MIXED")
    results, _ = simulation.run_ranks(make_cp_backend, batch, strategy)
    if strategy == "zigzag":
        for rows, (out,) in results:
            assert rows.tolist() == list(range(32))
            assert torch.allclose(out.float(), batch.expected(), atol=0.02, rtol=0.01)
    else:
        assert_right(batch, results)


@pytest.mark.parametrize("strategy", ["interleave", "zigzag"])
@pytest.mark.parametrize(("pages", "gathers"), [(1, 7), (3, 3), (6, 2), (7, 1)])
def test_a_batch_that_the_buffer_does_not_hold_is_gathered_in_parts(make_cp_backend, strategy, pages, gathers):
    batch = simulation.CpBatch(2, *MIXES["prefixes"])
    results, relayed = simulation.run_ranks(make_cp_backend, batch, strategy, buffer_pages=pages)
    assert_right(batch, results)
    row_bytes = 656 * 64
    sent = [size for kind, size in relayed.sent[0] if kind == "all_gather" and size % row_bytes == 0]
    assert len(sent) == gathers
    assert sum(sent) == 7 * row_bytes
    assert max(sent) <= pages * row_bytes


def test_parts_are_merged_some_rows_at_a_time_and_one_part_after_the_other(make_cp_backend, monkeypatch):
    """However many parts there are: a step holds two results at most, and merging copies some rows of them."""
    from nsa_dcp.sglang_plugin.attention import cp_backend, cp_prefill

    alive, most, merged = weakref.WeakSet(), [], []
    attend, merge, attend_parts = cp_prefill.attend_selection, cp_prefill.merge_partials, cp_backend.attend_parts

    def attend_selection(*args, **kwargs):
        out, lse = attend(*args, **kwargs)
        alive.add(out)
        most.append(len(alive))
        return out, lse

    # The test itself keeps what the ranks before returned.
    monkeypatch.setattr(cp_backend, "attend_parts", lambda *args: alive.clear() or attend_parts(*args))
    monkeypatch.setattr(cp_prefill, "_MERGED_ROWS", 16)
    monkeypatch.setattr(cp_prefill, "attend_selection", attend_selection)
    monkeypatch.setattr(cp_prefill, "merge_partials", lambda out, lse: merged.append(out.shape[1]) or merge(out, lse))
    batch = simulation.CpBatch(2, *MIXES["prefixes"])
    results, relayed = simulation.run_ranks(make_cp_backend, batch, "interleave", buffer_pages=2)
    assert_right(batch, results)
    assert max(most) == 2
    # 70 tokens of each rank, merged in five pieces for each of the three parts after the first.
    assert merged == [16, 16, 16, 16, 6] * 3 * 2 * relayed.rounds


@pytest.mark.parametrize("kv_format", ["fp8", "bfloat16"])
def test_pages_are_gathered_as_bytes_once_a_layer_whoever_shares_them(make_cp_backend, kv_format):
    batch = simulation.CpBatch(4, [512, 512, 520], [16, 20, 8], shared_pages=2)
    results, relayed = simulation.run_ranks(make_cp_backend, batch, "interleave", kv_format=kv_format)
    assert_right(batch, results)
    pages = len({int(slot) // 256 for slots in batch.slots for slot in slots})
    assert pages == 5
    token_bytes = 656 if kv_format == "fp8" else 1152
    for rank in range(4):
        # What else goes over the wire is the strategy's own gather of the chunk's latents, in bfloat16.
        assert relayed.sent[rank] == [("all_gather", 12 * 1152), ("all_gather", pages * 64 * token_bytes)]


def test_every_token_is_quantised_once_and_by_the_cache_write(make_cp_backend, monkeypatch):
    from sglang.srt.layers.attention import dsa_backend

    monkeypatch.setattr(dsa_backend, "quantize_k_cache", lambda *_: pytest.fail("the whole cache is quantised"))
    batch = simulation.CpBatch(2, [0], [200])
    simulation.run_ranks(make_cp_backend, batch, "interleave", rounds=1)
    assert make_cp_backend.quantised == [200, 200]


def test_layers_that_share_a_selection_share_its_place_in_the_buffer(make_cp_backend, monkeypatch):
    from nsa_dcp.sglang_plugin.attention import cp_prefill

    made = []
    localize = cp_prefill.localize_gathered
    monkeypatch.setattr(cp_prefill, "localize_gathered", lambda *args: made.append(args) or localize(*args))
    batch = simulation.CpBatch(2, *MIXES["prefixes"])
    results, relayed = simulation.run_ranks(make_cp_backend, batch, "interleave", layers=(1, 2, 3))
    assert_right(batch, results, layers=3)
    assert len(made) == 2 * relayed.rounds
    # Each layer has latents of its own, so each gathers its own pages.
    assert sum(1 for _, size in relayed.sent[0] if size == 7 * 64 * 656) == 3


def test_of_many_parts_one_selection_is_in_memory_at_a_time(make_cp_backend, monkeypatch):
    """Each is as large as the whole selection, and nothing bounds their number but the pool."""
    from nsa_dcp.sglang_plugin.attention import cp_prefill

    alive, most = weakref.WeakSet(), []
    localize = cp_prefill.localize_gathered

    def localize_gathered(*args):
        most.append(len(alive))
        selection = localize(*args)
        alive.add(selection)
        return selection

    monkeypatch.setattr(cp_prefill, "localize_gathered", localize_gathered)
    batch = simulation.CpBatch(2, *MIXES["prefixes"])
    results, relayed = simulation.run_ranks(make_cp_backend, batch, "interleave", layers=(1, 2, 3), buffer_pages=1)
    assert_right(batch, results, layers=3)
    assert max(most) == 0
    assert len(most) == 7 * 3 * 2 * relayed.rounds
    assert not alive


def test_a_forward_does_not_use_the_pages_of_the_one_before(make_cp_backend):
    """A decode step after a prefill, and a graph's step, whose metadata was never made by `init_forward_metadata`."""
    from nsa_dcp.sglang_plugin.attention.cp_backend import _PARTS

    relayed = simulation.RelayedGroup(2)
    backend = make_cp_backend(relayed.rank(0))
    batch = simulation.CpBatch(2, [100], [20])
    simulation.run_rank(backend, batch)
    assert len(getattr(backend.forward_metadata, _PARTS)) == 1
    decode = simulation.CpBatch(2, [100], [1], mode="DECODE")
    backend.init_forward_metadata(decode.make_forward())
    assert not hasattr(backend.forward_metadata, _PARTS)
    # A copy for other rows is another forward's as far as pages go.
    assert not hasattr(dataclasses.replace(backend.forward_metadata), _PARTS)


def test_a_slice_of_the_heads_in_a_spread_prefill_is_refused(make_cp_backend):
    backend = make_cp_backend(simulation.RelayedGroup(2).rank(0))
    batch = simulation.CpBatch(2, [0], [20])
    batch.q = batch.q[:, : simulation.HEADS // 2]
    with pytest.raises(RuntimeError, match="layer 1 attends with 4 of 8 heads in a spread step"):
        simulation.run_rank(backend, batch)


# --- the buffer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context_len", "pool_rows", "dcp_size", "pages"),
    [(131072, 1 << 20, 8, 256), (131073, 1 << 20, 8, 257), (131072, 6400, 8, 100), (10, 640, 2, 1)],
    ids=["whole-pages", "one-token-more", "a-small-pool", "a-short-context"],
)
def test_the_buffer_holds_the_longest_request_that_fits(context_len, pool_rows, dcp_size, pages):
    assert buffer_pages(context_len, pool_rows, dcp_size) == pages


def test_the_buffers_bytes_are_the_ranks_pages_and_its_own():
    assert buffer_bytes(256, 8, 656) == 131072 * 656 * 9 // 8


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    dcp_size=st.sampled_from([2, 3, 8]),
    per_part=st.integers(1, 9),
    shared=st.integers(0, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_parts_hold_every_slot_of_every_request_once(lengths, dcp_size, per_part, shared, seed):
    generator = torch.Generator().manual_seed(seed)
    widened, num_pages = 64 * dcp_size, 64
    free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    common = [free.pop() for _ in range(shared)]
    # Beyond a request's tokens the table holds what was there before.
    table = torch.full((len(lengths) + 2, 1000), num_pages * widened - 1, dtype=torch.int32)
    used = set()
    for request, length in enumerate(lengths):
        count = -(-length // widened)
        pages = (common + [free.pop() for _ in range(max(0, count - shared))])[:count]
        used |= set(pages)
        positions = torch.arange(length)
        table[request + 1, :length] = torch.tensor(pages)[positions // widened] * widened + positions % widened
    requests = torch.arange(len(lengths)) + 1
    parts = plan_parts(table, requests, lengths, dcp_size, num_pages, per_part)
    assert all(0 < len(part.pages) <= per_part for part in parts)
    assert len(parts) == -(-len(used) // per_part)
    assert sorted(page for part in parts for page in part.pages.tolist()) == sorted(used)
    for part in parts:
        assert part.page_pos[part.pages.long()].tolist() == list(range(len(part.pages)))
        assert int((part.page_pos >= 0).sum()) == len(part.pages)
