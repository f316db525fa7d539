"""Splitting a chunk's tokens over context-parallel ranks: every token once, and one rank's consistent view."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_dcp.choices import CP_STRATEGIES
from nsa_dcp.cp_layout import can_split, restore_index, share_of, split_tokens

# 1-token requests among long ones, chunks just large enough, and requests of odd lengths.
INTERLEAVED = [
    pytest.param([1, 1, 300, 1, 1], 4, id="single-tokens-around-a-long-request"),
    pytest.param([1] * 9, 4, id="single-tokens-alone"),
    pytest.param([4], 4, id="a-token-per-rank"),
    pytest.param([1, 1], 2, id="a-request-per-rank"),
    pytest.param([5, 1, 7], 8, id="more-ranks-than-any-request-has-tokens"),
    pytest.param([0, 3, 0, 5, 0], 3, id="requests-without-tokens"),
    pytest.param([101], 1, id="one-rank"),
]
ZIGZAGGED = [
    pytest.param([8], 4, id="a-token-per-block"),
    pytest.param([8, 300, 9, 15], 4, id="unequal-requests"),
    pytest.param([101], 1, id="one-rank"),
]


@st.composite
def chunks(draw):
    strategy = draw(st.sampled_from(CP_STRATEGIES))
    cp_size = draw(st.sampled_from((1, 2, 3, 4, 8)))
    shortest = 2 * cp_size if strategy == "zigzag" else 0
    lens = draw(st.lists(st.integers(shortest, 60), min_size=1, max_size=8))
    if strategy == "interleave" and sum(lens) < cp_size:
        lens.append(cp_size)
    return lens, cp_size, strategy


@given(chunk=chunks())
def test_every_token_falls_to_one_rank_and_requests_stay_in_order(chunk):
    lens, cp_size, strategy = chunk
    shares = split_tokens(*chunk)
    assert len(shares) == cp_size
    assert sorted(torch.cat(shares).tolist()) == list(range(sum(lens)))
    # Ascending over the whole share: requests follow one another, and so do the tokens of each.
    for share in shares:
        assert share.dtype == torch.int64
        assert share.tolist() == sorted(share.tolist())
    if strategy == "interleave":
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(chunk=chunks())
def test_gathered_shares_are_restored_to_the_chunks_order(chunk):
    shares = split_tokens(*chunk)
    longest = max(map(len, shares))
    gathered = torch.full((len(shares), longest), -1)
    for rank, share in enumerate(shares):
        gathered[rank, : len(share)] = share
    assert gathered.flatten()[restore_index(shares)].tolist() == list(range(sum(chunk[0])))


@given(chunk=chunks())
def test_a_share_is_described_by_one_request_index(chunk):
    _check_shares(*chunk)


@pytest.mark.parametrize(("lens", "cp_size"), INTERLEAVED)
def test_interleave_describes_ranks_that_own_no_token_of_a_request(lens, cp_size):
    """Lengths, rows and offsets follow the same filter. Source: sgl-project/sglang 30439."""
    _check_shares(lens, cp_size, "interleave")


@pytest.mark.parametrize(("lens", "cp_size"), ZIGZAGGED)
def test_zigzag_gives_every_rank_a_part_of_every_request(lens, cp_size):
    for share in _check_shares(lens, cp_size, "zigzag"):
        assert share.request_index.tolist() == list(range(len(lens)))


def test_single_tokens_leave_some_ranks_without_the_request():
    """The case that a per-request view gets wrong is there: most ranks own nothing of most requests."""
    views = _check_shares([1, 1, 300, 1, 1], 4, "interleave")
    assert [view.request_index.tolist() for view in views] == [[0, 2], [1, 2], [2, 3], [2, 4]]
    assert [view.q_lens.tolist() for view in views] == [[1, 75], [1, 75], [75, 1], [75, 1]]


def test_a_rank_without_any_token_has_an_empty_view():
    share = share_of(torch.zeros(0, dtype=torch.int64), [3, 1])
    assert share.request_index.shape == share.row_request.shape == share.q_lens.shape == (0,)
    assert share.indptr.tolist() == [0]


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_zigzag_evens_causal_work(cp_size):
    """A query at position p attends to p + 1 tokens; contiguous blocks would give the last rank most of them."""
    lens = [2 * cp_size * 16, 2 * cp_size * 3]
    position = torch.cat([torch.arange(length) for length in lens])
    work = [int((position[share] + 1).sum()) for share in split_tokens(lens, cp_size, "zigzag")]
    assert len(set(work)) == 1
    contiguous = [int((block + 1).sum()) for block in torch.arange(lens[0]).tensor_split(cp_size)]
    assert max(contiguous) > 1.4 * min(contiguous)


@given(length=st.integers(64, 3000), cp_size=st.sampled_from((2, 3, 4, 8)))
def test_zigzag_work_differs_by_a_few_queries_where_blocks_are_uneven(length, cp_size):
    work = [int((share + 1).sum()) for share in split_tokens([length], cp_size, "zigzag")]
    assert max(work) - min(work) <= 3 * length


@pytest.mark.parametrize(
    ("lens", "cp_size", "strategy", "expected"),
    [
        pytest.param([3], 4, "interleave", False, id="interleave-fewer-tokens-than-ranks"),
        pytest.param([4], 4, "interleave", True, id="interleave-a-token-per-rank"),
        pytest.param([1, 1, 1, 1], 4, "interleave", True, id="interleave-counts-the-whole-batch"),
        pytest.param([], 2, "interleave", False, id="interleave-empty-batch"),
        pytest.param([], 2, "zigzag", False, id="zigzag-empty-batch"),
        pytest.param([7], 4, "zigzag", False, id="zigzag-a-token-short"),
        pytest.param([8], 4, "zigzag", True, id="zigzag-a-token-per-block"),
        pytest.param([800, 7], 4, "zigzag", False, id="zigzag-one-short-request"),
        pytest.param([1], 1, "interleave", True, id="interleave-one-rank"),
    ],
)
def test_whether_a_chunk_can_be_split(lens, cp_size, strategy, expected):
    assert can_split(lens, cp_size, strategy) is expected
    if not expected:
        with pytest.raises(ValueError, match=rf"^extend_lens must be splittable by {strategy} over {cp_size} ranks"):
            split_tokens(lens, cp_size, strategy)


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match=r"^cp_strategy must be one of interleave, zigzag, got 'ring'$"):
        split_tokens([100], 2, "ring")


def _check_shares(lens, cp_size, strategy):
    """Compare each rank's view with counting its tokens one by one; return the views."""
    request_of = [request for request, length in enumerate(lens) for _ in range(length)]
    views = []
    for tokens in split_tokens(lens, cp_size, strategy):
        view = share_of(tokens, lens)
        of_tokens = [request_of[token] for token in tokens.tolist()]
        present = sorted(set(of_tokens))
        assert view.token_index.tolist() == tokens.tolist()
        assert view.request_index.tolist() == present
        assert view.row_request.dtype == torch.int32
        assert [present[row] for row in view.row_request.tolist()] == of_tokens
        assert view.q_lens.tolist() == [of_tokens.count(request) for request in present]
        assert view.indptr.tolist() == [sum(view.q_lens.tolist()[:i]) for i in range(len(present) + 1)]
        for row, request in enumerate(present):
            owned = view.token_index[view.indptr[row] : view.indptr[row + 1]].tolist()
            assert {request_of[token] for token in owned} == {request}
        views.append(view)
    return views
