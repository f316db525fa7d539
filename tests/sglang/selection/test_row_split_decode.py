"""Decode selection split by rows over the ranks is the whole batch's, through sglang's own `_get_topk_paged` and its
own metadata, run at once and as a captured graph.

DeepGEMM's scores, its schedule, the top-k kernels and their plan are played in torch. A schedule or plan of other
lengths than those it is used with spoils the result, as it would a kernel's.
"""

import ast
import inspect
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from tests.sglang import decode_metadata as decode

pytestmark = pytest.mark.sglang

TOPK, HEADS, DIM, PAGE, NUM_SMS = 24, 2, 128, 64, 132
MAX_LEN, MAX_REQUESTS, LAYERS = 200, 136, (0, 3, 4)
TOPK_KERNELS = ("v2", "legacy", "unfused")


def schedule_of(context_lens, block_size, num_sms):
    assert (context_lens.dim(), context_lens.shape[1], block_size, num_sms) == (2, 1, PAGE, NUM_SMS)
    weighed = context_lens.flatten() * torch.arange(1, context_lens.shape[0] + 1)
    return weighed.sum().to(torch.int32).expand(num_sms + 1, 2).clone()


def plan_of(lengths):
    items = torch.stack([torch.arange(len(lengths), dtype=torch.int32), lengths.to(torch.int32)], dim=1)
    return torch.cat([lengths.sum().to(torch.int32).expand(1, 2), items])


def score(q, keys, weights, context_lens, page_table, schedule, max_len, clean_logits):
    """[rows, max_len]; garbage past each row's context, as the kernel leaves it, and everywhere by a stale schedule."""
    from sglang.srt.layers.attention.dsv4.indexer import fp8_paged_mqa_logits_torch

    assert not clean_logits
    assert q.shape[0] == weights.shape[0] == context_lens.shape[0] == page_table.shape[0] <= NUM_SMS
    logits = fp8_paged_mqa_logits_torch(q, keys, weights, context_lens[:, 0], page_table, None, max_len, False)
    outside = torch.arange(max_len) >= context_lens
    fresh = (schedule == schedule_of(context_lens, PAGE, NUM_SMS)).all()
    return torch.where(fresh, logits.float().masked_fill(outside, 1e9), torch.nan)


def select_slots(logits, lengths, topk, slots_of_row):
    """[rows, topk] int32 slots of each row's best positions, -1 padded. Ties fall to the lower position."""
    outside = torch.arange(logits.shape[1]) >= lengths.unsqueeze(1)
    order = logits.masked_fill(outside, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :topk]
    kept = torch.arange(topk) < lengths.unsqueeze(1)
    return torch.where(kept, slots_of_row.gather(1, order), -1).to(torch.int32)


def topk_transform_paged_v2(logits, lengths, page_table, out, page_size, plan):
    assert logits.shape[0] == lengths.shape[0] == page_table.shape[0] == out.shape[0] == plan.shape[0] - 1
    slots = (page_table.unsqueeze(2) * page_size + torch.arange(page_size)).flatten(1)
    selected = select_slots(logits, lengths, out.shape[1], slots)
    out.copy_(torch.where((plan == plan_of(lengths)).all(), selected, -7))


def fast_topk_transform_fused(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts):
    assert row_starts is None
    assert score.shape[0] == lengths.shape[0] == page_table_size_1.shape[0] == cu_seqlens_q.shape[0] - 1
    selected = select_slots(score, lengths, topk, page_table_size_1)
    return torch.where((cu_seqlens_q == torch.arange(cu_seqlens_q.shape[0])).all(), selected, -7)


