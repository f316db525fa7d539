"""sglang's own attention module under CP-DCP: it leaves DCP to the backend, and takes what the backend returns."""

from types import SimpleNamespace

import pytest
import torch

from tests.sglang import cp_simulation as simulation

pytestmark = pytest.mark.sglang

make_cp_runner, make_cp_backend = simulation.make_cp_runner, simulation.make_cp_backend
HEADS, V_DIM = simulation.HEADS, 256


class NoRope(torch.nn.Module):
    def forward(self, positions, q, k):
        return q, k


class Output(torch.nn.Module):
    """Stands for the output projection, which needs a GPU's collectives."""

    def forward(self, values):
        return values, None


@pytest.fixture
def make_attention(monkeypatch):
    """A function that builds the module of the rank whose context is published."""
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.layers.cp import cp_decode_attn_tp
    from sglang.srt.models import deepseek_v2
    from sglang.srt.runtime_context import process_model_config

    for module in (dsa_indexer, deepseek_v2):
        monkeypatch.setattr(module, "get_rope_wrapper", lambda *_, **__: NoRope())
    monkeypatch.setattr(cp_decode_attn_tp, "_global_cp_decode_attn_tp_ctx", None)

    def build():
        config = process_model_config().hf_config
        attention = deepseek_v2.DeepseekV2AttentionMLA(
            config=config,
            hidden_size=config.hidden_size,
            num_heads=HEADS,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=V_DIM,
            q_lora_rank=512,
            kv_lora_rank=512,
            layer_id=1,
        )
        attention.attn_mqa.scaling = simulation.SM_SCALE
        generator = torch.Generator().manual_seed(2)
        attention.w_kc = torch.randn(HEADS, 192, 512, generator=generator).to(torch.bfloat16)
        attention.w_vc = torch.randn(HEADS, 512, V_DIM, generator=generator).to(torch.bfloat16)
        return attention

    return build


def mode(name):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(forward_mode=ForwardMode[name])


MODES = ("DECODE", "TARGET_VERIFY", "EXTEND", "MIXED")


def test_the_model_gathers_and_merges_nothing_once_it_is_told(make_cp_backend, make_attention):
    from sglang.srt.runtime_context import get_parallel

    from nsa_dcp.sglang_plugin.patches import hide_dcp_from_layers

    make_cp_backend(simulation.RelayedGroup(4).rank(1))
    attention = make_attention()
    # What stock sglang would do: gather the heads of different tokens, of which every rank has all.
    assert all(attention.is_dcp_mla_decode_phase(mode(name)) for name in MODES)
    assert attention.attn_mqa_for_dcp_decode.tp_q_head_num == 4 * HEADS
    hide_dcp_from_layers(torch.nn.ModuleList([attention]), HEADS)
    assert not any(attention.is_dcp_mla_decode_phase(mode(name)) for name in MODES)
    assert not attention.is_dcp_q_replicate_phase(mode("DECODE"))
    # The pools and the groups do not ask the layers.
    assert (get_parallel().attn_dcp_size, get_parallel().attn_dcp_rank) == (4, 1)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda layer: setattr(layer, "current_attention_backend", "nsa"), "attention layers that have not run"),
        (lambda layer: setattr(layer, "w_kc_qrep", torch.zeros(1)), "query projections that are not gathered"),
        (lambda layer: setattr(layer.attn_mqa, "tp_q_head_num", 2), "layers of 8 heads, found 2"),
    ],
    ids=["has-run", "replicated", "sliced"],
)
def test_a_model_that_is_not_as_expected_is_left_as_it_was(make_cp_backend, make_attention, spoil, sentence):
    from nsa_dcp.sglang_plugin.patches import hide_dcp_from_layers

    make_cp_backend(simulation.RelayedGroup(2).rank(0))
    layers = torch.nn.ModuleList([make_attention(), make_attention()])
    spoil(layers[1])
    with pytest.raises(RuntimeError, match=sentence):
        hide_dcp_from_layers(layers, HEADS)
    assert [layer.dcp_size for layer in layers] == [2, 2]


