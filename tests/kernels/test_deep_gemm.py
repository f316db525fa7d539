"""Index scores on Hopper, DeepGEMM's and the Triton kernel's, against float64."""

import math

import pytest
import torch

from nsa_dcp_kernels import _deep_gemm, reference, score_index
from nsa_dcp_kernels._triton import index_logits as kernels

# DeepGEMM's queries are rounded to float8; a bf16 product is exact and summed in float32.
RMS_FP8_QUERY, RMS_BF16, RMS_FLOAT32 = 4e-2, 1e-5, 1e-5


def draw_index_cache(num_pages: int, dtype: torch.dtype, used: torch.Tensor) -> torch.Tensor:
    """A cache whose unused pages are NaN."""
    keys = torch.randn(num_pages * 64, 128)
    if dtype != torch.uint8:
        cache = keys.to(dtype)
        pages = cache.view(num_pages, -1)
    else:
        cache = pages = torch.zeros(num_pages, 64 * 132, dtype=torch.uint8)
        reference.scatter_index_keys_(cache, keys, torch.arange(num_pages * 64))
    unused = torch.ones(num_pages, dtype=torch.bool)
    unused[used] = False
    pages[unused] = 255 if dtype == torch.uint8 else math.nan
    return cache


def draw_scoring(rows_per_request: list[int], max_context_len: int, num_heads: int, dtype: torch.dtype):
    """q, weights, cache, page table, row requests, context lengths. Pages past a context are out of range."""
    num_requests, num_tokens = len(rows_per_request), sum(rows_per_request)
    width = -(-max_context_len // 64)
    row_request = torch.repeat_interleave(torch.arange(num_requests), torch.tensor(rows_per_request)).int()
    context_lens = torch.randint(0, max_context_len + 1, (num_tokens,), dtype=torch.int32)
    context_lens[0] = max_context_len
    if num_tokens > 2:
        context_lens[1:3] = torch.tensor([0, 1])
    num_pages = num_requests * width + 3
    table = torch.randperm(num_pages)[: num_requests * width].view(num_requests, width).int()
    longest = torch.zeros(num_requests, dtype=torch.int32).scatter_reduce_(0, row_request.long(), context_lens, "amax")
    held = torch.arange(width) * 64 < longest.unsqueeze(1)
    cache = draw_index_cache(num_pages, dtype, table[held].long())
    table = torch.where(held, table, 1 << 28).int()
    q, weights = torch.randn(num_tokens, num_heads, 128), torch.randn(num_tokens, num_heads)
    return q, weights, cache, table, row_request, context_lens


def score_float64(q, weights, cache, table, row_request, context_lens, max_context_len):
    """By its formula, a query at a time."""
    logits = torch.full((len(q), max_context_len), -math.inf, dtype=torch.float64)
    for token, length in enumerate(context_lens.tolist()):
        position = torch.arange(length)
        slots = table[row_request[token]].long()[position // 64] * 64 + position % 64
        keys = reference.gather_index_keys(cache, slots).double()
        logits[token, :length] = weights[token].double() @ torch.relu(q[token].double() @ keys.T)
    return logits


def check_scores(scoring, max_context_len: int, rms: float, scored: torch.Tensor) -> None:
    """Errors are measured against the sum's terms: weights of both signs cancel in the sum itself."""
    q, weights, *rest = scoring
    expected = score_float64(*scoring, max_context_len)
    terms = score_float64(q, weights.abs(), *rest, max_context_len)
    scored = scored.cpu()
    assert scored.shape == expected.shape
    assert scored.dtype == torch.float32
    seen = expected != -math.inf
    assert torch.equal(scored != -math.inf, seen)
    assert (scored.double() - expected)[seen].norm() <= rms * terms[seen].norm()
    # One wrong entry must not hide among many right ones.
    assert ((scored.double() - expected)[seen].abs() <= 8 * rms * terms[seen].mean()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [32, 64])
@pytest.mark.parametrize(
    ("rows_per_request", "max_context_len"),
    [
        pytest.param([1], 1, id="one-token"),
        pytest.param([1] * 7, 300, id="decode-7"),
        pytest.param([1] * 32, 5000, id="decode-32"),
        pytest.param([1] * 133, 1000, id="decode-133"),
        pytest.param([3, 1, 2], 700, id="few-rows-each"),
        pytest.param([40, 30], 2000, id="prefill"),
        pytest.param([101], 4000, id="prefill-odd"),
    ],
)
def test_scores_match_float64(rows_per_request, max_context_len, num_heads):
    scoring = draw_scoring(rows_per_request, max_context_len, num_heads, torch.uint8)
    scored = score_index(*(tensor.cuda() for tensor in bf16_queries(scoring)), max_context_len)
    check_scores(bf16_queries(scoring), max_context_len, RMS_FP8_QUERY, scored)


@pytest.mark.gpu
def test_paged_and_ragged_scores_select_alike(monkeypatch):
    """Whichever kernel a batch's shape leads to, a row's scores are the same bits."""
    scoring = [tensor.cuda() for tensor in bf16_queries(draw_scoring([20, 16], 3000, 64, torch.uint8))]
    ragged = score_index(*scoring, 3000)
    monkeypatch.setattr(_deep_gemm, "_RAGGED_ROWS_PER_REQUEST", 1 << 30)
    assert torch.equal(score_index(*scoring, 3000), ragged)


@pytest.mark.gpu
def test_batch_without_a_context_scores_nothing():
    q, weights, cache, table, row_request, context_lens = draw_scoring([1] * 32, 256, 64, torch.uint8)
    scoring = (q.bfloat16(), weights, cache, table, row_request, torch.zeros_like(context_lens))
    scored = score_index(*(tensor.cuda() for tensor in scoring), 256)
    assert (scored == -math.inf).all()


@pytest.mark.gpu
def test_captured_scores_follow_their_contexts():
    scoring = [tensor.cuda() for tensor in bf16_queries(draw_scoring([1] * 16, 3000, 64, torch.uint8))]
    score_index(*scoring, 3000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scored = score_index(*scoring, 3000)
    for _ in range(3):
        scoring[0].normal_()
        scoring[5].copy_((scoring[5].float() * torch.rand(16, device="cuda")).int())
        graph.replay()
        assert torch.equal(scored, score_index(*scoring, 3000))


@pytest.mark.parametrize("num_heads", [1, 8, 48])
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=["fp8", "bf16", "f32"])
def test_triton_scores_match_float64(device, cache_dtype, num_heads):
    scoring = draw_scoring([1, 2, 3], 200, num_heads, cache_dtype)
    scored = kernels.score_index(*(tensor.to(device) for tensor in scoring), 200)
    check_scores(scoring, 200, RMS_FLOAT32, scored)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [4, 64])
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.bfloat16], ids=["fp8", "bf16"])
def test_triton_scores_of_bf16_queries_match_float64(cache_dtype, num_heads):
    scoring = bf16_queries(draw_scoring([5, 1, 70], 1500, num_heads, cache_dtype))
    scored = kernels.score_index(*(tensor.cuda() for tensor in scoring), 1500)
    check_scores(scoring, 1500, RMS_BF16, scored)


def test_index_cache_that_is_a_part_of_a_wider_one_is_refused(device):
    q, weights, cache, *rest = (tensor.to(device) for tensor in draw_scoring([2], 64, 8, torch.bfloat16))
    wider = torch.cat([cache, cache], dim=1)[:, :128]
    with pytest.raises(ValueError, match=r"index_cache must be contiguous, got strides \(256, 1\)"):
        kernels.score_index(q, weights, wider, *rest, 64)


def test_queries_without_a_request_are_refused():
    q, weights, cache, table, *rest = draw_scoring([2], 64, 32, torch.uint8)
    with pytest.raises(ValueError, match=r"page_table must have a page per request, got \[0, 1\]"):
        _deep_gemm.score_index(q, weights, cache, table[:0], *rest, 64)


def bf16_queries(scoring):
    return (scoring[0].bfloat16(), *scoring[1:])


def test_float64_scores_are_refused_on_a_gpu():
    q, weights, cache, table, row_request, context_lens = draw_scoring([2], 64, 8, torch.float32)
    with pytest.raises(NotImplementedError, match="float64 scores are for the CPU"):
        _deep_gemm.score_index(q.double(), weights.double(), cache, table, row_request, context_lens, 64)
