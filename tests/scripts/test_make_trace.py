"""The synthetic trace keeps the published statistics, is reproducible, and is a trace."""

import json
import statistics

import pytest

from scripts.benchmarks.agent_traces import make_trace
from scripts.benchmarks.agent_traces.dataset import read_trace


@pytest.fixture(scope="module")
def sessions():
    """Sessions as lists of word counts per turn; a tenth of the size, so that they are made quickly."""
    rows = make_trace.make_sessions(600, seed=1, scale=0.1)
    return [[len(turn["value"].split()) for turn in row["conversations"]] for row in rows]


def test_the_first_call_has_the_published_median(sessions):
    assert statistics.median(turns[0] for turns in sessions) == pytest.approx(1227.8, rel=0.05)


def test_calls_per_session_have_the_published_percentiles(sessions):
    calls = sorted(len(turns) // 2 for turns in sessions)
    assert calls[300] == pytest.approx(30, rel=0.1)
    assert calls[540] == pytest.approx(57, rel=0.15)


def test_each_call_grows_by_the_published_tokens(sessions):
    grown = [sum(turns[1:-1]) / (len(turns) // 2 - 1) for turns in sessions if len(turns) > 20]
    assert statistics.mean(grown) == pytest.approx(224.2, rel=0.03)


def test_input_to_output_is_as_published(sessions):
    prompt = sum(sum(turns[: 2 * call + 1]) for turns in sessions for call in range(len(turns) // 2))
    output = sum(sum(turns[1::2]) for turns in sessions)
    assert prompt / output == pytest.approx(131, rel=0.08)


def test_sessions_share_a_preamble_and_nothing_more():
    rows = make_trace.make_sessions(5, seed=3, scale=0.1)
    firsts = [row["conversations"][0]["value"].split() for row in rows]
    shared = next(at for at in range(len(firsts[0])) if len({tuple(first[: at + 1]) for first in firsts}) > 1)
    assert 98 <= shared <= 110


def test_a_seed_gives_one_trace(tmp_path):
    assert make_trace.make_sessions(3, seed=5, scale=0.01) == make_trace.make_sessions(3, seed=5, scale=0.01)
    assert make_trace.make_sessions(3, seed=5, scale=0.01) != make_trace.make_sessions(3, seed=6, scale=0.01)


def test_the_file_is_a_readable_trace(tmp_path, capsys):
    out = tmp_path / "trace.json"
    assert make_trace.main(["--sessions", "4", "--scale", "0.01", "--max-calls", "3", "--out", str(out)]) == 0
    sessions, skipped = read_trace(out)
    assert (len(sessions), skipped) == (4, [])
    assert max(session.num_calls for session in sessions) <= 3
    assert "4 sessions" in capsys.readouterr().out
    assert all(set(row) == {"conversations"} for row in json.loads(out.read_text()))


def test_a_folder_in_place_of_the_file_is_one_sentence(tmp_path, capsys):
    assert make_trace.main(["--sessions", "1", "--scale", "0.01", "--max-calls", "1", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error == f"make_trace: --out must be a file that can be written, got {tmp_path}: Is a directory\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sessions", "0"], "sessions must be positive, got 0"),
        (["--sessions", "-2"], "sessions must be positive, got -2"),
        (["--scale", "nan"], "scale must be positive, got nan"),
        (["--max-calls", "-1"], "max_calls must be positive, got -1"),
    ],
)
def test_bad_sizes_are_refused(tmp_path, capsys, argv, message):
    assert make_trace.main([*argv, "--out", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err
