"""Cache writes, merges, messages and page gathers."""

from collections.abc import Iterator

import torch
from kernel_timing import Record, time_calls

from nsa_dcp_kernels import (
    gather_pages,
    merge_packed,
    merge_partials,
    pack_latent,
    pack_partials,
    remap_to_gathered,
    scatter_index_keys_,
    scatter_latent_,
)
from nsa_dcp_kernels.kv_format import INDEX_KEY_BYTES, LATENT_BYTES, LATENT_DIM, PAGE_SIZE


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


def bench_all(quick: bool) -> Iterator[Record]:
    # Tokens of a decode step stand anywhere, those of a prefill chunk in whole pages.
    for num_tokens, dcp_size, run in [(128, 8, 1), (8192, 1, 1), (8192, 1, PAGE_SIZE), (8192, 8, 8 * PAGE_SIZE)]:
        yield from bench_cache_writes(num_tokens, dcp_size, run)
    for num_tokens in (128, 4096):
        yield from bench_merges(num_tokens)
    if not quick:
        yield from bench_merges(1024, dcp_size=2, heads=32)
        yield from bench_page_gather(256)
