"""Prefill's index keys out of their pages: against Python's own bytes, poisoned neighbours, and past 2**31 bytes."""

import numpy as np
import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.cases import POISON_BYTE, POISON_INT, poisoned
from nsa_dcp_kernels import gather_index_pages, join_index_pages, reference
from nsa_dcp_kernels._triton import index_page_gather as kernels

PAGE_BYTES = 64 * 132
LENGTHS = [[5], [64], [65, 1], [0, 130, 64, 3], [0], [200] * 7]


def draw(lengths: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random pages, a table of distinct ones whose unused entries are poison, and the lengths."""
    widths = [-(-length // 64) for length in lengths]
    cache = torch.randint(0, 256, (sum(widths) + 3, PAGE_BYTES), dtype=torch.uint8)
    order = torch.randperm(cache.shape[0])
    table = torch.full((len(lengths), max(widths) + 2), POISON_INT, dtype=dtype)
    for context, width in enumerate(widths):
        table[context, :width] = order[sum(widths[:context]) : sum(widths[:context]) + width]
    return cache, table, torch.tensor(lengths, dtype=dtype)


def by_hand(cache: torch.Tensor, table: torch.Tensor, lengths: list[int]) -> tuple[bytes, bytes]:
    pages = [bytes(page.tolist()) for page in cache]
    keys, scales = b"", b""
    for context, length in enumerate(lengths):
        for token in range(length):
            page, at = pages[int(table[context, token // 64])], token % 64
            keys += page[at * 128 : at * 128 + 128]
            scales += page[8192 + at * 4 : 8192 + at * 4 + 4]
    return keys, scales


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_context_gets_its_keys_and_scales_in_order(lengths, dtype, device):
    cache, table, seq_lens = draw(lengths, dtype)
    keys, scales = gather_index_pages(cache, table, seq_lens, sum(lengths), max(lengths))
    assert (bytes(keys.flatten().tolist()), bytes(scales.flatten().tolist())) == by_hand(cache, table, lengths)
    # A longest context that is an upper bound, and rows of a table that lie apart.
    wide = torch.cat([table, table.new_full(table.shape, POISON_INT)], dim=1)[:, : table.shape[1]]
    for longest, pages in ((max(lengths), table), (max(lengths) + 129, wide)):
        got = kernels.gather_index_pages(cache.to(device), pages.to(device), seq_lens.to(device), sum(lengths), longest)
        assert_bitwise_equal(got[0], keys)
        assert_bitwise_equal(got[1], scales)


def test_a_page_that_requests_share_is_read_for_each(device):
    cache, _, _ = draw([128], torch.int32)
    table = torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
    lens = torch.tensor([128, 70])
    expected = reference.gather_index_pages(cache, table, lens, 198, 128)
    assert_bitwise_equal(expected[0][:64], expected[0][128:192])
    got = kernels.gather_index_pages(cache.to(device), table.to(device), lens.to(device), 198, 128)
    for mine, theirs in zip(got, expected):
        assert_bitwise_equal(mine, theirs)


def test_nothing_is_gathered_from_no_contexts_and_no_tokens(device):
    for module in (reference, kernels) if device == "cpu" else (kernels,):
        cache = poisoned(2, PAGE_BYTES, dtype=torch.uint8, device=device)
        for table, lens in ((torch.zeros(0, 3), torch.zeros(0)), (torch.full((2, 3), 7), torch.zeros(2))):
            keys, scales = module.gather_index_pages(
                cache, table.to(device, torch.int32), lens.to(device, torch.int64), 0, 0
            )
            assert (keys.shape, scales.shape) == ((0, 128), (0, 4))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_ranks", "num_pages"), [(1, 1), (2, 3), (3, 2), (4, 1), (8, 2), (2, 0)])
def test_pages_of_ranks_are_joined_in_the_order_of_the_slots(num_ranks, num_pages, dtype, device):
    """Slot s is row s // N of rank s % N, by Python's own bytes; a byte is moved, never interpreted: NaN included."""
    packed = dtype == torch.uint8
    shape = (num_ranks, num_pages, PAGE_BYTES) if packed else (num_ranks, num_pages * 64, 128)
    shards = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)
    joined = join_index_pages(shards)
    assert joined.shape == ((num_ranks * num_pages, PAGE_BYTES) if packed else (num_ranks * num_pages * 64, 128))
    raw, rows = joined.view(torch.uint8), shards.view(torch.uint8)
    for slot in range(0, num_ranks * num_pages * 64, 1 if num_ranks * num_pages < 5 else 7):
        rank, row = slot % num_ranks, slot // num_ranks
        if not packed:
            assert torch.equal(raw[slot], rows[rank, row])
            continue
        (page, at), (local, there) = divmod(slot, 64), divmod(row, 64)
        for width, start in ((128, 0), (4, 64 * 128)):
            mine = raw[page, start + width * at : start + width * (at + 1)]
            assert torch.equal(mine, rows[rank, local, start + width * there : start + width * (there + 1)])
    by_kernel = kernels.join_index_pages(shards.to(device))
    assert_bitwise_equal(by_kernel.view(torch.uint8), raw)


def test_half_a_page_is_not_joined():
    with pytest.raises(ValueError, match="shards must hold whole pages"):
        join_index_pages(torch.zeros(2, 63, 128))


def test_wrong_tables_and_caches_are_refused():
    cache, table, lens = draw([5], torch.int32)
    with pytest.raises(ValueError, match=r"cache must have shape \[\*, 8448\]"):
        gather_index_pages(cache[:, :-1], table, lens, 5, 5)
    with pytest.raises(ValueError, match="page_table must have dtype int32 or int64, got float32"):
        gather_index_pages(cache, table.float(), lens, 5, 5)
    with pytest.raises(ValueError, match=r"seq_lens must have shape \[1\]"):
        gather_index_pages(cache, table, torch.cat([lens, lens]), 5, 5)
    with pytest.raises(ValueError, match="num_keys must be 0 or more, got -1"):
        gather_index_pages(cache, table, lens, -1, 5)


@pytest.mark.parametrize("page", [254_199, 254_200, 254_201, 300_000, 600_000])
def test_pages_past_2_gib_of_a_layer_are_found(page, device):
    """Untouched memory takes none in the interpreter, 5 GiB on a GPU. What a wrapped offset meets is poison."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of GPU memory")
    size = (page + 1) * PAGE_BYTES
    # numpy's: torch's is filled with poison in these tests, and so takes memory.
    memory = (
        torch.from_numpy(np.empty(size, np.uint8))
        if device == "cpu"
        else torch.empty(size, dtype=torch.uint8, device=device)
    )
    cache = memory.view(-1, PAGE_BYTES)
    for offset in (page * PAGE_BYTES, page * PAGE_BYTES + 8192):
        wrapped = offset % 2**31
        memory[wrapped : wrapped + 8192] = POISON_BYTE
    cache[page] = 7
    table, lens = torch.tensor([[page]], dtype=torch.int32, device=device), torch.tensor([64], device=device)
    keys, scales = kernels.gather_index_pages(cache, table, lens, 64, 64)
    assert keys.unique().tolist() == [7]
    assert scales.unique().tolist() == [7]
