"""Packing and scattering: bytes against numpy with its own float8 table, rows against Python integers."""

import math

import numpy as np
import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close
from nsa_dcp.testing.cases import (
    DCP_SIZES,
    POISON_BYTE,
    draw_latents,
    exact_latents,
    poison_,
    poisoned,
)
from nsa_dcp_kernels import pack_latent, reference, scatter_latent_, unpack_latent
from nsa_dcp_kernels._triton import kv_pack as kernels
from nsa_dcp_kernels._triton.page_gather import gather_pages

TOKEN_COUNTS = [1, 4, 63, 65]
# Relative RMS that rounding to 3 mantissa bits may cost a row: uniform in half a step of 2^-3, and some of the scale.
FP8_RMS = 0.04


def float8_table() -> np.ndarray:
    """Values of the float8_e4m3 codes 0 .. 126 from their bits: 4 exponent bits of bias 7, 3 mantissa bits."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def encode_float8(values: np.ndarray) -> np.ndarray:
    """Round to the nearest float8_e4m3, ties to the even code, by comparing distances in float64."""
    table, magnitude = float8_table(), np.abs(values.astype(np.float64))
    low = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, 126)
    high = np.minimum(low + 1, 126)
    below, above = magnitude - table[low], table[high] - magnitude
    code = np.where((above < below) | ((above == below) & (high % 2 == 0)), high, low)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def decode_float8(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 0x80, -1.0, 1.0) * float8_table()[codes & 0x7F]


def pack_by_hand(k_nope: torch.Tensor, k_rope: torch.Tensor) -> np.ndarray:
    """512 float8 | 4 float32 scales | 64 bfloat16, with float32 arithmetic; tiles too small for a scale are zeros."""
    rows = np.zeros((len(k_nope), 656), np.uint8)
    for token, row in enumerate(k_nope.float().numpy()):
        for tile in range(4):
            values = row[tile * 128 : (tile + 1) * 128]
            scale = np.abs(values).max() / np.float32(448)
            if scale < np.finfo(np.float32).tiny:
                scale = np.float32(1)
            scaled = np.clip(values * (np.float32(1) / scale), np.float32(-448), np.float32(448))
            rows[token, tile * 128 : (tile + 1) * 128] = encode_float8(scaled)
            rows[token, 512 + 4 * tile : 516 + 4 * tile] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
        bits = k_rope[token].float().numpy().view(np.uint32).astype(np.uint64)
        nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rows[token, 528:] = np.frombuffer(nearest_even.astype(np.uint16).tobytes(), np.uint8)
    return rows


def unpack_by_hand(packed: torch.Tensor) -> np.ndarray:
    rows = packed.numpy()
    scales = np.ascontiguousarray(rows[:, 512:528]).view(np.float32).repeat(128, axis=1)
    rope = (np.ascontiguousarray(rows[:, 528:]).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.concatenate([(decode_float8(rows[:, :512]) * scales).astype(np.float32), rope], axis=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
def test_reference_bytes_are_those_of_the_format(num_tokens, dtype):
    k_nope, k_rope = draw_latents(num_tokens, dtype)
    assert_bitwise_equal(pack_latent(k_nope, k_rope), torch.from_numpy(pack_by_hand(k_nope, k_rope)))


def test_every_float8_code_decodes_to_its_value():
    packed = torch.zeros(1, 656, dtype=torch.uint8)
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    packed[0, : len(codes)] = torch.tensor(codes, dtype=torch.uint8)
    packed[0, 512:528] = torch.tensor([1.0, 0.5, 3.0, 2.0]).view(torch.uint8)
    assert_bitwise_equal(unpack_latent(packed), torch.from_numpy(unpack_by_hand(packed)))


def test_every_midpoint_rounds_to_the_even_code():
    table = float8_table()
    midpoints = torch.from_numpy(((table[:-1] + table[1:]) / 2).astype(np.float32))
    k_nope = torch.zeros(1, 512)
    k_nope[0, :126], k_nope[0, 127] = midpoints, 448.0
    k_nope[0, 128:254], k_nope[0, 255] = -midpoints, 448.0
    packed = pack_latent(k_nope, torch.zeros(1, 64))
    codes = packed[0, :126].tolist()
    assert codes == [low + low % 2 for low in range(126)]
    assert packed[0, 128:254].tolist() == [code | 0x80 for code in codes]


def test_unpacking_returns_what_was_packed_within_float8_rounding():
    k_nope, k_rope = torch.randn(65, 512), torch.randn(65, 64).bfloat16().float()
    values = unpack_latent(pack_latent(k_nope, k_rope))
    assert_close(values[:, :512], k_nope, rms=FP8_RMS)
    assert_bitwise_equal(values[:, 512:], k_rope)


def test_tiles_of_zeros_and_of_subnormal_scale_read_back_as_zeros():
    """A scale of zero makes 0 * (1 / 0) a NaN in the cache."""
    k_nope, k_rope = torch.zeros(2, 512), torch.zeros(2, 64)
    k_nope[1, :128], k_nope[1, 128:256], k_nope[1, 256:384] = 1e-45, 1e-40, -5e-36
    assert_bitwise_equal(unpack_latent(pack_latent(k_nope, k_rope)).abs(), torch.zeros(2, 576))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
def test_kernel_packs_and_unpacks_the_reference_bytes(num_tokens, dtype, device):
    k_nope, k_rope = (tensor.to(dtype) for tensor in exact_latents(num_tokens))
    packed = kernels.pack_latent(k_nope.to(device), k_rope.to(device))
    assert_bitwise_equal(packed, reference.pack_latent(k_nope, k_rope))
    assert_bitwise_equal(kernels.unpack_latent(packed), reference.unpack_latent(packed.cpu()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [*TOKEN_COUNTS, 1000])
def test_kernel_rounds_as_the_reference_does(num_tokens, dtype):
    k_nope, k_rope = draw_latents(num_tokens, dtype)
    packed = kernels.pack_latent(k_nope.cuda(), k_rope.cuda())
    assert_bitwise_equal(packed, reference.pack_latent(k_nope, k_rope))
    assert_bitwise_equal(kernels.unpack_latent(packed), reference.unpack_latent(packed.cpu()))


def test_kernel_keeps_zeros_readable(device):
    k_nope, k_rope = torch.zeros(3, 512, device=device), torch.zeros(3, 64, device=device)
    k_nope[1, :128], k_nope[2, 128:256] = 1e-40, 1e-45
    assert_bitwise_equal(unpack_latent(kernels.pack_latent(k_nope, k_rope).cpu()), torch.zeros(3, 576))


@pytest.mark.sglang
def test_bytes_are_those_of_sglang_where_nothing_rounds(device):
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache

    k_nope, k_rope = (tensor.bfloat16().to(device) for tensor in exact_latents(64))
    k_nope[0, :128] = 1.0  # sglang stores NaN for a tile of zeros
    theirs = quantize_k_cache(torch.cat([k_nope, k_rope], dim=-1).view(1, 64, 1, 576)).view(torch.uint8).view(64, 656)
    assert_bitwise_equal(kernels.pack_latent(k_nope, k_rope), theirs)


@pytest.mark.gpu
@pytest.mark.sglang
def test_bytes_stay_within_a_rounding_of_sglang_compiled():
    """Compiled, its scale is amax * (1 / 448) and its reciprocal approximate: a last bit, and a code at ties."""
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache

    k_nope, k_rope = torch.randn(1024, 512).bfloat16().cuda(), torch.randn(1024, 64).bfloat16().cuda()
    theirs = quantize_k_cache(torch.cat([k_nope, k_rope], dim=-1).view(16, 64, 1, 576)).view(torch.uint8).view(-1, 656)
    ours = kernels.pack_latent(k_nope, k_rope)
    scales = [rows[:, 512:528].contiguous().view(torch.int32) for rows in (ours, theirs)]
    assert int((scales[0] - scales[1]).abs().max()) <= 1
    codes = [rows[:, :512].short() for rows in (ours, theirs)]
    assert int((codes[0] - codes[1]).abs().max()) <= 1
    assert_bitwise_equal(ours[:, 528:], theirs[:, 528:])


def draw_slots(num_tokens: int, num_slots: int) -> torch.Tensor:
    """Distinct slots in no order, a third of them -1, the pool's last slot among them."""
    slots = torch.randperm(num_slots)[:num_tokens]
    slots[torch.rand(num_tokens) < 1 / 3] = -1
    slots[-1] = -1 if num_slots - 1 in slots[:-1] else num_slots - 1
    return slots


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_each_token_lands_once_on_its_owner_row_and_nowhere_else(dcp_size, slot_dtype):
    """Filter and divide together: sgl-project/sglang 36989 and 36886 did one without the other.

    A negative slot means "another rank's token", not a write to the last row: vllm-project/vllm 50095.
    """
    num_rows, num_tokens = 128, 65
    k_nope, k_rope = draw_latents(num_tokens, torch.float32)
    slots = draw_slots(num_tokens, num_rows * dcp_size)
    owners = [divmod(slot, dcp_size)[::-1] if slot >= 0 else (-1, -1) for slot in slots.tolist()]
    packed = pack_latent(k_nope, k_rope)
    for rank in range(dcp_size):
        mine = [token for token, (owner, _) in enumerate(owners) if owner == rank]
        rows = [owners[token][1] for token in mine]
        latents = [poison_(tensor.clone()) for tensor in (k_nope, k_rope)]
        for poisoned_latent, latent in zip(latents, (k_nope, k_rope)):
            poisoned_latent[mine] = latent[mine]
        cache, plain = poisoned(num_rows, 656, dtype=torch.uint8), poisoned(num_rows, 576, dtype=torch.float32)
        expected, expected_plain = cache.clone(), plain.clone()
        expected[rows], expected_plain[rows] = packed[mine], torch.cat([k_nope, k_rope], dim=-1)[mine]
        for pool in (cache, plain):
            scatter_latent_(pool, *latents, slots.to(slot_dtype), dcp_size, rank)
        assert_bitwise_equal(cache, expected, f"rank {rank}")
        assert_bitwise_equal(plain, expected_plain, f"rank {rank}")


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dcp_size", [1, 2, 3, 8])
def test_kernel_scatters_as_the_reference_does(dcp_size, slot_dtype, device):
    num_rows, num_tokens = 64, 21
    k_nope, k_rope = exact_latents(num_tokens)
    slots = draw_slots(num_tokens, num_rows * dcp_size).to(slot_dtype)
    for rank in range(dcp_size):
        for cache_dtype in (torch.uint8, torch.float32, torch.bfloat16):
            width = 656 if cache_dtype == torch.uint8 else 576
            cache = poisoned(num_rows, width, dtype=cache_dtype, device=device)
            expected = cache.cpu().clone()
            args = (dcp_size, rank)
            kernels.scatter_latent_(cache, k_nope.to(device), k_rope.to(device), slots.to(device), *args)
            reference.scatter_latent_(expected, k_nope, k_rope, slots, *args)
            assert_bitwise_equal(cache, expected, f"rank {rank}, {cache_dtype}")


