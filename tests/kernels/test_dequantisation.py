"""The rule that decides whether a prefill call dequantises, the memory that the planner budgets, and the kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_dcp.planning.capacity import MOST_DEQUANTISED_BYTES
from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp_kernels import reference
from nsa_dcp_kernels._triton.latent_dequant import dequantise_latent
from nsa_dcp_kernels.dequantisation import dequantised_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "dcp_size", "rows_copied"),
    [
        (264, 64, 1, 0),
        (265, 64, 1, 64),
        (1024, 512 * 1024, 1, 512 * 1024),
        (1024, 512 * 1024 + 1, 1, 0),
        (1024, 256 * 1024, 2, 256 * 1024),
        (1024, 256 * 1024 + 1, 2, 0),
        (1024, 128 * 1024, 8, 128 * 1024),
        (1024, 128 * 1024 + 1, 8, 0),
        (1024, 128 * 1024 + 1, None, 0),
        (8192, GIB // 1152, 8, GIB // 1152),
        (8192, GIB // 1152 + 1, 8, 0),
    ],
)
def test_rows_are_dequantised_while_it_pays_and_fits(num_tokens, num_rows, dcp_size, rows_copied):
    assert dequantised_bytes(num_tokens, num_rows, dcp_size) == rows_copied * 1152


@given(
    num_tokens=st.integers(1, 20_000),
    num_rows=st.integers(1, 2_000_000),
    dcp_size=st.sampled_from([None, 1, 2, 4, 8]),
)
def test_nothing_takes_more_than_the_planner_budgets(num_tokens, num_rows, dcp_size):
    assert dequantised_bytes(num_tokens, num_rows, dcp_size) <= min(num_rows * 1152, MOST_DEQUANTISED_BYTES)


@pytest.mark.parametrize("num_rows", [1, 8, 21])
def test_rows_are_dequantised_wherever_they_stand(num_rows, device):
    """Dense rows, every other one, and the first bytes of wider ones."""
    packed = torch.randint(0, 0x7F, (num_rows, 656), dtype=torch.uint8)
    packed[:, 512:528] = torch.tensor([1.0, 0.5, 4.0, 2.0]).view(torch.uint8)
    packed[:, 528:] = torch.randn(num_rows, 64).bfloat16().view(torch.uint8)
    expected = reference.unpack_latent(packed).bfloat16()
    poison = torch.full_like(packed, 0xFF)
    every_other = torch.stack([packed, poison], dim=1).to(device)[:, 0]
    first_bytes = torch.cat([packed, poison[:, :48]], dim=1).to(device)[:, :656]
    for rows in (packed.to(device), every_other, first_bytes):
        assert_bitwise_equal(dequantise_latent(rows), expected)
