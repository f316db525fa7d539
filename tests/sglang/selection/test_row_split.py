"""Prefill selection split by rows over the ranks is the whole batch's, through sglang's own `_get_topk_ragged`.

DeepGEMM's scores, the cache gather and the fused top-k kernel are played in torch, with the argument checks of the
kernels.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.sglang

TOPK, HEADS, PAGE = 8, 2, 64


class Indexed(torch.Tensor):
    """A CPU tensor that says it is on device 0, as `_get_topk_ragged` wants of its queries."""

    @property
    def device(self):
        return torch.device("cpu", 0)


class Pool:
    """Index keys by slot; read through page tables, so that a wrong page table reads other keys."""

    index_page_size = PAGE

    def __init__(self, num_slots):
        self.keys = torch.randn(num_slots, 4, generator=torch.Generator().manual_seed(3))

    def get_index_k_scale_buffer(self, layer_id, seq_lens, page_table, seq_len_sum, max_seq_len):
        assert seq_len_sum == int(seq_lens.sum())
        assert max_seq_len == int(seq_lens.max())
        positions = [torch.arange(int(length)) for length in seq_lens]
        slots = [page_table[i, p // PAGE] * PAGE + p % PAGE for i, p in enumerate(positions)]
        return SlotKeys(self.keys[torch.cat(slots)]), torch.zeros(seq_len_sum, 4, dtype=torch.uint8)


class SlotKeys:
    """Keys that `_get_topk_ragged` may view as FP8 without changing them."""

    def __init__(self, keys):
        self.keys, self.shape = keys, keys.shape

    def view(self, dtype):
        return self


def score(q, keys_and_scales, weights, key_start, key_end, clean_logits):
    """[rows, keys]; garbage outside each row's own keys, as the kernel leaves it."""
    keys = keys_and_scales[0].keys
    logits = torch.einsum("th,thd,kd->tk", weights, q.as_subclass(torch.Tensor), keys)
    columns = torch.arange(len(keys))
    outside = (columns < key_start.unsqueeze(1)) | (columns >= key_end.unsqueeze(1))
    return logits.masked_fill(outside, 1e9)


def fast_topk_transform_fused(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts):
    requests = cu_seqlens_q.shape[0] - 1
    assert page_table_size_1.shape[0] == requests <= score.shape[0]
    assert (int(cu_seqlens_q[0]), int(cu_seqlens_q[-1])) == (0, score.shape[0])
    slots = torch.full((score.shape[0], topk), -1, dtype=torch.int32)
    for row in range(score.shape[0]):
        request = int(torch.searchsorted(cu_seqlens_q, row, right=True)) - 1
        start, length = int(row_starts[row]), int(lengths[row])
        positions = score[row, start : start + length].topk(min(topk, length)).indices
        slots[row, : len(positions)] = page_table_size_1[request, positions].to(torch.int32)
    return slots


class Gather:
    """An all-gather among ranks that run one after the other: first every rank's part is kept, then all are handed
    out."""

    def __init__(self, world_size):
        self.world_size, self.parts = world_size, {}

    def rank(self, rank):
        def all_gather_into_tensor(output, part):
            self.parts[rank] = part.clone()
            output.copy_(torch.cat([self.parts.get(r, part) for r in range(self.world_size)]))

        return SimpleNamespace(
            world_size=self.world_size, rank_in_group=rank, all_gather_into_tensor=all_gather_into_tensor
        )


