"""Our backend on real pools: the merged parts of all ranks are attention over all tokens, in every phase and format.

`forward_decode` and `forward_extend` are sglang's; only what they need of the rest of a server is filled in.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nsa_dcp_kernels import attend_sparse, merge_partials
from tests.sglang.served_parts import make_layer

pytestmark = pytest.mark.sglang

HEADS, TOPK, LAYER, SM_SCALE = 4, 128, 1, 0.1


@pytest.fixture
def make_backend(make_rank):
    """A function that builds one rank's backend around a real pool. Its constructor would need a GPU."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    from nsa_dcp.sglang_plugin.attention.backend import DcpDeepseekSparseAttnBackend

    def build(dcp_size, dcp_rank, kv_format="fp8", fused_topk=True):
        rank = make_rank(dcp_size, dcp_rank, kv_format)
        backend = object.__new__(DcpDeepseekSparseAttnBackend)
        backend.token_to_kv_pool = rank.pool
        backend.dcp_size, backend.dcp_rank = dcp_size, dcp_rank
        backend.num_q_heads, backend.num_dcp_q_heads = HEADS // dcp_size, HEADS
        backend.dsa_prefill_impl = backend.dsa_decode_impl = "flashmla_kv"
        backend.dsa_kv_cache_store_fp8 = rank.pool.dsa_kv_cache_store_fp8
        backend.dsa_index_kpool, backend.dsa_index_topk = 1, TOPK
        backend.use_mha, backend.hisparse_coordinator = False, None
        backend.use_fused_topk, backend.dsa_topk_backend = fused_topk, DSATopKBackend.SGL_KERNEL
        backend.forward_metadata = SimpleNamespace(page_table_1=None, cu_seqlens_q=None, dsa_extend_seq_lens_list=None)
        return backend

    return build


def layer(layer_id=LAYER, heads=HEADS):
    return make_layer(layer_id, heads, SM_SCALE)


def batch(mode, slots):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(forward_mode=ForwardMode[mode], out_cache_loc=slots)


