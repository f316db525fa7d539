"""Our kernels where 32 bits end: each must read and write where 64 bits say. In the interpreter, over memory of which
only what is touched exists; on a GPU `test_on_gpu.py` and `tests/sglang/planning/test_limits_on_gpu.py` have the rest.
"""

import numpy as np
import pytest
import torch

from nsa_dcp_kernels._triton import index_page_gather, kv_pack, localize, page_gather, page_table

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")


def untouched(rows: int, width: int, dtype: type, view: torch.dtype | None = None) -> torch.Tensor:
    tensor = torch.from_numpy(np.empty(rows * width, dtype)).view(rows, width)
    return tensor if view is None else tensor.view(view)


def test_pages_of_a_cache_past_4_gib_are_gathered():
    page = 7_000_000 // 64
    cache = untouched(7_000_064, 656, np.uint8)
    cache[page * 64 : (page + 1) * 64] = 5
    gathered = page_gather.gather_pages(cache, torch.tensor([page, page], dtype=torch.int32), 64)
    assert gathered.unique().tolist() == [5]


def test_index_keys_of_contexts_whose_sum_passes_2_31_bytes_are_written_apart():
    """The second context's keys begin 2**31 bytes into the result."""
    before, pages = 2**31 // 128, torch.tensor([[0] * 4, [3] * 4], dtype=torch.int32)
    cache = torch.zeros(8, 64 * 132, dtype=torch.uint8)
    cache[3] = 7
    keys, scales = untouched(before + 64, 128, np.uint8), untouched(before + 64, 4, np.uint8)
    starts = torch.tensor([0, before])
    index_page_gather._gather_index_pages_kernel[(1, 2)](
        cache.view(torch.int32),
        pages,
        torch.tensor([64, 64]),
        starts,
        keys.view(torch.int32),
        scales.view(torch.int32),
        pages.stride(0),
        PAGE_SIZE=64,
        KEY_WORDS=32,
        PAGE_WORDS=64 * 33,
    )
    assert (keys[before:].unique().tolist(), scales[before:].unique().tolist()) == ([7], [7])


def test_a_page_table_is_filled_from_a_request_table_past_4_billion_slots():
    slots = untouched(4_097, 1_048_580, np.int32)
    slots[4000, :640] = torch.arange(640, dtype=torch.int32) + 64 * 300_000
    table = torch.zeros(1, 16_385, dtype=torch.int32)
    page_table.fill_page_table_(table, slots, torch.tensor([4000]), torch.tensor([640]), 64)
    assert table[0, :10].tolist() == list(range(300_000, 300_010))


def test_slots_up_to_the_last_of_31_bits_are_localised_and_remapped():
    largest = 2**31 - 1
    slots = torch.tensor([[largest, largest - 1, 16_777_217, -1, 8, 0] + [-1] * 58], dtype=torch.int32)
    for rank in (0, 7):
        rows, length = localize.localize_topk(slots, 8, rank, 1)
        mine = [slot // 8 for slot in slots[0].tolist() if slot >= 0 and slot % 8 == rank]
        assert rows[0, : int(length[0])].tolist() == mine
    page_pos = torch.full((2**31 // 512,), -1, dtype=torch.int32)
    page_pos[largest // 512] = 3
    remapped = page_gather.remap_to_gathered(torch.tensor([[largest, 5]], dtype=torch.int32), page_pos, 8, 64 * 4, 64)
    assert remapped.tolist() == [[7 * 256 + 3 * 64 + 63, -1]]


def test_index_keys_and_latents_are_written_past_4_gib():
    page = 600_000
    cache = untouched(page + 1, 64 * 132, np.uint8)
    kv_pack.scatter_index_keys_(cache, torch.full((1, 128), 448.0), torch.tensor([page * 64 + 7]))
    read = kv_pack.gather_index_keys(cache, torch.tensor([page * 64 + 7]))
    assert read.unique().tolist() == [448.0]
    latents = untouched(8_000_000, 656, np.uint8)
    kv_pack.scatter_latent_(
        latents, torch.full((1, 512), 448.0), torch.ones(1, 64), torch.tensor([7_999_999 * 8 + 5]), 8, 5
    )
    assert kv_pack.unpack_latent(latents[-1:])[0, ::511].tolist() == [448.0, 448.0]
