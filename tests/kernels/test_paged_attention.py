"""Attention over pages and over a step's own tokens: against softmax written out per query and head in float64."""

import itertools
import math

import pytest
import torch

from nsa_dcp.testing.cases import poisoned
from nsa_dcp_kernels import attend_chunk, attend_pages, kv_head_reference, merge_partials, scatter_kv_

FP8 = torch.float8_e4m3fn


def softmax_by_hand(query, keys, values, sm_scale):
    """(out [D], lse) of one query of one head over lists of keys and values, in Python floats."""
    scores = [sm_scale * math.fsum(a * b for a, b in zip(query, key)) for key in keys]
    if not scores:
        return [0.0] * len(query), -math.inf
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    out = [math.fsum(w * value[d] for w, value in zip(weights, values)) / total for d in range(len(query))]
    return out, top + math.log(total)


def draw_pages(lengths, page_size, kv_heads, dim, dtype=torch.float64, seed=0):
    """A cache of NaN where nothing is written, a page table that points out of it past each length, the contexts."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    pages = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    table = torch.full((len(lengths), max([*counts, 1])), 1 << 30, dtype=torch.int32)
    shape = ((sum(counts) + 1) * page_size, kv_heads, dim)
    k_cache, v_cache = poisoned(*shape, dtype=torch.float64).to(dtype), poisoned(*shape, dtype=torch.float64).to(dtype)
    contexts = []
    for request, (length, count) in enumerate(zip(lengths, counts)):
        table[request, :count] = torch.tensor([pages.pop() for _ in range(count)])
        k, v = torch.randn(2, length, kv_heads, dim, generator=generator, dtype=torch.float64).unbind(0)
        for position in range(length):
            row = int(table[request, position // page_size]) * page_size + position % page_size
            k_cache[row], v_cache[row] = k[position].to(dtype), v[position].to(dtype)
        contexts.append((k, v))
    return k_cache, v_cache, table, contexts


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (6, 3)])
def test_pages_are_attended_to_up_to_each_length(heads, kv_heads, page_size):
    lengths, dim, sm_scale = [0, 1, 65, 17], 8, 0.3
    k_cache, v_cache, table, contexts = draw_pages(lengths, page_size, kv_heads, dim)
    row_request = torch.tensor([2, 0, 3, 2, 1])
    q = torch.randn(5, heads, dim, dtype=torch.float64)
    out, lse = attend_pages(q, k_cache, v_cache, table, torch.tensor(lengths), row_request, sm_scale, page_size)
    for (token, request), head in itertools.product(enumerate(row_request.tolist()), range(heads)):
        k, v = (part[:, head // (heads // kv_heads)].tolist() for part in contexts[request])
        want_out, want_lse = softmax_by_hand(q[token, head].tolist(), k, v, sm_scale)
        torch.testing.assert_close(
            out[token, head], torch.tensor(want_out, dtype=torch.float64), rtol=1e-12, atol=1e-12
        )
        assert lse[token, head].item() == pytest.approx(want_lse, rel=1e-12)


def test_a_chunk_is_attended_to_causally_and_by_its_own_request_alone():
    starts, heads, kv_heads, dim = [0, 1, 1, 8, 13], 4, 2, 8
    q, k, v = (torch.randn(13, count, dim, dtype=torch.float64) for count in (heads, kv_heads, kv_heads))
    out, lse = attend_chunk(q, k, v, torch.tensor(starts), 0.4)
    for first, last in itertools.pairwise(starts):
        for token, head in itertools.product(range(first, last), range(heads)):
            keys, values = (part[first : token + 1, head // 2].tolist() for part in (k, v))
            want_out, want_lse = softmax_by_hand(q[token, head].tolist(), keys, values, 0.4)
            torch.testing.assert_close(out[token, head], torch.tensor(want_out, dtype=torch.float64))
            assert lse[token, head].item() == pytest.approx(want_lse, rel=1e-12)


@pytest.mark.parametrize("dcp_size", [1, 2, 3, 8])
def test_a_context_dealt_to_ranks_and_merged_with_the_chunk_is_plain_causal_attention(dcp_size):
    """Prefixes of 0, 1 and 70 tokens, of which the last rank may hold none, and chunks of 5, 1 and 3."""
    prefixes, chunks, page_size, heads, dim, sm_scale = [0, 1, 70], [5, 1, 3], 16, 4, 8, 0.35
    contexts = [torch.randn(2, s + t, 1, dim, dtype=torch.float64) for s, t in zip(prefixes, chunks)]
    queries = [torch.randn(t, heads, dim, dtype=torch.float64) for t in chunks]
    q = torch.cat(queries)
    starts = torch.tensor([0, *itertools.accumulate(chunks)])
    row_request = torch.repeat_interleave(torch.arange(3), torch.tensor(chunks))
    new = [torch.cat([context[part, s:] for context, s in zip(contexts, prefixes)]) for part in (0, 1)]
    partials = [attend_chunk(q, *new, starts, sm_scale)]
    pages = -(-max(prefixes) // (page_size * dcp_size))
    table = torch.arange(3 * pages).view(3, pages)
    slots = [
        (table[request, torch.arange(s) // (page_size * dcp_size)] * page_size * dcp_size)
        + torch.arange(s) % (page_size * dcp_size)
        for request, s in enumerate(prefixes)
    ]
    for rank in range(dcp_size):
        caches = [poisoned(3 * pages * page_size, 1, dim, dtype=torch.float64) for _ in range(2)]
        for context, of_request, s in zip(contexts, slots, prefixes):
            scatter_kv_(*caches, context[0, :s].contiguous(), context[1, :s].contiguous(), of_request, dcp_size, rank)
        lengths = torch.tensor([len(range(rank, s, dcp_size)) for s in prefixes])
        partials.append(attend_pages(q, *caches, table, lengths, row_request, sm_scale, page_size))
    merged, _ = merge_partials(torch.stack([out for out, _ in partials]), torch.stack([lse for _, lse in partials]))
    for request, (s, t) in enumerate(zip(prefixes, chunks)):
        k, v = contexts[request]
        seen = torch.ones(t, s + t, dtype=torch.bool).tril(s)
        expanded = [part.transpose(0, 1).expand(heads, -1, -1)[None] for part in (k, v)]
        want = torch.nn.functional.scaled_dot_product_attention(
            queries[request].transpose(0, 1)[None], *expanded, attn_mask=seen, scale=sm_scale
        )
        torch.testing.assert_close(merged[row_request == request], want[0].transpose(0, 1), rtol=1e-12, atol=1e-12)


def test_an_fp8_cache_is_read_with_its_scales():
    k_cache, v_cache, table, _ = draw_pages([20], 16, 1, 8, FP8)
    q = torch.randn(1, 2, 8)
    scaled = attend_pages(q, k_cache, v_cache, table, torch.tensor([20]), torch.tensor([0]), 0.5, 16, 0.25, 3.0)
    plain = [kv_head_reference.read(k_cache, torch.float32, 0.25), kv_head_reference.read(v_cache, torch.float32, 3.0)]
    want = attend_pages(q, *plain, table, torch.tensor([20]), torch.tensor([0]), 0.5, 16)
    torch.testing.assert_close(scaled, want)


def test_nothing_at_all_is_nothing():
    empty, cache = torch.zeros(0, 4, 8), torch.zeros(0, 2, 8)
    table, none = torch.zeros(0, 0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    out, lse = attend_pages(empty, cache, cache, table, none, none, 1.0, 64)
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))
    out, lse = attend_chunk(empty, cache, cache, torch.zeros(1, dtype=torch.int32), 1.0)
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": torch.zeros(2, 3, 8)}, "q must have a multiple of 2 heads, got 3"),
        ({"k_cache": torch.zeros(4, 2, 4)}, "k_cache must have shape"),
        ({"v_cache": torch.zeros(4, 1, 8)}, "v_cache must have shape"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, "lengths must have shape"),
        ({"row_request": torch.zeros(3, dtype=torch.int32)}, "row_request must have shape"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"k_scale": 2.0}, "k_scale must be 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_argument_is_refused_by_its_name(change, said):
    good = {
        "q": torch.zeros(2, 4, 8),
        "k_cache": torch.zeros(4, 2, 8),
        "v_cache": torch.zeros(4, 2, 8),
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "lengths": torch.zeros(1, dtype=torch.int32),
        "row_request": torch.zeros(2, dtype=torch.int32),
        "sm_scale": 1.0,
        "page_size": 4,
    }
    with pytest.raises(ValueError, match=said):
        attend_pages(**(good | change))


@pytest.mark.parametrize("starts", [[0, 1], [1, 2], [0, 2, 1, 2], []])
def test_a_chunks_bounds_ascend_over_all_its_tokens(starts):
    k = torch.zeros(2, 1, 8)
    with pytest.raises(ValueError, match="starts must ascend from 0 to 2"):
        attend_chunk(torch.zeros(2, 4, 8), k, k, torch.tensor(starts, dtype=torch.int64), 1.0)
