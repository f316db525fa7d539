"""Cache writes, merges, messages, page gathers and page tables."""

from collections.abc import Iterator

import torch

from nsa_dcp_kernels import (
    fill_page_table_,
    gather_pages,
    look_up_slots,
    merge_packed,
    merge_partials,
    pack_latent,
    pack_partials,
    remap_to_gathered,
    scatter_index_keys_,
    scatter_latent_,
)
from nsa_dcp_kernels.kv_format import INDEX_KEY_BYTES, LATENT_BYTES, LATENT_DIM, PAGE_SIZE
from scripts.benchmarks.timing import Record, time_calls


def draw_slots(num_sets: int, num_tokens: int, dcp_size: int, run: int) -> torch.Tensor:
    """[sets, T] int32: runs of `run` consecutive slots, each somewhere else."""
    runs = torch.randperm(num_sets * num_tokens * dcp_size // run, device="cuda")[: num_sets * num_tokens // run]
    return (runs.unsqueeze(1) * run + torch.arange(run, device="cuda")).int().view(num_sets, num_tokens)


def bench_cache_writes(num_tokens: int, dcp_size: int, run: int) -> Iterator[Record]:
    """A step's latents quantised into the rows that rank 0 owns, and its index keys."""
    num_sets = max(2, min(16, 65536 // num_tokens))
    rows = num_sets * num_tokens
    cache = torch.zeros(rows, LATENT_BYTES, dtype=torch.uint8, device="cuda")
    slots = draw_slots(num_sets, num_tokens, dcp_size, run)
    latents = torch.randn(num_sets, num_tokens, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    case = f"T={num_tokens} dcp={dcp_size} runs={run}"
    owned = num_tokens // dcp_size
    calls = [
        lambda at=at: scatter_latent_(cache, latents[at, :, :512], latents[at, :, 512:], slots[at], dcp_size, 0)
        for at in range(num_sets)
    ]
    moved = owned * (2 * LATENT_DIM + LATENT_BYTES) + 4 * num_tokens
    yield Record("pack + scatter latents", case, time_calls(calls), moved_bytes=moved)
    if dcp_size == 1 and run > 1:
        calls = [lambda at=at: pack_latent(latents[at, :, :512], latents[at, :, 512:]) for at in range(num_sets)]
        yield Record("pack latents", case, time_calls(calls), moved_bytes=num_tokens * (2 * LATENT_DIM + LATENT_BYTES))
        keys = torch.randn(num_sets, num_tokens, 128, dtype=torch.bfloat16, device="cuda")
        index_cache = torch.zeros(rows // PAGE_SIZE, PAGE_SIZE * INDEX_KEY_BYTES, dtype=torch.uint8, device="cuda")
        calls = [lambda at=at: scatter_index_keys_(index_cache, keys[at], slots[at]) for at in range(num_sets)]
        moved = num_tokens * (256 + INDEX_KEY_BYTES + 4)
        yield Record("pack + scatter index keys", case, time_calls(calls), moved_bytes=moved)


def bench_merges(num_tokens: int, dcp_size: int = 8, heads: int = 8) -> Iterator[Record]:
    """A rank's own heads of every rank's partial result."""
    num_sets = max(2, min(32, 16384 // num_tokens))
    out = torch.randn(num_sets, dcp_size, num_tokens, heads, 512, dtype=torch.bfloat16, device="cuda")
    lse = 4 * torch.randn(num_sets, dcp_size, num_tokens, heads, device="cuda")
    case = f"T={num_tokens} heads={heads} partials={dcp_size}"
    rows = num_tokens * heads
    moved = (dcp_size + 1) * rows * (2 * 512 + 4)
    calls = [lambda at=at: merge_partials(out[at], lse[at]) for at in range(num_sets)]
    yield Record("merge", case, time_calls(calls), moved_bytes=moved)
    gathered = out.transpose(1, 2).reshape(num_sets, num_tokens, dcp_size * heads, 512)
    gathered_lse = lse.transpose(1, 2).reshape(num_sets, num_tokens, dcp_size * heads)
    calls = [lambda at=at: pack_partials(gathered[at], gathered_lse[at], dcp_size) for at in range(num_sets)]
    yield Record("pack partials", case, time_calls(calls), moved_bytes=2 * dcp_size * rows * (2 * 512 + 4))
    packed = [pack_partials(gathered[at], gathered_lse[at], dcp_size) for at in range(num_sets)]
    calls = [lambda message=message: merge_packed(message, torch.bfloat16) for message in packed]
    yield Record("unpack + merge", case, time_calls(calls), moved_bytes=moved)
    try:
        from sglang.kernels.ops.attention.dcp_kernels import dcp_lse_combine_triton
    except ImportError:
        return
    calls = [lambda at=at: dcp_lse_combine_triton(out[at], lse[at], True, True) for at in range(num_sets)]
    yield Record("merge, sglang 0.5.23", case, time_calls(calls), moved_bytes=moved)


def bench_page_gather(num_pages: int, dcp_size: int = 8) -> Iterator[Record]:
    cache = torch.randint(0, 255, (16 * num_pages * PAGE_SIZE, LATENT_BYTES), dtype=torch.uint8, device="cuda")
    pages = [torch.randperm(16 * num_pages, device="cuda")[:num_pages].int() for _ in range(8)]
    calls = [lambda listed=listed: gather_pages(cache, listed) for listed in pages]
    moved = 2 * num_pages * PAGE_SIZE * LATENT_BYTES
    yield Record("gather pages", f"pages={num_pages}", time_calls(calls), moved_bytes=moved)
    page_pos = torch.arange(num_pages, dtype=torch.int32, device="cuda")
    slots = torch.randint(0, num_pages * PAGE_SIZE * dcp_size, (4, 1024, 2048), dtype=torch.int32, device="cuda")
    calls = [
        lambda at=at: remap_to_gathered(slots[at], page_pos, dcp_size, num_pages * PAGE_SIZE)
        for at in range(len(slots))
    ]
    yield Record("remap to gathered", "T=1024", time_calls(calls), moved_bytes=2 * slots[0].nbytes)


def bench_page_tables(num_rows: int, context: int, longest: int = 524288, num_sets: int = 4) -> Iterator[Record]:
    """A decode graph's page table of equal contexts, where contexts of up to `longest` tokens are admitted."""
    num_requests, pages_each = num_sets * num_rows, context // PAGE_SIZE
    pages = torch.randperm(num_requests * pages_each, device="cuda").int().view(num_requests, pages_each, 1)
    request_slots = torch.zeros(num_requests, longest, dtype=torch.int32, device="cuda")
    within_page = torch.arange(PAGE_SIZE, dtype=torch.int32, device="cuda")
    request_slots[:, :context] = (pages * PAGE_SIZE + within_page).view(num_requests, context)
    requests = torch.randperm(num_requests, device="cuda").view(num_sets, num_rows)
    lengths = torch.full((num_rows,), context, device="cuda")
    tables = torch.zeros(num_sets, num_rows, longest // PAGE_SIZE, dtype=torch.int32, device="cuda")
    case = f"B={num_rows} context={context}"
    calls = [lambda at=at: fill_page_table_(tables[at], request_slots, requests[at], lengths) for at in range(num_sets)]
    yield Record("fill page table", case, time_calls(calls), moved_bytes=2 * 4 * num_rows * pages_each)
    try:
        from sglang.kernels.ops.attention.dsa.metadata import fused_dsa_decode_metadata
    except ImportError:
        pass
    else:
        kept, sums = ([torch.zeros(num_rows + more, dtype=torch.int32, device="cuda") for _ in "ab"] for more in (0, 1))

        def fill(at: int) -> None:
            tensors = (lengths, requests[at], request_slots, kept[0], sums[0], None, kept[1], sums[1], tables[at])
            fused_dsa_decode_metadata(*tensors, num_rows, longest, 2048, PAGE_SIZE)

        calls = [lambda at=at: fill(at) for at in range(num_sets)]
        yield Record("fill page table and lengths, sglang 0.5.23", case, time_calls(calls))
    rows = torch.arange(num_rows, device="cuda")
    positions = torch.randint(0, context, (num_sets, num_rows, 2048), dtype=torch.int32, device="cuda")
    calls = [lambda at=at: look_up_slots(positions[at], rows, tables[at], PAGE_SIZE) for at in range(num_sets)]
    yield Record("look up slots", case, time_calls(calls), moved_bytes=2 * positions[0].nbytes)


def bench_all(quick: bool) -> Iterator[Record]:
    # Tokens of a decode step stand anywhere, those of a prefill chunk in whole pages.
    for num_tokens, dcp_size, run in [(128, 8, 1), (8192, 1, 1), (8192, 1, PAGE_SIZE), (8192, 8, 8 * PAGE_SIZE)]:
        yield from bench_cache_writes(num_tokens, dcp_size, run)
    for num_tokens in (128, 4096):
        yield from bench_merges(num_tokens)
    if not quick:
        yield from bench_merges(1024, dcp_size=2, heads=32)
        yield from bench_page_gather(256)
        yield from bench_page_tables(64, 4096)
        yield from bench_page_tables(64, 131072)
