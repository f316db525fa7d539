"""CP-DCP prefill's buffer: the remap against Python integers, and its round trip with the ranks' gathered pages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.cases import POISON_INT, poisoned
from nsa_dcp_kernels import gather_pages, reference, remap_to_gathered
from nsa_dcp_kernels._triton import page_gather as kernels

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


def remap_by_hand(slot: int, page_pos: list[int], dcp_size: int, local_rows: int, page_size: int) -> int:
    """Walk from a slot to its row as words say it: which page, which token in it, which rank holds that token."""
    if slot < 0:
        return -1
    page, token = divmod(slot, page_size * dcp_size)
    if page_pos[page] < 0:
        return -1
    row_in_page, rank = divmod(token, dcp_size)
    return rank * local_rows + page_pos[page] * page_size + row_in_page


@st.composite
def gathers(draw):
    dcp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    page_size = draw(st.sampled_from([1, 4, 64]))
    num_pages = draw(st.integers(1, 6))
    pages = draw(st.lists(st.integers(0, num_pages - 1), unique=True, max_size=num_pages))
    return dcp_size, page_size, num_pages, pages


@settings(max_examples=60)
@given(gathers())
def test_every_token_of_the_gathered_pages_is_found_once_with_its_bytes(gather):
    """Each rank contributes its part of the same pages; the buffer's rows and those pages' slots are in bijection."""
    dcp_size, page_size, num_pages, pages = gather
    num_slots = num_pages * page_size * dcp_size
    # Row r of rank n holds slot r * dcp_size + n: the owner rule, written as a table of the slots themselves.
    caches = [torch.arange(num_slots).view(-1, dcp_size)[:, rank : rank + 1].contiguous() for rank in range(dcp_size)]
    chosen = torch.tensor(pages, dtype=torch.int32)
    buffer = torch.cat([gather_pages(cache, chosen, page_size) for cache in caches]).flatten()
    page_pos = torch.full((num_pages,), -1, dtype=torch.int32)
    page_pos[chosen.long()] = torch.arange(len(pages), dtype=torch.int32)

    slots = torch.arange(num_slots, dtype=torch.int32).unsqueeze(0)
    rows = remap_to_gathered(slots, page_pos, dcp_size, len(pages) * page_size, page_size)[0]
    in_gathered_page = torch.isin(slots[0] // (page_size * dcp_size), chosen)
    assert torch.equal(rows >= 0, in_gathered_page)
    assert torch.equal(rows[in_gathered_page].sort().values, torch.arange(len(buffer), dtype=torch.int32))
    assert torch.equal(buffer[rows[in_gathered_page].long()], slots[0][in_gathered_page].long())


@settings(max_examples=60)
@given(gathers(), st.randoms(use_true_random=False))
def test_remap_is_the_walk_from_slot_to_page_to_rank(gather, random):
    dcp_size, page_size, num_pages, pages = gather
    page_pos = [-1] * num_pages
    for position, page in enumerate(pages):
        page_pos[page] = position
    num_slots = num_pages * page_size * dcp_size
    slots = [[random.choice([-1, num_slots - 1, random.randrange(num_slots)]) for _ in range(9)] for _ in range(3)]
    args = (dcp_size, len(pages) * page_size, page_size)
    rows = remap_to_gathered(torch.tensor(slots, dtype=torch.int32), torch.tensor(page_pos, dtype=torch.int32), *args)
    assert rows.dtype == torch.int32
    assert rows.tolist() == [[remap_by_hand(slot, page_pos, *args) for slot in row] for row in slots]


def test_requests_that_share_a_page_share_its_rows():
    """A prefix page named by two requests is gathered once, and both selections lead to the same rows."""
    page_pos = torch.tensor([-1, 0, 1, 2], dtype=torch.int32)
    shared, own_first, own_second = 1, 2, 3
    first = torch.tensor([[shared * 128 + 5, own_first * 128]], dtype=torch.int32)
    second = torch.tensor([[shared * 128 + 5, own_second * 128]], dtype=torch.int32)
    rows = remap_to_gathered(torch.cat([first, second]), page_pos, 2, 3 * 64)
    assert rows[0, 0] == rows[1, 0]
    assert rows[0, 1] != rows[1, 1]


def test_partial_last_page_is_gathered_whole_and_its_unwritten_rows_are_never_named():
    dcp_size, written = 2, 128 + 3
    caches = [poisoned(2 * 64, 1, dtype=torch.float32) for _ in range(dcp_size)]
    for slot in range(written):
        caches[slot % dcp_size][slot // dcp_size] = slot
    pages = torch.tensor([0, 1], dtype=torch.int32)
    buffer = torch.cat([gather_pages(cache, pages) for cache in caches])
    slots = torch.arange(written, dtype=torch.int32).unsqueeze(0)
    rows = remap_to_gathered(slots, pages, dcp_size, 128)
    assert torch.equal(buffer[rows[0].long(), 0], slots[0].float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "page_size"), [(656, 64), (576, 64), (1, 3), (100, 1), (65, 64)], ids=str)
def test_gather_copies_whole_pages_bit_for_bit(width, page_size, dtype, device):
    bits = torch.randint(0, 256, (4 * page_size, width * dtype.itemsize), dtype=torch.uint8)
    cache, pages = bits.view(dtype), torch.tensor([3, 0, 3], dtype=torch.int32)
    expected = torch.cat([cache[page * page_size : (page + 1) * page_size] for page in pages.tolist()])
    assert_bitwise_equal(gather_pages(cache, pages, page_size), expected)
    assert_bitwise_equal(kernels.gather_pages(cache.to(device), pages.to(device), page_size), expected)
    column = torch.stack([pages, torch.full_like(pages, POISON_INT)], dim=1).to(device)[:, 0]
    assert_bitwise_equal(kernels.gather_pages(cache.to(device), column, page_size), expected)


@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [1, 63, 100, 1025])
def test_kernel_remaps_as_the_reference_does(width, dcp_size, device):
    num_pages = 5
    page_pos = torch.tensor([2, -1, 0, 3, 1], dtype=torch.int32)
    last = num_pages * 64 * dcp_size - 1
    slots = torch.randint(-1, last + 1, (3, width), dtype=torch.int32)
    slots[0, 0], slots[1] = last, -1
    got = kernels.remap_to_gathered(slots.to(device), page_pos.to(device), dcp_size, 256, 64)
    assert_bitwise_equal(got, reference.remap_to_gathered(slots, page_pos, dcp_size, 256, 64))
    poison = torch.full_like(slots, POISON_INT)
    every_other = torch.stack([slots, poison], dim=-1).to(device)[:, :, 0]
    first_columns = torch.cat([slots, poison], dim=-1).to(device)[:, :width]
    for view in (every_other, first_columns):
        again = kernels.remap_to_gathered(view, page_pos.to(device), dcp_size, 256, 64)
        assert_bitwise_equal(again, got)
    column = torch.stack([page_pos, torch.full_like(page_pos, POISON_INT)], dim=1).to(device)[:, 0]
    assert_bitwise_equal(kernels.remap_to_gathered(slots.to(device), column, dcp_size, 256, 64), got)


def test_nothing_selected_and_nothing_gathered(device):
    no_pages = torch.zeros(0, dtype=torch.int32, device=device)
    cache = torch.zeros(128, 656, dtype=torch.uint8, device=device)
    page_pos = torch.tensor([-1, -1], dtype=torch.int32, device=device)
    for module in (reference, kernels) if device == "cpu" else (kernels,):
        assert module.gather_pages(cache, no_pages, 64).shape == (0, 656)
        for shape in ((0, 8), (3, 0)):
            empty = torch.zeros(shape, dtype=torch.int32, device=device)
            assert module.remap_to_gathered(empty, page_pos, 2, 0, 64).shape == shape
        nowhere = torch.arange(-1, 256, dtype=torch.int32, device=device).unsqueeze(0)
        assert bool((module.remap_to_gathered(nowhere, page_pos, 2, 0, 64) == -1).all())


def test_cache_of_a_broken_page_is_refused():
    with pytest.raises(ValueError, match=r"cache must be \[n \* 64, W\], got \[65, 4\]"):
        gather_pages(torch.zeros(65, 4), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="pages must have dtype int32, got int64"):
        gather_pages(torch.zeros(64, 4), torch.zeros(1, dtype=torch.int64))
