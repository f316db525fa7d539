"""What a rank selects under context parallelism, through sglang's own indexer metadata and `_get_topk_ragged`.

The batch's lengths, page tables, offsets and key ranges are filtered for the rank, by sglang (interleave) or by us
(zigzag). Were one of them filtered by another index than the rest, a row would select another request's tokens.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.sglang import cp_simulation as simulation
from tests.sglang.selection import test_row_split as row_split

pytestmark = pytest.mark.sglang


make_cp_runner, make_cp_backend = simulation.make_cp_runner, simulation.make_cp_backend
select_all, TOPK = row_split.select_all, row_split.TOPK

MIXES = {
    "one-token-requests-among-long-ones": ("interleave", [0, 300, 1, 63, 200, 9], [1, 40, 1, 1, 33, 1]),
    "fewer-tokens-than-two-a-rank": ("interleave", [100, 0, 64], [1, 3, 1]),
    "zigzag": ("zigzag", [130, 0, 64, 257], [19, 40, 17, 64]),
    "zigzag-of-one-token-blocks": ("zigzag", [300, 1], [8, 8]),
}


def prepared(backend, batch):
    """A forward as the runner prepares it, its metadata made."""
    from sglang.srt.layers.cp.base import get_cp_strategy
    from sglang.srt.layers.cp.utils import is_cp_active, prepare_cp_forward

    backend.req_to_token_pool.req_to_token = batch.req_to_token()
    forward = batch.make_forward()
    assert is_cp_active(forward)
    prepare_cp_forward(forward)
    backend.init_forward_metadata(forward)
    return forward, get_cp_strategy()


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("rank", range(4))
def test_each_row_selects_its_own_requests_tokens(make_cp_backend, select_all, rank, mix, fused, chunked):
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    strategy, prefixes, extends = MIXES[mix]
    batch = simulation.CpBatch(4, prefixes, extends)
    backend = make_cp_backend(simulation.RelayedGroup(4).rank(rank), strategy)
    backend.use_fused_topk = fused
    forward, strategy = prepared(backend, batch)
    rows = strategy.local_q_indices(len(batch.q), forward)
    select, pool, chunk = select_all
    pool.now = row_split.Pool(batch.num_slots)
    width = sum(length for length in batch.lengths)
    chunk.bytes = 3 * width * Indexer._MQA_LOGITS_BYTES_PER_ELEM if chunked else None

    generator = torch.Generator().manual_seed(1)
    q = torch.randn(len(batch.q), 2, 4, generator=generator)
    weights = torch.randn(len(batch.q), 2, 1, generator=generator)
    local_q = strategy.shard_hidden_states(q, forward).as_subclass(row_split.Indexed)
    local_weights = strategy.shard_hidden_states(weights, forward)
    metadata = backend.get_indexer_metadata(1, forward)
    if not fused:
        from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

        object.__setattr__(metadata, "topk_backend", DSATopKBackend.TORCH)
    selection = select(False, forward, 1, local_q, local_weights, metadata)

    assert selection.shape == (local_q.shape[0], TOPK)
    assert (selection[len(rows) :] == -1).all()
    request_of = torch.repeat_interleave(torch.arange(len(extends)), torch.tensor(extends))
    position_of = torch.cat([torch.arange(p, p + e) for p, e in zip(prefixes, extends)])
    for place, row in enumerate(rows.tolist()):
        slots = batch.slots[request_of[row]][: position_of[row] + 1]
        scores = torch.einsum("h,hd,kd->k", weights[row, :, 0], q[row], pool.now.keys[slots])
        best = scores.topk(min(TOPK, len(slots))).indices
        expected = (slots[best] if fused else best).tolist()
        assert sorted(selection[place].tolist()) == sorted(expected + [-1] * (TOPK - len(best)))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("mix", MIXES)
def test_what_is_filtered_is_filtered_by_one_index(make_cp_backend, mix, rank):
    assert_filtered_by_one_index(make_cp_backend, rank, *MIXES[mix])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("strategy", ["interleave", "zigzag"])
def test_any_mix_is_filtered_by_one_index(make_cp_backend, strategy, seed):
    draw = random.Random(seed)
    shortest = 8 if strategy == "zigzag" else 1
    extends = [draw.choice([shortest, draw.randint(shortest, 40)]) for _ in range(draw.randint(1, 6))]
    extends[-1] = max(extends[-1], 5)
    prefixes = [draw.choice([0, 63, 64, draw.randint(1, 200)]) for _ in extends]
    for rank in range(4):
        assert_filtered_by_one_index(make_cp_backend, rank, strategy, prefixes, extends)


def assert_filtered_by_one_index(make_cp_backend, rank, strategy, prefixes, extends):
    batch = simulation.CpBatch(4, prefixes, extends)
    backend = make_cp_backend(simulation.RelayedGroup(4).rank(rank), strategy)
    forward, strategy = prepared(backend, batch)
    rows, metadata = strategy.local_q_indices(len(batch.q), forward), backend.forward_metadata
    request_of = torch.repeat_interleave(torch.arange(len(extends)), torch.tensor(extends))[rows]
    position_of = torch.cat([torch.arange(p, p + e) for p, e in zip(prefixes, extends)])[rows]
    lengths = torch.tensor(batch.lengths)

    # Runs of rows of one request: interleave has one for each request that the rank has tokens of, zigzag two.
    runs = metadata.dsa_extend_seq_lens_list
    assert metadata.cu_seqlens_q.tolist() == [0, *torch.tensor(runs).cumsum(0).tolist()]
    assert sum(runs) == len(rows)
    run_of = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs))
    assert len(metadata.page_table_1) == len(metadata.cache_seqlens_int32) == len(runs)
    for run in range(len(runs)):
        (request,) = request_of[run_of == run].unique().tolist()
        assert metadata.cache_seqlens_int32[run] == lengths[request]
        assert torch.equal(metadata.page_table_1[run, : lengths[request]].long(), batch.slots[request])
    assert metadata.cu_seqlens_k.tolist() == [0, *metadata.cache_seqlens_int32.cumsum(0).tolist()]
    assert metadata.max_seq_len_q == max(runs)

    # What index keys are gathered by, one entry a request; each row's range lies in its own request's keys.
    kept = request_of.unique().tolist() if strategy.name == "interleave" else list(range(len(extends)))
    assert metadata.indexer_seq_lens.tolist() == metadata.indexer_seq_lens_cpu.tolist() == lengths[kept].tolist()
    assert len(metadata.real_page_table) == len(kept)
    before = dict(zip(kept, [0, *lengths[kept].cumsum(0).tolist()]))
    key_start, key_end = metadata.indexer_k_start_end
    assert key_start.tolist() == [before[request] for request in request_of.tolist()]
    assert (key_end - key_start).tolist() == metadata.dsa_seqlens_expanded.tolist() == (position_of + 1).tolist()
    assert [kept[entry] for entry in metadata.token_to_batch_idx.tolist()] == request_of.tolist()

    # Physical rows: those of the rank, and padding that selects nothing.
    selected = metadata.dsa_cache_seqlens_int32
    assert len(selected) == forward.attn_cp_metadata.per_rank_actual_token[rank]
    assert selected.tolist() == [min(p + 1, simulation.TOPK) for p in position_of.tolist()] + [0] * (
        len(selected) - len(rows)
    )
    assert metadata.dsa_cu_seqlens_q.tolist() == list(range(len(selected) + 1))
    assert metadata.dsa_cu_seqlens_k.tolist() == [0, *selected.cumsum(0).tolist()]


@pytest.mark.parametrize("strategy", ["interleave", "zigzag"])
def test_positions_become_slots_of_their_own_request(make_cp_backend, strategy):
    """Unfused, a selection is positions, and sglang turns them into slots by runs of rows."""
    batch = simulation.CpBatch(2, [130, 0, 64], [19, 40, 17])
    slots = batch.selection.clone()
    request_of = torch.repeat_interleave(torch.arange(3), torch.tensor(batch.extends))
    for row, request in enumerate(request_of.tolist()):
        position = torch.full((batch.num_slots,), -1, dtype=torch.int32)
        position[batch.slots[request]] = torch.arange(batch.lengths[request], dtype=torch.int32)
        batch.selection[row] = torch.where(slots[row] >= 0, position[slots[row].clamp(min=0).long()], -1)

    def build(group, *args):
        backend = make_cp_backend(group, *args)
        backend.use_fused_topk = False
        return backend

    results, _ = simulation.run_ranks(build, batch, strategy)
    batch.selection = slots
    expected = batch.expected()
    for rows, (out,) in results:
        assert torch.allclose(out.float(), expected[rows], atol=0.02, rtol=0.01)


@pytest.mark.parametrize("strategy", ["interleave", "zigzag"])
def test_every_rank_stores_every_tokens_index_key(make_cp_backend, strategy):
    batch = simulation.CpBatch(4, [130, 0, 64, 257], [19, 40, 17, 64])
    keys = torch.randn(len(batch.q), 128).to(torch.bfloat16)
    relayed = simulation.RelayedGroup(4)
    # Once to send, once to receive what the others sent.
    gathered = []
    for rank in [*range(4), *range(4)]:
        forward, used = prepared(make_cp_backend(relayed.rank(rank), strategy), batch)
        local = used.shard_hidden_states(keys, forward)
        local[len(used.local_q_indices(len(keys), forward)) :] = float("nan")
        gathered.append(used.materialize_full_indexer_k_cache(local, forward))
    assert all(torch.equal(received, keys) for received in gathered[4:])


def test_zigzag_for_flashattention_is_as_it_was(make_cp_backend):
    """Its `materialize_full_mla_kv` writes the cache and returns None: the class and its other objects keep it."""
    from sglang.srt.layers.cp.base import get_cp_strategy
    from sglang.srt.layers.cp.zigzag import ZigzagCPStrategy

    before = dict(vars(ZigzagCPStrategy))
    make_cp_backend(simulation.RelayedGroup(2).rank(0), "zigzag")
    assert dict(vars(ZigzagCPStrategy)) == before
    served, other = get_cp_strategy(), ZigzagCPStrategy(2)
    assert type(served) is ZigzagCPStrategy
    assert other.materialize_full_mla_kv.__func__ is ZigzagCPStrategy.materialize_full_mla_kv
    with pytest.raises(NotImplementedError):
        other.materialize_full_indexer_k_cache(None, SimpleNamespace())
