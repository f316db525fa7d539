"""CP-DCP steps that every rank works on: decode, target-verify and short chunks, with all heads or a slice of them."""

from types import SimpleNamespace

import pytest
import torch

from tests.sglang import cp_simulation as simulation

pytestmark = pytest.mark.sglang

make_cp_runner, make_cp_backend = simulation.make_cp_runner, simulation.make_cp_backend
HEADS = simulation.HEADS


@pytest.fixture(autouse=True)
def _lengths_on_a_cpu(monkeypatch):
    """A verify step's lengths, which sglang expands in a kernel."""
    from sglang.srt.layers.attention import dsa_backend

    def expand(extend_seq_lens, seq_lens, total_len, max_q_len):
        rows = [torch.arange(length - extend + 1, length + 1) for extend, length in zip(extend_seq_lens, seq_lens)]
        return torch.cat(rows).to(torch.int32)

    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", expand)


def step_rank(backend, batch, sliced, selection=None):
    """One rank's step as the model runs it: every token, all heads or this rank's slice of them."""
    pool, group = backend.token_to_kv_pool, backend._group
    backend.req_to_token_pool.req_to_token = batch.req_to_token()
    cached = torch.cat([slots[:length] for slots, length in zip(batch.slots, batch.prefixes)])
    latents = batch.latents[cached].unsqueeze(1)
    pool.set_mla_kv_buffer(simulation.layer(1), cached, latents[..., :512], latents[..., 512:])
    forward = batch.make_forward()
    if batch.mode == "TARGET_VERIFY":
        # Here sglang's lengths are those before the step.
        backend.speculative_num_draft_tokens = batch.extends[0]
        forward.seq_lens = forward.seq_lens - batch.extends[0]
        forward.seq_lens_cpu = forward.seq_lens_cpu - batch.extends[0]
    backend.init_forward_metadata(forward)
    heads = HEADS // group.world_size if sliced else HEADS
    first = group.rank_in_group * heads if sliced else 0
    q = batch.q[:, first : first + heads]
    chunk = batch.latents[batch.chunk].unsqueeze(1)
    attend = backend.forward_decode if batch.mode == "DECODE" else backend.forward_extend
    out = attend(
        q[..., :512].clone(),
        chunk[..., :512],
        chunk[..., :512],
        simulation.layer(heads),
        forward,
        q_rope=q[..., 512:].clone(),
        k_rope=chunk[..., 512:],
        topk_indices=(batch.selection if selection is None else selection).clone(),
    )
    return out.view(-1, heads, 512), slice(first, first + heads)


def step_ranks(make_cp_backend, batch, sliced, selections=None, **settings):
    """All ranks, in rounds; returns each rank's result and heads, and the group."""
    relayed, rounds = simulation.RelayedGroup(batch.cp_size), None
    while rounds is None or relayed.rounds < rounds:
        relayed.rounds += 1
        results = [
            step_rank(make_cp_backend(relayed.rank(r), **settings), batch, sliced, selections and selections[r])
            for r in range(batch.cp_size)
        ]
        rounds = len(relayed.sent[0]) + 1
    return results, relayed


def assert_right(batch, results):
    expected = batch.expected()
    for out, heads in results:
        # The parts are rounded to bfloat16 before they are merged.
        assert torch.allclose(out.float(), expected[:, heads], atol=0.02, rtol=0.01)
        assert not out[-1].any()


STEPS = {
    "decode": ([130, 1, 300, 64, 257], [1, 1, 1, 1, 1], "DECODE"),
    "verify": ([130, 65, 300], [3, 3, 3], "TARGET_VERIFY"),
    "chunk-shorter-than-the-ranks": ([130], [3], "EXTEND"),
}


@pytest.mark.parametrize(
    ("comm_backend", "kv_format"), [("a2a", "fp8"), ("a2a", "bfloat16"), ("ag_rs", "fp8")], ids=lambda value: value
)
@pytest.mark.parametrize("sliced", [True, False], ids=["sliced", "all-heads"])
@pytest.mark.parametrize("step", STEPS)
def test_each_rank_ends_with_the_heads_it_began_with(make_cp_backend, step, sliced, comm_backend, kv_format):
    prefixes, extends, mode = STEPS[step]
    batch = simulation.CpBatch(4, prefixes, extends, mode=mode)
    results, _ = step_ranks(make_cp_backend, batch, sliced, comm_backend=comm_backend, kv_format=kv_format)
    assert_right(batch, results)


@pytest.mark.parametrize("cp_size", [2, 8])
@pytest.mark.parametrize("sliced", [True, False], ids=["sliced", "all-heads"])
def test_other_numbers_of_ranks(make_cp_backend, cp_size, sliced):
    batch = simulation.CpBatch(cp_size, [3, 700], [1, 1], mode="DECODE")
    results, _ = step_ranks(make_cp_backend, batch, sliced)
    assert_right(batch, results)


