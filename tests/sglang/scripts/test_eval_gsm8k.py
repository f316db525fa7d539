"""eval_gsm8k.sh with sglang's real runner, against a small local completions server that knows the answers."""

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[3]
ANSWERS = [number * 3 for number in range(20)]


class _Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send({"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "x"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = int(body["prompt"].rsplit("number ", 1)[1].split("?")[0])
        answer = ANSWERS[number] if number % 4 or not self.server.makes_mistakes else ANSWERS[number] + 1
        choice = {"index": 0, "text": f" The answer is {answer}.", "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
        self._send(
            {"id": "x", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice], "usage": usage}
        )

    def _send(self, answer):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def servers():
    """URLs of a server that is always right and of one that is wrong on every fourth question."""
    running = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) for _ in range(2)]
    for server, makes_mistakes in zip(running, (False, True)):
        server.makes_mistakes = makes_mistakes
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_address[1]}" for server in running]
    for server in running:
        server.shutdown()
        server.server_close()


def test_scores_of_two_servers_stand_side_by_side(servers, tmp_path, monkeypatch):
    data = tmp_path / "test.jsonl"
    rows = [{"question": f"What is number {n}?", "answer": f"#### {answer}"} for n, answer in enumerate(ANSWERS)]
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    out = tmp_path / "gsm8k.json"
    for name, url in zip(("tp", "tp_dcp"), servers):
        command = [ROOT / "scripts" / "eval_gsm8k.sh", "--server", f"{name}={url}", "--out", out]
        command += ["--questions", "15", "--threads", "4", "--data", data]
        done = subprocess.run(["bash", *map(str, command)], capture_output=True, text=True, cwd=tmp_path, timeout=900)
        assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    # The first five of the twenty are the runner's examples; 8, 12 and 16 of the rest are answered wrongly.
    assert result["servers"]["tp"]["accuracy"] == 1.0
    assert result["servers"]["tp_dcp"]["accuracy"] == pytest.approx(12 / 15)
    assert result["differences"][0]["accuracy"] == pytest.approx(-3 / 15)
    assert "tp_dcp - tp: -0.2000" in done.stdout
