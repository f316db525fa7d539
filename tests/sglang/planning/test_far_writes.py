"""sglang's writes where 32 bits end: rows of `planning/limits.py`'s docstring that a larger pool relies on.

In Triton's interpreter, over memory of which only what is touched exists. If one stops being so, it needs a row.
"""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.sglang


def untouched(rows: int, width: int) -> torch.Tensor:
    return torch.from_numpy(np.empty(rows * width, np.uint8)).view(rows, width)


def test_a_latent_is_written_5_gb_into_a_layer(publish_rank):
    from sglang.kernels.ops.kvcache import mla_buffer

    publish_rank(8, 5)
    rows, rank, ranks = 8_000_000, 5, 8
    cache = untouched(rows, 656)
    cache[[3, 7, rows - 1]] = 0
    slots = torch.tensor([(rows - 1) * ranks + rank, 3 * ranks + 1, 7 * ranks + rank])
    nope, rope = torch.full((3, 528), 9, dtype=torch.uint8), torch.full((3, 128), 4, dtype=torch.uint8)
    mla_buffer.set_mla_kv_buffer_kernel[(3, 1)](
        cache, nope, rope, slots, 0, 656, 528, 128, 528, 128, BLOCK=1024, DCP_RANK=rank, DCP_WORLD_SIZE=ranks
    )
    for row in (rows - 1, 7):
        assert (cache[row, :528].unique().tolist(), cache[row, 528:].unique().tolist()) == ([9], [4])
    assert not bool(cache[3].any())


def test_an_index_key_is_written_5_gb_into_a_layer():
    from sglang.kernels.ops.kvcache.dsa_index_k_cache import _set_k_and_s_triton

    pages = 600_000
    cache = untouched(pages, 64 * 132)
    keys = torch.ones(1, 128).to(torch.float8_e4m3fn)
    _set_k_and_s_triton(cache, torch.tensor([(pages - 1) * 64 + 7]), keys, torch.tensor([2.5]), 64)
    assert cache[-1, 7 * 128 : 8 * 128].view(torch.float8_e4m3fn).float().unique().tolist() == [1.0]
    assert cache[-1, 8192 + 28 : 8192 + 32].view(torch.float32).tolist() == [2.5]


def test_the_request_table_is_as_wide_as_planned(publish_rank):
    """`held_memory` counts its columns."""
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len

    from nsa_dcp.planning.held_memory import request_table_columns

    for dcp_size in (2, 8):
        publish_rank(dcp_size, 0)
        assert get_req_to_token_extra_context_len() == request_table_columns(0, dcp_size)
        for steps, drafts in ((3, 4), (1, 2), (5, 6)):
            publish_rank(
                dcp_size,
                0,
                speculative_algorithm="EAGLE",
                speculative_num_steps=steps,
                speculative_eagle_topk=1,
                speculative_num_draft_tokens=drafts,
            )
            assert get_req_to_token_extra_context_len() == request_table_columns(0, dcp_size, drafts)


def test_sglangs_pool_has_the_planned_bytes():
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from nsa_dcp.planning.held_memory import held_memory
    from nsa_dcp.planning.limits import Sizes

    pool = ReqToTokenPool(size=48, max_context_len=4100, device="cpu", enable_memory_saver=False)
    planned = held_memory(Sizes(requests=48, context=4100), longest=4096)
    assert pool.req_to_token.nbytes == planned.request_table
