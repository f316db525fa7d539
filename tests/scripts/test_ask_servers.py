"""The scripts that ask servers, from their command line to their reports, with a stand-in for sglang's server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Answers with tokens that depend on the prompt; refuses what is no list of ids, or longer than pool or model allow.
FAKE_LAUNCH_SERVER = """
import http.server, json, sys
option = lambda name: int(sys.argv[sys.argv.index(name) + 1])
tokens = option("--max-total-tokens") * option("--dcp-size")
print(f"max_total_num_tokens={tokens}, chunked_prefill_size=2048", flush=True)
print(f"Decode batch, #running-req: {option('--max-running-requests')}, #token: 1", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer(200, {"max_total_num_tokens": tokens})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if not isinstance(ids, list) or len(ids) > min(tokens, 65536):
            return self.answer(400, {})
        found = [[-0.5, (sum(ids) + n) % 97, None] for n in range(wanted)]
        best = [[entry, [-3.0, 98, None]] for entry in found]
        cached = 2048 if len(ids) == 2200 else 0
        meta = {"cached_tokens": cached, "output_token_logprobs": found, "output_top_logprobs": best}
        self.answer(200, {"meta_info": meta})
    def answer(self, status, content):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer
server.request_queue_size = 200
server(("127.0.0.1", option("--port")), Handler).serve_forever()
"""


@pytest.fixture
def ask(tmp_path, unused_port):
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(FAKE_LAUNCH_SERVER)

    def run(script, *configs):
        command = [sys.executable, "-m", f"scripts.served_checks.{script}", tmp_path / "model", tmp_path / "out"]
        command += ["--port", str(unused_port)]
        command += [word for config in configs for word in ("--config", config)]
        environment = os.environ | {"PYTHONPATH": str(package.parent)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)

    return run


@pytest.mark.parametrize("script", ["ask_servers", "ask_crowd"])
def test_servers_are_asked_and_their_reports_compared(ask, script, tmp_path):
    done = ask(script, "tp1-dcp1", "tp2-dcp2")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads((tmp_path / "out" / f"{config}.json").read_text()) for config in ("tp1-dcp1", "tp2-dcp2")]
    pool = 24576 if script == "ask_servers" else 393216
    for report in reports:
        assert report["misuse"] == {"malformed": 400, "over the pool": 400, "afterwards": 200}
        assert report["max_total_num_tokens"] == pool and report["logged_capacity"] == [pool]
    assert reports[0]["scenes"] == reports[1]["scenes"]
    paths = [tmp_path / "out" / f"{report['config']}.json" for report in reports]
    command = [sys.executable, "-m", "scripts.served_checks.compare_answers", *paths, "--rounding", "0.01"]
    compared = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert compared.returncode == 0 and "same tokens" in compared.stdout, compared.stdout + compared.stderr


def test_a_report_that_is_there_is_not_asked_for_again(ask, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tp1-dcp1.json").write_text("{}")
    done = ask("ask_servers", "tp1-dcp1")
    assert done.returncode == 0 and not (tmp_path / "out" / "tp1-dcp1.log").exists()


def test_a_server_that_does_not_start_is_named_and_the_next_one_asked(ask, tmp_path):
    done = ask("ask_servers", "dcp1", "tp1-dcp1")
    assert done.returncode == 1
    assert "1 of 2 configs have no report: dcp1" in done.stderr
    assert (tmp_path / "out" / "tp1-dcp1.json").exists()
