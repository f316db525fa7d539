"""Exact selections stand for sglang's default: through sglang's own indexer, and as it makes metadata.

DeepGEMM's scores and sglang's top-k kernels are played in torch, as in the tests of row-split selection.
"""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sglang import decode_metadata as decode
from tests.sglang.selection import test_row_split as prefill
from tests.sglang.selection import test_row_split_decode as row_split_decode
from tests.sglang.selection import test_row_split_verify as row_split_verify

pytestmark = pytest.mark.sglang

played, indexer, make_backend = row_split_decode.played, row_split_decode.indexer, row_split_decode.make_backend
select_all = prefill.select_all
TOPK = row_split_decode.TOPK


def exactly(metadata):
    from nsa_dcp.sglang_plugin.selection.exact_topk import ExactTopK

    attention = metadata.attn_metadata
    if attention.page_table_1 is not None:
        # sglang's has the request table's dtype.
        attention = dataclasses.replace(attention, page_table_1=attention.page_table_1.to(torch.int32))
    return dataclasses.replace(metadata, attn_metadata=attention, topk_backend=ExactTopK(metadata.topk_backend))


def as_sets(selection):
    return selection.sort(dim=1).values


@given(requests=prefill.requests, unfused=st.booleans(), rows_per_chunk=st.sampled_from([None, 1, 2, 5]))
@settings(max_examples=60)
def test_a_prefill_without_ties_is_selected_as_by_a_kernel_that_misses_nothing(
    select_all, requests, unfused, rows_per_chunk
):
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    select, pool, chunk = select_all
    extends, prefixes = zip(*requests)
    metadata, num_slots = prefill.make_metadata(extends, prefixes, unfused)
    pool.now = prefill.Pool(num_slots)
    chunk.bytes = rows_per_chunk and rows_per_chunk * 16 * Indexer._MQA_LOGITS_BYTES_PER_ELEM
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(sum(extends) + 1, prefill.HEADS, 4, generator=generator).as_subclass(prefill.Indexed)
    weights = torch.randn(sum(extends) + 1, prefill.HEADS, 1, generator=generator)
    mode = SimpleNamespace(is_extend_without_speculative=lambda: True)
    batch = SimpleNamespace(forward_mode=mode, seq_lens_cpu=[], extend_seq_lens_cpu=[])
    whole = select(False, batch, 0, q, weights, metadata)
    assert torch.equal(as_sets(select(False, batch, 0, q, weights, exactly(metadata))), as_sets(whole))


def test_ties_of_a_prefill_fall_to_the_lower_positions(select_all):
    select, pool, chunk = select_all
    metadata, num_slots = prefill.make_metadata((9, 30, 1), (100, 0, 63), unfused=False)
    pool.now, chunk.bytes = prefill.Pool(num_slots), None
    q = torch.zeros(40, prefill.HEADS, 4).as_subclass(prefill.Indexed)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
        seq_lens_cpu=[],
        extend_seq_lens_cpu=[],
    )
    selection = select(False, batch, 0, q, torch.zeros(40, prefill.HEADS, 1), exactly(metadata))
    attention = metadata.attn_metadata
    first = attention.page_table_1[attention.token_to_batch_idx.long(), : prefill.TOPK].to(torch.int32)
    shown = torch.arange(prefill.TOPK) < attention.dsa_seqlens_expanded.unsqueeze(1)
    assert torch.equal(selection, torch.where(shown, first, -1))


@pytest.mark.parametrize("kernel", ["v2", "legacy"])
@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_decode_verify_and_draft_extend_are_selected_as_by_a_kernel_that_misses_nothing(
    indexer, make_backend, kernel, mode
):
    if mode == "DECODE":
        q, weights, requests, lengths = row_split_decode.draw(64, seed=12, padding=3)
        backend = make_backend(kernel)
        decode.prepare_step(backend, requests, lengths, capturing=True)
        metadata = decode.prepare_step(backend, requests, lengths)
    else:
        q, weights, requests, lengths = row_split_verify.draw(16, 4, seed=12, padding=3)
        metadata = row_split_verify.refreshed(make_backend(kernel, 4), requests, lengths)
    batch = row_split_decode.decode_batch(mode)
    whole = indexer._get_topk_paged(batch, 0, q, weights, metadata)
    selection = indexer._get_topk_paged(batch, 0, q, weights, exactly(metadata))
    # Without the plan, which it does not need.
    assert torch.equal(as_sets(selection), as_sets(whole))
    assert (selection[64:] == -1).all()


def test_a_step_that_is_not_captured_is_selected_alike(indexer, make_backend, publish_rank):
    publish_rank(1, 0)
    backend = make_backend("v2")
    q, weights, requests, lengths = row_split_decode.draw(5, seed=3)
    metadata = decode.prepare_step(backend, requests, lengths, captured=False)
    batch = row_split_decode.decode_batch()
    whole = indexer._get_topk_paged(batch, 0, q, weights, metadata)
    assert torch.equal(as_sets(indexer._get_topk_paged(batch, 0, q, weights, exactly(metadata))), as_sets(whole))


