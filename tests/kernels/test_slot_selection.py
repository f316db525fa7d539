"""Selection for servers: the kernels against the reference, and the reference against Python's sort."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp_kernels import reference, select_slots
from nsa_dcp_kernels._triton import slot_selection as kernels

SPECIAL = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45])
KINDS = ("normal", "far", "ties", "special", "constant", "nan", "denormal", "huge", "rising", "periodic", "last-bit")


def draw_scores(kind: str, num_rows: int, width: int, period: int = 4096) -> torch.Tensor:
    scores = torch.randn(num_rows, width)
    column = torch.arange(width).expand_as(scores)
    if kind == "far":
        return scores + 50
    if kind == "ties":
        return (3 * scores).round()
    if kind == "special":
        return SPECIAL[torch.randint(0, len(SPECIAL), scores.shape)]
    if kind in ("constant", "nan"):
        return torch.full_like(scores, -3.5 if kind == "constant" else math.nan)
    if kind == "denormal":
        return torch.randint(-4000, 4000, scores.shape).float() * 1e-45
    if kind == "huge":
        scores[torch.arange(num_rows), torch.randint(0, width, (num_rows,))] = 3e38
        return scores
    if kind == "rising":
        # The best lie side by side, in the last program's range.
        return column.float()
    if kind == "periodic":
        # The best lie in few groups, so that the groups' maxima bound the rest poorly.
        return scores - 100 * (column % period >= max(1, period // 8))
    if kind == "last-bit":
        return (torch.randint(0, 1 << 9, scores.shape, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    return scores


def pick_by_sorting(scores: list[float], topk: int) -> list[int]:
    ranks = [(math.isnan(score), 0.0 if math.isnan(score) else -score, at) for at, score in enumerate(scores)]
    return sorted(at for *_, at in sorted(ranks)[:topk])


def draw_call(kind, num_rows, width, topk, *, ragged, paged, requests, page=64, longest=None):
    """Arguments of a selection whose unused entries and pages would show."""
    longest = width if longest is None else longest
    scores = draw_scores(kind, num_rows, width)
    starts = torch.randint(0, max(1, width - longest + 1), (num_rows,), dtype=torch.int32) if ragged else None
    lengths = torch.randint(0, longest + 1, (num_rows,), dtype=torch.int32)
    lengths[0] = longest
    short = torch.tensor([0, 1, topk, topk + 1, -1])[: num_rows - 1]
    lengths[1 : 1 + len(short)] = short.clamp(max=longest).to(torch.int32)
    first = torch.zeros(num_rows, dtype=torch.int32) if starts is None else starts
    column = torch.arange(width)
    outside = (column < first.unsqueeze(1)) | (column >= (first + lengths).unsqueeze(1))
    # Garbage that would win, or poison.
    scores[outside] = torch.where(torch.rand(int(outside.sum())) < 0.5, math.inf, math.nan)
    table = request = None
    if paged:
        pages = -(-longest // page)
        rows = requests or num_rows
        table = torch.randperm(rows * pages).view(rows, pages).to(torch.int32) + 5
        request = torch.randint(0, requests, (num_rows,), dtype=torch.int32) if requests else None
    return scores, lengths, topk, starts, table, request, page


def assert_as_reference(call, device):
    moved = [value.to(device) if isinstance(value, torch.Tensor) else value for value in call]
    assert_bitwise_equal(kernels.select_slots(*moved).cpu(), reference.select_slots(*call))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_rows", "width", "longest", "ragged", "paged", "requests", "page"),
    [
        pytest.param(7, 3001, None, False, True, 0, 64, id="held-whole"),
        pytest.param(2, 8192, None, False, False, 0, 64, id="as-many-as-are-held"),
        pytest.param(3, 8193, None, False, True, 2, 1, id="one-more"),
        pytest.param(2, 40000, 33333, True, True, 2, 1, id="ragged"),
        pytest.param(1, 70001, 69998, True, False, 0, 64, id="odd-pitch"),
        pytest.param(3, 70004, 5000, False, True, 0, 64, id="wide-and-short"),
    ],
)
def test_kernels_select_as_the_reference(device, kind, num_rows, width, longest, ragged, paged, requests, page):
    call = draw_call(
        kind, num_rows, width, 2048, ragged=ragged, paged=paged, requests=requests, page=page, longest=longest
    )
    assert_as_reference(call, device)


def test_a_million_keys_are_selected_from_exactly(device):
    assert_as_reference(draw_call("normal", 1, 1 << 20, 2048, ragged=False, paged=True, requests=0), device)


@pytest.fixture
def small(monkeypatch):
    """Sizes at which every path is reached by few entries."""
    for name, size in {
        "_GROUPS": 32,
        "_HELD": 64,
        "_LEAST_RANGE": 32,
        "_RUN": 8,
        "_MOST_ROWS": 5,
        "_MOST_SPLITS": 16,
    }.items():
        monkeypatch.setattr(kernels, name, size)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1 << 30),
    kind=st.sampled_from(KINDS),
    num_rows=st.integers(1, 7),
    width=st.integers(1, 600),
    topk=st.integers(1, 32),
    programs=st.sampled_from([1, 16, 512]),
    ragged=st.booleans(),
    paged=st.booleans(),
    requests=st.integers(0, 3),
    page=st.sampled_from([1, 4, 64]),
    cut=st.integers(0, 900),
)
def test_kernels_select_as_the_reference_whatever_overflows(
    small, seed, kind, num_rows, width, topk, programs, ragged, paged, requests, page, cut
):
    if torch.cuda.is_available():
        pytest.skip("compiles anew for each size")
    torch.manual_seed(seed)
    kernels._PROGRAMS = programs
    call = list(
        draw_call(
            kind, num_rows, width, topk, ragged=ragged, paged=paged, requests=requests, page=page,
            longest=max(1, width - cut),
        )
    )  # fmt: skip
    if kind == "periodic":
        call[0] = torch.where(torch.isfinite(call[0]), draw_scores(kind, num_rows, width, 32), call[0])
    assert_as_reference(call, "cpu")


@pytest.mark.parametrize("programs", [1, 512])
@pytest.mark.parametrize("kind", ["periodic", "constant", "ties", "last-bit", "rising"])
def test_where_more_reach_the_bound_than_are_held_each_row_is_written_alone(small, monkeypatch, kind, programs):
    if torch.cuda.is_available():
        pytest.skip("compiles anew for each size")
    kernels._PROGRAMS = programs
    searched = []
    whole = kernels._select_from_row.fn
    monkeypatch.setattr(kernels, "_select_from_row", lambda *args: (searched.append(1), whole(*args)))
    for width in (900, 333):
        scores, lengths = draw_scores(kind, 1, width, 32), torch.tensor([width - 3])
        around = torch.full((3, 29), -7, dtype=torch.int32)
        kernels._launch(scores, lengths, 29, None, None, None, 64, around[1:2], None)
        wanted = reference.select_slots(scores, lengths, 29, None, None, None, 64)
        assert_bitwise_equal(around, torch.cat([torch.full_like(wanted, -7), wanted, torch.full_like(wanted, -7)]))
    assert bool(searched) == (kind != "rising")


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.setattr(kernels, "_PROGRAMS", kernels._PROGRAMS)


@settings(max_examples=100)
@given(
    row=st.lists(st.sampled_from([*SPECIAL.tolist(), 3e38]), min_size=1, max_size=30),
    start=st.integers(0, 30),
    length=st.integers(-2, 40),
    topk=st.integers(1, 35),
    pages=st.permutations(range(10)),
)
def test_a_selection_is_the_head_of_the_sorted_order_as_slots(row, start, length, topk, pages):
    start = min(start, len(row))
    seen = row[start : start + max(length, 0)]
    wanted = [pages[at // 4] * 4 + at % 4 for at in pick_by_sorting(seen, topk)]
    got = select_slots(
        torch.tensor([row]),
        torch.tensor([length]),
        topk,
        row_starts=torch.tensor([start]),
        page_table=torch.tensor([pages], dtype=torch.int32),
        page_size=4,
    )
    assert got.dtype == torch.int32
    assert got.tolist() == [wanted + [-1] * (topk - len(wanted))]


def test_a_row_is_selected_alike_in_any_batch_and_width(device):
    scores = draw_scores("ties", 3, 20000).to(device)
    lengths = torch.tensor([20000, 9000, 4097], dtype=torch.int32, device=device)
    together = kernels.select_slots(scores, lengths, 2048, None, None, None, 64)
    for row in range(3):
        alone = kernels.select_slots(scores[row : row + 1], lengths[row : row + 1], 2048, None, None, None, 64)
        assert_bitwise_equal(alone[0], together[row])
    wider = torch.nn.functional.pad(scores, (0, 20001), value=math.inf)
    assert_bitwise_equal(kernels.select_slots(wider, lengths, 2048, None, None, None, 64), together)


@pytest.mark.parametrize("shape", [(0, 100), (3, 0), (0, 0)], ids=str)
def test_nothing_to_select_from_selects_nothing(device, shape):
    lengths = torch.full((shape[0],), 5, dtype=torch.int32)
    for selected in (
        kernels.select_slots(torch.empty(shape, device=device), lengths.to(device), 64, None, None, None, 64),
        select_slots(torch.empty(shape), lengths, 64),
    ):
        assert_bitwise_equal(selected.cpu(), torch.full((shape[0], 64), -1, dtype=torch.int32))


def test_wrong_arguments_are_named():
    scores, lengths = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="scores must have dtype float32, got bfloat16"):
        select_slots(scores.bfloat16(), lengths, 2)
    with pytest.raises(ValueError, match=r"lengths must have shape \[2\], got \[3\]"):
        select_slots(scores, table[:, 0], 2)
    with pytest.raises(ValueError, match="row_starts must have dtype int32 or int64, got float32"):
        select_slots(scores, lengths, 2, row_starts=scores[:, 0])
    with pytest.raises(ValueError, match="page_table must have 2 rows, one a row, got 3"):
        select_slots(scores, lengths, 2, page_table=table)
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        select_slots(scores, lengths, 0)
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        select_slots(scores, lengths, 1, page_size=0)
    with pytest.raises(ValueError, match="topk must be at most 4096 on a GPU, got 4097"):
        kernels.select_slots(scores, lengths, 4097, None, None, None, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "far", "ties", "rising", "periodic", "constant"])
@pytest.mark.parametrize(
    ("num_rows", "width"), [(1, 1 << 20), (8, 131072), (16, 1048580), (64, 32768), (300, 16388), (5000, 9000)], ids=str
)
def test_kernels_select_as_the_reference_at_size(num_rows, width, kind):
    scores = draw_scores(kind, num_rows, width)
    lengths = torch.randint(width // 2, width + 1, (num_rows,), dtype=torch.int32)
    selected = kernels.select_slots(scores.cuda(), lengths.cuda(), 2048, None, None, None, 64)
    rows = torch.randint(0, num_rows, (8,)).unique()
    assert_bitwise_equal(
        selected.cpu()[rows], reference.select_slots(scores[rows], lengths[rows], 2048, None, None, None, 64)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 600])
def test_a_captured_selection_follows_lengths_scores_and_pages(num_rows):
    width = 70016
    scores, table = torch.randn(num_rows, width, device="cuda"), torch.zeros(num_rows, width // 64, device="cuda").int()
    lengths = torch.full((num_rows,), width, device="cuda").int()
    kernels.select_slots(scores, lengths, 2048, None, table, None, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected = kernels.select_slots(scores, lengths, 2048, None, table, None, 64)
    for longest in (width, 2048, 9000):
        scores.normal_()
        lengths.copy_(torch.randint(0, longest + 1, (num_rows,)))
        table.copy_(torch.randint(0, 1 << 24, table.shape))
        graph.replay()
        wanted = reference.select_slots(scores.cpu(), lengths.cpu(), 2048, None, table.cpu(), None, 64)
        assert_bitwise_equal(selected.cpu(), wanted)
        for _ in range(10):
            assert torch.equal(kernels.select_slots(scores, lengths, 2048, None, table, None, 64), selected)
