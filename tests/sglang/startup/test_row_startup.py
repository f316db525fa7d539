"""A server whose prefills may go by rows: chosen by the environment, said in the log, refused where it cannot be."""

import json
from types import SimpleNamespace

import pytest

from tests.sglang.startup import test_startup as startup

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("registered", "on_hopper")]

runner, build = startup.runner, startup.build
SIZE, HEADS = startup.DCP_SIZE, startup.HEADS


@pytest.fixture
def row_backend():
    """Imported before `build` puts a marker in place of the class that it inherits from."""
    from nsa_dcp.sglang_plugin.attention import row_backend

    return row_backend


@pytest.fixture
def made(row_backend, monkeypatch, runner, build):
    """Arguments of the backend by rows that was made; the model's layer has what that one looks at."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    calls = []

    def make(*args):
        calls.append(args)
        return SimpleNamespace(
            device="cpu",
            dsa_index_topk=2048,
            _fused_decode_metadata=SimpleNamespace(),
            dsa_topk_backend=DSATopKBackend.SGL_KERNEL,
            count_rows=lambda metadata: metadata.rows,
        )

    monkeypatch.setattr(row_backend, "RowPrefillBackend", make)
    (layer,) = runner.model
    layer.num_local_heads = HEADS // SIZE
    layer.attn_mqa = SimpleNamespace(tp_q_head_num=HEADS // SIZE)
    return calls


def log_line(caplog):
    (line,) = [record.message for record in caplog.records if record.message.startswith("nsa-dcp serves ")]
    return json.loads(line.removeprefix("nsa-dcp serves "))


@pytest.mark.parametrize("asked", [None, "", "queries"])
def test_prefills_go_by_queries_unless_asked(made, build, runner, monkeypatch, caplog, asked):
    if asked is None:
        monkeypatch.delenv("NSA_DCP_PREFILL", raising=False)
    else:
        monkeypatch.setenv("NSA_DCP_PREFILL", asked)
    with caplog.at_level("INFO", logger="nsa_dcp"):
        assert build(runner) == ("ours", runner)
    assert made == []
    served = log_line(caplog)
    assert served["prefill"] == "queries"
    assert "has not run on a GPU" not in caplog.text
    assert served["buffer_budget_bytes"]["page_gather"] == served["buffer_budget_bytes"]["row_exchange"] == 0
    assert runner.model[0].indexer._get_topk_ragged.rows_kept is None


@pytest.mark.parametrize("asked", ["rows", "auto"])
def test_prefills_go_by_rows_where_asked(made, build, runner, monkeypatch, caplog, asked):
    from sglang.srt.runtime_context import get_parallel

    monkeypatch.setenv("NSA_DCP_PREFILL", asked)
    with caplog.at_level("INFO", logger="nsa_dcp"):
        build(runner)
    ((model_runner, group, tell_layers, rule, pages),) = made
    assert model_runner is runner and group is get_parallel().dcp_group
    for dcp_size in (1, SIZE):
        tell_layers(dcp_size)
        assert [layer.dcp_size for layer in runner.model] == [dcp_size]
    sizes = rule.sizes
    assert (rule.way, sizes.dcp_size, sizes.heads, sizes.topk) == (asked, SIZE, HEADS // SIZE, 2048)
    assert sizes.row_bytes == runner.token_to_kv_pool.kv_buffer[0][0].nbytes
    config = runner.model_config.hf_config
    assert sizes.layers == config.num_hidden_layers and 0 < sizes.selecting_layers <= sizes.layers
    assert sizes.selections_travel
    served = log_line(caplog)
    assert served["prefill"] == asked
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"NSA_DCP_PREFILL={asked} has not run on a GPU yet" in warned
    budget = served["buffer_budget_bytes"]
    assert budget["page_gather"] == pages * 64 * sizes.row_bytes * (SIZE + 1)
    assert budget["row_exchange"] > 0
    # A rank keeps what it selects in the forwards that the backend names.
    assert runner.model[0].indexer._get_topk_ragged.rows_kept(SimpleNamespace(rows=9)) == 9


def test_a_way_that_there_is_not_stops_the_server(made, build, runner, monkeypatch):
    monkeypatch.setenv("NSA_DCP_PREFILL", "heads")
    with pytest.raises(ValueError, match=r"NSA_DCP_PREFILL=heads.*the ways are queries, rows, auto"):
        build(runner)


def test_broadcast_selections_stop_it(made, build, runner, monkeypatch):
    """They would be the first rank's, of its rows alone, on every rank."""
    from sglang.srt.environ import envs

    monkeypatch.setenv("NSA_DCP_PREFILL", "rows")
    with envs.SGLANG_DSA_TOPK_BROADCAST.override(True), pytest.raises(RuntimeError, match="SGLANG_DSA_TOPK_BROADCAST"):
        build(runner)
    assert made == []


def test_a_wire_stops_it(made, build, runner, monkeypatch):
    monkeypatch.setenv("NSA_DCP_PREFILL", "auto")
    monkeypatch.setenv("NSA_DCP_WIRE", "peer")
    with pytest.raises(ValueError, match="NSA_DCP_PREFILL=auto with NSA_DCP_WIRE=peer"):
        build(runner)
    assert made == []


def test_layers_that_would_not_hand_over_their_own_heads_stop_it(made, build, runner, monkeypatch):
    monkeypatch.setenv("NSA_DCP_PREFILL", "rows")
    runner.model[0].attn_mqa.tp_q_head_num = HEADS
    with pytest.raises(RuntimeError, match=r"attention with 16 heads, found 64"):
        build(runner)