@pytest.mark.parametrize("sliced", [True, False], ids=["sliced", "all-heads"])
def test_ranks_whose_selections_for_a_short_chunk_differ_attend_to_the_first_ranks(make_cp_backend, sliced):
    """Decode's selections agree before they get here: test_cp_decode_selection.py."""
    batch = simulation.CpBatch(4, [130], [3], mode="EXTEND")
    others = batch.selection.flip(1).contiguous()
    others[0] = int(batch.slots[0][0])
    results, _ = step_ranks(make_cp_backend, batch, sliced, [batch.selection, others, others, others])
    assert_right(batch, results)


@pytest.mark.parametrize("step", STEPS)
def test_what_goes_over_the_wire(make_cp_backend, step):
    prefixes, extends, mode = STEPS[step]
    batch, tokens = simulation.CpBatch(4, prefixes, extends, mode=mode), sum(extends)
    # Decode's and verify's selections agree already.
    selection = [("broadcast", tokens * simulation.TOPK * 4)] if mode == "EXTEND" else []
    # Partial results with their log-sum-exp behind each head's 512 values.
    exchange = ("all_to_all", tokens * HEADS * 514 * 2)
    _, relayed = step_ranks(make_cp_backend, batch, sliced=True)
    assert relayed.sent[2] == [*selection, ("all_gather", tokens * HEADS // 4 * 576 * 2), exchange]
    _, relayed = step_ranks(make_cp_backend, batch, sliced=False)
    assert relayed.sent[2] == [*selection, exchange, ("all_gather", tokens * HEADS // 4 * 512 * 2)]


def test_layers_that_share_a_short_chunks_selection_agree_on_it_once(make_cp_backend):
    relayed = simulation.RelayedGroup(2)
    backend = make_cp_backend(relayed.rank(0))
    metadata = SimpleNamespace(indexer_k_start_end=(torch.zeros(1), torch.ones(1)))
    slots = torch.tensor([[1, 2, -1]], dtype=torch.int32)
    q, cache = torch.randn(1, HEADS, 576).to(torch.bfloat16), backend.token_to_kv_pool.get_key_buffer(1)
    cache.view(torch.uint8).zero_()
    for layer_id in (1, 2, 3):
        backend._forward_flashmla_kv(q, cache, 512, 0.1, simulation.layer(HEADS, layer_id), metadata, slots)
    assert [kind for kind, _ in relayed.sent[0]].count("broadcast") == 1


@pytest.mark.parametrize("kv_format", ["fp8", "bfloat16"])
def test_the_launches_over_a_packed_cache_are_planned_with_the_selection(make_cp_backend, monkeypatch, kv_format):
    from nsa_dcp.sglang_plugin.attention import backend as module
    from nsa_dcp_kernels import localize_selection

    planned = []

    def localize(slots, dcp_size, dcp_rank, *, planned_heads=None):
        planned.append((dcp_size, dcp_rank, planned_heads))
        return localize_selection(slots, dcp_size, dcp_rank)

    backend = make_cp_backend(simulation.RelayedGroup(4).rank(2), kv_format=kv_format)
    monkeypatch.setattr(module, "localize_selection", localize)
    cache = backend.token_to_kv_pool.get_key_buffer(1)
    cache.view(torch.uint8).zero_()
    for heads in (HEADS, HEADS // 4):
        backend._forward_flashmla_kv(
            torch.zeros(1, heads, 576, dtype=torch.bfloat16),
            cache,
            512,
            0.1,
            simulation.layer(heads),
            SimpleNamespace(indexer_k_start_end=None),
            torch.tensor([[1, 2, -1]], dtype=torch.int32),
        )
    # The kernel sees all heads, whether a rank began with a slice of them or not.
    assert planned == [(4, 2, HEADS if kv_format == "fp8" else None)] * 2


@pytest.mark.parametrize("heads", [1, 3, 16])
def test_heads_that_are_neither_all_nor_a_slice_are_refused(make_cp_backend, heads):
    backend = make_cp_backend(simulation.RelayedGroup(2).rank(0))
    q = torch.zeros(1, heads, 576, dtype=torch.bfloat16)
    cache = backend.token_to_kv_pool.get_key_buffer(1)
    with pytest.raises(RuntimeError, match=f"layer 1 attends with {heads} of 8 heads in a replicated step"):
        backend._forward_flashmla_kv(q, cache, 512, 0.1, simulation.layer(heads), object(), None)


def test_an_idle_step_needs_no_group(make_cp_backend):
    """sglang leaves attention out; the ranks of a DCP group hold the same requests, so all of them idle together."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = make_cp_backend(SimpleNamespace(world_size=2, rank_in_group=0, ranks=[0, 1]))
    assert type(backend).forward is AttentionBackend.forward
    out = backend.forward(
        torch.zeros(0, HEADS, 512),
        None,
        None,
        simulation.layer(HEADS),
        SimpleNamespace(forward_mode=ForwardMode.IDLE),
        q_rope=torch.zeros(0, HEADS, 64),
    )
    assert out.shape[0] == 0
