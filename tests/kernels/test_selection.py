"""A step's selection, prepared once: what a rank keeps of it, and that layers which share it leave it as it is."""

import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.cases import DCP_SIZES, ODD_SIZES, draw_selection, poisoned
from nsa_dcp_kernels import attend_selection, attend_sparse, localize_selection, localize_topk

SM_SCALE = 0.07


def draw_layer(num_rows: int, owned: torch.Tensor) -> torch.Tensor:
    """A cache whose owned rows are drawn; the others are NaN."""
    cache = poisoned(num_rows, 576, dtype=torch.float32)
    cache[owned] = torch.randn(len(owned), 576)
    return cache


@pytest.mark.parametrize("planned_heads", [None, 5, 64, 128])
@pytest.mark.parametrize("width", ODD_SIZES)
@pytest.mark.parametrize("dcp_size", DCP_SIZES)
def test_a_selection_is_a_ranks_rows_and_on_a_cpu_it_has_no_plan(dcp_size, width, planned_heads):
    slots = draw_selection(7, width, 300, seed=width)
    for rank in range(dcp_size):
        selection = localize_selection(slots, dcp_size, rank, planned_heads=planned_heads)
        rows, length = localize_topk(slots, dcp_size, rank)
        assert_bitwise_equal(selection.rows, rows)
        assert_bitwise_equal(selection.length, length)
        assert (selection.dcp_size, selection.plans) == (dcp_size, {})


@pytest.mark.parametrize("raw_lse", [False, True])
def test_layers_that_share_a_selection_attend_to_their_own_rows_and_change_nothing(raw_lse):
    slots = draw_selection(6, 65, 400)
    selection = localize_selection(slots, 4, 3)
    before = selection.rows.clone(), selection.length.clone()
    owned = selection.rows[selection.rows >= 0].unique().long()
    q = torch.randn(6, 3, 576)
    for _ in range(3):
        cache = draw_layer(100, owned)
        out, lse = attend_selection(q, cache, selection, SM_SCALE, raw_lse=raw_lse)
        expected, expected_lse = attend_sparse(q, cache, selection.rows, selection.length, SM_SCALE)
        assert_bitwise_equal(out, expected)
        assert_bitwise_equal(lse, expected_lse)
        assert bool(out.isfinite().all())
    assert_bitwise_equal(selection.rows, before[0])
    assert_bitwise_equal(selection.length, before[1])


@pytest.mark.parametrize(("num_tokens", "width"), [(0, 64), (3, 0), (0, 0)], ids=str)
def test_no_tokens_and_no_width_select_nothing(num_tokens, width):
    selection = localize_selection(torch.zeros(num_tokens, width, dtype=torch.int32), 4, 1, planned_heads=64)
    out, lse = attend_selection(
        torch.randn(num_tokens, 2, 576), poisoned(64, 576, dtype=torch.float32), selection, SM_SCALE
    )
    assert_bitwise_equal(out, torch.zeros(num_tokens, 2, 512))
    assert_bitwise_equal(lse, torch.full((num_tokens, 2), -torch.inf))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, dtype=torch.int32), 2, 0), r"topk_slots must have shape \[\*, \*\], got \[4\]"),
        ((torch.zeros(2, 4), 2, 0), "topk_slots must have dtype int32, got float32"),
        ((torch.zeros(2, 4, dtype=torch.int32), 2, 2), r"dcp_rank must be in \[0, 2\), got 2"),
        ((torch.zeros(2, 4, dtype=torch.int32), 0, 0), "dcp_size must be at least 1, got 0"),
    ],
    ids=["one dimension", "dtype", "rank", "no ranks"],
)
@pytest.mark.parametrize("planned_heads", [None, 64])
def test_wrong_arguments_are_named(arguments, message, planned_heads):
    with pytest.raises(ValueError, match=message):
        localize_selection(*arguments, planned_heads=planned_heads)
