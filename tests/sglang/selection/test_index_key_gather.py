"""A pool of ours gathers a prefill's index keys past 2**31 bytes, where sglang's own kernel reads other memory.

In Triton's interpreter, over memory of which only what is touched exists.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.sglang.served_parts import make_pool

pytestmark = pytest.mark.sglang

PAGE_BYTES = 64 * 132


def layer_memory(page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's pages up to one, 4 GiB behind the start of their memory: a wrapped offset leads to 99s."""
    front = -(-(2**31) // PAGE_BYTES)
    memory = torch.from_numpy(np.empty((front + page + 1) * PAGE_BYTES, np.uint8))
    pages = memory[front * PAGE_BYTES :].view(-1, PAGE_BYTES)
    for place in range(0, PAGE_BYTES, 8192):
        wrapped = (page * PAGE_BYTES + place + 2**31) % 2**32 - 2**31
        at = front * PAGE_BYTES + wrapped
        memory[at : at + 8192] = 99
    pages[page] = 7
    return memory, pages


@pytest.fixture
def pool(publish_rank):
    publish_rank(2, 0)
    return make_pool(256, 2)


def gather(pool, page):
    table, lens = torch.tensor([[page]], dtype=torch.int32), torch.tensor([64])
    return [part.unique().tolist() for part in pool.get_index_k_scale_buffer(1, lens, table, 64, 64)]


@pytest.mark.parametrize("page", [1_000, 254_199, 254_200, 300_000])
def test_the_indexers_door_leads_to_our_gather(pool, page):
    from nsa_dcp.sglang_plugin.patches import gather_index_keys_past_2_gib

    memory, pages = layer_memory(page)
    pool.index_key_cache.buffer[1] = pages
    stock = gather(pool, page)
    # If this stops being so, sglang's gather has 64 bits and ours may go.
    assert (stock == [[7], [7]]) == (page < 254_200)
    # On a CPU tensor ours runs its reference; tests/kernels shows that the kernel agrees, at these pages too.
    gather_index_keys_past_2_gib(pool)
    assert gather(pool, page) == [[7], [7]]
    del memory


def test_what_we_gather_is_what_sglang_does_and_a_second_hook_changes_nothing(pool):
    from nsa_dcp.sglang_plugin.patches import gather_index_keys_past_2_gib
    from nsa_dcp.sglang_plugin.selection.index_key_gather import WideIndexKeyGather

    for pages in pool.index_key_cache.buffer:
        pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    lens = torch.tensor([70, 64, 1, 130])
    table = torch.tensor([[3, 1, 0], [5, 0, 0], [2, 0, 0], [7, 6, 4]], dtype=torch.int32)
    stock = pool.get_index_k_scale_buffer(0, lens, table, 265, 130)
    gather_index_keys_past_2_gib(pool)
    hook = pool.index_key_cache.get_k_and_scale
    gather_index_keys_past_2_gib(pool)
    assert pool.index_key_cache.get_k_and_scale is hook
    assert isinstance(hook, WideIndexKeyGather)
    for mine, theirs in zip(pool.get_index_k_scale_buffer(0, lens, table, 265, 130), stock, strict=True):
        assert torch.equal(mine, theirs)


def test_another_layout_of_index_keys_stops_the_server(pool):
    from nsa_dcp.sglang_plugin.patches import gather_index_keys_past_2_gib

    pool.index_key_cache.buffer[1] = torch.zeros(4, PAGE_BYTES // 2, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="index-key pages of 8448 bytes in layer 1"):
        gather_index_keys_past_2_gib(pool)
    with pytest.raises(RuntimeError, match="an IndexKeyCache in the pool, found SimpleNamespace"):
        gather_index_keys_past_2_gib(SimpleNamespace(index_key_cache=SimpleNamespace(get_k_and_scale=None)))


def test_layers_that_share_a_selection_have_no_pages_to_look_at(publish_rank):
    from nsa_dcp.sglang_plugin.patches import gather_index_keys_past_2_gib

    publish_rank(2, 0)
    pool = make_pool(256, 2)
    pool.index_key_cache.buffer[1] = torch.zeros(0, 1, dtype=torch.uint8)
    gather_index_keys_past_2_gib(pool)
