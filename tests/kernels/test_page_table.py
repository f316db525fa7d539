"""Page tables and slots looked up in them: kernels against references, references against walks over tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.testing.cases import POISON_INT
from nsa_dcp_kernels import fill_page_table_, look_up_slots, reference
from nsa_dcp_kernels._triton import page_table as kernels


def draw_slots(num_requests: int, num_pages: int, page_size: int, seed: int) -> torch.Tensor:
    """[Q, num_pages * page_size] int32: each request's pages in random order, its tokens' slots in each in order."""
    pages = torch.randperm(num_requests * num_pages, generator=torch.Generator().manual_seed(seed))
    slots = pages.view(num_requests, num_pages, 1) * page_size + torch.arange(page_size)
    return slots.flatten(1).to(torch.int32)


def fill_by_tokens(table: list[list[int]], slots: list[list[int]], requests: list[int], lengths: list[int], size: int):
    """Token by token: the page of every slot, where it belongs in the row."""
    for row, request, length in zip(table, requests, lengths):
        for position in range(length):
            if position // size < len(row):
                row[position // size] = slots[request][position] // size


@st.composite
def steps(draw):
    num_requests, num_pages = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    page_size = draw(st.sampled_from([1, 3, 64]))
    rows = draw(st.lists(st.integers(0, num_requests - 1), max_size=6))
    lengths = [draw(st.integers(0, num_pages * page_size)) for _ in rows]
    return num_requests, num_pages, page_size, rows, lengths, draw(st.integers(1, num_pages + 2))


@settings(max_examples=80)
@given(steps(), st.integers(0, 9))
def test_a_row_has_the_page_of_each_of_its_tokens_and_keeps_the_rest(step, seed):
    num_requests, num_pages, page_size, rows, lengths, width = step
    slots = draw_slots(num_requests, num_pages, page_size, seed)
    table = torch.full((len(rows), width), POISON_INT, dtype=torch.int32)
    expected = table.tolist()
    fill_by_tokens(expected, slots.tolist(), rows, lengths, page_size)
    fill_page_table_(table, slots, torch.tensor(rows, dtype=torch.int64), torch.tensor(lengths).long(), page_size)
    assert table.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("num_rows", "num_pages", "width"), [(1, 1, 1), (5, 130, 130), (64, 1100, 1100), (3, 40, 17)])
def test_the_kernel_is_the_reference(num_rows, num_pages, width, dtype, device):
    slots = draw_slots(num_rows + 2, num_pages, 64, 3)
    # Rows of wider tensors, as a server's are.
    slots = torch.nn.functional.pad(slots, (0, 5), value=POISON_INT)
    generator = torch.Generator().manual_seed(4)
    requests = torch.randperm(num_rows + 2, generator=generator)[:num_rows].to(dtype)
    lengths = torch.randint(0, num_pages * 64 + 1, (num_rows,), generator=generator).to(dtype)
    lengths[0] = num_pages * 64
    lengths[-1] = min(65, num_pages * 64)
    expected = torch.full((num_rows, width + 3), POISON_INT, dtype=torch.int32)
    table = expected.clone().to(device)
    reference.fill_page_table_(expected[:, :width], slots, requests, lengths, 64)
    kernels.fill_page_table_(table[:, :width], slots.to(device), requests.to(device), lengths.to(device), 64)
    assert torch.equal(table.cpu(), expected)


@settings(max_examples=80)
@given(steps(), st.randoms(use_true_random=False))
def test_a_position_is_looked_up_as_its_token_was_dealt(step, random):
    num_requests, num_pages, page_size, rows, *_ = step
    slots = draw_slots(num_requests, num_pages, page_size, 5)
    table = (slots[:, ::page_size] // page_size).contiguous()
    positions = [[random.randrange(-1, num_pages * page_size) for _ in range(5)] for _ in rows]
    looked_up = look_up_slots(
        torch.tensor(positions, dtype=torch.int32).view(-1, 5), torch.tensor(rows).long(), table, page_size
    )
    by_hand = [[-1 if at < 0 else int(slots[row, at]) for at in chosen] for row, chosen in zip(rows, positions)]
    assert looked_up.dtype == torch.int32
    assert looked_up.tolist() == by_hand


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (7, 2048), (64, 1100), (3, 0), (0, 64)])
def test_the_look_up_kernel_is_the_reference(num_rows, width, dtype, device):
    generator = torch.Generator().manual_seed(6)
    num_pages, page_size = 33, 192
    table = torch.randperm(5 * num_pages, generator=generator).view(5, num_pages).to(torch.int32)
    # A row of a wider tensor, and what no request has been given.
    table = torch.nn.functional.pad(table, (0, 3), value=POISON_INT)[:, :num_pages]
    positions = torch.randint(-1, num_pages * page_size, (num_rows, width), generator=generator).to(dtype)
    requests = torch.randint(0, 5, (num_rows,), generator=generator).to(dtype)
    expected = reference.look_up_slots(positions, requests, table, page_size)
    got = kernels.look_up_slots(positions.to(device), requests.to(device), table.to(device), page_size)
    assert torch.equal(got.cpu(), expected)
    # A column alone, as decode's new tokens are.
    column = kernels.look_up_slots(positions.to(device)[:, :1], requests.to(device), table.to(device), page_size)
    assert torch.equal(column.cpu(), expected[:, :1])


@pytest.mark.gpu
def test_a_captured_launch_follows_the_lengths_of_each_replay():
    slots, requests = draw_slots(9, 50, 64, 5).cuda(), torch.arange(7, device="cuda")
    lengths = torch.ones(7, dtype=torch.int32, device="cuda")
    table = torch.full((7, 50), POISON_INT, dtype=torch.int32, device="cuda")
    fill_page_table_(table, slots, requests, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_page_table_(table, slots, requests, lengths)
    for seed in (1, 2):
        lengths.copy_(torch.randint(0, 3201, (7,), generator=torch.Generator().manual_seed(seed)))
        expected = table.cpu()
        reference.fill_page_table_(expected, slots.cpu(), requests.cpu(), lengths.cpu(), 64)
        graph.replay()
        assert torch.equal(table.cpu(), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": torch.zeros(2, 3)}, "page_table must have dtype int32"),
        ({"page_table": torch.zeros(3, 2, dtype=torch.int32).T}, "page_table must have contiguous rows"),
        ({"request_slots": torch.zeros(4, dtype=torch.int32)}, r"request_slots must have shape \[\*, \*\]"),
        ({"requests": torch.zeros(3, dtype=torch.int32)}, r"requests must have shape \[2\], got \[3\]"),
        ({"lengths": torch.zeros(2)}, "lengths must have dtype int32 or int64"),
        ({"page_size": 0}, "page_size must be at least 1"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    arguments = {
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "request_slots": torch.zeros(4, 192, dtype=torch.int32),
        "requests": torch.zeros(2, dtype=torch.int64),
        "lengths": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        fill_page_table_(**(arguments | changes))


def test_a_table_of_no_pages_has_no_slots():
    """What a step of empty contexts looks up."""
    none = torch.full((2, 3), -1, dtype=torch.int32)
    assert torch.equal(look_up_slots(none, torch.tensor([0, 1]), torch.empty(2, 0, dtype=torch.int32), 64), none)