@pytest.mark.parametrize("rows", [8, 64])
def test_a_captured_step_follows_its_lengths_and_reads_nothing_on_the_host(indexer, make_backend, monkeypatch, rows):
    """The kernels are played by operations that a graph can hold; what is around them is ours. 64 rows are split."""
    from nsa_dcp.sglang_plugin.selection import exact_topk

    def select_slots(scores, lengths, topk, *, row_starts=None, page_table=None, row_request=None, page_size=64):
        assert (row_starts, row_request, page_size) == (None, None, 64)
        slots = (page_table.unsqueeze(2) * page_size + torch.arange(page_size)).flatten(1)
        return row_split_decode.select_slots(scores, lengths, topk, slots)

    monkeypatch.setattr(exact_topk, "select_slots", select_slots)
    backend = make_backend("v2")
    backend.dsa_topk_backend = exact_topk.ExactTopK(backend.dsa_topk_backend)
    assert backend.dsa_drop_wide_page_table
    q, weights, requests, lengths = row_split_decode.draw(rows, seed=6)
    metadata = decode.prepare_step(backend, requests, torch.ones(rows, dtype=torch.int32), capturing=True)
    assert metadata.topk_backend is backend.dsa_topk_backend
    (split, *_) = row_split_decode.make_splits(
        indexer._get_topk_paged, decode.RelayedGather(2), broadcast_selection=lambda selection: None
    )
    batch = row_split_decode.decode_batch()
    split(batch, 0, q, weights, metadata)
    graph = decode.Graph()
    with graph:
        output = split(batch, 0, q, weights, metadata)
    decode.prepare_step(backend, requests, lengths)
    graph.replay()
    stock = dataclasses.replace(metadata, topk_backend=backend.dsa_topk_backend.stock)
    mine = rows // 2 if rows == 64 else rows
    assert torch.equal(output[:mine], indexer._get_topk_paged(batch, 0, q, weights, stock)[:mine])


def test_it_answers_whatever_sglang_asks_of_its_own():
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    from nsa_dcp.sglang_plugin.selection.exact_topk import ExactTopK

    asked = {name for name, method in vars(DSATopKBackend).items() if inspect.isfunction(method) and name[0] != "_"}
    assert asked >= {"topk_func", "topk_transform", "should_use_topk_v2"}
    for name in asked:
        mine, theirs = (inspect.signature(getattr(kind, name)) for kind in (ExactTopK, DSATopKBackend))
        assert list(mine.parameters) == list(theirs.parameters)
        assert [one.default for one in mine.parameters.values()] == [one.default for one in theirs.parameters.values()]
    exact = ExactTopK(DSATopKBackend.SGL_KERNEL)
    for name in asked - {"topk_func", "topk_transform"}:
        assert getattr(exact, name)() == getattr(DSATopKBackend.SGL_KERNEL, name)()


def test_a_ragged_selection_is_an_error(make_backend):
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod

    metadata, _ = prefill.make_metadata((3,), (0,), unfused=False)
    ragged = dataclasses.replace(exactly(metadata), topk_transform_method=TopkTransformMethod.RAGGED)
    with pytest.raises(RuntimeError, match=r"needs selections as slots \(PAGED\), found RAGGED"):
        ragged.topk_transform(torch.zeros(3, 3), prefill.TOPK)


@pytest.mark.parametrize("backend", ["torch", "flashinfer", "sgl-kernel"])
@pytest.mark.parametrize("choice", ["stock", "exact"])
def test_a_top_k_that_a_user_names_stays(monkeypatch, backend, choice):
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    from nsa_dcp.sglang_plugin import patches
    from nsa_dcp.sglang_plugin.selection import exact_topk

    checked = []
    monkeypatch.setenv("NSA_DCP_TOPK", choice)
    monkeypatch.setattr(exact_topk, "check_selection", lambda device, topk: checked.append((device.type, topk)))
    ours = SimpleNamespace(device="cpu", dsa_index_topk=2048, dsa_topk_backend=DSATopKBackend(backend))
    replaced = choice == "exact" and backend == "sgl-kernel"
    assert patches.use_exact_topk(ours) == ("exact" if replaced else backend)
    assert isinstance(ours.dsa_topk_backend, exact_topk.ExactTopK) == replaced
    assert checked == [("cpu", 2048)] * replaced


def test_the_trial_passes_and_stops_a_server_whose_selection_is_not_exact(monkeypatch):
    from nsa_dcp.sglang_plugin.selection import exact_topk

    exact_topk.check_selection(torch.device("cpu"), 2048)
    right = exact_topk.select_slots

    def miss_one(*args, page_size, **kwargs):
        selected = right(*args, page_size=page_size, **kwargs)
        selected[-1, 7] += page_size == 64
        return selected

    monkeypatch.setattr(exact_topk, "select_slots", miss_one)
    with pytest.raises(RuntimeError, match="selected in decode, ties to the lower position, found 1 entries"):
        exact_topk.check_selection(torch.device("cpu"), 2048)


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_rows_of_requests_in_any_order_with_empty_ones_among_them_are_told_apart(kind):
    from nsa_dcp.sglang_plugin.selection.exact_topk import requests_of_rows

    first_rows = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert requests_of_rows(first_rows, 5).tolist() == [0, 0, 2, 2, 2]
    got = requests_of_rows(first_rows, 5, kind([7, 8, 3]))
    assert (got.tolist(), got.dtype) == ([7, 7, 3, 3, 3], torch.int32)