def test_kernel_takes_the_two_halves_of_one_projection(device):
    both = torch.cat(exact_latents(9), dim=-1).bfloat16()
    k_nope, k_rope = both.to(device)[:, :512], both.to(device)[:, 512:]
    cache = poisoned(9, 656, dtype=torch.uint8, device=device)
    kernels.scatter_latent_(cache, k_nope, k_rope, torch.arange(9, device=device), 1, 0)
    assert_bitwise_equal(cache, reference.pack_latent(both[:, :512], both[:, 512:]))
    assert_bitwise_equal(kernels.pack_latent(k_nope, k_rope), cache)


def test_scattering_twenty_times_writes_the_same_bytes(device):
    k_nope, k_rope = (tensor.to(device) for tensor in draw_latents(9))
    slots = torch.arange(9, device=device) * 2
    first = kernels.pack_latent(k_nope, k_rope)
    for _ in range(20):
        cache = poisoned(9, 656, dtype=torch.uint8, device=device)
        kernels.scatter_latent_(cache, k_nope, k_rope, slots, 2, 0)
        assert_bitwise_equal(cache, first)


def test_rows_past_two_gib_are_written_and_gathered_in_their_place(device):
    """A byte's offset does not fit 32 bits there. Memory that is only zeroed costs nothing on a CPU."""
    num_rows = (2**31 // 656 // 64 + 2) * 64
    cache = torch.zeros(num_rows, 656, dtype=torch.uint8, device=device)
    latents = exact_latents(2)
    rows = torch.tensor([num_rows - 1, num_rows - 64], device=device)
    kernels.scatter_latent_(cache, *(latent.to(device) for latent in latents), rows * 8 + 5, 8, 5)
    expected = reference.pack_latent(*latents)
    assert_bitwise_equal(cache[rows], expected)
    page = gather_pages(cache, torch.tensor([num_rows // 64 - 1], dtype=torch.int32, device=device), 64)
    assert_bitwise_equal(page[[63, 0]], expected)
    del cache, page
    num_pages = 2**31 // (64 * 132) + 2
    index_cache = torch.zeros(num_pages, 64 * 132, dtype=torch.uint8, device=device)
    keys, slots = latents[0][:, :128].to(device), torch.tensor([num_pages * 64 - 1, 3], device=device)
    kernels.scatter_index_keys_(index_cache, keys, slots)
    last_page = index_cache[-1:].cpu()
    assert_bitwise_equal(
        kernels.gather_index_keys(index_cache, slots)[:1], reference.gather_index_keys(last_page, torch.tensor([63]))
    )
    assert bool(last_page.any())


def test_no_tokens_and_no_owned_tokens_write_nothing(device):
    for module in (reference, kernels) if device == "cpu" else (kernels,):
        for slots in ([], [-1, -5, -1], [1, 3, 5]):
            cache = poisoned(4, 656, dtype=torch.uint8, device=device)
            latents = torch.ones(len(slots), 512, device=device), torch.ones(len(slots), 64, device=device)
            module.scatter_latent_(cache, *latents, torch.tensor(slots, dtype=torch.int64, device=device), 2, 0)
            assert bool((cache == POISON_BYTE).all()), slots
        assert module.pack_latent(*(latent[:0] for latent in latents)).shape == (0, 656)
        assert module.unpack_latent(cache[:0]).shape == (0, 576)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("k_nope", torch.zeros(2, 511), r"k_nope must have shape \[\*, 512\], got \[2, 511\]"),
        ("k_rope", torch.zeros(3, 64), r"k_rope must have shape \[2, 64\], got \[3, 64\]"),
        ("k_rope", torch.zeros(2, 64).bfloat16(), "k_rope must have dtype float32, got bfloat16"),
        ("cache", torch.zeros(4, 576, dtype=torch.uint8), r"cache must have shape \[\*, 656\], got \[4, 576\]"),
        ("slots", torch.zeros(2), "slots must have dtype int32 or int64, got float32"),
        ("dcp_rank", 2, r"dcp_rank must be in \[0, 2\), got 2"),
        ("dcp_size", 0, "dcp_size must be at least 1, got 0"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_wrong_arguments_are_named(argument, value, message):
    arguments = {
        "cache": torch.zeros(4, 656, dtype=torch.uint8),
        "k_nope": torch.zeros(2, 512),
        "k_rope": torch.zeros(2, 64),
        "slots": torch.zeros(2, dtype=torch.int64),
        "dcp_size": 2,
        "dcp_rank": 0,
        argument: value,
    }
    with pytest.raises(ValueError, match=message):
        scatter_latent_(**arguments)


@pytest.mark.parametrize("where", ["reference", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_nan_in_a_latent_stays_visible(where):
    """Not in the interpreter: it turns a NaN into 384."""
    k_nope, k_rope = torch.ones(1, 512), torch.ones(1, 64)
    k_nope[0, 5] = math.nan
    packed = pack_latent(k_nope, k_rope) if where == "reference" else kernels.pack_latent(k_nope.cuda(), k_rope.cuda())
    values = unpack_latent(packed.cpu())
    assert math.isnan(values[0, 5])
    assert bool((values[0, 128:] == 1).all())
