"""Every script that is told where to write refuses a place where it cannot, before it works, in one sentence."""

import importlib
import sys

import pytest

MISSING = "/nowhere/at/all"


@pytest.mark.parametrize(
    ("script", "argv", "option"),
    [
        ("benchmarks.collectives.bench", ["glm-5.2", "--device", "cpu", "--json", f"{MISSING}/x.json"], "--json"),
        ("benchmarks.collectives.bench", ["glm-5.2", "--json", "x.json", "--tables", f"{MISSING}/x.json"], "--tables"),
        ("benchmarks.decode_step.bench", ["--json", f"{MISSING}/x.json"], "--json"),
        ("benchmarks.kernels.bench", ["--json", f"{MISSING}/x.json"], "--json"),
        ("benchmarks.prefill_chunk.bench", ["--json", f"{MISSING}/x.json"], "--json"),
        ("benchmarks.servers.compare_step_model", ["glm-5.2", "bench.json", "--json", f"{MISSING}/x.json"], "--json"),
        ("benchmarks.servers.plot", ["bench.json", "--out", f"{MISSING}/x.svg"], "--out"),
        ("benchmarks.agent_traces.make_trace", ["--out", f"{MISSING}/x.json"], "--out"),
        ("served_checks.compare_answers", ["a.json", "b.json", "--rounding", "0", "--out", f"{MISSING}/x.md"], "--out"),
        ("served_checks.compare_answers", ["a", "b", "--rounding", "0", "--keep", f"{MISSING}/x.jsonl"], "--keep"),
        ("benchmarks.servers.bench", ["model", "FILE/out", "--config", "tp1-dcp1"], "out"),
        ("benchmarks.servers.mid_size_model", ["FILE/out"], "out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_place_that_cannot_be_written_is_refused_by_option_and_path(
    script, argv, option, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    argv = [word.replace("FILE", str(tmp_path / "file")) for word in argv]
    monkeypatch.setattr(sys, "argv", [script, *argv])
    monkeypatch.chdir(tmp_path)
    status = None
    try:
        status = importlib.import_module(f"scripts.{script}").main()
    except SystemExit as stop:
        status = stop.code
    said = status if isinstance(status, str) else capsys.readouterr().err.strip().splitlines()[-1]
    assert status not in (None, 0)
    path = next(word for word in argv if MISSING in word or str(tmp_path) in word)
    assert f"{option} must be" in said and f"got {path}" in said and "\n" not in said
    assert sorted(place.name for place in tmp_path.iterdir()) == ["file"]
