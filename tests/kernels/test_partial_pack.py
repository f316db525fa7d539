"""The messages of `a2a`: byte layout against numpy, the round trip, and the fused merge."""

import math

import numpy as np
import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close, assert_lse_close
from nsa_dcp.testing.cases import draw_partials
from nsa_dcp_kernels import merge_packed, merge_partials, pack_partials, reference, unpack_partials
from nsa_dcp_kernels._triton import partial_pack as kernels

RMS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
LSE_ATOL = 4e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

SHAPES = [
    pytest.param(1, 1, 1, 64, id="one-rank"),
    pytest.param(2, 3, 5, 64, id="odd-heads"),
    pytest.param(3, 2, 1, 100, id="dcp3"),
    pytest.param(4, 63, 1, 2, id="63-tokens"),
    pytest.param(8, 3, 8, 512, id="dcp8-mla"),
    pytest.param(20, 5, 4, 32, id="more-partials-than-held-at-once"),
]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(("dcp_size", "num_tokens", "heads", "dim"), SHAPES)
def test_chunk_n_holds_the_bytes_of_rank_n_heads(dcp_size, num_tokens, heads, dim, dtype):
    out, lse = draw_partials(1, num_tokens, dcp_size * heads, dim, dtype)
    packed = pack_partials(out[0], lse[0], dcp_size).numpy()
    out_bytes = np.frombuffer(out[0].contiguous().view(torch.uint8).numpy().tobytes(), np.uint8)
    lse_bytes = np.frombuffer(lse[0].numpy().tobytes(), np.uint8)
    row, lse_row = dim * out.itemsize, lse.itemsize
    assert packed.shape == (dcp_size, num_tokens, heads, row + lse_row)
    for rank, token, head in np.ndindex(dcp_size, num_tokens, heads):
        source = token * dcp_size * heads + rank * heads + head
        entry = packed[rank, token, head].tobytes()
        assert entry[:row] == out_bytes[source * row : (source + 1) * row].tobytes()
        assert entry[row:] == lse_bytes[source * lse_row : (source + 1) * lse_row].tobytes()


@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4, 8])
def test_exchanged_chunks_merge_to_each_rank_its_own_heads(dcp_size):
    num_tokens, heads = 3, 2
    out, lse = draw_partials(dcp_size, num_tokens, dcp_size * heads, 16)
    whole, whole_lse = merge_partials(out, lse)
    sent = [pack_partials(out[rank], lse[rank], dcp_size) for rank in range(dcp_size)]
    for rank in range(dcp_size):
        received = torch.stack([message[rank] for message in sent])
        merged, total = merge_packed(received, out.dtype)
        own = slice(rank * heads, (rank + 1) * heads)
        assert_bitwise_equal(merged, whole[:, own])
        assert_bitwise_equal(total, whole_lse[:, own])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_unpacking_returns_every_bit(dtype):
    out, lse = draw_partials(4, 5, 3, 10, dtype)
    packed = torch.stack([pack_partials(out[n], lse[n], 1)[0] for n in range(4)])
    unpacked_out, unpacked_lse = unpack_partials(packed, dtype)
    assert_bitwise_equal(unpacked_out, out)
    assert_bitwise_equal(unpacked_lse, lse)


# Packing moves words, so every dtype is exact in the interpreter too.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dcp_size", "num_tokens", "heads", "dim"), SHAPES)
def test_kernel_packs_and_unpacks_the_reference_bytes(dcp_size, num_tokens, heads, dim, dtype, device):
    out, lse = draw_partials(1, num_tokens, dcp_size * heads, dim, dtype)
    packed = kernels.pack_partials(out[0].to(device), lse[0].to(device), dcp_size)
    assert_bitwise_equal(packed, reference.pack_partials(out[0], lse[0], dcp_size))
    unpacked_out, unpacked_lse = kernels.unpack_partials(packed, dtype)
    expected_out, expected_lse = reference.unpack_partials(packed.cpu(), dtype)
    assert_bitwise_equal(unpacked_out, expected_out)
    assert_bitwise_equal(unpacked_lse, expected_lse)


