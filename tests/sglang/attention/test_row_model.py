"""TP-DCP prefill by rows through sglang's own attention layer, which the backend tells whether to gather heads.

`forward_absorb_prepare` and `forward_absorb_core` run as they are, of each rank in turn, from latents to values; what a
prefill by rows leaves behind must not reach the next step.
"""

import contextlib
import functools
import math

import pytest
import torch

from nsa_dcp.planning.prefill_ways import LayerSizes, PrefillRule, block_of_rows
from tests.sglang import cp_simulation as simulation

pytestmark = pytest.mark.sglang

make_cp_runner = simulation.make_cp_runner
HEADS, TOPK, LAYER, V_DIM, NOPE = simulation.HEADS, simulation.TOPK, simulation.LAYER, 256, 192


class NoRope(torch.nn.Module):
    def forward(self, positions, q, k):
        return q, k


class Values(torch.nn.Module):
    """In place of the output projection: what it would be given."""

    def forward(self, values):
        return values, None


class LatentContext:
    """In place of sglang's attention-TP context: the projections' result of this step."""

    latent = None

    def fetch_qkv_latent(self):
        return self.latent


@pytest.fixture
def make_attention(monkeypatch):
    """A function that builds sglang's attention layer of one rank, with weights that leave queries as they are."""
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.models import deepseek_v2
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
    from sglang.srt.runtime_context import process_model_config

    for module in (dsa_indexer, deepseek_v2):
        monkeypatch.setattr(module, "get_rope_wrapper", lambda *_, **__: NoRope())
    context = LatentContext()
    monkeypatch.setattr(forward_mla, "get_attn_tp_context", lambda: context)

    def build(rank, size):
        config = process_model_config().hf_config
        attention = deepseek_v2.DeepseekV2AttentionMLA(
            config=config,
            hidden_size=config.hidden_size,
            num_heads=HEADS,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=64,
            v_head_dim=V_DIM,
            q_lora_rank=512,
            kv_lora_rank=512,
            layer_id=LAYER,
        )
        local = HEADS // size
        for radix in (attention.attn_mqa, attention.attn_mqa_for_dcp_decode):
            radix.scaling = simulation.SM_SCALE
        w_vc = torch.randn(HEADS, 512, V_DIM, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
        attention.w_kc = torch.eye(NOPE, 512, dtype=torch.bfloat16).repeat(local, 1, 1)
        attention.w_vc = w_vc[rank * local : (rank + 1) * local].contiguous()
        attention.o_proj, attention.current_attention_backend = Values(), "nsa"
        attention.q_a_layernorm = attention.kv_a_layernorm = torch.nn.Identity()
        attention.skip_topk = True
        return attention, context, w_vc

    return build


@pytest.fixture
def merged(monkeypatch):
    """sglang's exchange of partial results, whose Triton takes a minute here, by its meaning."""
    from sglang.srt.layers.dcp import comm as dcp_comm
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    from nsa_dcp_kernels import merge_partials

    def merge(out, lse, group, is_lse_base_on_e, comm_backend):
        outs = group.all_gather(out.float().unsqueeze(0), dim=0)
        lses = group.all_gather(lse.unsqueeze(0), dim=0) / math.log2(math.e)
        whole = merge_partials(outs, lses)[0].to(out.dtype)
        local = whole.shape[1] // group.world_size
        return whole[:, group.rank_in_group * local : (group.rank_in_group + 1) * local].contiguous()

    monkeypatch.setattr(dcp_comm, "use_symmetric_memory", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(forward_mla, "dcp_a2a_lse_reduce", merge)


def make_backend(make_cp_runner, group, attention, way):
    from nsa_dcp.sglang_plugin import patches
    from nsa_dcp.sglang_plugin.attention.row_backend import RowPrefillBackend

    size = group.world_size
    sizes = LayerSizes(dcp_size=size, heads=HEADS // size, row_bytes=656, topk=TOPK, layers=1, selecting_layers=1)
    runner = make_cp_runner(group, context_parallel=False)
    layer = attention(group.rank_in_group, size)
    tell = functools.partial(patches.tell_layers_of_dcp, [layer[0]])
    return RowPrefillBackend(runner, group, tell, PrefillRule(sizes, way), 64), layer


def run_rank(backend, layer, batch, padding, way):
    """This rank's heads of every row, times its part of w_vc; and which of the layer's two attentions ran."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    attention, context, _ = layer
    size, rank = backend.dcp_size, backend.dcp_rank
    called = []
    for label in ("attn_mqa", "attn_mqa_for_dcp_decode"):
        getattr(attention, label).register_forward_pre_hook(lambda *_, label=label: called.append(label))
    cached = torch.cat([slots[:prefix] for slots, prefix in zip(batch.slots, batch.prefixes)])
    latents = batch.latents[cached].unsqueeze(1)
    backend.token_to_kv_pool.set_mla_kv_buffer(attention.attn_mqa, cached, latents[..., :512], latents[..., 512:])
    backend.req_to_token_pool.req_to_token = batch.req_to_token()
    forward, rows = batch.make_forward(), len(batch.q)
    # As MLP sync leaves a batch: rows past its own hold anything.
    forward.global_num_token_non_padded_cpu = rows
    forward.out_cache_loc = torch.cat([forward.out_cache_loc, torch.zeros(padding, dtype=torch.int64)])
    forward.positions = torch.zeros(rows + padding, dtype=torch.int64)
    forward.attn_dcp_metadata = forward._attn_output = None
    forward.mha_return_lse = False
    backend.init_forward_metadata(forward)
    local = HEADS // size
    queries = torch.cat([batch.q[..., :NOPE], batch.q[..., 512:]], dim=-1)
    queries = torch.cat([queries, torch.full((padding, *queries.shape[1:]), math.nan, dtype=torch.bfloat16)])
    attention.q_b_proj_forward = lambda _: queries[:, rank * local : (rank + 1) * local].contiguous()
    chunk = torch.cat([batch.latents[batch.chunk], torch.full((padding, 576), math.nan, dtype=torch.bfloat16)])
    context.latent = torch.cat([torch.zeros(len(chunk), 512, dtype=torch.bfloat16), chunk], dim=-1)
    selection = batch.selection.clone()
    if way == "rows":
        start, stop = block_of_rows(rows, size, rank)
        selection[:start] = selection[stop:] = -1
    selection = torch.cat([selection, torch.full((padding, TOPK), -1, dtype=torch.int32)])
    with forward_context(ForwardContext(attn_backend=backend)):
        inner = attention.forward_absorb_prepare(
            None, torch.zeros(len(chunk), 1, dtype=torch.bfloat16), forward, None, None, selection
        )
        out = attention.forward_absorb_core(*inner)
    return (out[0] if isinstance(out, tuple) else out), called


CASES = {
    "prompts": ([130, 70], [6, 3], "EXTEND", 0),
    "padded": ([130, 70], [6, 3], "EXTEND", 3),
    "prompt and decode rows": ([130, 70], [6, 1], "MIXED", 0),
    "fewer rows than ranks": ([130], [2], "EXTEND", 0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["rows", "queries"])
@pytest.mark.parametrize("size", [2, 4])
def test_sglangs_layer_gives_the_same_values_either_way(make_cp_runner, make_attention, merged, size, way, case):
    prefixes, extends, mode, padding = CASES[case]
    batch = simulation.CpBatch(size, prefixes, extends, mode=mode)
    # w_kc is the identity on the first 192 of 512 dimensions.
    batch.q[..., NOPE:512] = 0
    relayed, rounds = simulation.RelayedGroup(size), None
    while rounds is None or relayed.rounds < rounds:
        relayed.rounds += 1
        results = []
        for rank in range(size):
            backend, layer = make_backend(make_cp_runner, relayed.rank(rank), make_attention, way)
            results.append((*run_rank(backend, layer, batch, padding, way), layer))
        rounds = len(relayed.sent[0]) + 1
    expected, local = batch.expected(), HEADS // size
    for rank, (out, called, (attention, _, w_vc)) in enumerate(results):
        assert called == ["attn_mqa" if way == "rows" else "attn_mqa_for_dcp_decode"]
        assert attention.dcp_size == (1 if way == "rows" else size)
        mine = slice(rank * local, (rank + 1) * local)
        values = torch.einsum("thl,hlv->thv", expected[:, mine], w_vc[mine].float()).flatten(1)
        assert out.shape[0] == len(batch.q) + padding and not out[len(batch.q) :].any()
        assert torch.allclose(out[: len(batch.q)].float(), values, atol=2.0, rtol=0.01)
    kinds = [kind for kind, _ in relayed.sent[0]]
    assert (kinds == ["all_to_all", "all_gather", "all_to_all"]) == (way == "rows")


def test_a_layer_that_was_never_told_again_would_be_refused(make_cp_runner, make_attention, merged):
    """By queries after by rows, without the backend's word in between: sglang's layer gathers no heads."""
    batch = simulation.CpBatch(2, [130, 70], [6, 3])
    batch.q[..., NOPE:512] = 0
    backend, layer = make_backend(make_cp_runner, simulation.RelayedGroup(2).rank(0), make_attention, "queries")
    backend._tell_layers = lambda _: None
    layer[0].dcp_size = 1
    with pytest.raises(RuntimeError, match="attends with 4 heads where DCP gathers 8"):
        run_rank(backend, layer, batch, 0, "queries")
