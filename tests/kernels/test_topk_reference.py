"""Selection: the reference against Python's sort."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp_kernels import select_topk

# Few distinct values, so that ties at the cut are the rule; both zeros, infinities, NaN and subnormals among them.
SCORES = [0.0, -0.0, 1.0, 1.0 + 2**-23, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3e38]
rows = st.lists(st.sampled_from(SCORES), min_size=1, max_size=40)


def select_by_sorting(scores: list[float], context_len: int, topk: int) -> list[int]:
    """The first `topk` positions by (score descending, position ascending), NaN last; in ascending order."""
    seen = range(min(context_len, len(scores)))
    order = sorted(seen, key=lambda position: (math.isnan(scores[position]), _descending(scores[position]), position))
    chosen = sorted(order[:topk])
    return chosen + [-1] * (topk - len(chosen))


def _descending(score: float) -> float:
    return 0.0 if math.isnan(score) else -score


def select(logits: torch.Tensor, context_lens: list[int], topk: int) -> list[list[int]]:
    selection = select_topk(logits, torch.tensor(context_lens, dtype=torch.int32), topk)
    assert selection.dtype == torch.int32
    return selection.tolist()


@settings(max_examples=100)
@given(row=rows, context_len=st.integers(0, 40), topk=st.integers(1, 45))
def test_selection_is_the_head_of_the_sorted_order(row, context_len, topk):
    context_len = min(context_len, len(row))
    assert select(torch.tensor([row]), [context_len], topk) == [select_by_sorting(row, context_len, topk)]


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 512])
@pytest.mark.parametrize("length", [1, 63, 65, 100, 700])
def test_selection_of_random_scores_is_exact(length, topk):
    logits = torch.randn(4, length)
    context_lens = [length, 0, 1, length // 2]
    wanted = [select_by_sorting(row, seen, topk) for row, seen in zip(logits.tolist(), context_lens)]
    assert select(logits, context_lens, topk) == wanted


def test_ties_at_the_cut_fall_to_the_lower_positions_on_every_rank():
    logits = torch.tensor([[5.0, 1.0, 7.0, 1.0, 1.0, 9.0, 1.0]])
    assert select(logits, [7], 4) == [[0, 1, 2, 5]]
    assert select(logits, [7], 5) == [[0, 1, 2, 3, 5]]
    assert select(torch.zeros(1, 300), [300], 4) == [[0, 1, 2, 3]]
    assert select(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), [4], 2) == [[0, 1]]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 3e38], ids=str)
def test_what_lies_past_the_context_is_never_selected(garbage):
    """Paged scores past context_len are garbage: flashinfer-ai/flashinfer 4365, sgl-project/sglang 33059."""
    logits = torch.randn(4, 65)
    context_lens = [65, 64, 1, 0]
    clean = select(logits, context_lens, 64)
    for row, seen in zip(logits, context_lens):
        row[seen:] = garbage
    assert select(logits, context_lens, 64) == clean
    assert clean[3] == [-1] * 64


def test_nan_is_selected_only_when_numbers_run_out():
    logits = torch.tensor([[math.nan, -math.inf, math.nan, 2.0]])
    assert select(logits, [4], 2) == [[1, 3]]
    assert select(logits, [4], 3) == [[0, 1, 3]]


def test_selection_of_a_row_does_not_depend_on_its_batch():
    logits = torch.randint(0, 3, (9, 200)).float()
    context_lens = torch.randint(0, 201, (9,), dtype=torch.int32)
    together = select_topk(logits, context_lens, 64)
    for row in range(9):
        alone = select_topk(logits[row : row + 1].clone(), context_lens[row : row + 1], 64)
        assert_bitwise_equal(alone, together[row : row + 1])
    wider = torch.cat([logits, torch.full((9, 100), math.nan)], dim=1)
    assert_bitwise_equal(select_topk(wider, context_lens, 64), together)
    for _ in range(20):
        assert_bitwise_equal(select_topk(logits, context_lens, 64), together)


@pytest.mark.parametrize(("num_tokens", "length"), [(0, 64), (3, 0), (0, 0)], ids=str)
def test_nothing_to_select_from_selects_nothing(num_tokens, length):
    selection = select_topk(torch.zeros(num_tokens, length), torch.zeros(num_tokens, dtype=torch.int32), 8)
    assert_bitwise_equal(selection, torch.full((num_tokens, 8), -1, dtype=torch.int32))


def test_wrong_arguments_are_named():
    lens = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="logits must have dtype float32, got bfloat16"):
        select_topk(torch.zeros(2, 4).bfloat16(), lens, 2)
    with pytest.raises(ValueError, match=r"context_lens must have shape \[3\], got \[2\]"):
        select_topk(torch.zeros(3, 4), lens, 2)
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        select_topk(torch.zeros(2, 4), lens, 0)