def make_metadata(extends, prefixes, unfused):
    from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod
    from sglang.srt.layers.attention.dsa_backend import DSAMetadata

    lengths = [prefix + extend for prefix, extend in zip(prefixes, extends)]
    pages = [-(-length // PAGE) for length in lengths]
    width = max(pages)
    # Every request's pages lie elsewhere in the pool.
    blocks = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(4))
    real = torch.zeros(len(extends), width, dtype=torch.int32)
    for request, (count, taken) in enumerate(zip(pages, torch.tensor(pages).cumsum(0) - torch.tensor(pages))):
        real[request, :count] = blocks[taken : taken + count]
    positions = torch.arange(width * PAGE)
    page_table_1 = real[:, positions // PAGE] * PAGE + positions % PAGE
    before = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    expanded = torch.cat([torch.arange(p + 1, p + e + 1) for p, e in zip(prefixes, extends)]).to(torch.int32)
    request_of_row = torch.repeat_interleave(torch.arange(len(extends)), torch.tensor(extends)).to(torch.int32)
    start = before[request_of_row.long()].to(torch.int32)

    def cumulated(counts):
        return torch.cat([torch.zeros(1), torch.tensor(counts).cumsum(0)]).to(torch.int32)

    attention = DSAMetadata(
        page_size=PAGE,
        cache_seqlens_int32=torch.tensor(lengths, dtype=torch.int32),
        max_seq_len_q=max(extends),
        max_seq_len_k=max(lengths),
        cu_seqlens_q=cumulated(extends),
        cu_seqlens_k=cumulated(lengths),
        page_table_1=page_table_1,
        real_page_table=real,
        dsa_cache_seqlens_int32=expanded.clamp(max=TOPK),
        dsa_cu_seqlens_q=torch.arange(len(expanded) + 1),
        dsa_cu_seqlens_k=expanded,
        dsa_extend_seq_lens_list=list(extends),
        dsa_seqlens_expanded=expanded,
        indexer_k_start_end=(start, start + expanded),
        indexer_seq_lens_cpu=torch.tensor(lengths),
        indexer_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        token_to_batch_idx=request_of_row,
    )
    return DSAIndexerMetadata(
        attn_metadata=attention,
        topk_transform_method=TopkTransformMethod.PAGED,
        topk_backend=DSATopKBackend.TORCH if unfused else DSATopKBackend.SGL_KERNEL,
        force_unfused_topk=unfused,
    ), sum(pages) * PAGE


@pytest.fixture(scope="module")
def select_all():
    """sglang's own `_get_topk_ragged`, its kernels played in torch; and a way to make it chunk its rows."""
    from sglang.srt.layers.attention.dsa import dsa_indexer

    chunk = SimpleNamespace(bytes=None)
    pool = SimpleNamespace(now=None)
    indexer = object.__new__(dsa_indexer.Indexer)
    torch.nn.Module.__init__(indexer)
    indexer.index_topk, indexer.num_init_tokens, indexer.num_local_tokens = TOPK, 0, 0
    indexer.logits_with_pp_recv = False
    indexer._pad_heads_for_deep_gemm = lambda q, weights: (q, weights, HEADS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsa_indexer, "resolve_fp8_mqa_logits_fn", lambda: score)
        patch.setattr(dsa_indexer, "get_token_to_kv_pool", lambda: pool.now)
        patch.setattr(
            dsa_indexer,
            "mqa_logits_should_chunk",
            lambda **_: (chunk.bytes is not None, chunk.bytes or 0),
        )
        fake = SimpleNamespace(
            fast_topk_transform_fused=fast_topk_transform_fused, fast_topk_transform_ragged_fused=None
        )
        patch.setitem(sys.modules, "sgl_kernel", fake)
        yield indexer._get_topk_ragged, pool, chunk


requests = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0, 0, 1, 63, 64, 100])), min_size=1, max_size=5)


@given(
    requests=requests,
    world_size=st.sampled_from([2, 3, 8]),
    padding=st.integers(0, 3),
    unfused=st.booleans(),
    rows_per_chunk=st.sampled_from([None, 2]),
)
@settings(max_examples=60)
def test_every_ranks_share_together_is_the_selection_of_the_whole_batch(
    select_all, requests, world_size, padding, unfused, rows_per_chunk
):
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    from nsa_dcp.sglang_plugin.selection.row_split import RowSplitSelection

    select, pool, chunk = select_all
    extends, prefixes = zip(*requests)
    metadata, num_slots = make_metadata(extends, prefixes, unfused)
    pool.now = Pool(num_slots)
    chunk.bytes = rows_per_chunk and rows_per_chunk * 16 * Indexer._MQA_LOGITS_BYTES_PER_ELEM
    generator = torch.Generator().manual_seed(5)
    num_rows = sum(extends) + padding
    q = torch.randn(num_rows, HEADS, 4, generator=generator).as_subclass(Indexed)
    weights = torch.randn(num_rows, HEADS, 1, generator=generator)
    mode = SimpleNamespace(is_extend_without_speculative=lambda: True)
    batch = SimpleNamespace(forward_mode=mode, seq_lens_cpu=[], extend_seq_lens_cpu=[])

    whole = select(False, batch, 0, q, weights, metadata)
    gather = Gather(world_size)
    splits = [RowSplitSelection(select, TOPK, gather.rank(rank)) for rank in range(world_size)]
    for split in splits:
        split(False, batch, 0, q, weights, metadata)
    for split in splits:
        selection = split(False, batch, 0, q, weights, metadata)
        assert torch.equal(selection, whole)
        assert (selection[sum(extends) :] == -1).all()


def test_each_rank_scores_its_share_alone():
    from nsa_dcp.sglang_plugin.selection.row_split import RowSplitSelection

    seen = []

    def select(enable_dual_stream, forward_batch, layer_id, q, weights, metadata):
        seen.append((q.shape[0], weights.shape[0], metadata.get_indexer_kvcache_range()[0].shape[0]))
        return torch.zeros(q.shape[0], TOPK, dtype=torch.int32)

    metadata, _ = make_metadata((5, 4), (0, 64), unfused=True)
    gather = Gather(4)
    for rank in range(4):
        split = RowSplitSelection(select, TOPK, gather.rank(rank))
        split(False, None, 0, torch.zeros(9, 2, 4), torch.zeros(9, 2, 1), metadata)
    # ceil(9 / 4) rows a rank; the last rank has none.
    assert seen == [(3, 3, 3)] * 3


def test_an_indexer_is_split_once():
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    from nsa_dcp.sglang_plugin.patches import split_rows
    from nsa_dcp.sglang_plugin.selection.row_split import RowSplitSelection

    indexer = object.__new__(Indexer)
    torch.nn.Module.__init__(indexer)
    indexer.index_topk = TOPK
    model, group = torch.nn.ModuleList([indexer, torch.nn.Linear(1, 1)]), object()
    split_rows(model, group)
    split_rows(model, group)
    assert isinstance(indexer._get_topk_ragged, RowSplitSelection)
    assert not isinstance(indexer._get_topk_ragged.select, RowSplitSelection)
    assert indexer._get_topk_ragged.group is group
