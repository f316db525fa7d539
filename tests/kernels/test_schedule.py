"""Schedules: by an emulator of FlashMLA's partition rules, and the kernel against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.cases import draw_selection
from nsa_dcp_kernels import localize_topk, plan_sparse
from nsa_dcp_kernels.schedule import SparsePlan, plan_rows
from nsa_dcp_kernels.schedule_reference import PIECE_COST

NUM_SMS = 132
SKEWED = [0, 1, 64, 65, 300, 2048]


def walk(plan: SparsePlan) -> list[list[tuple[int, int, int | None]]]:
    """What FlashMLA does with a plan: for each row, the (first block, end block, partial) of its pieces.

    A partial is an entry of FlashMLA's scratch; None writes the row's output itself. Written from the kernel's source
    (sparse FP8 decoding on SM90), not from ours.
    """
    num_rows, row_blocks = len(plan.rows), plan.rows.shape[1] // 64
    num_splits = plan.num_splits.tolist()
    pieces = [[] for _ in range(num_rows)]
    for first, last, begin, end, first_split_index, first_is_split, last_is_split, _ in plan.schedule.tolist():
        if first >= num_rows:
            continue
        for row in range(first, last + 1):
            is_split = first_is_split if row == first else last_is_split if row == last else 0
            split_index = first_split_index if row == first else 0
            pieces[row].append(
                (
                    begin if row == first else 0,
                    end if row == last else row_blocks,
                    num_splits[row] + split_index if is_split else None,
                )
            )
    return pieces


def load_of(plan: SparsePlan) -> int:
    """Blocks walked by the busiest part, a row's start counted in."""
    row_blocks = plan.rows.shape[1] // 64
    loads = [0]
    for first, last, begin, end, *_ in plan.schedule.tolist():
        if first < len(plan.rows):
            walked = end - begin if first == last else row_blocks - begin + (last - first - 1) * row_blocks + end
            loads.append(walked + PIECE_COST * (last - first + 1))
    return max(loads)


