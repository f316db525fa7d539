"""bench_trace against a real local streaming server that also drops, refuses and garbles."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from scripts.benchmarks.agent_traces import bench as bench_trace


def write_trace(path, sessions=2, turns=5):
    rows = [
        {
            "conversations": [
                {"from": ("human", "gpt")[turn % 2], "value": f"session {number} turn {turn}"} for turn in range(turns)
            ]
        }
        for number in range(sessions)
    ]
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture
def bench(server, tmp_path, capsys):
    """Run bench_trace against the server; returns (exit status, report or None, stdout, stderr)."""

    def _bench(*more, trace=None, url=None):
        trace = trace or write_trace(tmp_path / "trace.json")
        argv = ["--url", url or server.url, "--trace", trace, "--out", tmp_path / "out", *more]
        status = bench_trace.main([str(word) for word in argv])
        report = tmp_path / "out" / "report.json"
        captured = capsys.readouterr()
        return status, json.loads(report.read_text()) if report.exists() else None, captured.out, captured.err

    return _bench


def test_call_k_resends_the_first_2k_minus_1_turns(bench, server):
    status, report, _, _ = bench("--concurrency", 1)
    assert status == 0
    assert [len(body["messages"]) for body in server.requests] == [1, 3, 5, 1, 3, 5]
    assert server.requests[1]["messages"] == [
        {"role": "user", "content": "session 0 turn 0"},
        {"role": "assistant", "content": "session 0 turn 1"},
        {"role": "user", "content": "session 0 turn 2"},
    ]
    assert report["calls"] == {"planned": 6, "finished": 6, "succeeded": 6, "failed": 0}
    assert report["complete"]


def test_requests_stream_and_ask_for_usage(bench, server):
    bench("--max-tokens", 7, "--ignore-eos", "--model", "named")
    body = server.requests[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("named", 7, 0)
    assert (body["stream"], body["stream_options"], body["ignore_eos"]) == (True, {"include_usage": True}, True)


def test_the_report_counts_tokens_times_and_cache_hits(bench, server):
    _, report, out, _ = bench("--concurrency", 1)
    # Two sessions of calls with 4, 12 and 20 words; the server had seen 0, 4 and 12 of them.
    assert report["prompt_tokens"]["mean"] == 12 and report["output_tokens"]["mean"] == 8
    assert report["cache_hit_rate"] == 2 * (0 + 4 + 12) / 72
    assert 0 < report["ttft_s"]["p50"] <= report["latency_s"]["max"] <= report["wall_s"]
    assert report["throughput"]["output_tokens_per_s"] == pytest.approx(48 / report["wall_s"])
    assert "6 of 6 calls succeeded" in out and "TTFT" in out and "of input tokens" in out


def test_turns_sessions_and_concurrency_are_limits(bench, server, tmp_path):
    trace = write_trace(tmp_path / "many.json", sessions=6, turns=9)
    _, report, _, _ = bench("--turns", 2, "--sessions", 4, "--concurrency", 3, trace=trace)
    assert report["calls"]["planned"] == 8 == len(server.requests)
    assert 1 <= server.most_in_flight <= 3


def test_every_line_of_calls_is_there(bench, tmp_path):
    bench()
    lines = [json.loads(line) for line in (tmp_path / "out" / "calls.jsonl").read_text().splitlines()]
    assert sorted((line["session"], line["call"]) for line in lines) == [
        (f"row {session}", call) for session in (1, 2) for call in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("drop", "the connection was dropped before the end of the stream"),
        ("refuse", "connection: RemoteDisconnected"),
        ("half", "connection: IncompleteRead"),
        ("http 500", "HTTP 500: oops"),
        ("not json", "the stream held a line that is not JSON: '{broken'"),
        ("not object", "the stream held a line that is no object: '[1]'"),
        ("server error", "the server said: {'message': 'out of slots'}"),
        ("no token", "the stream held no token"),
    ],
)
def test_a_fault_in_mid_run_is_counted_and_the_run_completes(bench, server, fault, said):
    server.misbehave = lambda number, body: fault if number in (2, 3) else None
    status, report, out, _ = bench("--concurrency", 1)
    assert status == 1
    assert report["calls"] == {"planned": 6, "finished": 6, "succeeded": 4, "failed": 2}
    assert report["complete"]
    (error,) = report["errors"]
    assert said in error and report["errors"][error] == 2
    assert f"error x2: {error}" in out
    # Times and tokens are of good calls alone.
    assert report["ttft_s"]["count"] == 4


def test_a_server_that_goes_away_leaves_a_report(bench, server):
    def go_away(number, body):
        if number == 3:
            server.socket.close()
        return "refuse" if number >= 3 else None

    server.misbehave = go_away
    status, report, _, _ = bench("--concurrency", 1)
    assert status == 1
    assert report["calls"]["succeeded"] == 2 and report["calls"]["failed"] == 4
    assert report["complete"]


def test_a_silent_server_is_timed_out(bench, server):
    server.misbehave = lambda number, body: "hang" if number == 1 else None
    status, report, _, _ = bench("--concurrency", 1, "--timeout-s", 10)
    assert status == 1
    assert report["errors"] == {"timed out after 10 s of silence": 1}


def test_a_server_without_usage_is_counted_by_pieces(bench, server):
    server.misbehave = lambda number, body: "no usage"
    status, report, out, _ = bench()
    assert (status, report["output_tokens"]["mean"]) == (0, 4)
    assert (report["prompt_tokens"], report["cache_hit_rate"]) == (None, None)
    assert "not reported by the server" in out


def test_unreadable_rows_are_skipped_named_and_counted(bench, tmp_path):
    good = json.dumps({"conversations": [{"from": "human", "value": "hello"}]})
    (tmp_path / "lines.jsonl").write_text("\n".join([good, "{broken", "[]", "", good]))
    status, report, _, err = bench(trace=tmp_path / "lines.jsonl")
    assert status == 0
    assert report["rows_skipped"] == [
        {"where": "line 2", "reason": report["rows_skipped"][0]["reason"]},
        {"where": "line 3", "reason": "no list of conversations"},
    ]
    assert report["setup"]["rows_skipped"] == 2
    assert "skipped line 2: not JSON" in err and "skipped 2 unreadable row(s) of 4" in err
    assert report["calls"]["planned"] == 2


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_a_summary_page_is_written(bench, tmp_path, suffix):
    page = tmp_path / f"summary{suffix}"
    assert bench("--summary", page)[0] == 0
    data = page.read_bytes()
    if suffix == ".png":
        assert data.startswith(b"\x89PNG")
    else:
        assert b"6 of 6 calls succeeded" in data and data.count(b"<circle") == 12


def test_a_page_escapes_what_the_server_says(bench, server, tmp_path):
    server.misbehave = lambda number, body: "not json" if number == 1 else None
    server.models = ["<script>alert(1)</script>"]
    bench("--summary", tmp_path / "summary.html")
    assert b"<script>" not in (tmp_path / "summary.html").read_bytes()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--concurrency", 0], "concurrency must be at least 1, got 0"),
        (["--turns", -1], "turns must be at least 1, got -1"),
        (["--timeout-s", 0], "timeout_s must be more than 0, got 0.0"),
        (["--summary", "x.pdf"], "summary must end in .html or .png"),
        (["--summary", "/nowhere/at/all/x.html"], "--summary must be a file in a folder that exists, got /nowhere/at"),
        (["--out", "/dev/null/x"], "--out must be a folder that can be written, got /dev/null/x: Not a directory"),
        (["--api-key-file", "/nowhere"], "No such file"),
    ],
)
def test_misuse_is_one_sentence_and_status_2(bench, server, argv, message):
    status, report, out, err = bench(*argv)
    assert (status, report, out, err.count("\n")) == (2, None, "", 1)
    assert err.startswith("benchmarks.agent_traces: ") and message in err
    assert not server.requests


def test_a_bad_url_and_an_absent_server_are_said_before_anything_runs(bench):
    assert "url must be http://host:port" in bench(url="ftp://x")[3]
    status, _, _, err = bench(url="http://127.0.0.1:1")
    assert status == 2
    assert "the server must list its models" in err and "start it, or name the model with --model" in err


def test_a_missing_matplotlib_is_said_before_anything_runs(bench, server, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, _, err = bench("--summary", "x.png")
    assert status == 2 and "pip install matplotlib, or use .html" in err
    assert not server.requests


def test_an_interrupt_keeps_the_partial_report(server, tmp_path):
    reached = threading.Event()

    def hang_third(number, body):
        if number == 3:
            reached.set()
            return "hang"
        return None

    server.misbehave = hang_third
    trace = write_trace(tmp_path / "trace.json")
    command = [
        sys.executable,
        "-m",
        bench_trace.__name__,
        "--url",
        server.url,
        "--trace",
        trace,
        "--out",
        tmp_path / "out",
    ]
    running = subprocess.Popen(
        [*map(str, command), "--concurrency", "1"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert reached.wait(900)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=900)
    assert running.returncode == 130, err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert not report["complete"]
    assert report["calls"]["planned"] == 6 and report["calls"]["succeeded"] == 2
    assert "incomplete: 4 calls were not made" in out
    assert "Traceback" not in err
