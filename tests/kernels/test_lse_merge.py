"""Merging partials: against softmax over the union, and the kernel against the reference."""

import math

import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close, assert_lse_close
from nsa_dcp.testing.cases import draw_partials
from nsa_dcp_kernels import merge_partials, reference
from nsa_dcp_kernels._triton import lse_merge as kernels

# Relative RMS of the merged output; half precision is dominated by its own rounding (2^-9 and 2^-12 at most).
RMS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
LSE_ATOL = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 4e-6, torch.float16: 4e-6}

SHAPES = [
    pytest.param(1, 1, 1, 64, id="one-partial"),
    pytest.param(2, 3, 5, 64, id="odd-heads"),
    pytest.param(3, 2, 1, 65, id="odd-dim"),
    pytest.param(4, 1, 3, 100, id="dim-100"),
    pytest.param(8, 3, 8, 512, id="dcp8-mla"),
    pytest.param(20, 5, 4, 32, id="more-partials-than-held-at-once"),
    pytest.param(8, 63, 1, 8, id="63-tokens"),
    pytest.param(2, 65, 2, 1, id="65-tokens-one-value"),
]


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention by its textbook formula: scores [T, H, S], values [S, D]; no tokens give out 0 and lse -inf."""
    if not scores.shape[-1]:
        return scores.new_zeros(*scores.shape[:2], values.shape[1]), scores.new_full(scores.shape[:2], -math.inf)
    weight = scores.exp()
    denominator = weight.sum(-1)
    return weight @ values / denominator.unsqueeze(-1), denominator.log()


def split_attention(sizes: list[int], dtype: torch.dtype, num_tokens: int = 3, num_heads: int = 2, dim: int = 16):
    """One softmax over sum(sizes) tokens, whole and as partials over `sizes` tokens each."""
    scores = 2 * torch.randn(num_tokens, num_heads, sum(sizes), dtype=torch.float64)
    values = torch.randn(sum(sizes), dim, dtype=torch.float64)
    order = torch.randperm(sum(sizes)).split(sizes)
    parts = [attend(scores[..., part], values[part]) for part in order]
    out, lse = (torch.stack(tensors) for tensors in zip(*parts))
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    return out.to(dtype), lse.to(acc), attend(scores, values)


@pytest.mark.parametrize("dtype", RMS, ids=str)
@pytest.mark.parametrize("sizes", [[7], [1, 1], [5, 0, 9], [0, 0, 0, 1], [1, 2, 3, 4, 5, 6, 7, 100]], ids=str)
def test_merge_of_parts_is_softmax_over_their_union(sizes, dtype):
    """A part without tokens is neutral: vllm-project/vllm 38416 (a sequence shorter than dcp_size)."""
    out, lse, (whole, whole_lse) = split_attention(sizes, dtype)
    merged, total = merge_partials(out, lse)
    assert merged.dtype == dtype
    assert_close(merged, whole, rms=RMS[dtype])
    assert_lse_close(total, whole_lse, atol=LSE_ATOL[dtype])


def test_merging_in_stages_is_merging_at_once():
    out, lse, (whole, whole_lse) = split_attention([4, 1, 0, 6, 2], torch.float64)
    first, second = merge_partials(out[:2], lse[:2]), merge_partials(out[2:], lse[2:])
    merged, total = merge_partials(torch.stack([first[0], second[0]]), torch.stack([first[1], second[1]]))
    assert_close(merged, whole, rms=RMS[torch.float64])
    assert_lse_close(total, whole_lse, atol=LSE_ATOL[torch.float64])


def test_base_two_lse_misses_by_far_more_than_the_tolerance():
    """sgl-project/sglang 40903 and vllm-project/vllm 52796: a base-2 lse in a natural-log merge goes unnoticed."""
    out, lse, (whole, whole_lse) = split_attention([3072, 64], torch.float32)
    merged, total = merge_partials(out, lse * math.log2(math.e))
    error = (merged - whole).norm() / whole.norm()
    assert error > 1000 * RMS[torch.float32]
    assert (total - whole_lse).abs().min() > 1
    with pytest.raises(AssertionError, match="relative RMS"):
        assert_close(merged, whole, rms=RMS[torch.float32])


@pytest.mark.parametrize("spelling", [-math.inf, math.inf, math.nan], ids=str)
def test_empty_partial_is_never_used_however_it_is_spelled(spelling):
    """Kernels leave what nothing attended to undefined: vllm-project/vllm 46076, flashinfer-ai/flashinfer 4975."""
    out, lse, _ = split_attention([4, 5, 6], torch.float32)
    alone = merge_partials(out[[0, 2]], lse[[0, 2]])
    lse[1] = spelling
    for garbage in (math.nan, math.inf, -math.inf, 1e38):
        out[1] = garbage
        merged = merge_partials(out, lse)
        assert_bitwise_equal(merged[0], alone[0], f"out under {spelling}, {garbage}")
        assert_bitwise_equal(merged[1], alone[1], f"lse under {spelling}, {garbage}")


@pytest.mark.parametrize("num_partials", [1, 2, 8, 11])
def test_nothing_attended_anywhere_gives_zero_and_minus_infinity(num_partials, device):
    """-inf - -inf is NaN in a careless merge: vllm-project/vllm 49054 (a padding row of a CUDA graph)."""
    out = torch.full((num_partials, 2, 3, 16), math.nan, device=device)
    lse = torch.tensor([-math.inf, math.nan, math.inf], device=device).repeat(num_partials, 2, 1)
    for merge in (reference.merge_partials, kernels.merge_partials):
        merged, total = merge(out.cpu(), lse.cpu()) if merge is reference.merge_partials else merge(out, lse)
        assert_bitwise_equal(merged, torch.zeros(2, 3, 16))
        assert_bitwise_equal(total, torch.full((2, 3), -math.inf))


def test_one_partial_comes_back_bit_for_bit(device_dtype):
    device, dtype = device_dtype
    out, lse = torch.randn(1, 5, 3, 64).to(dtype), 10 * torch.randn(1, 5, 3)
    for merged, total in (reference.merge_partials(out, lse), kernels.merge_partials(out.to(device), lse.to(device))):
        assert_bitwise_equal(merged, out[0])
        assert_bitwise_equal(total, lse[0])


def test_extreme_magnitudes_neither_overflow_nor_lose_the_dominant_partial(device):
    lse = torch.tensor([-1.5e38, -1e4, 0.0, 1e4, 1.5e38], device=device).view(5, 1, 1)
    out = torch.arange(5.0, device=device).view(5, 1, 1, 1).expand(5, 1, 1, 8).contiguous()
    for count in range(1, 6):
        merged, total = kernels.merge_partials(out[:count], lse[:count])
        assert_bitwise_equal(merged, torch.full((1, 1, 8), float(count - 1)))
        assert_bitwise_equal(total, lse[count - 1])


@pytest.mark.parametrize(("num_partials", "num_tokens", "num_heads", "dim"), SHAPES)
def test_kernel_agrees_with_the_reference(num_partials, num_tokens, num_heads, dim, device_dtype):
    device, dtype = device_dtype
    out, lse = draw_partials(num_partials, num_tokens, num_heads, dim, dtype)
    merged, total = kernels.merge_partials(out.to(device), lse.to(device))
    expected, expected_total = reference.merge_partials(out, lse)
    assert merged.dtype == dtype and total.dtype == torch.float32
    assert_close(merged, expected, rms=RMS[dtype])
    assert_lse_close(total, expected_total, atol=LSE_ATOL[dtype])


def test_kernel_takes_views_into_wider_tensors(device_dtype):
    device, dtype = device_dtype
    out, lse = draw_partials(3, 4, 6, 128, dtype)
    wide_out, wide_lse = out.to(device), lse.to(device)
    for heads, dims in [
        (slice(0, 4), slice(0, 128)),
        (slice(1, 6, 2), slice(64, 128)),
        (slice(0, 6), slice(0, 128, 2)),
    ]:
        got = kernels.merge_partials(wide_out[:, 1:, heads, dims], wide_lse[:, 1:, heads])
        want = reference.merge_partials(out[:, 1:, heads, dims], lse[:, 1:, heads])
        assert_close(got[0], want[0], rms=RMS[dtype], label=f"{heads} {dims}")
        assert_lse_close(got[1], want[1], atol=LSE_ATOL[dtype], label=f"{heads} {dims}")


def test_twenty_repeats_are_bitwise_equal_and_leave_the_inputs_alone(device_dtype):
    device, dtype = device_dtype
    out, lse = (tensor.to(device) for tensor in draw_partials(8, 3, 4, 64, dtype))
    before = out.clone(), lse.clone()
    first = kernels.merge_partials(out, lse)
    for _ in range(19):
        again = kernels.merge_partials(out, lse)
        assert_bitwise_equal(again[0], first[0])
        assert_bitwise_equal(again[1], first[1])
    assert_bitwise_equal(out, before[0])
    assert_bitwise_equal(lse, before[1])


def test_no_tokens_give_no_rows(device):
    for merge in (merge_partials, kernels.merge_partials):
        merged, total = merge(torch.zeros(4, 0, 8, 512, device=device), torch.zeros(4, 0, 8, device=device))
        assert merged.shape == (0, 8, 512) and total.shape == (0, 8)


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 3), r"out must have shape \[\*, \*, \*, \*\], got \[2, 3, 4\]"),
        (torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3), r"lse must have shape \[2, 3, 4\], got \[2, 4, 3\]"),
        (torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4).half(), "lse must have dtype float32, got float16"),
        (torch.zeros(2, 3, 4, 8).int(), torch.zeros(2, 3, 4), "out must have dtype bfloat16 or"),
        (torch.zeros(0, 3, 4, 8), torch.zeros(0, 3, 4), "out must hold at least one partial, got 0"),
    ],
    ids=["rank", "transposed-lse", "half-lse", "integers", "no-partials"],
)
def test_wrong_arguments_are_named(out, lse, message):
    with pytest.raises(ValueError, match=message):
        merge_partials(out, lse)
