"""The index-key cache: page layout by Python integers, neighbours left alone, read back as written."""

import struct

import numpy as np
import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close
from nsa_dcp.testing.cases import POISON_BYTE, exact_latents, poisoned
from nsa_dcp_kernels import gather_index_keys, reference, scatter_index_keys_, scatter_latent_
from nsa_dcp_kernels._triton import kv_pack as kernels

PAGE_BYTES = 64 * 132
FP8_RMS = 0.04
DTYPES = [torch.uint8, torch.float32, torch.bfloat16]


def make_cache(pages: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    shape = (pages, PAGE_BYTES) if dtype == torch.uint8 else (pages * 64, 128)
    return poisoned(*shape, dtype=dtype, device=device)


def draw_keys(num_tokens: int) -> torch.Tensor:
    """[T, 128] float32 that quantise without rounding."""
    return exact_latents(num_tokens)[0][:, 128:256].contiguous()


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_key_and_scale_go_to_their_places_in_the_page_and_neighbours_stay(slot_dtype):
    """The cache's rows are pages and slots are tokens: sgl-project/sglang 31218 and ROCm/aiter 5591 mixed them up."""
    cache, keys = make_cache(4, torch.uint8), draw_keys(6)
    slots = [70, 5, -1, 4 * 64 - 1, 64, 63]  # 4 * 64 - 1 is the last the cache has
    expected = bytearray(cache.numpy().tobytes())
    for key, slot in zip(keys, slots):
        if slot < 0:
            continue
        scale = float(key.abs().max()) / 448
        codes = (key / scale).to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
        page, token = divmod(slot, 64)
        key_at, scale_at = page * PAGE_BYTES + token * 128, page * PAGE_BYTES + 64 * 128 + token * 4
        expected[key_at : key_at + 128] = codes
        expected[scale_at : scale_at + 4] = struct.pack("<f", scale)
    scatter_index_keys_(cache, keys, torch.tensor(slots, dtype=slot_dtype))
    assert_bitwise_equal(cache, torch.from_numpy(np.frombuffer(bytes(expected), np.uint8).reshape(4, -1).copy()))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_keys_read_back_as_written_and_none_reads_as_zeros(dtype):
    cache, keys = make_cache(2, dtype), torch.randn(100, 128)
    slots = torch.randperm(128)[:100].to(torch.int32)
    scatter_index_keys_(cache, keys, slots)
    read = gather_index_keys(cache, torch.cat([slots.flip(0), torch.tensor([-1, -7])]))
    assert read.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(read[:100], keys.flip(0), rms=FP8_RMS if dtype == torch.uint8 else 2**-8)
    assert bool((read[100:] == 0).all())


def test_one_slot_mapping_is_divided_for_latents_and_undivided_for_keys():
    """Writing one of the caches with the other's mapping: vllm-project/vllm-ascend 14536, sgl-project/sglang 36886."""
    dcp_size, num_rows = 4, 64
    slots = torch.tensor([0, 5, 130, num_rows * dcp_size - 1])
    keys = draw_keys(4)
    index_cache = make_cache(dcp_size, torch.uint8)
    scatter_index_keys_(index_cache, keys, slots)
    assert_bitwise_equal(gather_index_keys(index_cache, slots), keys)
    k_nope, k_rope = exact_latents(4)
    for token, slot in enumerate(slots.tolist()):
        latents = poisoned(num_rows, 576, dtype=torch.float32)
        scatter_latent_(latents, k_nope, k_rope, slots, dcp_size, slot % dcp_size)
        assert_bitwise_equal(latents[slot // dcp_size, :512], k_nope[token])


@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sharded_keys_go_to_their_owner_alone_and_together_are_what_one_cache_holds(dtype, dcp_size, device):
    """Every slot's key is on the rank slot % N in row slot // N; a rank's other rows keep their poison."""
    keys, slots = draw_keys(70), torch.randperm(64 * dcp_size * 2)[:70].to(torch.int32)
    slots[::9] = -1
    full = make_cache(2 * dcp_size, dtype)
    reference.scatter_index_keys_(full, keys, slots)
    for rank in range(dcp_size):
        expected = make_cache(2, dtype)
        own = (slots >= 0) & (slots % dcp_size == rank)
        reference.scatter_index_keys_(expected, keys[own], slots[own] // dcp_size)
        cache, by_kernel = make_cache(2, dtype), make_cache(2, dtype, device)
        scatter_index_keys_(cache, keys, slots, dcp_size, rank)
        kernels.scatter_index_keys_(by_kernel, keys.to(device), slots.to(device), dcp_size, rank)
        assert_bitwise_equal(cache, expected)
        assert_bitwise_equal(by_kernel, expected)
        everyones = torch.arange(rank, 64 * dcp_size * 2, dcp_size)
        written = torch.isin(everyones, slots)
        mine = gather_index_keys(cache, everyones // dcp_size)[written]
        assert_bitwise_equal(mine, gather_index_keys(full, everyones)[written])


def test_a_rank_outside_its_group_is_refused():
    with pytest.raises(ValueError, match=r"dcp_rank must be in \[0, 2\), got 2"):
        scatter_index_keys_(make_cache(1, torch.uint8), draw_keys(1), torch.zeros(1).int(), 2, 2)


def test_key_of_zeros_reads_back_as_zeros():
    cache = make_cache(1, torch.uint8)
    scatter_index_keys_(cache, torch.zeros(2, 128), torch.tensor([0, 63]))
    assert_bitwise_equal(gather_index_keys(cache, torch.tensor([0, 63])), torch.zeros(2, 128))


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 63, 65])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_writes_and_reads_as_the_reference_does(dtype, num_tokens, slot_dtype, device):
    keys = draw_keys(num_tokens)
    slots = torch.randperm(192)[:num_tokens].to(slot_dtype)
    slots[torch.rand(num_tokens) < 1 / 4] = -1
    cache, expected = make_cache(3, dtype, device), make_cache(3, dtype)
    kernels.scatter_index_keys_(cache, keys.to(device), slots.to(device))
    reference.scatter_index_keys_(expected, keys, slots)
    assert_bitwise_equal(cache, expected)
    read = kernels.gather_index_keys(cache, slots.to(device))
    assert_bitwise_equal(read, reference.gather_index_keys(expected, slots))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_rounds_as_the_reference_does(dtype):
    keys, slots = torch.randn(1000, 128).to(dtype), torch.randperm(1024)[:1000]
    cache, expected = make_cache(16, torch.uint8, "cuda"), make_cache(16, torch.uint8)
    kernels.scatter_index_keys_(cache, keys.cuda(), slots.cuda())
    reference.scatter_index_keys_(expected, keys, slots)
    assert_bitwise_equal(cache, expected)


def test_kernel_takes_bfloat16_slices_of_a_wider_projection(device):
    wide = torch.cat([draw_keys(5), torch.full((5, 64), float("nan"))], dim=-1).bfloat16()
    cache, expected = make_cache(1, torch.uint8, device), make_cache(1, torch.uint8)
    kernels.scatter_index_keys_(cache, wide.to(device)[:, :128], torch.arange(5, device=device))
    reference.scatter_index_keys_(expected, wide[:, :128], torch.arange(5))
    assert_bitwise_equal(cache, expected)


def test_no_tokens_write_and_read_nothing(device):
    no_slots = torch.zeros(0, dtype=torch.int64, device=device)
    for module in (reference, kernels) if device == "cpu" else (kernels,):
        cache = make_cache(1, torch.uint8, device)
        module.scatter_index_keys_(cache, torch.zeros(0, 128, device=device), no_slots)
        module.scatter_index_keys_(cache, torch.ones(2, 128, device=device), no_slots.new_tensor([-1, -2]))
        assert bool((cache == POISON_BYTE).all())
        assert module.gather_index_keys(cache, no_slots).shape == (0, 128)


def test_cache_of_tokens_where_pages_are_wanted_is_refused():
    with pytest.raises(ValueError, match=r"cache must have shape \[\*, 8448\], got \[64, 132\]"):
        scatter_index_keys_(torch.zeros(64, 132, dtype=torch.uint8), torch.zeros(1, 128), torch.zeros(1).int())
