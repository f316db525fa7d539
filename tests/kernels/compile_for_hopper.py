"""Compile every kernel for sm_90 as its launch function specialises it, on a machine without a GPU.

The interpreter accepts programs that Triton's compiler rejects. Sizes of 1 and multiples of 16 are among those
compiled, since Triton specialises them. Run in a process of its own: the interpreter, once chosen, cannot be left.
Prints the name of each kernel compiled.
"""

import os
import re

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nsa_dcp_kernels._triton import (
    index_logits,
    index_page_gather,
    index_query,
    kv_pack,
    kv_scatter,
    latent_dequant,
    localize,
    lse_merge,
    page_gather,
    page_table,
    partial_pack,
    peer_exchange,
    schedule,
    sharded_selection,
    slot_selection,
    topk,
)
from nsa_dcp_kernels.peer_memory import PeerChannels


class HopperWithoutDevice:
    """What the compiler asks of a driver; nothing is launched."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead_of_launching(launch):
    def run(self, *args, grid, warmup, **kwargs):
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if self.__name__ == "_gather_index_pages_kernel":
            check_wide_products(compiled.asm["ttir"])
        # Its pointers carry a layout hint that is not true of them: a store of more than one entry would be wrong.
        assert self.__name__ != "_select_kernel" or "st.global.v" not in compiled.asm["ptx"]
        # These read rows of any pitch and start by whole wide loads.
        wide = self.__name__ in ("_group_maxima_kernel", "_collect_kernel") and launch_takes_wide_loads(kwargs)
        assert not wide or "ld.global.v4" in compiled.asm["ptx"]
        if self.__name__ in ("_exchange_partials_kernel", "_gather_rows_kernel"):
            check_peer_protocol(compiled.asm["ptx"])
        print(self.__name__)

    return run


def check_peer_protocol(ptx: str) -> None:
    """What no interpreter can tell of programs that meet in peers' memory."""
    lines = [line.strip() for line in ptx.splitlines()]
    (release, *_) = releases = [at for at, line in enumerate(lines) if ".sys.release.exch.b64" in line]
    acquires = [at for at, line in enumerate(lines) if ".sys.acquire" in line and ".b64" in line]
    assert releases and acquires and release < min(acquires)
    # One thread releases, after all threads' writes: the barrier between is the last before it.
    assert "bar.sync" in " ".join(lines[max(0, release - 40) : release]), "no barrier before the flags"
    # Each look at a flag is one thread's, handed to all through shared memory: no two can decide otherwise.
    assert all(lines[at].startswith("@") for at in acquires)
    # Both ways of a slot are wide, and what was received comes from where peers write, not from a cache of this SM.
    assert "st.global.v4.b32" in ptx and "ld.global.cg.v4.b32" in ptx
    assert "ld.global.cg.b16" not in ptx and "st.global.b16" not in ptx
    # No registers in memory, and an end for a wait.
    assert ".local" not in ptx and "%globaltimer" in ptx and "trap;" in ptx


def check_wide_products(ttir: str) -> None:
    """Every product by a page's words is one of 64 bits: in 32 it wraps in a cache past 2**31 bytes."""
    products = [line for line in ttir.splitlines() if "arith.muli" in line]
    narrow = [line for line in products if re.search(r": (tensor<\d+(x\d+)*x)?i32", line)]
    # Of 32 bits are places inside a page alone: 64 tokens of 32 words.
    assert products and all("tensor<64x1xi32>" in line for line in narrow), narrow


def launch_takes_wide_loads(kwargs) -> bool:
    return kwargs["UNIT"] == 4


def compile_merges() -> None:
    for dtype, num_partials, num_tokens, num_heads, dim in [
        (torch.bfloat16, 1, 1, 1, 512),
        (torch.bfloat16, 8, 128, 8, 512),
        (torch.float16, 3, 3, 5, 66),
        (torch.float32, 20, 1, 2, 64),
    ]:
        out = torch.zeros(num_partials, num_tokens, num_heads, dim, dtype=dtype)
        lse = torch.zeros(num_partials, num_tokens, num_heads)
        lse_merge.merge_partials(out, lse)
        packed = partial_pack.pack_partials(out[0], lse[0], num_heads).expand(num_heads, -1, -1, -1)
        partial_pack.unpack_partials(packed, dtype)
        partial_pack.merge_packed(packed, dtype)


