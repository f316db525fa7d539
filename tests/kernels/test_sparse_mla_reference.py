"""Sparse attention: the reference against softmax over the selected tokens, and split over ranks against the whole."""

import math

import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close, assert_lse_close
from nsa_dcp.testing.cases import DCP_SIZES, ODD_SIZES, POISON_INT, draw_selection, poisoned
from nsa_dcp_kernels import (
    attend_selection,
    attend_sparse,
    localize_selection,
    localize_topk,
    merge_partials,
    pack_latent,
    reference,
    scatter_latent_,
    unpack_latent,
)

# Relative RMS of one head's output, and absolute error of its lse, against float64.
RMS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3}
LSE_ATOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}
SM_SCALE = 1 / math.sqrt(192)


def attend_by_formula(q: torch.Tensor, latents: dict[int, torch.Tensor], selection: list[list[int]]):
    """Softmax over the tokens each row selects, one token at a time in float64; latents are looked up by slot."""
    num_tokens, num_heads, _ = q.shape
    out = torch.zeros(num_tokens, num_heads, 512, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    for token, slots in enumerate(selection):
        chosen = [latents[slot].double() for slot in slots if slot >= 0]
        if chosen:
            kv = torch.stack(chosen)
            weight = (q[token].double() @ kv.T * SM_SCALE).exp()
            out[token] = weight @ kv[:, :512] / weight.sum(-1, keepdim=True)
            lse[token] = weight.sum(-1).log()
    return out, lse


def draw_queries(num_tokens: int, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, 576, dtype=torch.float64).to(dtype)


def fill_rank_caches(latents: torch.Tensor, slots: torch.Tensor, dcp_size: int, packed: bool):
    """Scatter every token to the rank that owns it; each rank's other rows are NaN."""
    num_rows = 128
    caches = []
    for rank in range(dcp_size):
        shape, dtype = ((num_rows, 656), torch.uint8) if packed else ((num_rows, 576), latents.dtype)
        cache = poisoned(*shape, dtype=dtype)
        scatter_latent_(cache, latents[:, :512], latents[:, 512:], slots, dcp_size, rank)
        caches.append(cache)
    return caches


@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", ODD_SIZES)
def test_attention_is_softmax_over_the_selected_rows(width, q_dtype, cache_dtype):
    """Rows that nobody selects are NaN; -1 stands anywhere; a row that selects nothing gives out 0 and lse -inf.

    Not a large finite lse (flashinfer-ai/flashinfer 4452), not an unwritten row (4975), no neighbour's entry
    (Dao-AILab/flash-attention 2573), and per token, not per request (vllm-project/vllm 38416).
    """
    selection = draw_selection(5, width, 101, seed=width)
    selection[selection == 50] = -1
    latents = torch.randn(101, 576)
    kv_rows = pack_latent(latents[:, :512], latents[:, 512:]) if cache_dtype == torch.uint8 else latents.to(cache_dtype)
    values = unpack_latent(kv_rows) if cache_dtype == torch.uint8 else kv_rows.float()
    kv_rows[50] = poisoned(kv_rows.shape[1], dtype=cache_dtype)
    q = draw_queries(5, 3, q_dtype)
    out, lse = attend_sparse(q, kv_rows, selection, None, SM_SCALE)
    expected, expected_lse = attend_by_formula(q, dict(enumerate(values)), selection.tolist())
    assert out.dtype == q_dtype and lse.dtype == torch.float32
    assert_close(out, expected, rms=RMS[q_dtype])
    assert_lse_close(lse, expected_lse, atol=LSE_ATOL[q_dtype])
    assert_bitwise_equal(lse[1], torch.full((3,), -math.inf))


@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_partials_of_all_ranks_merge_to_attention_over_all_tokens(dcp_size):
    """Partition and merge together (sgl-project/sglang 37487), ranks that own nothing of a row or at all among them."""
    num_slots = 128 * dcp_size
    slots = torch.randperm(num_slots)[:100]
    latents = torch.randn(100, 576, dtype=torch.float64)
    places = draw_selection(6, 40, 100, seed=dcp_size)
    selection = torch.where(places >= 0, slots[places.clamp(min=0).long()].to(torch.int32), -1)
    # Row 2 is a single token, so every rank but one owns nothing of it.
    selection[2] = -1
    selection[2, 17] = slots[0].to(torch.int32)
    q = draw_queries(6, 2, torch.float64)
    partials = [
        attend_selection(q, cache, localize_selection(selection, dcp_size, rank), SM_SCALE)
        for rank, cache in enumerate(fill_rank_caches(latents, slots, dcp_size, packed=False))
    ]
    out, lse = merge_partials(*(torch.stack(tensors) for tensors in zip(*partials)))
    expected, expected_lse = attend_by_formula(q, dict(zip(slots.tolist(), latents)), selection.tolist())
    assert_close(out, expected, rms=RMS[torch.float64])
    assert_lse_close(lse, expected_lse, atol=LSE_ATOL[torch.float64])


@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_packed_partials_merge_to_attention_over_the_dequantised_tokens(dcp_size):
    slots = torch.randperm(128 * dcp_size)[:100]
    latents = torch.randn(100, 576)
    selection = slots[draw_selection(4, 65, 100, holes=False).clamp(min=0).long()].to(torch.int32)
    q = draw_queries(4, 2, torch.float32)
    partials = [
        attend_sparse(q, cache, *localize_topk(selection, dcp_size, rank), SM_SCALE)
        for rank, cache in enumerate(fill_rank_caches(latents, slots, dcp_size, packed=True))
    ]
    out, lse = merge_partials(*(torch.stack(tensors) for tensors in zip(*partials)))
    values = unpack_latent(pack_latent(latents[:, :512], latents[:, 512:]))
    expected, expected_lse = attend_by_formula(q, dict(zip(slots.tolist(), values)), selection.tolist())
    assert_close(out, expected, rms=RMS[torch.float32])
    assert_lse_close(lse, expected_lse, atol=LSE_ATOL[torch.float32])


def test_entries_past_the_length_are_not_read():
    kv_rows, q = torch.randn(40, 576), draw_queries(4, 2, torch.float32)
    rows = torch.stack([torch.randperm(40)[:16] for _ in range(4)]).to(torch.int32)
    length = torch.tensor([16, 0, 5, 1], dtype=torch.int32)
    cut = rows.clone()
    for token, count in enumerate(length.tolist()):
        cut[token, count:] = -1
    kv_rows[39] = math.nan
    cut[cut == 39], rows[rows == 39] = -1, -1
    wanted = attend_sparse(q, kv_rows, cut, None, SM_SCALE)
    for garbage in (39, 0):
        rows[torch.arange(16) >= length.unsqueeze(1)] = garbage
        got = attend_sparse(q, kv_rows, rows, length, SM_SCALE)
        assert_bitwise_equal(got[0], wanted[0], f"garbage {garbage}")
        assert_bitwise_equal(got[1], wanted[1], f"garbage {garbage}")


def test_chunking_over_tokens_changes_nothing(monkeypatch):
    kv_rows, q = torch.randn(64, 576), draw_queries(7, 2, torch.float32)
    rows = draw_selection(7, 33, 64)
    whole = attend_sparse(q, kv_rows, rows, None, SM_SCALE)
    monkeypatch.setattr(reference, "_ATTEND_CHUNK_BYTES", 1)
    chunked = attend_sparse(q, kv_rows, rows, None, SM_SCALE)
    assert_close(chunked[0], whole[0], rms=RMS[torch.float32])
    assert_lse_close(chunked[1], whole[1], atol=LSE_ATOL[torch.float32])


def test_large_scores_do_not_overflow():
    kv_rows, q = 30 * torch.randn(9, 576), 30 * draw_queries(2, 2, torch.float32)
    rows = torch.arange(9, dtype=torch.int32).expand(2, 9).contiguous()
    out, lse = attend_sparse(q, kv_rows, rows, None, 1.0)
    scores = torch.einsum("thd,kd->thk", q.double(), kv_rows.double())
    assert float(scores.abs().max()) > 1e4
    assert_close(out, scores.softmax(-1) @ kv_rows.double()[:, :512], rms=1e-3)
    assert_close(lse, scores.logsumexp(-1), rms=1e-6)


def test_twenty_repeats_are_bitwise_equal():
    kv_rows, q, rows = torch.randn(64, 576), draw_queries(3, 4, torch.bfloat16), draw_selection(3, 63, 64)
    first = attend_sparse(q, kv_rows, rows, None, SM_SCALE)
    for _ in range(19):
        again = attend_sparse(q, kv_rows, rows, None, SM_SCALE)
        assert_bitwise_equal(again[0], first[0])
        assert_bitwise_equal(again[1], first[1])


@pytest.mark.parametrize(("num_tokens", "width", "num_rows"), [(0, 8, 4), (2, 0, 4), (2, 8, 0), (2, 8, 4)], ids=str)
def test_nothing_selected_gives_zero_and_minus_infinity(num_tokens, width, num_rows):
    rows = torch.full((num_tokens, width), -1, dtype=torch.int32)
    kv_rows, q = poisoned(num_rows, 656, dtype=torch.uint8), draw_queries(num_tokens, 64, torch.bfloat16)
    lengths = (None, torch.zeros(num_tokens, dtype=torch.int32), torch.full((num_tokens,), width, dtype=torch.int32))
    for length in lengths:
        out, lse = attend_sparse(q, kv_rows, rows, length, SM_SCALE)
        assert_bitwise_equal(out, torch.zeros(num_tokens, 64, 512, dtype=torch.bfloat16))
        assert_bitwise_equal(lse, torch.full((num_tokens, 64), -math.inf))


def test_wrong_arguments_are_named():
    q, kv_rows, rows = torch.zeros(2, 4, 576), torch.zeros(8, 576), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"q must have shape \[\*, \*, 576\], got \[2, 4, 512\]"):
        attend_sparse(q[..., :512], kv_rows, rows, None, 1.0)
    with pytest.raises(ValueError, match=r"kv_rows must have shape \[\*, 656\], got \[8, 576\]"):
        attend_sparse(q, kv_rows.to(torch.uint8), rows, None, 1.0)
    with pytest.raises(ValueError, match="topk_rows must have dtype int32, got int64"):
        attend_sparse(q, kv_rows, rows.long(), None, 1.0)
    with pytest.raises(ValueError, match=r"topk_length must have shape \[2\], got \[3\]"):
        attend_sparse(q, kv_rows, rows, torch.full((3,), POISON_INT, dtype=torch.int32), 1.0)
