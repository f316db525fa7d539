"""Attention, localisation and scheduling of one DCP rank, against the stock schedule and a TP rank's own attention."""

from collections.abc import Callable, Iterator

import torch

from nsa_dcp_kernels import _flash_mla, attend_selection, localize_selection, localize_topk, plan_sparse
from nsa_dcp_kernels._triton.latent_dequant import dequantise_latent
from nsa_dcp_kernels.kv_format import KV_LORA_RANK, LATENT_BYTES, LATENT_DIM
from scripts.benchmarks.timing import Record, time_calls

SM_SCALE = LATENT_DIM**-0.5
TOPK = 2048
CACHE_ROWS = 1 << 19
SETS = 8
SKEWED = (0, 1, 64, 65, 300, 2048)


def draw_slots(num_tokens: int, dcp_size: int, num_rows: int = CACHE_ROWS) -> torch.Tensor:
    """[T, 2048] ascending slots; a rank's share of a row is Binomial(2048, 1 / dcp_size)."""
    slots = torch.randint(0, num_rows * dcp_size, (num_tokens, TOPK), dtype=torch.int32, device="cuda")
    return slots.sort(-1).values


def draw_skewed_slots(num_tokens: int, dcp_size: int) -> torch.Tensor:
    """[T, 2048] slots of which rank 0 owns 0, 1, 64, 65, 300 or 2048, in a random order of rows."""
    counts = torch.tensor(SKEWED).repeat(-(-num_tokens // len(SKEWED)))[:num_tokens]
    counts = counts[torch.randperm(num_tokens)].cuda().unsqueeze(1)
    row = torch.randint(0, CACHE_ROWS, (num_tokens, TOPK), dtype=torch.int32, device="cuda")
    return row * dcp_size + (torch.arange(TOPK, device="cuda") >= counts).int()


def draw_queries(num_tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(num_tokens, heads, LATENT_DIM, dtype=torch.bfloat16, device="cuda")


def draw_cache(num_rows: int = CACHE_ROWS) -> torch.Tensor:
    """Packed rows: bytes of finite values, scales near one."""
    cache = torch.randint(0, 120, (num_rows, LATENT_BYTES), dtype=torch.uint8, device="cuda")
    cache[:, 512:528].view(torch.float32).uniform_(0.5, 2)
    cache[:, 528:].view(torch.bfloat16).normal_()
    return cache


def attention_cost(num_valid: int, num_tokens: int, heads: int) -> tuple[int, int]:
    """(bytes, FLOP) that attending to `num_valid` rows in all cannot do without."""
    queries_and_outputs = 2 * num_tokens * heads * (LATENT_DIM + KV_LORA_RANK)
    return num_valid * LATENT_BYTES + queries_and_outputs, 2 * num_valid * heads * (LATENT_DIM + KV_LORA_RANK)


def walk_everything(slots: torch.Tensor, dcp_size: int, q: torch.Tensor, cache: torch.Tensor) -> Callable[[], object]:
    """Localise, and attend with FlashMLA's own schedule, made once outside."""
    meta = _flash_mla.hold_schedule(None)

    def call() -> object:
        rows, _ = localize_topk(slots, dcp_size, 0)
        return _flash_mla.launch_packed(q, cache, rows, SM_SCALE, meta)

    return call


def bench_attention(
    cache: torch.Tensor, num_tokens: int, heads: int, dcp_size: int, skewed: bool = False
) -> Iterator[Record]:
    """The whole of a layer that makes its own selection: localise, schedule, attend.

    As a step calls it: the plan is made with the localisation, and an empty row's lse is left to the merge. The stock
    side localises as well, and leaves the lse alike. "public lse" is the default call: planned by the layer, -inf.
    """
    draw = draw_skewed_slots if skewed else draw_slots
    sets = [(draw_queries(num_tokens, heads), draw(num_tokens, dcp_size)) for _ in range(SETS)]
    valid = [int(localize_topk(slots, dcp_size, 0)[1].sum()) for _, slots in sets]
    cost = attention_cost(sum(valid) // SETS, num_tokens, heads)
    case = f"b={num_tokens} heads={heads} " + ("skewed" if skewed else f"dcp={dcp_size}")
    ours = [
        lambda q=q, slots=slots: attend_selection(
            q, cache, localize_selection(slots, dcp_size, 0, planned_heads=heads), SM_SCALE, raw_lse=True
        )
        for q, slots in sets
    ]
    yield Record("attention fp8, planned", case, time_calls(ours), *cost)
    default = [
        lambda q=q, slots=slots: attend_selection(q, cache, localize_selection(slots, dcp_size, 0), SM_SCALE)
        for q, slots in sets
    ]
    yield Record("attention fp8, planned, public lse", case, time_calls(default), *cost)
    stock = [walk_everything(slots, dcp_size, q, cache) for q, slots in sets]
    yield Record("attention fp8, stock schedule", case, time_calls(stock), *cost)
    selections = [localize_selection(slots, dcp_size, 0) for _, slots in sets]
    reused = [
        lambda q=q, selection=selection: attend_selection(q, cache, selection, SM_SCALE, raw_lse=True)
        for (q, _), selection in zip(sets, selections)
    ]
    yield Record("attention fp8, plan reused", case, time_calls(reused), *cost)


def bench_tp_rank(cache: torch.Tensor, num_tokens: int) -> Record:
    """A TP rank of eight holds every token and pads its heads to 64; it localises nothing."""
    sets = [(draw_queries(num_tokens, 64), draw_slots(num_tokens, 1)) for _ in range(SETS)]
    metas = [_flash_mla.hold_schedule(None) for _ in sets]
    calls = [
        lambda q=q, rows=rows, meta=meta: _flash_mla.launch_packed(q, cache, rows, SM_SCALE, meta)
        for (q, rows), meta in zip(sets, metas)
    ]
    cost = attention_cost(num_tokens * TOPK, num_tokens, 64)
    return Record("attention fp8, a TP rank's own", f"b={num_tokens} heads=64 dcp=1", time_calls(calls), *cost)


def bench_plan(num_tokens: int, heads: int = 64, dcp_size: int = 8) -> Iterator[Record]:
    """Localisation alone, and with the schedule."""
    num_sms = _flash_mla.count_sms(torch.device("cuda", 0))
    sets = [draw_slots(num_tokens, dcp_size) for _ in range(max(16, min(128, 16384 // num_tokens)))]
    case = f"b={num_tokens} heads={heads} dcp={dcp_size}"
    localize = [lambda slots=slots: localize_topk(slots, dcp_size, 0) for slots in sets]
    yield Record("localize", case, time_calls(localize), moved_bytes=8 * num_tokens * TOPK)
    plan = [lambda slots=slots: plan_sparse(slots, dcp_size, 0, heads, num_sms) for slots in sets]
    yield Record("localize + schedule", case, time_calls(plan), moved_bytes=16 * num_tokens * TOPK)
    try:
        from sglang.kernels.ops.attention.dsa.transform_index import transform_index_page_table_dcp
    except ImportError:
        return
    theirs = [lambda slots=slots: transform_index_page_table_dcp(slots, dcp_size, 0) for slots in sets]
    yield Record("localize, sglang 0.5.23", case, time_calls(theirs), moved_bytes=8 * num_tokens * TOPK)


def bench_bf16(num_tokens: int, dcp_size: int, heads: int = 64) -> Record:
    cache = torch.randn(1 << 18, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    num_sets = max(2, min(SETS, 4096 // num_tokens))
    sets = [(draw_queries(num_tokens, heads), draw_slots(num_tokens, dcp_size, len(cache))) for _ in range(num_sets)]
    calls = [
        lambda q=q, slots=slots: attend_selection(q, cache, localize_selection(slots, dcp_size, 0), SM_SCALE)
        for q, slots in sets
    ]
    flop = 2 * num_tokens * TOPK // dcp_size * heads * (LATENT_DIM + KV_LORA_RANK)
    return Record("attention bf16", f"b={num_tokens} heads={heads} dcp={dcp_size}", time_calls(calls, 10), flop=flop)


def bench_prefill(num_tokens: int, cache_rows: int, dcp_size: int, heads: int = 64) -> Iterator[Record]:
    """Prefill-size FP8 rows: launches of at most twice the parts, or the cache dequantised for the bf16 kernel."""
    cache = draw_cache(cache_rows)
    q, slots = draw_queries(num_tokens, heads), draw_slots(num_tokens, dcp_size, cache_rows)
    case = f"T={num_tokens} cache={cache_rows} heads={heads} dcp={dcp_size}"
    flop = 2 * num_tokens * TOPK // dcp_size * heads * (LATENT_DIM + KV_LORA_RANK)
    decide = _flash_mla.dequantised_bytes
    for op, pays in (("prefill fp8, planned launches", False), ("prefill fp8, dequantised", True)):
        _flash_mla.dequantised_bytes = lambda *_, pays=pays: int(pays)
        call = [lambda: attend_selection(q, cache, localize_selection(slots, dcp_size, 0), SM_SCALE)]
        yield Record(op, case, time_calls(call, 8), flop=flop)
    _flash_mla.dequantised_bytes = decide
    yield Record(
        "prefill fp8, stock schedule", case, time_calls([walk_everything(slots, dcp_size, q, cache)], 8), flop=flop
    )
    moved = cache_rows * (LATENT_BYTES + 2 * LATENT_DIM)
    yield Record(
        "dequantise", f"cache={cache_rows}", time_calls([lambda: dequantise_latent(cache)], 8), moved_bytes=moved
    )


def bench_all(quick: bool) -> Iterator[Record]:
    cache = draw_cache()
    batches = (64, 128) if quick else (1, 8, 16, 32, 64, 96, 100, 128, 133, 160, 200, 256)
    for num_tokens in batches:
        for dcp_size in (8,) if quick else (8, 4, 2, 1):
            yield from bench_attention(cache, num_tokens, 64, dcp_size)
    for num_tokens in (64, 128) if quick else (1, 16, 32, 64, 80, 96, 128):
        for dcp_size in (8,) if quick else (8, 2, 1):
            yield from bench_attention(cache, num_tokens, 128, dcp_size)
    for num_tokens in (60, 120):
        yield from bench_attention(cache, num_tokens, 64, 8, skewed=True)
    for num_tokens in (64, 128, 256):
        yield bench_tp_rank(cache, num_tokens)
        yield from bench_plan(num_tokens)
    yield from bench_plan(128, heads=128)
    del cache
    for num_tokens in (32, 128) if quick else (32, 128, 1024, 8192):
        yield bench_bf16(num_tokens, 8)
        yield bench_bf16(num_tokens, 1)
    for num_tokens, cache_rows, dcp_size in [(512, 16384, 8), (1024, 16384, 8), (1024, 131072, 1), (8192, 16384, 8)]:
        yield from bench_prefill(num_tokens, cache_rows, dcp_size)
