"""sglang's own attention module in a padded idle step under DCP: prepared as before, and nothing is logged."""

import logging
from types import SimpleNamespace

import pytest
import torch

from tests.sglang import cp_simulation as simulation
from tests.sglang.attention import test_cp_model

pytestmark = pytest.mark.sglang

make_cp_runner, make_cp_backend = simulation.make_cp_runner, simulation.make_cp_backend
make_attention, mode = test_cp_model.make_attention, test_cp_model.mode
ROWS = 3


@pytest.fixture
def layer(make_cp_backend, make_attention, monkeypatch):
    """A layer that gathers and merges over two ranks itself, as in TP-DCP, and shares a selection."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    make_cp_backend(simulation.RelayedGroup(2).rank(0))
    layer = make_attention()
    layer.q_a_layernorm, layer.kv_a_layernorm = torch.nn.Identity(), torch.nn.Identity()
    layer.skip_topk, layer.current_attention_backend = True, "nsa"
    queries = torch.randn(ROWS, layer.num_local_heads, 256).to(torch.bfloat16)
    layer.q_b_proj_forward = lambda _: queries
    latents = torch.randn(ROWS, 512 + 576).to(torch.bfloat16)
    context = SimpleNamespace(fetch_qkv_latent=lambda: latents)
    monkeypatch.setattr(forward_mla, "get_attn_tp_context", lambda: context)
    assert layer.dcp_size == 2
    return layer


def prepare(layer, name, caplog):
    """What `forward_absorb_prepare` returns and logs, called as sglang's layer calls it."""
    forward = SimpleNamespace(forward_mode=mode(name).forward_mode, attn_cp_metadata=None)
    selection = torch.full((ROWS, simulation.TOPK), -1, dtype=torch.int32)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        state = layer.forward_absorb_prepare(
            torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, 1024), forward, None, None, selection
        )
    return state, [record.message for record in caplog.records if "not supported forward_mode" in record.message]


def test_an_idle_step_logs_nothing_and_is_prepared_as_before(layer, caplog):
    from nsa_dcp.sglang_plugin.patches import prepare_idle_steps_quietly

    stock, warnings = prepare(layer, "IDLE", caplog)
    assert len(warnings) == 1, "what sglang does of itself"
    prepare_idle_steps_quietly(torch.nn.ModuleList([layer]))
    prepare_idle_steps_quietly(torch.nn.ModuleList([layer]))
    quiet, warnings = prepare(layer, "IDLE", caplog)
    assert warnings == []
    assert len(quiet) == len(stock)
    for ours, theirs in zip(quiet, stock, strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else True
    assert layer.dcp_size == 2


def test_other_steps_gather_as_before(layer, caplog, monkeypatch):
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    from nsa_dcp.sglang_plugin.patches import prepare_idle_steps_quietly

    gathered = []
    monkeypatch.setattr(
        forward_mla,
        "all_gather_q_for_mla_decode",
        lambda q_nope_out, q_pe: gathered.append(layer.dcp_size) or (q_nope_out, q_pe),
    )
    prepare_idle_steps_quietly(torch.nn.ModuleList([layer]))
    for name in ("DECODE", "TARGET_VERIFY"):
        assert prepare(layer, name, caplog)[1] == []
    assert gathered == [2, 2]


def test_a_layer_that_fails_in_an_idle_step_keeps_its_dcp_size(layer, caplog):
    from nsa_dcp.sglang_plugin.patches import prepare_idle_steps_quietly

    prepare_idle_steps_quietly(torch.nn.ModuleList([layer]))
    layer.q_b_proj_forward = None
    with pytest.raises(TypeError):
        prepare(layer, "IDLE", caplog)
    assert layer.dcp_size == 2
