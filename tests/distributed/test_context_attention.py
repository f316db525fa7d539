"""Attention of models with KV heads over gloo ranks, against torch's own over whole contexts in one process."""

import itertools

import pytest
import torch

from nsa_dcp import comm
from nsa_dcp.cache import KeyValueCache
from nsa_dcp.config import COMM_BACKENDS
from nsa_dcp.kv_heads.context_attention import LocalContext, attend_cached, attend_extended
from nsa_dcp.launcher import run_ranks
from nsa_dcp.testing.poisoned_memory import poisoned_allocations

HEADS, DIM, SCALE = 2, 16, 0.3
# (tokens cached before, new tokens): nothing before, fewer than ranks, whole and broken widened pages.
STEPS = {
    "prefill": [(0, 7), (0, 1), (0, 130)],
    "mixed": [(0, 5), (1, 3), (513, 1), (64, 2), (2, 6)],
    "verify": [(3, 4), (512, 4), (70, 4)],
    "decode": [(0, 1), (1, 1), (7, 1), (511, 1), (70, 1)],
}


def whole(q, k, v, prefix):
    """[T, H, D] of one request by torch's attention, one KV head for all query heads."""
    seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(prefix)
    keys, values = (part.expand(q.shape[1], -1, -1)[None] for part in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=seen, scale=SCALE
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("world_size", [pytest.param(size, id=f"dcp{size}") for size in (2, 3, 4, 8)])
def test_attention_over_parts_is_attention_over_the_whole_context(world_size):
    """Every kind of step, both backends, on caches of NaN where a rank owns nothing."""
    run_ranks(attend_on_rank, world_size, (world_size,))


@poisoned_allocations()
def attend_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    for (kind, step), backend in itertools.product(STEPS.items(), COMM_BACKENDS):
        torch.manual_seed(len(kind))
        contexts = [torch.randn(2, s + t, DIM, dtype=torch.float64) for s, t in step]
        queries = [torch.randn(t, HEADS * world_size, DIM, dtype=torch.float64) for _, t in step]
        page = 64 * world_size
        counts = [-(-(s + t) // page) for s, t in step]
        order = (torch.randperm(sum(counts)) + 1).tolist()
        table = torch.zeros(len(step), max(counts), dtype=torch.int32)
        for request, count in enumerate(counts):
            table[request, :count] = torch.tensor([order.pop() for _ in range(count)])
        cache = KeyValueCache(1, 64 * sum(counts), 1, DIM, torch.float64, torch.device("cpu"), world_size, rank)
        for part in cache.layers[0]:
            part.fill_(float("nan"))
        for request, (s, t) in enumerate(step):
            cached = s + t if kind == "decode" else s
            slots = torch.tensor(
                [int(table[request, at // page]) * page + at % page for at in range(cached)], dtype=torch.int32
            )
            k, v = (part[:cached].unsqueeze(1) for part in contexts[request])
            cache.write(0, k, v, slots)
        lengths = torch.tensor([len(range(rank, s + (kind == "decode"), world_size)) for s, _ in step])
        row_request = torch.repeat_interleave(torch.arange(len(step)), torch.tensor([t for _, t in step]))
        own = slice(rank * HEADS, (rank + 1) * HEADS)
        q = torch.cat(queries)[:, own].contiguous()
        context = LocalContext(*cache.layers[0], table, lengths, row_request)
        if kind == "decode":
            out = attend_cached(q, context, SCALE, group, backend)
        else:
            new = [torch.cat([c[part, s:] for c, (s, _) in zip(contexts, step)]).unsqueeze(1) for part in (0, 1)]
            starts = torch.tensor([0, *itertools.accumulate(t for _, t in step)])
            prefix = context if any(s for s, _ in step) else None
            out = attend_extended(q, *new, starts, prefix, SCALE, group, backend)
        want = torch.cat([whole(q, *context, s)[:, own] for q, context, (s, _) in zip(queries, contexts, step)])
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12, msg=f"{kind} by {backend} on rank {rank}")
