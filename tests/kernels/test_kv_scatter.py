"""Keys and values by head, written where a rank owns them: rows by plain integers, values by numpy's own rounding."""

import inspect

import numpy as np
import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.cases import DCP_SIZES, poisoned
from nsa_dcp_kernels import kv_head_reference, round_kv, scatter_kv_
from nsa_dcp_kernels._triton import kv_scatter as kernels

FP8 = torch.float8_e4m3fn
# (tokens, KV heads, head dim): one, odd ones, a head dim that is no power of two.
SHAPES = [(1, 1, 128), (13, 2, 96), (65, 3, 64), (8, 1, 80)]


def draw(num_tokens, heads, dim, seed=0):
    """Values that FP8 holds exactly under scale 0.5 or 1: Triton's interpreter truncates what a GPU rounds."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, heads, dim)
    mantissa = torch.randint(8, 16, shape, generator=generator) * torch.randint(0, 2, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return sign * mantissa * 2.0 ** torch.randint(-4, 4, shape, generator=generator)


def draw_slots(num_tokens, rows, dcp_size, seed=0):
    """Distinct slots, the last of the pool among them, and none for every fourth token."""
    slots = torch.randperm(rows * dcp_size, generator=torch.Generator().manual_seed(seed))[:num_tokens].to(torch.int32)
    slots[0] = rows * dcp_size - 1
    slots[3::4] = -1
    return slots


def expected_cache(values, slots, rows, dcp_size, dcp_rank, dtype, scale):
    expected = poisoned(rows, *values.shape[1:], dtype=torch.float32).to(dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0 and slot % dcp_size == dcp_rank:
            scaled = values[token] / scale
            expected[slot // dcp_size] = (scaled.clamp(-448, 448) if dtype == FP8 else scaled).to(dtype)
    return expected


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_token_lies_in_its_owners_row_and_nowhere_else(shape, dcp_size, dtype):
    rows = 128
    k, v, slots = draw(*shape), draw(*shape, seed=1), draw_slots(shape[0], rows, dcp_size)
    scales = (0.5, 1.0) if dtype == FP8 else (1.0, 1.0)
    for rank in range(dcp_size):
        caches = [poisoned(rows, *shape[1:], dtype=torch.float32).to(dtype) for _ in range(2)]
        scatter_kv_(*caches, k, v, slots, dcp_size, rank, *scales)
        for cache, values, scale in zip(caches, (k, v), scales):
            assert_bitwise_equal(
                as_bytes(cache), as_bytes(expected_cache(values, slots, rows, dcp_size, rank, dtype, scale))
            )


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_writes_the_references_bytes(shape, dcp_size, dtype, slot_dtype, device):
    rows = 128
    k, v, slots = draw(*shape), draw(*shape, seed=1), draw_slots(shape[0], rows, dcp_size).to(slot_dtype)
    scales = (0.5, 1.0) if dtype == FP8 else (1.0, 1.0)
    want = [poisoned(rows, *shape[1:], dtype=torch.float32).to(dtype) for _ in range(2)]
    got = [cache.clone().to(device) for cache in want]
    kv_head_reference.scatter_kv_(*want, k, v, slots, dcp_size, dcp_size - 1, *scales)
    kernels.scatter_kv_(*got, k.to(device), v.to(device), slots.to(device), dcp_size, dcp_size - 1, *scales)
    for ours, theirs in zip(got, want):
        assert_bitwise_equal(as_bytes(ours.cpu()), as_bytes(theirs))


@pytest.mark.parametrize("run", [kv_head_reference.scatter_kv_, kernels.scatter_kv_], ids=["reference", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_views_are_written_and_read_by_their_strides(run, dtype, device):
    """Both halves of one allocation, heads and rows apart; K and V as slices of one projection."""
    if device == "cuda" and run is kv_head_reference.scatter_kv_:
        pytest.skip("the reference runs on a CPU")
    pool = poisoned(2, 3, 40, 32, dtype=torch.float32, device=device).to(dtype)
    k_cache, v_cache = pool[0].transpose(0, 1), pool[1].transpose(0, 1)
    packed = draw(5, 1, 2 * 3 * 32 + 7).squeeze(1).to(device)
    k, v = packed[:, : 3 * 32].unflatten(1, (3, 32)), packed[:, 3 * 32 : 6 * 32].unflatten(1, (3, 32))
    slots = torch.tensor([79, -1, 0, 12, 3], device=device)
    run(k_cache, v_cache, k, v, slots, 2, 0, 1.0, 1.0)
    for cache, values in ((k_cache, k), (v_cache, v)):
        for row in range(40):
            token = {0: 2, 6: 3}.get(row)
            kept = cache[row].float()
            assert kept.isnan().all() if token is None else torch.equal(kept, values[token])


def test_saturates_and_rounds_to_the_nearest_even_code():
    """Against numpy: midpoints between neighbouring codes, and values past the largest."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).double().numpy()
    midpoints = (codes[:-1] + codes[1:]) / 2
    even = np.where(np.arange(126) % 2 == 0, codes[:-1], codes[1:])
    values = torch.from_numpy(np.concatenate([midpoints, [449.0, 1e30, -1e30]]))[None, None]
    want = torch.from_numpy(np.concatenate([even, [448.0, 448.0, -448.0]]))[None, None]
    assert torch.equal(round_kv(values, FP8), want)
    assert torch.equal(round_kv(values * 0.25, FP8, 0.25), want * 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_what_is_written_reads_back_as_round_kv_says(dtype):
    k = torch.randn(9, 2, 64)
    scale = 0.37 if dtype == FP8 else 1.0
    cache = torch.zeros(9, 2, 64).to(dtype)
    scatter_kv_(cache, cache.clone(), k, k, torch.arange(9), 1, 0, scale, 1.0)
    assert torch.equal(kv_head_reference.read(cache, torch.float32, scale), round_kv(k, dtype, scale))


@pytest.mark.parametrize("run", [scatter_kv_, kernels.scatter_kv_], ids=["op", "kernel"])
def test_no_tokens_write_nothing(run):
    cache = poisoned(4, 1, 8, dtype=torch.float32)
    run(cache, cache, torch.zeros(0, 1, 8), torch.zeros(0, 1, 8), torch.zeros(0, dtype=torch.int32), 2, 1, 1.0, 1.0)
    assert cache.isnan().all()


def test_another_number_of_tokens_is_no_other_program():
    """A constant of the program would compile one for every length of a prompt."""
    parameters = inspect.signature(kernels._scatter_kv_kernel.fn).parameters
    constants = {name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)}
    assert "num_tokens" in parameters
    assert constants == {"DCP_SIZE", "HEAD_DIM", "BLOCK_T", "BLOCK_D", "QUANTISE"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
@pytest.mark.parametrize(("slot", "dcp_size"), [(8 * (2**24 + 3) + 5, 8), (2**31 + 7, 1024)])
def test_rows_past_2_31_elements_and_slots_past_2_31_are_written(slot, dcp_size):
    """In 32 bits the row's offset, or the slot, would wrap. Of the memory only what is touched exists."""
    dim = 128
    rows = slot // dcp_size + 1
    caches = [torch.from_numpy(np.empty(rows * dim, np.uint8)).view(FP8).view(rows, 1, dim) for _ in range(2)]
    k = draw(1, 1, dim)
    kernels.scatter_kv_(*caches, k, k, torch.tensor([slot]), dcp_size, slot % dcp_size, 1.0, 1.0)
    assert torch.equal(caches[0][-1].float(), k[0]) and torch.equal(caches[1][-1].float(), k[0])


GOOD = {
    "k_cache": torch.zeros(4, 2, 8),
    "v_cache": torch.zeros(4, 2, 8),
    "k": torch.zeros(3, 2, 8),
    "v": torch.zeros(3, 2, 8),
    "slots": torch.zeros(3, dtype=torch.int32),
    "dcp_size": 2,
    "dcp_rank": 1,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": torch.zeros(3, 16)}, "k must have shape"),
        ({"v": torch.zeros(3, 2, 9)}, "v must have shape"),
        ({"v": torch.zeros(3, 2, 8).bfloat16()}, "v must have dtype float32"),
        ({"k_cache": torch.zeros(4, 1, 8)}, "k_cache must have shape"),
        ({"v_cache": torch.zeros(5, 2, 8)}, "v_cache must have shape"),
        ({"v_cache": torch.zeros(4, 2, 8).bfloat16()}, "v_cache must have dtype float32"),
        ({"k_cache": torch.zeros(4, 8, 2).transpose(1, 2)}, "k_cache must have contiguous heads"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slots must have shape"),
        ({"slots": torch.zeros(3)}, "slots must have dtype int32 or int64"),
        ({"dcp_rank": 2}, "dcp_rank must be in"),
        ({"k_scale": 0.0}, "k_scale must be positive and finite"),
        ({"v_scale": float("nan")}, "v_scale must be positive and finite"),
        ({"k_scale": 2.0}, "k_scale must be 1 for a cache of torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_argument_is_refused_by_its_name(change, said):
    with pytest.raises(ValueError, match=said):
        scatter_kv_(**(GOOD | change))
