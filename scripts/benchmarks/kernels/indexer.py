"""Scoring and selection, every rank scoring every row against each rank scoring its share."""

from collections.abc import Iterator

import torch

from nsa_dcp_kernels import find_threshold, join_index_pages, score_index, select_candidates, select_topk, take_own
from nsa_dcp_kernels.kv_format import INDEX_KEY_BYTES, PAGE_SIZE
from scripts.benchmarks.timing import Record, time_calls

TOPK = 2048
HEADS = 64
# The [rows, context] float32 scores held at once, as in nsa_dcp.indexer.
LOGITS_BYTES = 256 << 20


def bench_selection(num_tokens: int, length: int) -> Iterator[Record]:
    num_sets = max(1, min(8, (1 << 29) // (4 * num_tokens * length)))
    logits = torch.randn(num_sets, num_tokens, length, device="cuda")
    context_lens = torch.full((num_tokens,), length, dtype=torch.int32, device="cuda")
    case = f"T={num_tokens} context={length}"
    moved = 4 * num_tokens * (length + TOPK)
    ours = [lambda at=at: select_topk(logits[at], context_lens, TOPK) for at in range(num_sets)]
    yield Record("select", case, time_calls(ours, 10), moved_bytes=moved)
    theirs = [lambda at=at: torch.topk(logits[at], TOPK, dim=-1, sorted=False) for at in range(num_sets)]
    yield Record("select, torch.topk", case, time_calls(theirs, 10), moved_bytes=moved)


def draw_scoring(num_tokens: int, num_requests: int, length: int) -> tuple[torch.Tensor, ...]:
    pages = -(-length // PAGE_SIZE)
    cache = torch.randint(0, 120, (num_requests * pages, PAGE_SIZE * INDEX_KEY_BYTES), dtype=torch.uint8, device="cuda")
    cache[:, PAGE_SIZE * 128 :].view(torch.float32).uniform_(0.5, 2)
    table = torch.randperm(num_requests * pages, device="cuda").view(num_requests, pages).int()
    row_request = torch.arange(num_requests, device="cuda").repeat_interleave(num_tokens // num_requests).int()
    context_lens = torch.full((num_tokens,), length, dtype=torch.int32, device="cuda")
    q = torch.randn(num_tokens, HEADS, 128, dtype=torch.bfloat16, device="cuda")
    return q, torch.randn(num_tokens, HEADS, device="cuda"), cache, table, row_request, context_lens


def select_rows(scoring: tuple[torch.Tensor, ...], length: int) -> None:
    """Score and select a step's rows, as many at once as the budget holds."""
    q, weights, cache, table, row_request, context_lens = scoring
    step = max(1, LOGITS_BYTES // (4 * length))
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        logits = score_index(q[part], weights[part], cache, table, row_request[part], context_lens[part], length)
        select_topk(logits, context_lens[part], TOPK)


def bench_indexer(num_tokens: int, num_requests: int, length: int, dcp_size: int = 8) -> Iterator[Record]:
    """A step's scoring and selection: all rows, and one rank's share of them; the gather of the rest is bytes."""
    scoring = draw_scoring(num_tokens, num_requests, length)
    case = f"T={num_tokens} requests={num_requests} context={length}"
    flop = 2 * 128 * HEADS * num_tokens * length
    if num_tokens * length * 4 <= LOGITS_BYTES:
        yield Record("score", case, time_calls([lambda: score_index(*scoring, length)], 10), flop=flop)
    yield Record("score + select, every row", case, time_calls([lambda: select_rows(scoring, length)], 5), flop=flop)
    if num_tokens >= dcp_size:
        q, weights, cache, table, row_request, context_lens = scoring
        mine = slice(0, num_tokens, dcp_size)
        share = (q[mine].contiguous(), weights[mine].contiguous(), cache, table)
        share += (row_request[mine].contiguous(), context_lens[mine].contiguous())
        gathered = 4 * TOPK * num_tokens * (dcp_size - 1) // dcp_size
        yield Record(
            f"score + select, 1/{dcp_size} of the rows, {gathered / 1e6:.1f} MB gathered",
            case,
            time_calls([lambda: select_rows(share, length)], 5),
            flop=flop // dcp_size,
        )


def bench_sharded(num_tokens: int, length: int, dcp_size: int = 8) -> Iterator[Record]:
    """One rank's part of a step's selection over sharded index keys; what ranks exchange is bytes."""
    own = -(-length // dcp_size)
    q, weights, cache, table, row_request, own_lens = draw_scoring(num_tokens, num_tokens, own)
    case = f"T={num_tokens} context={length} dcp={dcp_size}"
    flop = 2 * 128 * HEADS * num_tokens * own

    def select_own() -> torch.Tensor:
        logits = score_index(q, weights, cache, table, row_request, own_lens, own)
        return select_candidates(logits, own_lens, TOPK)

    sent = 8 * TOPK * num_tokens * (dcp_size - 1) // dcp_size
    name = f"score + candidates, every row, {sent / 1e6:.1f} MB exchanged"
    yield Record(name, case, time_calls([select_own], 5), flop=flop)
    candidates = select_own()
    lists = candidates[: -(-num_tokens // dcp_size)].expand(dcp_size, -1, -1, -1).contiguous()
    yield Record("threshold, 1/dcp of the rows", case, time_calls([lambda: find_threshold(lists)], 10))
    cutoffs = find_threshold(candidates.expand(dcp_size, -1, -1, -1).contiguous())
    take = time_calls([lambda: take_own(candidates, cutoffs, table, dcp_size, 0, row_request=row_request)], 10)
    yield Record("own rows", case, take, moved_bytes=12 * num_tokens * TOPK)


def bench_join(num_tokens: int, dcp_size: int = 8) -> Iterator[Record]:
    """A prompt's index pages, gathered from all ranks, put in the order of its tokens."""
    pages = num_tokens // (PAGE_SIZE * dcp_size)
    shape = (dcp_size, pages, PAGE_SIZE * INDEX_KEY_BYTES)
    shards = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    joined = time_calls([lambda: join_index_pages(shards)], 10)
    yield Record("join index pages", f"tokens={num_tokens} dcp={dcp_size}", joined, moved_bytes=2 * shards.nbytes)


def bench_all(quick: bool) -> Iterator[Record]:
    for num_tokens, length in [(8, 131072), (64, 32768), (256, 8192), (2048, 32768)]:
        yield from bench_selection(num_tokens, length)
    yield from bench_indexer(64, 64, 32768)
    yield from bench_sharded(64, 32768)
    yield from bench_join(131072)
    if quick:
        return
    yield from bench_indexer(8, 8, 131072)
    yield from bench_indexer(8, 8, 16384)
    yield from bench_indexer(256, 256, 8192)
    yield from bench_indexer(8192, 1, 32768)
    yield from bench_indexer(8192, 1, 131072)
    for num_tokens, length in [(1, 4096), (1, 131072), (16, 131072), (16, 1 << 20), (256, 8192)]:
        yield from bench_sharded(num_tokens, length)
    yield from bench_sharded(64, 32768, dcp_size=2)
    yield from bench_join(1 << 20)