def check_plan(plan: SparsePlan, compact: torch.Tensor, parts: int) -> None:
    """Every block that holds a valid index is walked once and no other is; splits and flags agree."""
    num_rows, width = compact.shape
    assert plan.schedule.shape == (parts, 8)
    assert plan.num_splits.shape == (num_rows + 1,)
    assert plan.num_splits[0] == 0
    # FlashMLA's scratch has one entry per row and one per part.
    assert plan.num_splits[-1] <= num_rows + parts
    for first, last, begin, end, *_ in plan.schedule.tolist():
        # A part that ends before it begins has no meaning to FlashMLA.
        assert first == num_rows or (first <= last < num_rows and (first < last or begin < end))
    for row, pieces in enumerate(walk(plan)):
        indices = plan.rows[row]
        kept = compact[row, : int(plan.length[row])]
        assert torch.equal(indices[indices >= 0], kept), row
        holds = set((indices.view(-1, 64) >= 0).any(1).nonzero().flatten().tolist())
        walked = [block for begin, end, _ in pieces for block in range(begin, end)]
        assert all(0 <= begin < end <= width // 64 for begin, end, _ in pieces), (row, pieces)
        assert len(walked) == len(set(walked)), (row, pieces)
        assert set(walked) == holds or (not holds and len(walked) == 1), (row, pieces, holds)
        partials = sorted(partial for _, _, partial in pieces if partial is not None)
        splits = range(int(plan.num_splits[row]), int(plan.num_splits[row + 1]))
        assert len(splits) == len(pieces), (row, pieces)
        assert partials == (list(splits) if len(pieces) > 1 else []), (row, pieces)


def compact_rows(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = torch.tensor(lengths, dtype=torch.int32)
    rows = torch.randint(0, 1 << 20, (len(lengths), width), dtype=torch.int32)
    return torch.where(torch.arange(width) < length.unsqueeze(1), rows, -1), length


@st.composite
def launches(draw: st.DrawFn) -> tuple[list[int], int, int]:
    parts = draw(st.integers(1, 24))
    width = 64 * draw(st.sampled_from([1, 2, 3, 8, 32]))
    anywhere = st.integers(0, width)
    special = st.sampled_from([min(width, length) for length in SKEWED])
    alike = st.integers(*draw(st.sampled_from([(0, 0), (1, 64), (width - 63, width), (width // 2, width // 2 + 1)])))
    of_row = draw(st.sampled_from([anywhere, special, alike, st.one_of(anywhere, special)]))
    lengths = draw(st.lists(of_row, min_size=1, max_size=2 * parts))
    return [min(width, length) for length in lengths], width, parts


@settings(max_examples=400)
@given(launches())
def test_every_block_is_walked_once(launch):
    lengths, width, parts = launch
    rows, length = compact_rows(lengths, width)
    (plan,) = plan_rows(rows, length, parts)
    check_plan(plan, rows, parts)


def test_a_long_row_behind_a_short_one_with_parts_to_spare_has_no_empty_part():
    """Two cuts once fell into the gap before the long row, and FlashMLA was given a part that ends before it begins."""
    rows, length = compact_rows([300, 64, 0, 64, 0, 512, 0, 0, 1, 0], 512)
    (plan,) = plan_rows(rows, length, 18)
    check_plan(plan, rows, 18)


@pytest.mark.parametrize(
    ("h_q", "num_rows"),
    [(64, rows) for rows in (1, 2, 63, 64, 65, 100, 131, 132, 133, 160, 263, 264)]
    + [(128, rows) for rows in (1, 65, 66, 67, 96, 131, 132)],
)
@pytest.mark.parametrize("lengths", ["full", "dcp8", "skewed", "empty"])
def test_every_block_is_walked_once_on_132_sms(h_q, num_rows, lengths):
    parts = NUM_SMS // (h_q // 64)
    drawn = {
        "full": lambda: torch.full((num_rows,), 2048),
        "dcp8": lambda: torch.distributions.Binomial(2048, torch.tensor(1 / 8)).sample((num_rows,)),
        "skewed": lambda: torch.tensor(SKEWED)[torch.randint(0, len(SKEWED), (num_rows,))],
        "empty": lambda: torch.zeros(num_rows),
    }[lengths]()
    rows, length = compact_rows(drawn.int().tolist(), 2048)
    (plan,) = plan_rows(rows, length, parts)
    check_plan(plan, rows, parts)


@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("num_rows", [1, 16, 64, 66, 128, 132])
def test_busiest_part_walks_at_most_two_blocks_more_than_the_stock_schedule_gives_it(num_rows, dcp_size, h_q):
    """The stock schedule spreads all K / 64 blocks of every row evenly, a row's start counted in. Two blocks are what
    leaving parts idle may cost."""
    parts = NUM_SMS // (h_q // 64)
    length = torch.distributions.Binomial(2048, torch.tensor(1 / dcp_size)).sample((num_rows,))
    (plan,) = plan_rows(*compact_rows(length.int().tolist(), 2048), parts)
    stock = -(-num_rows * (2048 // 64 + PIECE_COST) // parts) + PIECE_COST
    assert load_of(plan) <= stock + 2


def test_short_rows_share_parts_so_that_long_ones_get_more():
    lengths = [SKEWED[index % 6] for index in torch.randperm(120).tolist()]
    rows, length = compact_rows(lengths, 2048)
    (plan,) = plan_rows(rows, length, NUM_SMS)
    check_plan(plan, rows, NUM_SMS)
    # One part to each row would leave 32 blocks to the part of every long one.
    assert load_of(plan) <= 14


def test_long_row_gets_more_parts():
    rows, length = compact_rows([2048] + [64] * 60, 2048)
    (plan,) = plan_rows(rows, length, NUM_SMS)
    pieces = [len(row) for row in walk(plan)]
    assert pieces[1:] == [1] * 60
    assert pieces[0] >= 16


@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [64, 512, 1024, 2048])
def test_plan_keeps_what_a_rank_owns(width, dcp_size):
    slots = draw_selection(17, width, 3 * width)
    for rank in range(dcp_size):
        plan = plan_sparse(slots, dcp_size, rank, 64, 9 + rank)
        rows, length = localize_topk(slots, dcp_size, rank)
        assert_bitwise_equal(plan.length, length)
        check_plan(plan, rows, 9 + rank)


def test_more_rows_than_a_launch_holds_become_several_launches():
    rows, length = compact_rows([100, 0, 640, 64, 65, 1, 2] * 3, 640)
    plans = plan_rows(rows, length, 4)
    assert [len(plan.rows) for plan in plans] == [8, 8, 5]
    for plan, part in zip(plans, rows.split(8)):
        check_plan(plan, part, 4)


def test_no_rows_give_an_idle_plan():
    plan = plan_sparse(torch.empty(0, 128, dtype=torch.int32), 2, 0, 64, NUM_SMS)
    assert plan.rows.shape == (0, 128)
    assert plan.num_splits.tolist() == [0]
    assert plan.schedule.shape == (NUM_SMS, 8)
    assert plan_rows(torch.empty(0, 128, dtype=torch.int32), torch.empty(0, dtype=torch.int32), 4) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"h_q": 96}, "h_q must be 64 or 128, got 96", id="heads"),
        pytest.param({"num_sms": 1}, "at most 2 rows for 1 parts, got 3", id="too-many-rows"),
        pytest.param({"num_sms": 1, "h_q": 128}, "num_sms must be at least 2, got 1", id="too-few-sms"),
        pytest.param({"width": 100}, "multiple of 64 wide, got 100", id="width"),
        pytest.param({"dcp_rank": 2}, r"dcp_rank must be in \[0, 2\), got 2", id="rank"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    args = {"width": 128, "dcp_size": 2, "dcp_rank": 1, "h_q": 64, "num_sms": 8} | change
    slots = torch.zeros(3, args.pop("width"), dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        plan_sparse(slots, **args)


@pytest.mark.parametrize(
    ("num_rows", "width", "parts"),
    [
        pytest.param(1, 64, 1, id="one-row"),
        pytest.param(5, 2048, 4, id="more-rows-than-parts"),
        pytest.param(8, 2048, 4, id="two-rows-a-part"),
        pytest.param(7, 192, 9, id="fewer-rows-than-parts"),
        pytest.param(21, 512, 4, id="three-launches"),
        pytest.param(13, 8192, 12, id="wide"),
    ],
)
@pytest.mark.parametrize("lengths", ["anywhere", "full", "skewed", "alike"])
def test_kernel_plans_as_the_reference(device, num_rows, width, parts, lengths):
    drawn = {
        "anywhere": lambda: torch.randint(0, width + 1, (num_rows,)),
        "full": lambda: torch.full((num_rows,), width),
        "skewed": lambda: torch.tensor(SKEWED)[torch.randint(0, len(SKEWED), (num_rows,))].clamp(max=width),
        "alike": lambda: width // 2 + torch.randint(-40, 40, (num_rows,)),
    }[lengths]()
    assert_kernel_agrees(*compact_rows(drawn.clamp(0, width).tolist(), width), parts, device)


def test_kernel_plans_as_the_reference_on_a_line_of_over_32768_half_blocks(device):
    """Packed into the upper half of an integer, such a line's end was negative, and rows behind it were lost."""
    assert_kernel_agrees(*compact_rows([22400] * 48, 22400), 24, device)


@pytest.mark.gpu
@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize("width", [64, 512, 1024, 2048])
def test_kernel_plans_as_the_reference_on_132_sms(width, h_q):
    parts = NUM_SMS // (h_q // 64)
    for num_rows in (1, 31, 63, 64, 65, 67, 95, 128, 132, 133, 144, 160, 200, 256, 264, 265, 1000):
        for length in (
            torch.randint(0, width + 1, (num_rows,)),
            torch.full((num_rows,), width),
            torch.distributions.Binomial(width, torch.tensor(1 / 8)).sample((num_rows,)),
            torch.distributions.Binomial(width, torch.tensor(1 / 2)).sample((num_rows,)),
            torch.tensor(SKEWED)[torch.randint(0, len(SKEWED), (num_rows,))].clamp(max=width),
        ):
            assert_kernel_agrees(*compact_rows(length.int().tolist(), width), parts, "cuda")


def assert_kernel_agrees(rows: torch.Tensor, length: torch.Tensor, parts: int, device: str) -> None:
    from nsa_dcp_kernels._triton.schedule import plan_rows as launch

    aligned, schedule, num_splits = launch(rows.to(device), length.to(device), parts, 2 * parts)
    expected = plan_rows(rows, length, parts)
    every_other = torch.stack([length, torch.zeros_like(length)], dim=1).to(device)[:, 0]
    assert_bitwise_equal(launch(rows.to(device), every_other, parts, 2 * parts)[1], schedule)
    assert_bitwise_equal(aligned.cpu(), torch.cat([plan.rows for plan in expected]))
    assert_bitwise_equal(schedule.cpu(), torch.stack([plan.schedule for plan in expected]))
    for index, plan in enumerate(expected):
        assert_bitwise_equal(num_splits[index, : len(plan.num_splits)].cpu(), plan.num_splits)


@pytest.mark.gpu
def test_captured_plan_follows_its_input():
    slots = draw_selection(128, 2048, 8 * 4096).cuda()
    plan_sparse(slots, 8, 3, 64, NUM_SMS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = plan_sparse(slots, 8, 3, 64, NUM_SMS)
    for seed in (1, 2):
        drawn = draw_selection(128, 2048, 8 * 4096, seed)
        slots.copy_(drawn)
        graph.replay()
        expected = plan_sparse(drawn, 8, 3, 64, NUM_SMS)
        for name in ("rows", "length", "schedule", "num_splits"):
            assert_bitwise_equal(getattr(plan, name).cpu(), getattr(expected, name))
