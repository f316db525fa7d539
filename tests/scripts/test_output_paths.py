"""Every script that is told where to write refuses a place where it cannot, before it works, in one sentence."""

import importlib
import sys

import pytest

MISSING = "/nowhere/at/all"


@pytest.mark.parametrize(
    ("script", "argv", "option"),
    [
        ("bench_collectives", ["glm-5.2", "--device", "cpu", "--json", f"{MISSING}/x.json"], "--json"),
        ("bench_collectives", ["glm-5.2", "--json", "x.json", "--tables", f"{MISSING}/x.json"], "--tables"),
        ("bench_decode", ["--json", f"{MISSING}/x.json"], "--json"),
        ("bench_kernels", ["--json", f"{MISSING}/x.json"], "--json"),
        ("bench_prefill", ["--json", f"{MISSING}/x.json"], "--json"),
        ("compare_step_model", ["glm-5.2", "bench.json", "--json", f"{MISSING}/x.json"], "--json"),
        ("make_trace", ["--out", f"{MISSING}/x.json"], "--out"),
        ("one_gpu_compare", ["a.json", "b.json", "--rounding", "0", "--out", f"{MISSING}/x.md"], "--out"),
        ("one_gpu_compare", ["a.json", "b.json", "--rounding", "0", "--keep", f"{MISSING}/x.jsonl"], "--keep"),
        ("bench_server", ["model", "FILE/out", "--config", "tp1-dcp1"], "out"),
        ("mid_size_model", ["FILE/out"], "out"),
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
        status = importlib.import_module(script).main()
    except SystemExit as stop:
        status = stop.code
    said = status if isinstance(status, str) else capsys.readouterr().err.strip().splitlines()[-1]
    assert status not in (None, 0)
    path = next(word for word in argv if MISSING in word or str(tmp_path) in word)
    assert f"{option} must be" in said and f"got {path}" in said and "\n" not in said
    assert sorted(place.name for place in tmp_path.iterdir()) == ["file"]
