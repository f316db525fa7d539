"""A decode graph's page table filled page by page is the one that sglang's kernel fills token by token."""

from types import SimpleNamespace

import pytest
import torch

from tests.sglang import decode_metadata as decode
from tests.sglang.selection import test_row_split_decode as row_split_decode

pytestmark = pytest.mark.sglang

played, make_backend = row_split_decode.played, row_split_decode.make_backend
POISON = -9


def tables_of(metadata):
    whole = metadata.attn_metadata
    names = "cache_seqlens_int32 cu_seqlens_k dsa_cache_seqlens_int32 dsa_cu_seqlens_k real_page_table page_table_1"
    return {name: getattr(whole, name) for name in names.split()}


@pytest.mark.parametrize("kernel", row_split_decode.TOPK_KERNELS)
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_a_replays_metadata_are_sglangs(make_backend, kernel, num_rows):
    from nsa_dcp.sglang_plugin.attention.decode_page_table import PagewiseDecodeMetadata

    refreshed = []
    for wrap in (lambda fill: fill, PagewiseDecodeMetadata):
        backend = make_backend(kernel)
        backend._fused_decode_metadata = wrap(decode.fill_decode_metadata)
        ones = torch.ones(num_rows, dtype=torch.int32)
        metadata = decode.prepare_step(backend, torch.arange(num_rows), ones, capturing=True)
        tables_of(metadata)["real_page_table"].fill_(POISON)
        for seed in (5, 6):
            generator = torch.Generator().manual_seed(seed)
            requests = torch.randperm(row_split_decode.MAX_REQUESTS, generator=generator)[:num_rows]
            lengths = torch.randint(1, row_split_decode.MAX_LEN + 1, (num_rows,), generator=generator)
            metadata = decode.prepare_step(backend, requests, lengths.to(torch.int32))
        refreshed.append(tables_of(metadata))
    stock, ours = refreshed
    # The fused kernel alone goes without a table of slots.
    assert (stock["page_table_1"] is None) == (kernel == "v2")
    for name, tensor in stock.items():
        assert torch.equal(ours[name], tensor) if tensor is not None else ours[name] is None, name


def test_without_a_table_of_slots_sglangs_kernel_is_launched_for_no_tokens(monkeypatch):
    """Its first program writes the lengths; the others, none here, the tables."""
    from sglang.kernels.ops.attention.dsa import metadata

    launches = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *arguments, **_: launches.append((grid, arguments))

    monkeypatch.setattr(metadata, "_fused_dsa_decode_metadata_kernel", Recorder())
    tensor = SimpleNamespace(is_cuda=True, stride=lambda dim: 1)
    names = "seq_lens req_pool_indices req_to_token cache_seqlens cu_seqlens_k dsa_cache_seqlens dsa_cu_seqlens_k"
    tensors = dict.fromkeys([*names.split(), "real_page_table"], tensor)
    sizes = {"bs": 5, "dsa_index_topk": 64, "physical_page_size": 64}
    metadata.fused_dsa_decode_metadata(**tensors, **sizes, page_table_1=None, max_len=0)
    metadata.fused_dsa_decode_metadata(**tensors, **sizes, page_table_1=None, max_len=1000)
    assert [grid for grid, _ in launches] == [(1,), (1 + 5 * 8,)]


def test_sglangs_first_program_writes_lengths_and_no_table():
    from sglang.kernels.ops.attention.dsa.metadata import _fused_dsa_decode_metadata_kernel

    lengths = torch.tensor([3, 70, 0], dtype=torch.int64)
    table = torch.full((3, 4), POISON, dtype=torch.int32)
    cache, topk = torch.zeros(2, 3, dtype=torch.int32)
    sums, topk_sums = torch.full((2, 4), POISON, dtype=torch.int32)
    slots = torch.zeros(3, 256, dtype=torch.int32)
    _fused_dsa_decode_metadata_kernel[(1,)](
        *(lengths, torch.arange(3), slots, cache, sums, table, topk, topk_sums, table),
        *(1, 1, 256, 1, 4, 1, 4, 1, 3, 0, 64, 64, True, False),
        BLOCK_BS=4,
        BLOCK_N=128,
    )
    assert (cache.tolist(), topk.tolist()) == ([3, 70, 0], [3, 64, 0])
    assert (sums.tolist(), topk_sums.tolist()) == ([0, 3, 73, 73], [0, 3, 67, 67])
    assert (table == POISON).all()
