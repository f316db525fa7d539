"""TP-DCP attention over gloo ranks against one process that holds every token, on caches poisoned where none is."""

import math

import pytest
import torch

from nsa_dcp import comm
from nsa_dcp.choices import COMM_BACKENDS
from nsa_dcp.launcher import run_ranks
from nsa_dcp.layout import local_seq_lens, slots_at
from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close, assert_lse_close
from nsa_dcp.testing.batch import PRECISIONS, draw_batch, latents_as_stored
from nsa_dcp.testing.oracle import attend_dense, deal_slots
from nsa_dcp.testing.poisoned_memory import poisoned_allocations
from nsa_dcp.tp_dcp import attend_sharded
from nsa_dcp_kernels import attend_selection, localize_selection

SCALE = 0.05
HEADS = 2
K = 40


def draw_rows(batch):
    """Query rows as (request, selected positions): what each protects is said beside it."""
    size, lens = batch.dcp_size, batch.seq_lens
    generator = torch.Generator().manual_seed(7)
    scattered = torch.randperm(lens[0], generator=generator)[:K].tolist()
    return [
        (0, scattered),
        (1, []),  # a row that selects nothing
        (0, list(range(0, lens[0], size))[:K]),  # every rank but one owns nothing of the row
        (0, list(range(size - 1, lens[0], size))[:K]),  # and so does every rank but the last
        (0, [lens[0] - 1]),  # the one token on the last, nearly empty page
        (1, list(range(lens[1]))),  # a request shorter than the group: the last rank owns nothing of it
        (2, [0]),  # a request of one token
        (3, [lens[3] - 1, -1, 0, -1, -1, 63, 64]),  # holes, and the last slot of a page, which is full
        (4, [lens[4] - 1, 0, lens[4] - 6, lens[4] - 5]),  # across the edge of a widened page, in no order
    ]


def draw_decode_batch(dcp_size):
    page = 64 * dcp_size
    return draw_batch([2 * page + 1, max(1, dcp_size - 1), 1, page, page + 5], dcp_size, seed=3)


def as_tensors(rows):
    positions = torch.full((len(rows), K), -1, dtype=torch.int32)
    for row, (_, selected) in enumerate(rows):
        positions[row, : len(selected)] = torch.tensor(selected, dtype=torch.int32)
    return positions, torch.tensor([request for request, _ in rows], dtype=torch.int32)


def attend_rows(q, rows, latents, owned_by=None):
    """The oracle row by row: each sees its own request alone, or what of it is in `owned_by`."""
    results = [
        attend_dense(
            q[row : row + 1],
            latents[request],
            [[position for position in selected if owned_by is None or position in owned_by]],
            SCALE,
        )
        for row, (request, selected) in enumerate(rows)
    ]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


@pytest.mark.parametrize("world_size", [pytest.param(size, id=f"dcp{size}") for size in (2, 3, 4, 8)])
def test_attention_over_shards_is_attention_over_all_tokens(world_size):
    """Both backends, every storage; rows, requests and batches of which ranks own nothing.

    Sources: vllm-project/vllm 54541, 38416, 46076; sgl-project/sglang 37487, 31821, 36886, 33926;
    flashinfer-ai/flashinfer 4452; deepseek-ai/FlashMLA 109.
    """
    run_ranks(attend_on_rank, world_size, (world_size,))


@poisoned_allocations()
def attend_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    batch = draw_decode_batch(world_size)
    rows = draw_rows(batch)
    positions, row_request = as_tensors(rows)
    selection = localize_selection(slots_at(positions, row_request, batch.page_table, world_size), world_size, rank)
    own = slice(rank * HEADS, (rank + 1) * HEADS)
    owned = {
        position for position, (owner, _) in enumerate(deal_slots(max(batch.seq_lens), world_size)) if owner == rank
    }
    assert selection.length.tolist() == [len(owned & set(selected)) for _, selected in rows]
    if rank == world_size - 1:
        assert selection.length[5] == 0
        assert local_seq_lens(torch.tensor(batch.seq_lens), world_size, rank)[1] == 0
    for precision in PRECISIONS:
        q = torch.randn(len(rows), world_size * HEADS, 576, generator=torch.Generator().manual_seed(9)).to(
            precision.query
        )
        cache = batch.latent_cache(rank, precision.storage).layers[0]
        latents = [latents_as_stored(latent, precision.storage) for latent in batch.latents]
        expected, _ = attend_rows(q, rows, latents)
        for backend in COMM_BACKENDS:
            label = f"{backend} {precision}"
            out = attend_sharded(q[:, own], cache, selection, SCALE, group, backend)
            assert out.dtype == precision.query, label
            assert_close(out, expected[:, own], rms=precision.rms, label=label)
            assert_bitwise_equal(out[1], torch.zeros(HEADS, 512, dtype=precision.query), label)

        # This rank's partial: natural log, -inf where it owns nothing, of its own tokens alone.
        partial, lse = attend_selection(q, cache, selection, SCALE)
        expected_partial, expected_lse = attend_rows(q, rows, latents, owned)
        assert_close(partial, expected_partial, rms=precision.rms, label=f"partial {precision}")
        assert_lse_close(lse, expected_lse, atol=1e-5, label=f"partial {precision}")