def problem(dcp_size, num_tokens, seed=0):
    """Latents that FP8 holds exactly, at slots of every rank, and selections with -1 anywhere."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = (128 + 64) * dcp_size
    slots = torch.randperm(num_slots - 1, generator=generator)[:48] + 1
    slots[0] = num_slots - 1
    codes = torch.randint(-8, 9, (len(slots), 512), generator=generator).float()
    codes[:, ::128] = 448.0
    k_nope = (codes / 4).to(torch.bfloat16)
    k_rope = torch.randn(len(slots), 64, generator=generator).to(torch.bfloat16)
    q = torch.randn(num_tokens, HEADS, 576, generator=generator).to(torch.bfloat16)
    q[..., :512:128] = 0.0  # or the scales' 112 would decide every score
    chosen = torch.randint(0, len(slots), (num_tokens, TOPK), generator=generator)
    selection = slots[chosen].to(torch.int32)
    selection[torch.rand(num_tokens, TOPK, generator=generator) < 0.3] = -1
    # One token whose selection lies on rank 0 alone, and one that attends to nothing.
    selection[0][selection[0] % dcp_size != 0] = -1
    selection[1] = -1
    return slots, k_nope, k_rope, q, selection


def expected(slots, k_nope, k_rope, q, selection):
    """Attention over all tokens, in one piece, from the latents that were written."""
    everything = torch.full((int(slots.max()) + 1, 576), math.nan)
    everything[slots] = torch.cat([k_nope, k_rope], dim=-1).float()
    return attend_sparse(q.float(), everything, selection, None, SM_SCALE)


def run_ranks(make_backend, mode, dcp_size, kv_format, num_tokens=5):
    """Write and attend on every rank in turn; return the merged result and what it should be."""
    slots, k_nope, k_rope, q, selection = problem(dcp_size, num_tokens)
    outs, lses = [], []
    for dcp_rank in range(dcp_size):
        backend = make_backend(dcp_size, dcp_rank, kv_format)
        rows = backend.token_to_kv_pool.kv_buffer[LAYER].view(torch.uint8)
        rows.fill_(0xFF)
        forward = backend.forward_decode if mode == "DECODE" else backend.forward_extend
        # The views that sglang's head gather returns: transposed, so not contiguous.
        q_nope, q_rope = q.transpose(0, 1).contiguous().transpose(0, 1).split([512, 64], dim=-1)
        out, lse = forward(
            q_nope,
            k_nope.unsqueeze(1),
            k_nope.unsqueeze(1),
            layer(),
            batch(mode, slots),
            q_rope=q_rope,
            k_rope=k_rope.unsqueeze(1),
            topk_indices=selection,
        )
        # What the model does with the result before it merges.
        outs.append(out.view(-1, HEADS, 512).float())
        lses.append(lse.contiguous())
    merged, lse = merge_partials(torch.stack(outs), torch.stack(lses) / math.log2(math.e))
    return merged, lse, expected(slots, k_nope, k_rope, q, selection)


@pytest.mark.parametrize("kv_format", ["fp8", "bfloat16"])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "MIXED", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
@pytest.mark.parametrize("dcp_size", [2, 4])
def test_merged_parts_are_attention_over_all_tokens(make_backend, dcp_size, mode, kv_format):
    merged, lse, (out, whole_lse) = run_ranks(make_backend, mode, dcp_size, kv_format)
    # The parts are rounded to bfloat16 before they are merged.
    assert torch.allclose(merged, out, atol=0.02, rtol=0.01)
    assert torch.allclose(lse, whole_lse, atol=1e-4)
    assert torch.equal(merged[1], torch.zeros(HEADS, 512))
    assert torch.isneginf(lse[1]).all()


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_the_unfused_selection_is_localised_as_the_fused_one(make_backend, mode):
    """Fused top-k hands over slots; unfused, positions that sglang turns into slots before it calls us."""
    slots, k_nope, k_rope, q, selection = problem(2, 5)
    positions = torch.full_like(selection, -1)
    for position, slot in enumerate(slots.tolist()):
        positions[selection == slot] = position
    requests = 5 if mode == "DECODE" else 1
    results = []
    for fused in (True, False):
        backend = make_backend(2, 1, "bfloat16", fused_topk=fused)
        backend.forward_metadata = SimpleNamespace(
            page_table_1=slots.to(torch.int32).repeat(requests, 1),
            cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32),
            dsa_extend_seq_lens_list=[5],
        )
        results.append(
            (backend.forward_decode if mode == "DECODE" else backend.forward_extend)(
                q[..., :512].clone(),
                k_nope.unsqueeze(1),
                k_nope.unsqueeze(1),
                layer(),
                batch(mode, slots),
                q_rope=q[..., 512:].clone(),
                k_rope=k_rope.unsqueeze(1),
                topk_indices=selection if fused else positions,
            )
        )
    (out, lse), (unfused_out, unfused_lse) = results
    assert lse.isfinite().any()
    assert torch.equal(out, unfused_out)
    assert torch.equal(lse, unfused_lse)


def test_a_rank_that_owns_nothing_returns_zeros_and_minus_infinity(make_backend):
    slots, k_nope, k_rope, q, selection = problem(4, 5)
    backend = make_backend(4, 3)
    backend.token_to_kv_pool.kv_buffer[LAYER].fill_(0xFF)
    out, lse = backend.forward_decode(
        q[..., :512].clone(),
        k_nope.unsqueeze(1),
        k_nope.unsqueeze(1),
        layer(),
        batch("DECODE", slots),
        q_rope=q[..., 512:].clone(),
        k_rope=k_rope.unsqueeze(1),
        topk_indices=torch.where(selection % 4 == 3, -1, selection),
    )
    assert torch.equal(out, torch.zeros(5, HEADS, 512, dtype=torch.bfloat16))
    assert torch.isneginf(lse).all()
    assert lse.dtype == torch.float32


def test_a_padded_decode_batch_gets_empty_rows(make_backend):
    slots, k_nope, k_rope, q, selection = problem(2, 6)
    backend = make_backend(2, 0)
    out, lse = backend.forward_decode(
        q[..., :512].clone(),
        k_nope.unsqueeze(1),
        k_nope.unsqueeze(1),
        layer(),
        batch("DECODE", slots),
        q_rope=q[..., 512:].clone(),
        k_rope=k_rope.unsqueeze(1),
        topk_indices=selection[:4],
    )
    assert out.shape == (6, HEADS, 512)
    assert torch.equal(out[4:], torch.zeros(2, HEADS, 512, dtype=torch.bfloat16))
    assert torch.isneginf(lse[4:]).all()


def test_heads_that_were_not_gathered_are_refused(make_backend):
    slots, _, _, q, selection = problem(2, 3)
    backend = make_backend(2, 0)
    with pytest.raises(RuntimeError, match="layer 1 attends with 2 heads where DCP gathers 4"):
        backend.forward_decode(
            q[:, :2, :512].clone(),
            None,
            None,
            layer(heads=2),
            batch("DECODE", slots),
            q_rope=q[:, :2, 512:].clone(),
            topk_indices=selection,
        )


@pytest.mark.parametrize("kv_format", ["fp8", "bfloat16"])
def test_the_kernel_is_tried_before_anything_is_served(make_backend, kv_format):
    backend = make_backend(4, 2, kv_format)
    backend.check_kernel(backend.token_to_kv_pool.get_key_buffer(0))


@pytest.mark.parametrize(("out", "lse"), [(0.0, math.inf), (0.0, 0.0), (math.nan, -math.inf), (1.0, -math.inf)])
def test_a_kernel_that_answers_for_nothing_is_refused(make_backend, monkeypatch, out, lse):
    from nsa_dcp.sglang_plugin.attention import backend as module

    backend = make_backend(4, 2, "bfloat16")
    answer = torch.full((1, HEADS, 512), out), torch.full((1, HEADS), lse)
    monkeypatch.setattr(module, "attend_selection", lambda *_: answer)
    with pytest.raises(RuntimeError, match=r"log-sum-exp of -inf for an empty selection"):
        backend.check_kernel(backend.token_to_kv_pool.get_key_buffer(0))


class Localised:
    """Stands for `localize_selection`, and counts."""

    def __init__(self):
        self.calls = 0

    def __call__(self, slots):
        self.calls += 1
        return object()


def test_consecutive_layers_localise_a_shared_selection_once():
    from nsa_dcp.sglang_plugin.attention.backend import prepare_once

    slots, metadata, localise = torch.zeros(2, 4, dtype=torch.int32), object(), Localised()
    results = [prepare_once(slots, layer_id, metadata, localise) for layer_id in (3, 4, 5)]
    assert localise.calls == 1
    assert results[0] is results[1] is results[2]


@pytest.mark.parametrize(
    ("slots_alike", "metadata_alike", "next_layer"),
    [(False, True, 4), (True, False, 4), (True, True, 3), (True, True, 5), (True, True, 0)],
    ids=["another-selection", "another-forward", "same-layer-again", "a-layer-between", "first-layer-again"],
)
def test_anything_else_is_localised_anew(slots_alike, metadata_alike, next_layer):
    from nsa_dcp.sglang_plugin.attention.backend import prepare_once

    slots, metadata, localise = torch.zeros(2, 4, dtype=torch.int32), object(), Localised()
    prepare_once(slots, 3, metadata, localise)
    next_slots, next_metadata = slots if slots_alike else slots.clone(), metadata if metadata_alike else object()
    prepare_once(next_slots, next_layer, next_metadata, localise)
    assert localise.calls == 2


def test_cache_rows_are_views():
    from nsa_dcp.sglang_plugin.attention.backend import cache_rows

    packed = torch.zeros(8, 1, 656, dtype=torch.uint8)
    rows = cache_rows(packed.view(torch.float8_e4m3fn))
    assert rows.dtype == torch.uint8
    assert rows.shape == (8, 656)
    assert rows.data_ptr() == packed.data_ptr()
    plain = torch.zeros(8, 1, 576, dtype=torch.bfloat16)
    assert cache_rows(plain).dtype == torch.bfloat16
    assert cache_rows(plain).data_ptr() == plain.data_ptr()


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED", "TARGET_VERIFY"])
def test_heads_that_sglangs_concatenation_does_not_reach_are_joined_before_it(make_backend, mode, monkeypatch):
    """sglang multiplies a head by the stride between heads in 32 bits; what it is given here starts 2**31 values in."""
    from sglang.srt.layers.attention import dsa_backend

    joined = []

    def concatenate(q_nope, q_rope):
        assert (q_nope.shape[1] - 1) * max(q_nope.stride(1), q_rope.stride(1)) < 2**31
        joined.append(q_nope.shape)
        return torch.cat([q_nope, q_rope], dim=-1)

    monkeypatch.setattr(dsa_backend, "concat_mla_absorb_q_general", concatenate)
    slots, k_nope, k_rope, q, selection = problem(2, 5)
    stride = 2**31 // (HEADS - 1) + 8
    # numpy's memory: untouched, it takes none.
    memory = torch.from_numpy(np.empty((HEADS - 1) * stride + 5 * 576, np.uint16)).view(torch.bfloat16)
    far = memory.as_strided((5, HEADS, 576), (576, stride, 1))
    far.copy_(q)
    results = []
    for queries in (far, q.transpose(0, 1).contiguous().transpose(0, 1)):
        q_nope, q_rope = queries.split([512, 64], dim=-1)
        results.append(
            make_backend(2, 1).forward_extend(
                q_nope,
                k_nope.unsqueeze(1),
                k_nope.unsqueeze(1),
                layer(),
                batch(mode, slots),
                q_rope=q_rope,
                k_rope=k_rope.unsqueeze(1),
                topk_indices=selection,
            )
        )
    # Of those that we joined sglang makes two views, and joins them again: their heads are 576 values apart.
    assert len(joined) == 2
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
