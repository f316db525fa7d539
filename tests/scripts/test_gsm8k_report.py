"""GSM8K results side by side: added server by server, compared with the first."""

import json
import math

import pytest

from scripts import gsm8k_report


def metrics_file(path, **fields):
    path.write_text(json.dumps(fields))
    return path


def test_servers_are_added_one_by_one_and_compared_with_the_first(tmp_path):
    out = tmp_path / "out.json"
    for name, score in (("tp", 0.95), ("tp_dcp", 0.94), ("cp_dcp", 0.96)):
        metrics = metrics_file(tmp_path / "m.json", score=score, latency=2.0, output_throughput=100.0)
        gsm8k_report.add_score(out, name, "http://x", 200, metrics)
    result = json.loads(out.read_text())
    assert list(result["servers"]) == ["tp", "tp_dcp", "cp_dcp"]
    assert result["servers"]["tp"]["standard_error"] == pytest.approx(math.sqrt(0.95 * 0.05 / 200))
    assert [(d["from"], d["to"], round(d["accuracy"], 3)) for d in result["differences"]] == [
        ("tp", "tp_dcp", -0.01),
        ("tp", "cp_dcp", 0.01),
    ]
    text = gsm8k_report.format_result(result)
    assert "tp_dcp - tp: -0.0100 +-" in text


def test_a_name_scored_again_is_replaced(tmp_path):
    out = tmp_path / "out.json"
    for score in (0.5, 0.6):
        gsm8k_report.add_score(out, "tp", "u", 10, metrics_file(tmp_path / "m.json", score=score))
    assert json.loads(out.read_text())["servers"]["tp"]["accuracy"] == 0.6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "metrics must be a readable JSON file"),
        ("[]", "metrics must hold a JSON object"),
        ("{}", "metrics must hold a score between 0 and 1"),
        ('{"score": 2}', "metrics must hold a score between 0 and 1"),
        ('{"score": true}', "metrics must hold a score between 0 and 1"),
    ],
)
def test_metrics_that_are_none_are_refused(tmp_path, content, message):
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        gsm8k_report.add_score(tmp_path / "out.json", "tp", "u", 10, tmp_path / "m.json")
    assert not (tmp_path / "out.json").exists()