@pytest.mark.parametrize("world_size", [pytest.param(size, id=f"dcp{size}") for size in (2, 3)])
def test_a_batch_of_which_ranks_own_nothing_and_an_empty_one(world_size):
    """Ranks with nothing to attend to take part all the same. Sources: vllm-project/vllm 50095, 38416."""
    run_ranks(attend_to_little_on_rank, world_size, (world_size,))


@poisoned_allocations()
def attend_to_little_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    # Requests of one token: the first rank holds the whole batch.
    batch = draw_batch([1, 1, 1], world_size, seed=4)
    slots = torch.tensor([[batch.slots(request)[0], -1] for request in range(3)], dtype=torch.int32)
    selection = localize_selection(slots, world_size, rank)
    assert selection.length.tolist() == ([1, 1, 1] if rank == 0 else [0, 0, 0])
    for precision in PRECISIONS:
        q = torch.randn(3, world_size, 576, generator=torch.Generator().manual_seed(9)).to(precision.query)
        cache = batch.latent_cache(rank, precision.storage).layers[0]
        assert cache.isnan().all() if rank and precision.storage.is_floating_point else True
        for backend in COMM_BACKENDS:
            out = attend_sharded(q[:, rank : rank + 1], cache, selection, SCALE, group, backend)
            # One visible token has all the weight.
            expected = torch.stack([latents_as_stored(latent, precision.storage)[0, :512] for latent in batch.latents])
            assert_close(out[:, 0], expected.to(precision.query), rms=precision.rms, label=f"{backend} {precision}")

            nothing = localize_selection(torch.full((3, 2), -1, dtype=torch.int32), world_size, rank)
            out = attend_sharded(q[:, rank : rank + 1], cache, nothing, SCALE, group, backend)
            assert_bitwise_equal(out, torch.zeros(3, 1, 512, dtype=precision.query))

            none = localize_selection(slots[:0], world_size, rank)
            out = attend_sharded(q[:0, rank : rank + 1], cache, none, SCALE, group, backend)
            assert out.shape == (0, 1, 512)


@pytest.mark.parametrize("world_size", [pytest.param(size, id=f"dcp{size}") for size in (2, 4)])
def test_requests_that_share_a_prefix_attend_to_the_same_rows(world_size):
    """Sources: vllm-project/vllm 52796, sgl-project/sglang 33309."""
    run_ranks(attend_to_shared_prefix_on_rank, world_size, (world_size,))


@poisoned_allocations()
def attend_to_shared_prefix_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    page = 64 * world_size
    batch = draw_batch([page + 3, 2 * page, page], world_size, seed=6, shared_pages=1)
    assert batch.pages[0][0] == batch.pages[1][0] == batch.pages[2][0]
    rows = [(request, sorted({0, page - 1, length - 1, page // 2})) for request, length in enumerate(batch.seq_lens)]
    positions, row_request = as_tensors(rows)
    selection = localize_selection(slots_at(positions, row_request, batch.page_table, world_size), world_size, rank)
    for precision in PRECISIONS:
        q = torch.randn(3, world_size, 576, generator=torch.Generator().manual_seed(9)).to(precision.query)
        latents = [latents_as_stored(latent, precision.storage) for latent in batch.latents]
        expected = attend_rows(q, rows, latents)[0][:, rank : rank + 1]
        cache = batch.latent_cache(rank, precision.storage).layers[0]
        for backend in COMM_BACKENDS:
            out = attend_sharded(q[:, rank : rank + 1], cache, selection, SCALE, group, backend)
            assert_close(out, expected, rms=precision.rms, label=f"{backend} {precision}")


@pytest.mark.parametrize("world_size", [pytest.param(size, id=f"dcp{size}") for size in (2, 3)])
def test_heads_return_to_the_rank_whose_queries_they_were(world_size):
    """What one head of one rank asks for is answered there and nowhere else. Source: sgl-project/sglang 32858."""
    run_ranks(attend_with_one_hot_heads_on_rank, world_size, (world_size,))


@poisoned_allocations()
def attend_with_one_hot_heads_on_rank(rank, _send, world_size):
    group = comm.contiguous_group(world_size)
    batch = draw_batch([world_size * HEADS], world_size, seed=8)
    # Head h of the group looks for token h alone: the latents are orthogonal and the queries are large.
    batch.latents[0].copy_(torch.eye(world_size * HEADS, 576, dtype=torch.float64))
    q = math.sqrt(1e6) * torch.eye(world_size * HEADS, 576, dtype=torch.float64).unsqueeze(0)
    slots = torch.tensor([batch.slots(0)], dtype=torch.int32)
    cache = batch.latent_cache(rank, torch.float64).layers[0]
    own = slice(rank * HEADS, (rank + 1) * HEADS)
    for backend in COMM_BACKENDS:
        out = attend_sharded(q[:, own], cache, localize_selection(slots, world_size, rank), 1.0, group, backend)
        assert_close(out[0], batch.latents[0][own, :512], rms=1e-12, label=backend)
