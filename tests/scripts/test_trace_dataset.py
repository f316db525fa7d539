"""Reading traces: what a row may be, what is skipped and why."""

import json

import pytest

from scripts.benchmarks.agent_traces.dataset import Session, read_trace

GOOD = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(json.dumps([GOOD, GOOD]), id="list"),
        pytest.param(json.dumps([GOOD, GOOD], indent=2), id="indented list"),
        pytest.param(f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n", id="lines"),
        pytest.param(f"\n  [{json.dumps(GOOD)},{json.dumps(GOOD)}]", id="list after blanks"),
    ],
)
def test_lists_and_lines_are_read_alike(tmp_path, text):
    (tmp_path / "t").write_text(text)
    sessions, skipped = read_trace(tmp_path / "t")
    assert [session.turns for session in sessions] == [("a", "b")] * 2
    assert skipped == []


def test_a_truncated_list_keeps_the_rows_before_the_cut(tmp_path):
    (tmp_path / "t").write_text(json.dumps([GOOD, GOOD, GOOD])[:-20])
    sessions, skipped = read_trace(tmp_path / "t")
    assert len(sessions) == 2
    assert skipped[0].where == "row 3" and "not JSON from here to the end of the file" in skipped[0].reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no list of conversations"),
        (None, "no list of conversations"),
        ({"conversations": []}, "no list of conversations"),
        ({"conversations": "x"}, "no list of conversations"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "turn 1 is from 'gpt', not from the user"),
        ({"conversations": [{"from": "human", "value": "x"}] * 2}, "turn 2 is from 'human', not from the assistant"),
        ({"conversations": [{"from": "tool", "value": "x"}]}, "turn 1 is from 'tool', not from the user"),
        ({"conversations": [{"from": "human", "value": None}]}, "turn 1 has no text"),
        ({"conversations": [{"from": "human"}]}, "turn 1 has no text"),
        ({"conversations": ["x"]}, "turn 1 has no text"),
        ({"conversations": [{"from": "system", "value": 1}]}, "the system turn has no text"),
        ({"conversations": [{"from": "system", "value": "x"}]}, "no turn beside the system's"),
    ],
)
def test_a_bad_row_is_skipped_with_its_reason(tmp_path, row, reason):
    (tmp_path / "t").write_text(json.dumps([GOOD, row]))
    sessions, skipped = read_trace(tmp_path / "t")
    assert len(sessions) == 1
    assert [(row.where, row.reason) for row in skipped] == [("row 2", reason)]


def test_bytes_that_are_not_utf8_do_not_stop_the_rest(tmp_path):
    (tmp_path / "t").write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    sessions, skipped = read_trace(tmp_path / "t")
    assert (len(sessions), len(skipped)) == (1, 1)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[", "\n"])
def test_a_trace_without_a_readable_session_is_refused(tmp_path, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ValueError, match="trace must hold at least one readable session"):
        read_trace(tmp_path / "t")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trace must be a readable file, got '.*nowhere': No such file"):
        read_trace(tmp_path / "nowhere")


def test_calls_of_a_session():
    session = Session("row 1", "be brief", ("q1", "a1", "q2"))
    assert session.num_calls == 2
    assert [message["role"] for message in session.messages(2)] == ["system", "user", "assistant", "user"]
    assert session.messages(1) == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q1"}]
    with pytest.raises(ValueError, match=r"call must be in \[1, 2\], got 3"):
        session.messages(3)
