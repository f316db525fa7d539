"""The wire's benchmark and soak: what can be said without GPUs."""

import pytest

from scripts.benchmarks.collectives import soak_wire, wire_bench


def test_the_table_compares_transports_row_by_row():
    records = [
        {"ranks": 2, "rows": 16, "exchange": "partials", "over": "nccl", "us": 16.0},
        {"ranks": 2, "rows": 16, "exchange": "partials", "over": "peer", "us": 4.0},
        {"ranks": 2, "rows": 1, "exchange": "queries", "over": "nccl", "us": 10.0},
    ]
    lines = wire_bench.format_table(records)[2:]
    assert lines == ["| 2 | partials | 16 | 16.0 | - | 4.0 | 0.25 |", "| 2 | queries | 1 | 10.0 | - | - | - |"]


def test_heads_that_do_not_divide_are_refused_before_a_rank_starts(tmp_path, capsys):
    with pytest.raises(SystemExit, match="--heads must be a multiple of --ranks = 3, got 64"):
        wire_bench.main(["--json", str(tmp_path / "wire.json"), "--ranks", "3"])
    with pytest.raises(SystemExit):
        soak_wire.main(["--ranks", "3"])
    with pytest.raises(SystemExit):
        soak_wire.main(["--kill", "1", "--stop", "1"])
    assert "one of them" in capsys.readouterr().err


def test_without_gpus_a_soak_says_so_and_fails(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    assert soak_wire.main(["--replays", "1"]) == 1
    assert "ended:" in capsys.readouterr().err