def compile_cache_writes() -> None:
    for dtype, num_tokens, slot_dtype, group in [
        (torch.bfloat16, 1, torch.int32, (1, 0)),
        (torch.bfloat16, 128, torch.int64, (8, 7)),
        (torch.float32, 3, torch.int64, (3, 1)),
    ]:
        k_nope, k_rope = torch.zeros(num_tokens, 512, dtype=dtype), torch.zeros(num_tokens, 64, dtype=dtype)
        kv_pack.unpack_latent(kv_pack.pack_latent(k_nope, k_rope))
        slots = torch.zeros(num_tokens, dtype=slot_dtype)
        for cache in (torch.zeros(64, 656, dtype=torch.uint8), torch.zeros(64, 576, dtype=torch.bfloat16)):
            kv_pack.scatter_latent_(cache, k_nope, k_rope, slots, *group)
        for cache in (torch.zeros(1, 64 * 132, dtype=torch.uint8), torch.zeros(64, 128, dtype=torch.bfloat16)):
            kv_pack.scatter_index_keys_(cache, k_nope[:, :128], slots)
            kv_pack.scatter_index_keys_(cache, k_nope[:, :128], slots, *group[:2])
            kv_pack.gather_index_keys(cache, slots)


def compile_kv_writes() -> None:
    for dtype, num_tokens, heads, dim, slot_dtype, group in [
        (torch.bfloat16, 1, 1, 128, torch.int32, (1, 0)),
        (torch.bfloat16, 128, 2, 96, torch.int64, (8, 7)),
        (torch.float32, 3, 1, 80, torch.int64, (3, 1)),
    ]:
        k = torch.zeros(num_tokens, heads, dim, dtype=dtype)
        for stored in (torch.bfloat16, torch.float8_e4m3fn):
            cache = torch.zeros(64, heads, dim, dtype=stored)
            kv_scatter.scatter_kv_(cache, cache, k, k, torch.zeros(num_tokens, dtype=slot_dtype), *group, 1.0, 0.5)


def compile_page_gather() -> None:
    page_gather.gather_pages(torch.zeros(128, 656, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32), 64)
    page_gather.gather_pages(torch.zeros(3, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32), 3)
    for dcp_size, width in [(1, 1), (3, 100), (8, 2048)]:
        slots = torch.zeros(3, width, dtype=torch.int32)
        page_gather.remap_to_gathered(slots, torch.zeros(dcp_size, dtype=torch.int32), dcp_size, 64, 64)


def compile_index_page_gather() -> None:
    for batch, pages, dtype in [(1, 1, torch.int32), (3, 17, torch.int64)]:
        table, lengths = torch.zeros(batch, pages, dtype=dtype), torch.full((batch,), 64 * pages, dtype=dtype)
        cache = torch.zeros(2, 64 * 132, dtype=torch.uint8)
        index_page_gather.gather_index_pages(cache, table, lengths, batch * 64 * pages, 64 * pages)
        index_page_gather.join_index_pages(torch.zeros(batch, pages, 64 * 132, dtype=torch.uint8))
        index_page_gather.join_index_pages(torch.zeros(batch, 64 * pages, 128, dtype=torch.bfloat16))


def compile_page_tables() -> None:
    for num_rows, width, length, dtype in [(1, 1, 64, torch.int32), (64, 8193, 524292, torch.int64)]:
        table, slots = torch.zeros(num_rows, width, dtype=torch.int32), torch.zeros(2, length, dtype=torch.int32)
        rows = torch.zeros(num_rows, dtype=dtype)
        page_table.fill_page_table_(table, slots, rows, rows, 64)
        page_table.look_up_slots(torch.zeros(num_rows, 2048 if num_rows > 1 else 1, dtype=dtype), rows, table, 512)


def compile_attention() -> None:
    for num_tokens, width, dcp_size, parts in [(1, 64, 1, 132), (5, 192, 3, 66), (300, 2048, 8, 132)]:
        slots = torch.zeros(num_tokens, width, dtype=torch.int32)
        for overlaps in (False, True):
            rows, length = localize.localize_topk(slots, dcp_size, 0, 1, plan_follows=overlaps)
            schedule.plan_rows(rows, length, parts, 2 * parts, after_localize=overlaps)
        localize.localize_topk(slots, 1, 0, 1, limit=length)
    for num_rows in (1, 64):
        latent_dequant.dequantise_latent(torch.zeros(num_rows, 656, dtype=torch.uint8))


