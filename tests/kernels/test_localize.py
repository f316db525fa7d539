"""The localisation kernel against the reference, exactly."""

import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.cases import draw_selection
from nsa_dcp_kernels import reference
from nsa_dcp_kernels._triton import localize as kernels


@pytest.mark.parametrize("interleave_size", [1, 16])
@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [1, 63, 64, 100, 2048])
def test_kernel_localizes_as_the_reference(device, width, dcp_size, interleave_size):
    slots = draw_selection(5, width, 4 * width)
    for rank in {0, dcp_size - 1}:
        rows, length = kernels.localize_topk(slots.to(device), dcp_size, rank, interleave_size)
        expected_rows, expected_length = reference.localize_topk(slots, dcp_size, rank, interleave_size)
        assert_bitwise_equal(rows.cpu(), expected_rows)
        assert_bitwise_equal(length.cpu(), expected_length)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 132, 133, 264, 265, 1000, 8192])
def test_kernel_localizes_any_number_of_tokens(num_tokens):
    slots = torch.randint(-2000, 20000, (num_tokens, 2048), dtype=torch.int32)
    rows, length = kernels.localize_topk(slots.cuda(), 8, 5, 1)
    expected_rows, expected_length = reference.localize_topk(slots, 8, 5, 1)
    assert_bitwise_equal(rows.cpu(), expected_rows)
    assert_bitwise_equal(length.cpu(), expected_length)


def test_largest_slots_do_not_overflow(device):
    slots = torch.tensor([[2**31 - 1, 2**31 - 2, -(2**31), -1, 0]], dtype=torch.int32)
    for rank in range(3):
        rows, length = kernels.localize_topk(slots.to(device), 3, rank, 64)
        expected_rows, expected_length = reference.localize_topk(slots, 3, rank, 64)
        assert_bitwise_equal(rows.cpu(), expected_rows)
        assert_bitwise_equal(length.cpu(), expected_length)


def test_entries_past_the_limit_are_dropped(device):
    rows = torch.tensor([[5, -1, 7, 9], [1, 2, 3, 4], [1, 2, 3, 4], [-1, -1, 8, -1]], dtype=torch.int32)
    limit = torch.tensor([3, 0, 9, 4], dtype=torch.int32)
    compact, length = kernels.localize_topk(rows.to(device), 1, 0, 1, limit=limit.to(device))
    assert compact.tolist() == [[5, 7, -1, -1], [-1, -1, -1, -1], [1, 2, 3, 4], [8, -1, -1, -1]]
    assert length.tolist() == [2, 0, 4, 1]


def test_rows_of_a_wider_tensor_are_read_in_place(device):
    wide = draw_selection(6, 256, 1000)
    rows, length = kernels.localize_topk(wide.to(device)[:, 64:192], 2, 1, 1)
    expected_rows, expected_length = reference.localize_topk(wide[:, 64:192], 2, 1, 1)
    assert_bitwise_equal(rows.cpu(), expected_rows)
    assert_bitwise_equal(length.cpu(), expected_length)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0)], ids=str)
def test_nothing_selected_gives_nothing(device, shape):
    rows, length = kernels.localize_topk(torch.empty(shape, dtype=torch.int32, device=device), 2, 0, 1)
    assert rows.shape == shape
    assert length.tolist() == [0] * shape[0]
