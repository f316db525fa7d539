"""CP-DCP prefill over gloo ranks: whole pages gathered as bytes, each rank's own queries with all heads."""

import pytest
import torch

from nsa_dcp import comm, cp_layout
from nsa_dcp.cache import LatentCache
from nsa_dcp.choices import CP_STRATEGIES
from nsa_dcp.cp_dcp import gather_rows, localize_gathered, plan_pages
from nsa_dcp.launcher import run_ranks
from nsa_dcp.layout import slots_at
from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close
from nsa_dcp.testing.batch import PAGE, PRECISIONS, draw_batch, latents_as_stored
from nsa_dcp.testing.cases import poison_
from nsa_dcp.testing.oracle import attend_dense
from nsa_dcp.testing.poisoned_memory import poisoned_allocations
from nsa_dcp.tp_dcp import attend_sharded
from nsa_dcp_kernels import attend_selection, localize_selection, pack_latent, reference

SCALE = 0.05
WORLDS = [pytest.param(size, id=f"cp{size}") for size in (2, 3, 4)]


def plan_of(batch, requests=None):
    """Gather what some requests of a batch use."""
    requests = range(len(batch.pages)) if requests is None else requests
    return plan_pages(batch.page_table[list(requests)], [len(batch.pages[r]) for r in requests], batch.num_pages)


# --- which pages ----------------------------------------------------------------------------------------------------


def test_a_page_that_requests_share_is_gathered_once():
    batch = draw_batch([300, 400, 256], 2, shared_pages=1)
    plan = plan_of(batch)
    used = {page for pages in batch.pages for page in pages}
    assert len(used) < sum(len(pages) for pages in batch.pages)
    assert sorted(plan.pages.tolist()) == sorted(used)
    assert plan.local_rows == PAGE * len(used)
    for page in range(batch.num_pages):
        place = int(plan.page_pos[page])
        assert (place == -1) == (page not in used)
        if page in used:
            assert int(plan.pages[place]) == page


def test_only_pages_in_use_are_gathered():
    """Neither reserved pages behind them, nor another request's, nor page 0, which no request holds."""
    table = torch.tensor([[5, 2, 9], [7, 1 << 20, 0]], dtype=torch.int32)
    plan = plan_pages(table, [2, 1], 10)
    assert plan.pages.dtype == plan.page_pos.dtype == torch.int32
    assert sorted(plan.pages.tolist()) == [2, 5, 7]
    assert [page for page in range(10) if plan.page_pos[page] >= 0] == [2, 5, 7]


def test_a_step_without_requests_gathers_nothing():
    for table, counts in ((torch.zeros(0, 3, dtype=torch.int32), []), (torch.ones(1, 3, dtype=torch.int32), [0])):
        plan = plan_pages(table, counts, 4)
        assert plan.local_rows == 0
        assert plan.page_pos.tolist() == [-1] * 4
        rows = torch.randn(4 * PAGE, 576)
        assert gather_rows(rows, plan, None).shape == (0, 576)


def test_a_slot_of_a_page_that_was_not_gathered_selects_nothing():
    """Rather than another request's row. Source: sgl-project/sglang 33309."""
    plan = plan_pages(torch.tensor([[3]], dtype=torch.int32), [1], 6)
    first, page = 3 * 128, 128
    # Slots of both neighbouring pages, for either owner.
    others = [first - 2, first - 1, first + page, first + page + 1, first - page, first - page + 1]
    slots = torch.tensor([[first, *others, -1, first + page - 1]], dtype=torch.int32)
    selection = localize_gathered(slots, plan, 2)
    assert selection.rows.tolist() == [[0, 64 + 63] + [-1] * 7]
    assert selection.length.tolist() == [2]


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLDS)
def test_gathered_rows_are_the_owners_rows_bit_for_bit(world_size):
    """Prefix and chunk alike, in every storage; what no token was written to stays poison and is never named.

    Sources: sgl-project/sglang 33309, sgl-project/sglang 31218.
    """
    run_ranks(gather_on_rank, world_size, (world_size,))