@pytest.mark.parametrize(("num_partials", "num_tokens", "heads", "dim"), SHAPES)
def test_kernel_merges_messages_as_the_reference_merges_partials(num_partials, num_tokens, heads, dim, device_dtype):
    device, dtype = device_dtype
    out, lse = draw_partials(num_partials, num_tokens, heads, dim, dtype)
    packed = torch.stack([pack_partials(out[n], lse[n], 1)[0] for n in range(num_partials)])
    merged, total = kernels.merge_packed(packed.to(device), dtype)
    expected, expected_total = reference.merge_partials(out, lse)
    assert merged.dtype == dtype and total.dtype == torch.float32
    assert_close(merged, expected, rms=RMS[dtype])
    assert_lse_close(total, expected_total, atol=LSE_ATOL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_interpreted_merge_keeps_the_two_values_of_a_word_apart(dtype, device):
    """Whole numbers under equal weights are exact however the interpreter rounds."""
    out = torch.arange(2 * 3 * 8).view(2, 3, 1, 8).to(dtype)
    packed = torch.stack([pack_partials(out[n], torch.zeros(3, 1), 1)[0] for n in range(2)])
    merged, total = kernels.merge_packed(packed.to(device), dtype)
    assert_bitwise_equal(merged, (12 + torch.arange(3 * 8).view(3, 1, 8)).to(dtype))
    assert_lse_close(total, torch.full((3, 1), math.log(2)), atol=LSE_ATOL)


def test_kernel_packs_the_real_heads_of_a_padded_output(device):
    """FlashMLA writes 64 or 128 heads; the first H_all of them are a view."""
    out, lse = torch.randn(3, 64, 16).bfloat16(), torch.randn(3, 64)
    packed = kernels.pack_partials(out.to(device)[:, :6], lse.to(device)[:, :6], 2)
    assert_bitwise_equal(packed, reference.pack_partials(out[:, :6], lse[:, :6], 2))
    transposed = torch.randn(64, 3)
    packed = kernels.pack_partials(out.to(device)[:, :6, ::2], transposed.to(device).T[:, :6], 2)
    assert_bitwise_equal(packed, reference.pack_partials(out[:, :6, ::2], transposed.T[:, :6], 2))


def test_kernel_packs_outputs_that_start_within_a_word(device):
    flat = torch.randn(1 + 3 * 4 * 16).bfloat16()
    lse = torch.randn(3, 4)
    packed = kernels.pack_partials(flat.to(device)[1:].view(3, 4, 16), lse.to(device), 2)
    assert_bitwise_equal(packed, reference.pack_partials(flat[1:].view(3, 4, 16), lse, 2))


def test_twenty_merges_are_bitwise_equal(device_dtype):
    device, dtype = device_dtype
    out, lse = draw_partials(8, 3, 2, 64, dtype)
    packed = torch.stack([pack_partials(out[n], lse[n], 1)[0] for n in range(8)]).to(device)
    first = kernels.merge_packed(packed, dtype)
    for _ in range(19):
        again = kernels.merge_packed(packed, dtype)
        assert_bitwise_equal(again[0], first[0])
        assert_bitwise_equal(again[1], first[1])


def test_messages_of_no_tokens_are_empty(device):
    for pack, merge in ((pack_partials, merge_packed), (kernels.pack_partials, kernels.merge_packed)):
        packed = pack(torch.zeros(0, 8, 512, device=device), torch.zeros(0, 8, device=device), 4)
        assert packed.shape == (4, 0, 2, 2052)
        merged, total = merge(packed, torch.float32)
        assert merged.shape == (0, 2, 512) and total.shape == (0, 2)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="out must have a multiple of 3 heads, got 8"):
        pack_partials(torch.zeros(2, 8, 4), torch.zeros(2, 8), 3)


def test_message_of_another_dtype_is_refused():
    packed = pack_partials(torch.zeros(2, 8, 3).bfloat16(), torch.zeros(2, 8), 2)
    with pytest.raises(ValueError, match="packed must hold whole values and a lse, got 10"):
        merge_packed(packed, torch.float32)
    with pytest.raises(ValueError, match="packed must hold at least one partial, got 0"):
        merge_packed(packed[:0], torch.bfloat16)


def test_kernel_refuses_outputs_of_half_words(device):
    with pytest.raises(NotImplementedError, match=r"an even head dim with torch\.bfloat16, got 65"):
        kernels.pack_partials(torch.zeros(2, 4, 65, dtype=torch.bfloat16, device=device), torch.zeros(2, 4), 2)