@pytest.fixture
def played(monkeypatch):
    """sglang's indexer and metadata code with its kernels played in torch; counts what is scheduled."""
    from sglang.kernels.ops.attention.dsv4 import topk
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.layers.attention.dsa import dsa_indexer, utils

    calls = SimpleNamespace(schedules=[], plans=[], scored=[])

    def count_schedule(context_lens, block_size, num_sms):
        calls.schedules.append(context_lens.shape[0])
        return schedule_of(context_lens, block_size, num_sms)

    def count_plan(lengths):
        calls.plans.append(lengths.shape[0])
        return plan_of(lengths)

    def count_score(q, *args, **kwargs):
        calls.scored.append(q.shape[0])
        return score(q, *args, **kwargs)

    for module in (dsa_backend, dsa_indexer, utils):
        monkeypatch.setattr(module, "resolve_paged_mqa_logits_metadata_fn", lambda: count_schedule)
        monkeypatch.setattr(module, "resolve_num_sms", lambda: NUM_SMS)
    generator = torch.Generator().manual_seed(3)
    pages = MAX_REQUESTS * -(-MAX_LEN // PAGE)
    keys = torch.randn(pages, PAGE * DIM, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(pages, PAGE, generator=generator).view(torch.uint8)
    pool = SimpleNamespace(
        index_page_size=PAGE, get_index_k_with_scale_buffer=lambda layer_id: torch.cat([keys, scales], 1)
    )
    monkeypatch.setattr(dsa_indexer, "_is_cuda", True)
    monkeypatch.setattr(dsa_indexer, "resolve_fp8_paged_mqa_logits_fn", lambda: count_score)
    monkeypatch.setattr(dsa_indexer, "get_token_to_kv_pool", lambda: pool)
    monkeypatch.setattr(dsa_backend, "is_cuda", lambda: True)
    # A Hopper GPU: a verify step's rows are scored each on its own.
    monkeypatch.setattr(dsa_backend, "get_platform", lambda: SimpleNamespace(is_sm100=False))
    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", decode.expand_lengths)
    monkeypatch.setattr(topk, "plan_topk_v2", count_plan)
    monkeypatch.setattr(topk, "topk_transform_paged_v2", topk_transform_paged_v2)
    kernels = SimpleNamespace(
        fast_topk_transform_fused=fast_topk_transform_fused, fast_topk_transform_ragged_fused=None
    )
    monkeypatch.setitem(sys.modules, "sgl_kernel", kernels)
    return calls


@pytest.fixture
def indexer(played):
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.attention.dsa.paged_mqa_logits_backend import DSAPagedMQALogitsBackend

    indexer = object.__new__(Indexer)
    torch.nn.Module.__init__(indexer)
    indexer.index_topk, indexer.n_heads, indexer.sm_count = TOPK, HEADS, NUM_SMS
    # A context's first token and its last two are always selected.
    indexer.num_init_tokens, indexer.num_local_tokens = 1, 2
    indexer.paged_mqa_logits_backend = DSAPagedMQALogitsBackend.DEEPGEMM
    return indexer


@pytest.fixture
def make_backend(played):
    """A function that returns sglang's metadata backend for one of its ways to select."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    was_set = envs.SGLANG_OPT_USE_TOPK_V2.is_set()

    def make(kernel, num_draft_tokens=None):
        envs.SGLANG_OPT_USE_TOPK_V2.set(kernel == "v2")
        topk_backend = DSATopKBackend.TORCH if kernel == "unfused" else DSATopKBackend.SGL_KERNEL
        return decode.make_metadata_backend(
            MAX_REQUESTS, MAX_LEN, TOPK, topk_backend, kernel != "unfused", num_draft_tokens=num_draft_tokens
        )

    yield make
    if not was_set:
        envs.SGLANG_OPT_USE_TOPK_V2.clear()


def draw(num_rows, seed, padding=0):
    """Queries, weights, requests and context lengths of a step; many contexts are shorter than a selection."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_rows + padding, HEADS, DIM, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(num_rows + padding, HEADS, 1, generator=generator)
    requests = torch.randperm(MAX_REQUESTS, generator=generator)[:num_rows]
    lengths = torch.randint(1, MAX_LEN + 1, (num_rows,), generator=generator, dtype=torch.int32)
    lengths[::3] = torch.randint(1, 2 * TOPK, (len(lengths[::3]),), generator=generator, dtype=torch.int32)
    lengths[:5] = torch.tensor([1, TOPK - 1, TOPK, TOPK + 1, MAX_LEN])
    return q, weights, requests, lengths


def decode_batch(mode="DECODE"):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(forward_mode=ForwardMode[mode])


def never(selection):
    raise AssertionError("rows that were gathered agree already")


def make_splits(select, gather, broadcast_selection=never, most_rows=NUM_SMS):
    from nsa_dcp.sglang_plugin.selection.row_split_decode import RankRequests, RowSplitDecodeSelection

    shares = [RankRequests(gather.rank(rank)) for rank in range(gather.world_size)]
    return [RowSplitDecodeSelection(select, share, broadcast_selection, most_rows) for share in shares]


def run_layers(split, queries, metadata):
    """Select in each layer that selects; every layer has queries of its own."""
    q, weights = queries
    return [split(decode_batch(), layer, q.roll(layer, 0), weights.roll(layer, 0), metadata) for layer in LAYERS]


@pytest.mark.parametrize("kernel", TOPK_KERNELS)
@pytest.mark.parametrize("num_rows", [64, 72, 96, 128, 136])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_ranks_share_together_is_the_selection_of_the_whole_batch(
    played, indexer, make_backend, kernel, num_rows, world_size
):
    backend = make_backend(kernel)
    q, weights, requests, lengths = draw(num_rows, seed=5)
    decode.prepare_step(backend, requests, lengths, capturing=True)
    metadata = decode.prepare_step(backend, requests, lengths)
    wholes = run_layers(indexer._get_topk_paged, (q, weights), metadata)
    shown = torch.arange(TOPK) < lengths.unsqueeze(1)
    assert all(torch.equal(whole >= 0, shown) for whole in wholes)

    splits = make_splits(indexer._get_topk_paged, decode.RelayedGather(world_size))
    # Layers one after the other, each of them on all ranks: what is gathered is one layer's.
    for layer, whole in zip(LAYERS, wholes, strict=True):
        arguments = (decode_batch(), layer, q.roll(layer, 0), weights.roll(layer, 0), metadata)
        for split in splits:
            split(*arguments)
        played.scored.clear()
        for split in splits:
            assert torch.equal(split(*arguments), whole)
        assert played.scored == [num_rows // world_size] * world_size


@pytest.mark.parametrize("kernel", TOPK_KERNELS)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_captured_step_selects_by_the_lengths_of_each_replay(indexer, make_backend, kernel, world_size):
    backend, num_rows = make_backend(kernel), 64
    q, weights, requests, lengths = draw(num_rows, seed=6)
    gather = decode.RelayedGather(world_size)
    splits = make_splits(indexer._get_topk_paged, gather)
    # As sglang captures: metadata of the shape, warm-up steps on it, then the step that is recorded.
    metadata = decode.prepare_step(backend, requests, torch.ones(num_rows, dtype=torch.int32), capturing=True)
    graphs, outputs = [], []
    for split in splits:
        for _ in range(2):
            split(decode_batch(), LAYERS[0], q, weights, metadata)
        graph = decode.Graph()
        with graph:
            outputs.append(split(decode_batch(), LAYERS[0], q, weights, metadata))
        graphs.append(graph)
    for seed in (7, 8):
        new_q, new_weights, requests, lengths = draw(num_rows, seed)
        q.copy_(new_q)
        weights.copy_(new_weights)
        assert decode.prepare_step(backend, requests, lengths).attn_metadata is metadata.attn_metadata
        whole = indexer._get_topk_paged(decode_batch(), LAYERS[0], q, weights, metadata)
        for graph in [*graphs, *graphs]:
            graph.replay()
        for output in outputs:
            assert torch.equal(output, whole)


def test_later_layers_of_a_captured_step_use_what_its_first_layer_made_in_the_graph(indexer, make_backend, played):
    backend, num_rows = make_backend("v2"), 64
    q, weights, requests, lengths = draw(num_rows, seed=6)
    metadata = decode.prepare_step(backend, requests, torch.ones(num_rows, dtype=torch.int32), capturing=True)
    # One rank alone: its own part stands for the others', so its own rows are what is compared.
    (split, *_) = make_splits(indexer._get_topk_paged, decode.RelayedGather(2))
    run_layers(split, (q, weights), metadata)
    played.schedules.clear()
    played.plans.clear()
    graph = decode.Graph()
    with graph:
        outputs = run_layers(split, (q, weights), metadata)
    assert (played.schedules, played.plans) == ([32], [32])
    decode.prepare_step(backend, requests, lengths)
    graph.replay()
    for output, whole in zip(outputs, run_layers(indexer._get_topk_paged, (q, weights), metadata), strict=True):
        assert torch.equal(output[:32], whole[:32])


@pytest.mark.parametrize("kernel", TOPK_KERNELS)
def test_a_share_of_more_rows_than_are_scored_at_once_is_selected_in_pieces(indexer, make_backend, played, kernel):
    """In a captured graph: its first layer makes each piece's metadata, and no scores are joined."""
    backend, num_rows = make_backend(kernel), 136
    q, weights, requests, lengths = draw(num_rows, seed=6)
    metadata = decode.prepare_step(backend, requests, torch.ones(num_rows, dtype=torch.int32), capturing=True)
    (split, *_) = make_splits(indexer._get_topk_paged, decode.RelayedGather(2), most_rows=30)
    run_layers(split, (q, weights), metadata)
    played.schedules.clear()
    graph = decode.Graph()
    with graph:
        outputs = run_layers(split, (q, weights), metadata)
    # This rank's 68 rows.
    assert played.schedules == [22, 23, 23]
    assert played.scored[-9:] == [22, 23, 23] * 3
    decode.prepare_step(backend, requests, lengths)
    graph.replay()
    for output, whole in zip(outputs, run_layers(indexer._get_topk_paged, (q, weights), metadata), strict=True):
        assert torch.equal(output[:68], whole[:68])


def test_the_graph_of_these_tests_would_show_what_is_not_made_anew(indexer, make_backend):
    """Metadata of the rank's rows made before the capture, as by its warm-up, goes stale: the replay is spoiled."""
    from nsa_dcp.sglang_plugin.selection.row_split_decode import narrow_metadata

    backend = make_backend("v2")
    q, weights, requests, lengths = draw(64, seed=6)
    metadata = decode.prepare_step(backend, requests, torch.ones(64, dtype=torch.int32), capturing=True)
    narrowed = narrow_metadata(metadata, slice(0, 32))
    graph = decode.Graph()
    with graph:
        output = indexer._get_topk_paged(decode_batch(), 0, q[:32], weights[:32], narrowed)
    decode.prepare_step(backend, requests, lengths)
    graph.replay()
    assert not torch.equal(output, indexer._get_topk_paged(decode_batch(), 0, q, weights, metadata)[:32])
    assert (output == -7).all()


def test_padding_rows_of_a_step_that_is_not_captured_select_nothing(indexer, make_backend):
    backend = make_backend("v2")
    q, weights, requests, lengths = draw(64, seed=9, padding=3)
    decode.prepare_step(backend, requests, lengths, capturing=True)
    metadata = decode.prepare_step(backend, requests, lengths)
    whole = indexer._get_topk_paged(decode_batch(), 0, q, weights, metadata)
    assert (whole[64:] == -1).all()
    splits = make_splits(indexer._get_topk_paged, decode.RelayedGather(4))
    for split in [*splits, *splits]:
        selection = split(decode_batch(), 0, q, weights, metadata)
    assert torch.equal(selection, whole)


def test_ranks_agree_where_their_own_kernels_would_not(make_backend):
    """Each rank's kernel breaks ties in its own way; of each row there is one selection."""

    def select_by(rank):
        return lambda _batch, _layer, q, *_: torch.full((q.shape[0], TOPK), rank, dtype=torch.int32)

    q, weights, requests, lengths = draw(96, seed=10)
    metadata = decode.prepare_step(make_backend("v2"), requests, lengths, capturing=True)
    splits = make_splits(None, decode.RelayedGather(4))
    for rank, split in enumerate(splits):
        split.select = select_by(rank)
    for split in splits:
        split(decode_batch(), 0, q, weights, metadata)
    for split in splits:
        selection = split(decode_batch(), 0, q, weights, metadata)
        assert torch.equal(selection[:, 0], torch.arange(4, dtype=torch.int32).repeat_interleave(24))


@pytest.mark.parametrize(
    ("num_rows", "world_size", "mode"),
    [(56, 8, "DECODE"), (63, 2, "DECODE"), (65, 2, "DECODE"), (100, 8, "DECODE"), (66, 4, "DECODE")]
    + [(64, 8, mode) for mode in ("DRAFT_EXTEND_V2", "IDLE")],
)
def test_small_and_odd_batches_and_other_steps_are_not_split_but_agreed_on(make_backend, num_rows, world_size, mode):
    """Verify steps that are not split: test_row_split_verify.py."""
    from nsa_dcp.sglang_plugin.selection.row_split_decode import RankRequests, RowSplitDecodeSelection

    seen, agreed = [], []
    q, weights, requests, lengths = draw(num_rows, seed=11)
    metadata = decode.prepare_step(make_backend("v2"), requests, lengths, capturing=True)
    batch, result = decode_batch(mode), object()

    def select(*arguments):
        seen.append(arguments)
        return result

    group = SimpleNamespace(world_size=world_size, rank_in_group=1)
    split = RowSplitDecodeSelection(select, RankRequests(group), agreed.append, NUM_SMS)
    assert split(batch, 0, q, weights, metadata) is result
    assert agreed == [result]
    assert all(mine is given for mine, given in zip(seen[0], (batch, 0, q, weights, metadata), strict=True))


def test_an_indexer_is_split_once_and_all_share_their_steps_metadata(indexer):
    from nsa_dcp.sglang_plugin.patches import split_decode_rows
    from nsa_dcp.sglang_plugin.selection.row_split_decode import RowSplitDecodeSelection

    other = type(indexer).__new__(type(indexer))
    torch.nn.Module.__init__(other)
    other.sm_count = 78
    model, group = torch.nn.ModuleList([indexer, other, torch.nn.Linear(1, 1)]), object()
    split_decode_rows(model, group, never)
    split_decode_rows(model, group, never)
    assert isinstance(indexer._get_topk_paged, RowSplitDecodeSelection)
    assert not isinstance(indexer._get_topk_paged.select, RowSplitDecodeSelection)
    assert indexer._get_topk_paged.share is other._get_topk_paged.share
    assert indexer._get_topk_paged.share.group is group
    assert (indexer._get_topk_paged.most_rows, other._get_topk_paged.most_rows) == (NUM_SMS, 78)


def test_the_indexer_reaches_its_selection_by_the_name_that_is_replaced():
    """`self._get_topk_paged(...)`, and nothing else in `forward_cuda` scores a decode batch on a Hopper GPU."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    tree = ast.parse(textwrap.dedent(inspect.getsource(Indexer.forward_cuda)))
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    reached = [call for call in calls if "_get_topk_paged" in call]
    assert reached == ["self._get_topk_paged(forward_batch, layer_id, q_fp8, weights, metadata)"]
    assert not any("paged_mqa_logits" in call for call in calls)