@poisoned_allocations()
def gather_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    page = PAGE * world_size
    batch = draw_batch([2 * page + 1, world_size - 1, page, page + 7], world_size, seed=21)
    for storage in (torch.float32, torch.bfloat16, torch.uint8):
        cache = batch.latent_cache(rank, storage).layers[0]
        before = cache.clone()
        for requests in ([0, 1, 2, 3], [1], [3, 0]):
            plan = plan_of(batch, requests)
            gathered = gather_rows(cache, plan, group)
            assert gathered.shape == (world_size * plan.local_rows, cache.shape[1])
            assert gathered.dtype == storage
            named = set()
            for request in requests:
                slots = torch.tensor([batch.slots(request)], dtype=torch.int32)
                selection = localize_gathered(slots, plan, world_size)
                assert int(selection.length[0]) == batch.seq_lens[request]
                rows = selection.rows[0].long()
                assert_bitwise_equal(gathered[rows], stored(batch.latents[request], storage), f"{storage} {request}")
                named |= set(rows.tolist())
            assert len(named) == sum(batch.seq_lens[request] for request in requests)
            others = torch.tensor([row for row in range(len(gathered)) if row not in named])
            assert_bitwise_equal(gathered[others], poison_(gathered[others].clone()))
        assert_bitwise_equal(cache, before, "the cache itself")


def stored(latents, storage):
    if storage == torch.uint8:
        return pack_latent(latents[:, :512].contiguous(), latents[:, 512:].contiguous())
    return latents.to(storage)


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("strategy", CP_STRATEGIES)
def test_each_ranks_queries_attend_to_prefix_and_chunk(world_size, strategy):
    """A chunk of long requests with cached prefixes and, interleaved, of single tokens; and as TP-DCP would do it.

    Sources: sgl-project/sglang 40903, vllm-project/vllm 52796 (prefix and chunk), sgl-project/sglang 30439.
    """
    run_ranks(attend_on_rank, world_size, (world_size, strategy))


@poisoned_allocations()
def attend_on_rank(rank, _send, world_size, strategy):
    group = comm.contiguous_group(world_size)
    page = PAGE * world_size
    # (cached prefix, new tokens): none, a prefix on a page edge, one off it; and a shared first page.
    chunk = [(page, 3 * world_size), (page + 3, 2 * world_size + 1), (page, 2 * world_size)]
    if strategy == "interleave":
        chunk = [(page, 1), (page, 4 * world_size + 1), (page + 5, 1), (2 * page - 1, 1)]
    batch = draw_batch([start + new for start, new in chunk], world_size, seed=22, shared_pages=1)
    tokens = [(request, start + i) for request, (start, new) in enumerate(chunk) for i in range(new)]
    # Causal, at most 30 positions, the token itself among them; one row selects nothing.
    generator = torch.Generator().manual_seed(23)
    selected = [[*torch.randperm(position, generator=generator)[:29].tolist(), position] for _, position in tokens]
    selected[2] = []
    positions = torch.full((len(tokens), 30), -1, dtype=torch.int32)
    for row, of_row in enumerate(selected):
        positions[row, : len(of_row)] = torch.tensor(of_row, dtype=torch.int32)
    row_request = torch.tensor([request for request, _ in tokens], dtype=torch.int32)
    slots = slots_at(positions, row_request, batch.page_table, world_size)
    plan = plan_of(batch)

    share = cp_layout.split_tokens([new for _, new in chunk], world_size, strategy)[rank]
    gathered_selection = localize_gathered(slots[share], plan, world_size)
    sharded_selection = localize_selection(slots, world_size, rank)
    for precision in PRECISIONS:
        q = torch.randn(len(tokens), world_size, 576, generator=torch.Generator().manual_seed(24)).to(precision.query)
        cache = batch.latent_cache(rank, precision.storage).layers[0]
        latents = [latents_as_stored(latent, precision.storage) for latent in batch.latents]
        expected = torch.cat(
            [
                attend_dense(q[row : row + 1], latents[request], [selected[row]], SCALE)[0]
                for row, (request, _) in enumerate(tokens)
            ]
        )
        gathered = gather_rows(cache, plan, group)
        out, _ = attend_selection(q[share], gathered, gathered_selection, SCALE)
        assert_close(out, expected[share], rms=precision.rms, label=f"{strategy} {precision}")
        # A chunk that cannot be split runs head-sharded: the same heads of the same tokens.
        fallback = attend_sharded(q[:, rank : rank + 1], cache, sharded_selection, SCALE, group, "a2a")
        assert_close(fallback, expected[:, rank : rank + 1], rms=precision.rms, label=f"fallback {precision}")


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_rank_without_query_tokens_still_contributes_its_pages(world_size):
    run_ranks(attend_on_one_rank_alone, world_size, (world_size,))