def test_steps_that_are_not_spread_run_a_slice_of_the_heads(make_cp_backend, make_attention):
    from sglang.srt.layers.cp.utils import prepare_cp_forward
    from sglang.srt.runtime_context import get_parallel

    backend = make_cp_backend(simulation.RelayedGroup(2).rank(1))
    attention = make_attention()
    decode = simulation.CpBatch(2, [9, 9], [1, 1], mode="DECODE").make_forward()
    short = simulation.CpBatch(2, [9], [1]).make_forward()
    spread = simulation.CpBatch(2, [9], [8]).make_forward()
    prepare_cp_forward(spread)
    with get_parallel().override(enable_cp_decode_attn_tp=True):
        for forward, heads in ((decode, HEADS // 2), (short, HEADS // 2), (spread, HEADS)):
            with attention.maybe_use_decode_attn_tp(forward):
                assert attention.attn_mqa.tp_q_head_num == attention.num_local_heads == len(attention.w_kc) == heads
            assert attention.attn_mqa.tp_q_head_num == attention.num_local_heads == backend.num_q_heads == HEADS


@pytest.mark.parametrize("name", MODES)
def test_what_the_backend_returns_is_what_the_model_projects(make_cp_backend, make_attention, name):
    """`forward_absorb_core` of every rank, all heads; rows in a spread step are the rank's own."""
    from sglang.srt.layers.cp.base import get_cp_strategy
    from sglang.srt.layers.cp.utils import is_cp_active, prepare_cp_forward
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    from nsa_dcp.sglang_plugin.patches import hide_dcp_from_layers

    extends = {"DECODE": [1, 1], "TARGET_VERIFY": [2, 2], "EXTEND": [5, 3], "MIXED": [6, 1]}[name]
    batch = simulation.CpBatch(2, [130, 70], extends, mode="EXTEND" if name == "TARGET_VERIFY" else name)
    relayed, rounds = simulation.RelayedGroup(2), None
    while rounds is None or relayed.rounds < rounds:
        relayed.rounds += 1
        results = []
        for rank in range(2):
            backend = make_cp_backend(relayed.rank(rank))
            attention = make_attention()
            hide_dcp_from_layers(torch.nn.ModuleList([attention]), HEADS)
            attention.o_proj, attention.current_attention_backend = Output(), "nsa"
            cached = torch.cat([slots[:prefix] for slots, prefix in zip(batch.slots, batch.prefixes)])
            latents = batch.latents[cached].unsqueeze(1)
            backend.token_to_kv_pool.set_mla_kv_buffer(
                attention.attn_mqa, cached, latents[..., :512], latents[..., 512:]
            )
            backend.req_to_token_pool.req_to_token = batch.req_to_token()
            forward = batch.make_forward()
            forward.global_num_token_non_padded_cpu = None
            rows = torch.arange(len(batch.q))
            if name == "TARGET_VERIFY":
                # Of its metadata that alone is read: fused selections are slots.
                forward.forward_mode = mode(name).forward_mode
                backend.forward_metadata = SimpleNamespace(indexer_k_start_end=None)
            else:
                if is_cp_active(forward):
                    prepare_cp_forward(forward)
                    rows = get_cp_strategy().local_q_indices(len(batch.q), forward)
                backend.init_forward_metadata(forward)
            chunk = batch.latents[batch.chunk].unsqueeze(1)
            with forward_context(ForwardContext(attn_backend=backend)):
                out = attention.forward_absorb_core(
                    batch.q[rows][..., 512:],
                    chunk[..., 512:],
                    batch.q[rows][..., :512],
                    chunk[..., :512],
                    forward,
                    None,
                    None,
                    batch.selection[rows].clone(),
                    None,
                )
            results.append((rows, out[0] if isinstance(out, tuple) else out, attention.w_vc))
        rounds = len(relayed.sent[0]) + 1
    for rows, out, w_vc in results:
        expected = torch.einsum("thl,hlv->thv", batch.expected()[rows], w_vc.float()).flatten(1)
        # Hundreds, of which the latents' constant values make up most.
        assert torch.allclose(out.float(), expected, atol=2.0, rtol=0.01)
    spread = name in ("EXTEND", "MIXED")
    assert sum(len(rows) for rows, _, _ in results) == len(batch.q) * (1 if spread else 2)
