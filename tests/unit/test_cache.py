"""The two caches of every rank, their first and last slots, and the allocator that addresses both."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_dcp.cache import STORAGE_DTYPES, IndexKeyCache, KeyValueCache, LatentCache, PageAllocator
from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.batch import draw_batch
from nsa_dcp.testing.cases import DCP_SIZES, poison_, poisoned
from nsa_dcp.testing.oracle import deal_slots
from nsa_dcp_kernels import gather_index_keys, pack_latent
from nsa_dcp_kernels.reference import index_page_views

CPU = torch.device("cpu")
STORAGES = [pytest.param(dtype, id=name) for name, dtype in STORAGE_DTYPES.items()]


def latent_cache(dcp_size, dcp_rank, dtype, size=128, layers=1):
    cache = LatentCache(layers, size, dtype, CPU, dcp_size, dcp_rank)
    for layer in cache.layers:
        poison_(layer)
    return cache


def stored(latents, dtype):
    """What a row must hold, bit for bit."""
    if dtype == torch.uint8:
        return pack_latent(latents[:, :512].contiguous(), latents[:, 512:].contiguous())
    return latents.to(dtype)


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_each_token_is_cached_in_its_owners_row_and_nowhere_else(dcp_size, dtype):
    """Filter and divide on the write door; a token of another rank, or none, leaves no trace.

    Sources: sgl-project/sglang 36989, sgl-project/sglang 37735, vllm-project/vllm 50095.
    """
    num_slots = (128 + 64) * dcp_size
    slots = torch.randperm(num_slots)[: num_slots // 2].to(torch.int32)
    slots[::7] = -1
    latents = torch.randn(len(slots), 576)
    dealt = deal_slots(num_slots, dcp_size)
    for rank in range(dcp_size):
        expected = poison_(torch.zeros_like(latent_cache(dcp_size, rank, dtype).layers[0]))
        for token, slot in enumerate(slots.tolist()):
            if slot != -1 and dealt[slot][0] == rank:
                expected[dealt[slot][1]] = stored(latents[token : token + 1], dtype)[0]
        cache = latent_cache(dcp_size, rank, dtype)
        cache.write(0, latents[:, :512].contiguous(), latents[:, 512:].contiguous(), slots)
        assert_bitwise_equal(cache.layers[0], expected, f"rank {rank}")


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_every_index_key_is_cached_at_its_undivided_slot(dcp_size, dtype):
    """Keys and scales of the other tokens of a page stay as they were.

    Sources: vllm-project/vllm-ascend 14536, sgl-project/sglang 31218.
    """
    num_slots = (128 + 64) * dcp_size
    slots = torch.randperm(num_slots)[: num_slots // 2].to(torch.int32)
    slots[::7] = -1
    # Small integers with a peak of 448: exact in every storage.
    keys = torch.randint(-8, 9, (len(slots), 128)).float()
    keys[:, 0] = 448.0
    cache = IndexKeyCache([0], 128, dtype, CPU, dcp_size)
    poison_(cache.layers[0])
    cache.write(0, keys, slots)
    every_slot = gather_index_keys(cache.layers[0], torch.arange(num_slots))
    expected = poisoned(num_slots, 128, dtype=torch.float32)
    for token, slot in enumerate(slots.tolist()):
        if slot != -1:
            expected[slot] = keys[token]
    torch.testing.assert_close(every_slot, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_the_last_slot_that_can_be_handed_out_is_written_and_read_in_both_caches(dcp_size, dtype):
    """Sized per rank but addressed by slot, the index keys would overrun. Source: sgl-project/sglang 36886."""
    size = 3 * 64
    allocator = PageAllocator(size, dcp_size)
    last_page = max(allocator.allocate(allocator.num_free))
    last_slot = last_page * allocator.page_slots + allocator.page_slots - 1
    assert last_slot == (size + 64) * dcp_size - 1
    latents, keys = torch.randn(1, 576), torch.randint(-8, 9, (1, 128)).float()
    keys[:, 0] = 448.0
    slots = torch.tensor([last_slot], dtype=torch.int32)
    for rank in range(dcp_size):
        cache = latent_cache(dcp_size, rank, dtype, size)
        cache.write(0, latents[:, :512].contiguous(), latents[:, 512:].contiguous(), slots)
        expected = poison_(torch.zeros_like(cache.layers[0]))
        if rank == dcp_size - 1:
            expected[size + 64 - 1] = stored(latents, dtype)[0]
        assert_bitwise_equal(cache.layers[0], expected, f"rank {rank}")

        index_keys = IndexKeyCache([0], size, dtype, CPU, dcp_size)
        index_keys.write(0, keys, slots)
        assert torch.equal(gather_index_keys(index_keys.layers[0], slots), keys)
        assert index_keys.count_tokens() == 1


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_sharded_index_keys_lie_in_the_rows_of_their_latents(dcp_size, dtype):
    """As many rows as the latents have, every key on one rank, and nothing written anywhere else."""
    size, num_slots = 128, (128 + 64) * dcp_size
    slots = torch.randperm(num_slots)[: num_slots // 2].to(torch.int32)
    slots[::7] = -1
    keys = torch.randint(-8, 9, (len(slots), 128)).float()
    keys[:, 0] = 448.0
    counted = 0
    for rank in range(dcp_size):
        cache = IndexKeyCache([0], size, dtype, CPU, dcp_size, rank)
        latents = latent_cache(dcp_size, rank, dtype, size)
        poison_(cache.layers[0])
        cache.write(0, keys, slots)
        latents.write(0, torch.ones(len(slots), 512), torch.ones(len(slots), 64), slots)
        rows = gather_index_keys(cache.layers[0], torch.arange(size + 64))
        expected = poisoned(size + 64, 128, dtype=torch.float32)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0 and slot % dcp_size == rank:
                expected[slot // dcp_size] = keys[token]
        torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)
        assert cache.count_tokens() == latents.count_rows()
        counted += cache.count_tokens()
    assert counted == int((slots >= 0).sum())


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("dcp_size", [2, 3])
def test_the_first_slot_past_the_pool_is_an_error_not_a_stray_write(dcp_size, dtype):
    slot = torch.tensor([(128 + 64) * dcp_size], dtype=torch.int32)
    with pytest.raises(IndexError):
        latent_cache(dcp_size, 0, dtype).write(0, torch.ones(1, 512), torch.ones(1, 64), slot)
    with pytest.raises(IndexError):
        IndexKeyCache([0], 128, dtype, CPU, dcp_size).write(0, torch.ones(1, 128), slot)
    with pytest.raises(IndexError):
        IndexKeyCache([0], 128, dtype, CPU, dcp_size, 0).write(0, torch.ones(1, 128), slot)


def test_layers_are_written_apart():
    cache = latent_cache(2, 1, torch.float32, layers=3)
    cache.write(1, torch.ones(1, 512), torch.ones(1, 64), torch.tensor([5]))
    assert torch.equal(cache.layers[1][2], torch.ones(576))
    for other in (0, 2):
        assert cache.layers[other].isnan().all()
    index_keys = IndexKeyCache([0, 4], 64, torch.float32, CPU, 2)
    index_keys.write(4, torch.ones(1, 128), torch.tensor([5]))
    assert not index_keys.layers[0].any()
    assert sorted(index_keys.layers) == [0, 4]


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_ranks_hold_their_share_of_latents_and_all_index_keys(dcp_size, dtype):
    batch = draw_batch([64 * dcp_size + 1, 1, dcp_size - 1], dcp_size)
    total = sum(batch.seq_lens)
    slots = torch.tensor([slot for request in range(3) for slot in batch.slots(request)], dtype=torch.int32)
    latents, keys = torch.cat(batch.latents), torch.cat(batch.index_keys)
    held = []
    for rank in range(dcp_size):
        cache = LatentCache(1, batch.size, dtype, CPU, dcp_size, rank)
        cache.write(0, latents[:, :512].contiguous(), latents[:, 512:].contiguous(), slots)
        held.append(cache.count_rows())
        index_keys = IndexKeyCache([0], batch.size, dtype, CPU, dcp_size)
        index_keys.write(0, keys, slots)
        assert index_keys.count_tokens() == total
    assert held == [
        sum(owner == rank for length in batch.seq_lens for owner, _ in deal_slots(length, dcp_size))
        for rank in range(dcp_size)
    ]
    assert sum(held) == total


def test_a_row_of_each_storage_takes_the_bytes_it_is_charged():
    """Index keys are charged in full on every rank. Source: sgl-project/sglang 33912."""
    latent = {name: LatentCache(2, 64, dtype, CPU, 4, 0) for name, dtype in STORAGE_DTYPES.items()}
    assert {name: cache.bytes_per_row for name, cache in latent.items()} == {
        "float32": 2304, "bfloat16": 1152, "fp8_e4m3": 656,
    }  # fmt: skip
    index = {name: IndexKeyCache([0, 3, 5], 64, dtype, CPU, 4) for name, dtype in STORAGE_DTYPES.items()}
    assert {name: cache.bytes_per_token for name, cache in index.items()} == {
        "float32": 3 * 512, "bfloat16": 3 * 256, "fp8_e4m3": 3 * 132,
    }  # fmt: skip
    slots = (64 + 64) * 4
    for name in STORAGE_DTYPES:
        assert sum(layer.nbytes for layer in latent[name].layers) == 2 * (64 + 64) * latent[name].bytes_per_row
        assert sum(layer.nbytes for layer in index[name].layers.values()) == slots * index[name].bytes_per_token
    assert IndexKeyCache([], 64, torch.uint8, CPU, 4).bytes_per_token == 0


def test_a_written_fp8_key_of_zeros_counts_as_written():
    index_keys = IndexKeyCache([0], 64, torch.uint8, CPU, 2)
    index_keys.write(0, torch.zeros(2, 128), torch.tensor([64, 255]))
    assert index_keys.count_tokens() == 2
    assert index_page_views(index_keys.layers[0])[1].count_nonzero() == 2


@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_page_0_is_never_handed_out_and_every_other_page_once(dcp_size):
    allocator = PageAllocator(5 * 64, dcp_size)
    assert (allocator.num_pages, allocator.num_free, allocator.page_slots) == (6, 5, 64 * dcp_size)
    assert sorted(allocator.allocate(2) + allocator.allocate(0) + allocator.allocate(3)) == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"^count must be at most the 0 free pages, got 1$"):
        allocator.allocate(1)


def test_a_refused_allocation_takes_nothing():
    allocator = PageAllocator(3 * 64, 2)
    held = allocator.allocate(1)
    with pytest.raises(ValueError, match=r"^count must be at most the 2 free pages, got 3$"):
        allocator.allocate(3)
    assert sorted(held + allocator.allocate(2)) == [1, 2, 3]


def test_a_pool_without_rows_hands_out_nothing():
    allocator = PageAllocator(0, 4)
    assert (allocator.num_pages, allocator.num_free) == (1, 0)
    assert allocator.allocate(0) == []


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30), dcp_size=st.sampled_from(DCP_SIZES))
def test_released_pages_are_reused_and_ranks_hand_out_the_same_ones(steps, dcp_size):
    """Two allocators that see the same calls agree without talking, and no page is ever held twice."""
    ranks = [PageAllocator(12 * 64, dcp_size) for _ in range(2)]
    held: list[list[int]] = []
    for releases, count in steps:
        if releases and held:
            pages = held.pop(count % len(held))
            for allocator in ranks:
                allocator.release(pages)
        elif count <= ranks[0].num_free:
            handed_out = [allocator.allocate(count) for allocator in ranks]
            assert handed_out[0] == handed_out[1]
            assert len(handed_out[0]) == count
            held.append(handed_out[0])
        in_use = [page for pages in held for page in pages]
        assert len(set(in_use)) == len(in_use)
        assert set(in_use) <= set(range(1, 13))
        assert ranks[0].num_free == 12 - len(in_use)


@pytest.mark.parametrize("pages", [[0], [7], [1, 1]], ids=["reserved", "not handed out", "twice"])
def test_a_page_is_taken_back_only_from_who_holds_it(pages):
    """A page released twice would be handed to two requests, which then overwrite each other."""
    allocator = PageAllocator(size=640, dcp_size=2)
    held = allocator.allocate(3)
    assert 1 in held and 7 not in held
    with pytest.raises(ValueError, match="pages must be handed out and named once"):
        allocator.release(pages)
    allocator.release(held)
    with pytest.raises(ValueError, match="pages must be handed out and named once"):
        allocator.release(held[:1])
    assert sorted(allocator.allocate(allocator.num_free)) == list(range(1, allocator.num_pages))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_keys_and_values_are_cached_in_their_owners_row_and_nowhere_else(dcp_size, dtype):
    """Every slot of the pool, the padding page's among them; each value is rounded once."""
    num_slots = (64 + 64) * dcp_size
    slots = torch.randperm(num_slots).to(torch.int32)
    slots[::5] = -1
    k, v = torch.randn(num_slots, 2, 16), torch.randn(num_slots, 2, 16)
    dealt = deal_slots(num_slots, dcp_size)
    for rank in range(dcp_size):
        cache = KeyValueCache(2, 64, 2, 16, dtype, CPU, dcp_size, rank)
        for keys, values in cache.layers:
            keys.fill_(float("nan"))
            values.fill_(float("nan"))
        cache.write(0, k, v, slots)
        expected = torch.full((2, 128, 2, 16), float("nan"))
        for token, slot in enumerate(slots.tolist()):
            if slot != -1 and dealt[slot][0] == rank:
                row = dealt[slot][1]
                expected[0, row], expected[1, row] = k[token].to(dtype).float(), v[token].to(dtype).float()
        for stored, want in zip(cache.layers[0], expected):
            torch.testing.assert_close(stored.float(), want, rtol=0, atol=0, equal_nan=True)
        assert all(part.float().isnan().all() for part in cache.layers[1])
        assert cache.count_rows() == int((~expected[0].isnan()).all((1, 2)).sum())
        assert cache.bytes_per_row == 2 * 2 * 16 * dtype.itemsize