@poisoned_allocations()
def attend_on_one_rank_alone(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    batch = draw_batch([PAGE * world_size], world_size, seed=25)
    plan = plan_of(batch)
    gathered = gather_rows(batch.latent_cache(rank, torch.float64).layers[0], plan, group)
    slots = torch.tensor([batch.slots(0)], dtype=torch.int32)
    q = torch.randn(1, 2, 576, generator=torch.Generator().manual_seed(26), dtype=torch.float64)
    if rank:
        q, slots = q[:0], slots[:0]
    out, lse = attend_selection(q, gathered, localize_gathered(slots, plan, world_size), SCALE)
    assert out.shape == (len(q), 2, 512)
    expected, expected_lse = attend_dense(q, batch.latents[0], [list(range(PAGE * world_size))] * len(q), SCALE)
    assert_close(out, expected, rms=1e-12)
    assert_close(lse, expected_lse, rms=1e-12)


# --- quantisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLDS)
def test_each_token_and_layer_is_quantised_once_over_all_ranks(world_size):
    """In chunked CP-DCP prefill: neither the gather nor the prefix of a later chunk quantises anything again."""
    layers, chunk_lens = 3, [2 * PAGE * world_size + 1, 5, 1]
    packed = run_ranks(prefill_counting_quantised_rows, world_size, (world_size, layers, chunk_lens))
    assert sum(packed) == sum(chunk_lens) * layers
    # Each rank quantises its own share, to within a token a chunk.
    assert max(packed) - min(packed) <= layers * len(chunk_lens)


@poisoned_allocations()
def prefill_counting_quantised_rows(rank, _send, world_size, layers, chunk_lens):
    counted = {"packed": 0, "tiles": 0}
    pack, quantise = reference.pack_latent, reference.quantise_tiles

    def counting_pack(k_nope, k_rope):
        counted["packed"] += len(k_nope)
        return pack(k_nope, k_rope)

    def counting_quantise(tiles):
        counted["tiles"] += tiles.numel() // 128
        return quantise(tiles)

    group = comm.contiguous_group(world_size)
    batch = draw_batch([sum(chunk_lens)], world_size, seed=27)
    cache = LatentCache(layers, batch.size, torch.uint8, torch.device("cpu"), world_size, rank)
    slots = torch.tensor(batch.slots(0), dtype=torch.int32)
    latents = batch.latents[0].float()
    reference.pack_latent, reference.quantise_tiles = counting_pack, counting_quantise
    done = 0
    for new in chunk_lens:
        part = slice(done, done + new)
        done += new
        used = -(-done // (PAGE * world_size))
        plan = plan_pages(batch.page_table, [used], batch.num_pages)
        selection = localize_gathered(slots[:done].repeat(1, 1), plan, world_size)
        for layer in range(layers):
            cache.write(layer, latents[part, :512].contiguous(), latents[part, 512:].contiguous(), slots[part])
            gathered = gather_rows(cache.layers[layer], plan, group)
            out, _ = attend_selection(torch.ones(1, 2, 576), gathered, selection, SCALE)
            assert out.isfinite().all()
    assert counted["tiles"] == 4 * counted["packed"]
    return counted["packed"]
