"""The step model beside measured steps: the right mode and setup, and what is taken from the first config."""

import dataclasses
import json

import pytest

from nsa_dcp.planning.dimensions import dims_from_config
from nsa_dcp.planning.steps.step_inputs import measured_inputs
from nsa_dcp.planning.steps.step_model import DecodeSetup, predict_step
from scripts.benchmarks.servers import compare_step_model, mid_size_model

DIMS = dataclasses.replace(
    dims_from_config(mid_size_model.mid_size_config(), name="mid-size"), expert_bytes=2.0, dense_bytes=2.0
)
INPUTS = measured_inputs(DIMS)
TP, DCP = DecodeSetup(2, 1, replicate_q_proj=False), DecodeSetup(2, 2, replicate_q_proj=True)


def report(config, decode, **resolved):
    steps = [{"context": context, "running": batch, "step_us": us} for context, batch, us in decode]
    return {"config": config, "resolved": resolved, "decode": steps}


@pytest.mark.parametrize(
    ("config", "resolved", "mode", "expected"),
    [
        ("tp2-dcp1", {}, "tp", {"dcp_size": 1}),
        ("tp2-dcp2-a2a-profile", {"dcp_replicate_q_proj": True}, "tp_dcp", {"replicates_q_proj": True}),
        ("tp2-dcp2-a2a", {"dcp_replicate_q_proj": None}, "tp_dcp", {"replicates_q_proj": True}),
        ("tp2-dcp2-ag_rs", {"dcp_replicate_q_proj": None}, "tp_dcp", {"replicates_q_proj": False}),
        ("tp2-dcp2-a2a-noqrep", {"dcp_replicate_q_proj": False}, "tp_dcp", {"replicate_q_proj": False}),
        ("tp2-dcp2", {"dcp_comm_backend": "ag_rs"}, "tp_dcp", {"comm_backend": "ag_rs"}),
        ("tp4-dcp4-cpi-slice", {}, "cp_dcp", {"cp_decode_attn_tp": True, "tp_size": 4}),
        ("tp4-dcp4-cpi", {}, "cp_dcp", {"cp_decode_attn_tp": False}),
    ],
)
def test_a_config_is_predicted_in_its_own_mode(config, resolved, mode, expected):
    found, setup = compare_step_model.setup_of(report(config, [], **resolved))
    assert found == mode
    assert {name: getattr(setup, name) for name in expected} == expected


def test_what_is_not_predicted_comes_from_the_first_config_at_the_closest_batch():
    tp = [predict_step(DIMS, TP, INPUTS, "tp", batch, 4096)["total"] for batch in (64, 128)]
    dcp = [predict_step(DIMS, DCP, INPUTS, "tp_dcp", batch, 4096)["total"] for batch in (64, 256)]
    reports = [
        report("tp2-dcp1", [(4096, 64, tp[0] + 500), (4096, 128, tp[1] + 700)]),
        report("tp2-dcp2-a2a", [(4096, 64, 9000.0), (4096, 256, 9500.0), (32768, 4, 9500.0), (4096, 300, 9500.0)]),
    ]
    rows = compare_step_model.compare(DIMS, INPUTS, reports)
    # 300 requests are more than the tables know.
    assert [(row["config"], row["batch"]) for row in rows[2:]] == [("tp2-dcp2-a2a", batch) for batch in (64, 256, 4)]
    assert [row["unpredicted"] for row in rows[:2]] == pytest.approx([500, 700])
    assert [row["calibrated"] for row in rows[2:4]] == pytest.approx([dcp[0] + 500, dcp[1] + 700])
    assert [row["calibrated_from"] for row in rows] == [None, None, 64, 128, None]
    assert rows[2]["predicted"] == pytest.approx(sum(rows[2]["terms"].values()))


def test_the_command_says_how_many_are_within_the_tolerance(tmp_path, capsys):
    tp = predict_step(DIMS, TP, INPUTS, "tp", 64, 4096)["total"]
    dcp = predict_step(DIMS, DCP, INPUTS, "tp_dcp", 64, 4096)["total"]
    decode = {"tp2-dcp1": tp + 3000, "tp2-dcp2-a2a": (dcp + 3000) / 1.1}
    reports = [report(config, [(4096, 64, us)]) for config, us in decode.items()]
    (tmp_path / "bench.json").write_text(json.dumps({"reports": reports}))
    (tmp_path / "config.json").write_text(json.dumps(mid_size_model.mid_size_config()))
    (tmp_path / "tables.json").write_text(json.dumps({"all_reduce": {"4096": 0.001}}))
    compare_step_model.main([str(tmp_path), str(tmp_path / "bench.json"), "--json", str(tmp_path / "rows.json")])
    printed = capsys.readouterr().out
    assert "With the first config's rest: 1 of 1 within 15%" in printed
    assert "| 1.10 |" in printed
    assert "Inputs replaced: none" in printed
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 2
    compare_step_model.main(
        [str(tmp_path), str(tmp_path / "bench.json"), "--tables", str(tmp_path / "tables.json"), "--json", "/dev/null"]
    )
    assert "Inputs replaced: all_reduce: given in" in capsys.readouterr().out


def test_a_given_all_reduce_replaces_the_measured_one():
    inputs = INPUTS | {"all_reduce": dataclasses.replace(INPUTS["all_reduce"], value={4096.0: 7.0})}
    terms = predict_step(DIMS, TP, inputs, "tp", 64, 4096)
    assert terms["all_reduce"] == pytest.approx(2 * DIMS.num_hidden_layers * 7.0)
    assert predict_step(DIMS, TP, INPUTS, "tp", 64, 4096)["all_reduce"] > terms["all_reduce"]


def test_a_missing_report_is_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="compare_step_model: "):
        compare_step_model.main(["glm-5.2", str(tmp_path / "none.json")])