def compile_indexer() -> None:
    for num_tokens, length, wanted in [(1, 100, 1), (2, 5000, 2048), (64, 70000, 2048)]:
        context_lens = torch.zeros(num_tokens, dtype=torch.int32)
        topk.select_topk(torch.zeros(1, 1).expand(num_tokens, length).contiguous(), context_lens, wanted)
    for num_rows, width, pitch, ragged in [
        (1, 1 << 20, 1 << 20, False),
        (600, 9000, 9004, True),
        (40, 33000, 33001, True),
    ]:
        # Never read: nothing is launched.
        scores = torch.empty_strided((num_rows, width), (pitch, 1))
        values = torch.zeros(num_rows, dtype=torch.int32)
        table = torch.zeros(num_rows, 16385, dtype=torch.int32)
        slot_selection.select_slots(
            scores, values, 2048, values if ragged else None, table, values if ragged else None, 64
        )
        slot_selection.select_slots(scores, values, 2048, None, None, None, 64)
        slot_selection.select_candidates(scores, values, 2048)
    for dtype, num_tokens, num_heads, pages in [(torch.bfloat16, 1, 64, 2), (torch.float32, 3, 5, 16)]:
        q, weights = torch.zeros(num_tokens, num_heads, 128, dtype=dtype), torch.zeros(num_tokens, num_heads)
        table, row = torch.zeros(1, pages, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int32)
        index_query.quantise_queries(q, weights)
        index_query.list_pages(table, row, row, pages, pages)
        index_query.erase_past_(torch.zeros(num_tokens, 64 * pages), row)
        for cache in (torch.zeros(pages, 64 * 132, dtype=torch.uint8), torch.zeros(64 * pages, 128, dtype=dtype)):
            index_logits.score_index(q, weights, cache, table, row, row, 64 * pages)


def compile_sharded_selection() -> None:
    for dcp_size, num_rows, wanted, dtype in [
        (1, 1, 1, torch.int64),
        (3, 5, 100, torch.int32),
        (8, 64, 2048, torch.int32),
    ]:
        table, values = torch.zeros(num_rows, 17, dtype=torch.int32), torch.zeros(num_rows, dtype=dtype)
        sharded_selection.localize_contexts(table, values, dcp_size, 0)
        lists = torch.zeros(dcp_size, num_rows, 2, wanted, dtype=torch.int32)
        cutoffs = sharded_selection.find_threshold(lists)
        for request in (None, values):
            sharded_selection.take_own(lists[0], cutoffs, table, dcp_size, 0, request)


def compile_peer_exchanges() -> None:
    for num_ranks, num_tokens, pieces in [(2, 1, 1), (2, 256, 2), (3, 5, 1), (8, 256, 1)]:
        heads = max(1, 64 // num_ranks)
        channels = PeerChannels(
            addresses=torch.zeros(num_ranks + 1, dtype=torch.int64),
            epochs=torch.zeros(2, 256, dtype=torch.int64),
            fault=torch.zeros(1, dtype=torch.int64),
            rank=0,
            count=256,
            bytes=1 << 20,
            wait_limit=1 << 40,
        )
        out = torch.zeros(num_tokens, num_ranks * heads, 512, dtype=torch.bfloat16)
        for base_2 in (False, True):
            peer_exchange.exchange_partials([(out, torch.zeros(out.shape[:2]))] * pieces, channels, base_2)
        peer_exchange.gather_heads(torch.zeros(num_tokens, heads, 576, dtype=torch.bfloat16), channels)
        peer_exchange.gather_rows(torch.zeros(num_tokens, 2048, dtype=torch.int32), channels)


if __name__ == "__main__":
    triton.runtime.driver.set_active(HopperWithoutDevice())
    JITFunction.run = compile_instead_of_launching(JITFunction.run)
    compile_merges()
    compile_cache_writes()
    compile_kv_writes()
    compile_page_gather()
    compile_index_page_gather()
    compile_page_tables()
    compile_attention()
    compile_indexer()
    compile_sharded_selection()
    compile_peer_exchanges()
