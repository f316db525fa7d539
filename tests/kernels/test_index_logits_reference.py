"""Index scores: the reference against an einsum over each request's keys in the order of its positions."""

import math

import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close
from nsa_dcp.testing.cases import poisoned
from nsa_dcp_kernels import gather_index_keys, scatter_index_keys_, score_index

# Relative RMS of one query's scores: float32 results of float64 sums, whatever the inputs' dtype.
RMS = {torch.float32: 1e-6, torch.bfloat16: 1e-6}


def make_problem(context_lens, row_request, page_table, num_pages, cache_dtype, q_dtype=torch.float32, heads=4):
    """Keys by position for each request, and a cache that holds them at the slots of its pages, NaN everywhere else."""
    shape = (num_pages, 64 * 132) if cache_dtype == torch.uint8 else (num_pages * 64, 128)
    cache = poisoned(*shape, dtype=cache_dtype)
    longest = [
        max((seen for seen, owner in zip(context_lens, row_request) if owner == request), default=0)
        for request in range(len(page_table))
    ]
    slots = [
        torch.tensor([pages[position // 64] * 64 + position % 64 for position in range(length)], dtype=torch.int64)
        for pages, length in zip(page_table, longest)
    ]
    for request_slots in slots:
        scatter_index_keys_(cache, torch.randn(len(request_slots), 128), request_slots)
    keys = [gather_index_keys(cache, request_slots) for request_slots in slots]
    q = torch.randn(len(context_lens), heads, 128).to(q_dtype)
    weights = torch.randn(len(context_lens), heads)
    arguments = (
        q,
        weights,
        cache,
        torch.tensor(page_table, dtype=torch.int32),
        torch.tensor(row_request, dtype=torch.int32),
        torch.tensor(context_lens, dtype=torch.int32),
    )
    return arguments, keys


def score_by_einsum(q, weights, keys, row_request, context_lens, width):
    logits = torch.full((len(q), width), -math.inf, dtype=torch.float64)
    for token, (request, seen) in enumerate(zip(row_request, context_lens)):
        dots = torch.einsum("hd,sd->hs", q[token].double(), keys[request][:seen].double())
        logits[token, :seen] = torch.einsum("h,hs->s", weights[token].double(), dots.relu())
    return logits


@pytest.mark.parametrize("q_dtype", RMS, ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.float32, torch.bfloat16], ids=str)
def test_scores_are_weighted_rectified_products_of_the_request_keys(cache_dtype, q_dtype):
    """Requests of 1, 63, 64, 65 and 130 tokens, a padding row that sees nothing, queries of a request far apart.

    Keys past a request's length and pages of nobody are NaN: a wrong page or offset (ROCm/aiter 5591) cannot hide.
    """
    context_lens = [130, 1, 63, 64, 65, 0, 129, 2]
    row_request = [0, 1, 2, 3, 4, 1, 0, 4]
    page_table = [[9, 0, 4], [11, 11, 11], [2, 0, 0], [7, 0, 0], [5, 1, 0]]
    arguments, keys = make_problem(context_lens, row_request, page_table, 12, cache_dtype, q_dtype)
    logits = score_index(*arguments, 131)
    assert logits.dtype == torch.float32
    expected = score_by_einsum(*arguments[:2], keys, row_request, context_lens, 131)
    assert_close(logits, expected, rms=RMS[q_dtype])


@pytest.mark.parametrize("width", [257, 300, 320, 513])
def test_width_need_not_be_whole_pages(width):
    """flashinfer-ai/flashinfer 4365: the page grid and the logits' width agree only where both are aligned."""
    arguments, keys = make_problem([257], [0], [[3, 1, 4, 0, 2]], 5, torch.uint8)
    logits = score_index(*arguments, width)
    assert_close(logits, score_by_einsum(*arguments[:2], keys, [0], [257], width), rms=RMS[torch.float32])


def test_last_slot_of_the_cache_is_read():
    """Every rank's index cache spans all widened slots, the padding page too: sgl-project/sglang 36886."""
    arguments, keys = make_problem([64], [0], [[7]], 8, torch.uint8)
    logits = score_index(*arguments, 64)
    assert_close(logits, score_by_einsum(*arguments[:2], keys, [0], [64], 64), rms=RMS[torch.float32])


def test_context_beyond_4096_tokens_is_scored_to_its_end():
    """vllm-project/vllm 47827."""
    pages = torch.randperm(70).tolist()
    arguments, keys = make_problem([4400], [0], [pages], 70, torch.float32, heads=2)
    logits = score_index(*arguments, 4400)
    assert_close(logits, score_by_einsum(*arguments[:2], keys, [0], [4400], 4400), rms=RMS[torch.float32])


def test_scores_of_a_row_do_not_depend_on_the_rows_beside_it():
    context_lens, row_request = [100, 37, 100, 64], [0, 1, 0, 1]
    arguments, _ = make_problem(context_lens, row_request, [[0, 3], [2, 1]], 4, torch.uint8)
    together = score_index(*arguments, 100)
    for row in range(4):
        part = slice(row, row + 1)
        q, weights, cache, page_table, requests, lens = arguments
        alone = score_index(q[part], weights[part], cache, page_table, requests[part], lens[part], 100)
        assert_bitwise_equal(alone, together[part], f"row {row}")
    for _ in range(20):
        assert_bitwise_equal(score_index(*arguments, 100), together)


def test_equal_keys_tie_exactly_wherever_they_lie():
    cache = poisoned(4, 64 * 132, dtype=torch.uint8)
    slots = torch.tensor([3 * 64 + position % 64 if position < 64 else 64 + position % 64 for position in range(128)])
    scatter_index_keys_(cache, torch.randn(1, 128).expand(128, 128), slots)
    logits = score_index(
        torch.randn(1, 64, 128),
        torch.randn(1, 64),
        cache,
        torch.tensor([[3, 1]], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([128], dtype=torch.int32),
        128,
    )
    assert_bitwise_equal(logits, logits[:, :1].expand(1, 128).contiguous())


@pytest.mark.parametrize(("num_tokens", "width"), [(0, 64), (0, 0), (3, 0), (3, 65)], ids=str)
def test_nothing_to_score_gives_minus_infinity(num_tokens, width):
    """A step of padding rows only (vllm-project/vllm 51970): no page is looked at."""
    logits = score_index(
        torch.zeros(num_tokens, 4, 128),
        torch.zeros(num_tokens, 4),
        poisoned(1, 64 * 132, dtype=torch.uint8),
        torch.full((1, 2), -1, dtype=torch.int32),
        torch.zeros(num_tokens, dtype=torch.int32),
        torch.zeros(num_tokens, dtype=torch.int32),
        width,
    )
    assert_bitwise_equal(logits, torch.full((num_tokens, width), -math.inf))


def test_wrong_arguments_are_named():
    arguments, _ = make_problem([5], [0], [[0]], 1, torch.uint8)
    q, weights, cache, page_table, row_request, context_lens = arguments
    with pytest.raises(ValueError, match=r"weights must have shape \[1, 4\], got \[1, 3\]"):
        score_index(q, weights[:, :3], cache, page_table, row_request, context_lens, 5)
    with pytest.raises(ValueError, match=r"context_lens must have shape \[1\], got \[2\]"):
        score_index(q, weights, cache, page_table, row_request, context_lens.repeat(2), 5)
    with pytest.raises(ValueError, match="page_table must have dtype int32, got int64"):
        score_index(q, weights, cache, page_table.long(), row_request, context_lens, 5)
    with pytest.raises(ValueError, match="max_context_len must not be negative, got -1"):
        score_index(*arguments, -1)
