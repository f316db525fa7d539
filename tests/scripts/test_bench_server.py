"""bench_server against a fake server: pools of equal bytes, steps from a log, one failure is one gap."""

import itertools
import json
import socket
import sys
from types import SimpleNamespace

import pytest
import torch

from nsa_dcp.planning.capacity import bytes_per_token
from nsa_dcp.planning.dimensions import dims_from_config, preset_dims
from scripts.benchmarks.servers import bench as bench_server
from scripts.benchmarks.servers import cases, mid_size_model, probe, random_weights
from scripts.benchmarks.servers import report as server_bench_report
from scripts.served_checks import ask_servers

# Logs like sglang 0.5.23 while a batch decodes; admits at most LIMIT requests, dies when asked for KILL_AT of them.
FAKE_SERVER = """
import http.server, json, os, pathlib, sys, threading, time
port, limit, kill_at = map(int, sys.argv[1:4])
aborted, lock = threading.Event(), threading.Lock()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer({"max_total_num_tokens": 4096, "dcp_comm_backend": "a2a"})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/abort_request":
            aborted.set()
            return self.answer({})
        if self.path == "/start_profile":
            folder = pathlib.Path(body["output_dir"])
            folder.mkdir(parents=True)
            for rank in range(2): (folder / f"{rank}.trace.json.gz").write_bytes(b"x")
            return self.answer({})
        ids = body["input_ids"]
        assert all(isinstance(token, int) for prompt in ids for token in prompt)
        if len(ids) == kill_at: os._exit(9)
        if body["sampling_params"]["max_new_tokens"] > 1:
            running = min(limit, len(ids))
            aborted.clear()
            for number in range(60):
                # The first line of a batch still holds a prefill.
                rate = running * (1.0 if number == 0 else 500.0)
                print(f"[TP0] Decode batch, #running-req: {running}, #token: 7, token usage: 0.10, cuda graph: True, "
                      f"gen throughput (token/s): {rate:.2f}, #queue-req: {len(ids) - running}", flush=True)
                if aborted.wait(0.01): break
        self.answer([{"meta_info": {"cached_tokens": 0}} for _ in ids])
    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args): pass
print("%s: 12" % sys.argv[4])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A function that benchmarks configs with fake servers; returns the exit message and the reports by config."""
    config = mid_size_model.mid_size_config()
    (tmp_path / "config.json").write_text(json.dumps(config))

    def run(*argv, configs=("tp2-dcp1", "tp2-dcp2-a2a"), limit=1000, kill_at=-1, code=FAKE_SERVER):
        commands = []

        def fake_command(model, name, port, rows, batches, extra):
            commands.append(cases.bench_command(model, name, port, rows, batches, extra)[0])
            sizes = [str(value) for value in (port, limit, kill_at)]
            return [sys.executable, "-c", code, *sizes, random_weights.INITIALISED], {}

        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        out = tmp_path / "out"
        words = [word for name in configs for word in ("--config", name)]
        monkeypatch.setattr(bench_server, "bench_command", fake_command)
        monkeypatch.setattr(sys, "argv", ["bench", str(tmp_path), str(out), *words, "--port", str(port), *argv])
        message = None
        try:
            bench_server.main()
        except SystemExit as error:
            message = error.code
        reports = {name: json.loads((out / f"{name}.json").read_text()) for name in configs}
        return message, reports, (out / "bench.md").read_text(), commands

    return run


SMALL = ("--contexts", "256", "1024", "--concurrencies", "1", "4", "--prefill", "512", "--samples", "3")


def test_every_case_is_timed_from_the_log_of_a_full_batch(bench):
    message, reports, text, commands = bench(*SMALL, "--pool-gib", "0.04")
    assert message is None
    for name, report in reports.items():
        assert report["complete"] and report["random_weights"] and not report["failures"], name
        assert {one["step_us"] for one in report["decode"]} == {2000.0}
        assert all(one["running"] == one["concurrency"] and one["graph"] for one in report["decode"])
        assert [one["tokens"] for one in report["prefill"]] == [512]
    # Twice the tokens less the index keys, in the same bytes: more requests of 1,024 tokens.
    held = [max(one["running"] for one in report["decode"] if one["context"] == 1024) for report in reports.values()]
    assert held == [2, 4]
    assert "| 1,024 | 4 | - | 2.00" in text
    assert "| 1,024 | tp2-dcp2-a2a | 4 | 2.00 | 2,000 (the pool holds more) | 2.00x |" in text
    assert [command[command.index("--load-format") + 1] for command in commands] == ["dummy", "dummy"]


def test_what_was_prefilled_for_one_case_is_not_prefilled_for_the_next(bench):
    _, reports, _, _ = bench(*SMALL, "--pool-gib", "1")
    # 1 and 4 requests of 256 tokens; then 768 more tokens for 1 of them, and for 3.
    prefilled = [one["prefilled_tokens"] for one in reports["tp2-dcp1"]["decode"] if not one["largest"]]
    assert prefilled == [256, 3 * 256, 768, 3 * 768]


def test_a_batch_that_is_never_full_tells_how_many_ran(bench):
    _, reports, text, _ = bench(*SMALL, "--pool-gib", "1", limit=3, configs=("tp2-dcp1",))
    assert [one["running"] for one in reports["tp2-dcp1"]["decode"]] == [1, 3, 1, 3]
    assert "3 ran" in text


def test_a_server_that_dies_loses_only_what_comes_after_it(bench):
    message, reports, text, _ = bench(*SMALL, "--pool-gib", "1", kill_at=4)
    assert "2 of 2" in message
    for report in reports.values():
        assert [one["concurrency"] for one in report["decode"]] == [1]
        assert not report["complete"]
        assert [failure["case"] for failure in report["failures"]] == ["256x4", "server"]
    assert "not complete" in text


def test_a_server_that_does_not_start_does_not_lose_the_other(bench):
    code = "import sys; print('no such flag'); sys.exit(3)"
    message, reports, text, _ = bench(*SMALL, code=code)
    assert "2 of 2" in message
    assert "no such flag" in reports["tp2-dcp1"]["failures"][0]["error"]
    assert "not complete" in text


def test_no_case_is_begun_after_the_time_to_ask(bench):
    _, reports, _, _ = bench(*SMALL, "--ask-limit", "0", configs=("tp2-dcp1",))
    report = reports["tp2-dcp1"]
    assert report["decode"] == [] and report["failures"] == []
    assert {one["reason"] for one in report["skipped"] if "case" in one} == {"the time to ask this server is up"}


def test_a_complete_config_is_not_run_again_and_a_traced_one_has_its_files(bench):
    configs = ("tp2-dcp2-a2a-profile",)
    flags = ("--case", "256x2", "--prefill", "512", "--samples", "2", "--profile", "256x2")
    _, reports, _, commands = bench(*flags, configs=configs)
    report = reports[configs[0]]
    assert [path.rpartition("/")[2] for path in report["traces"]] == ["0.trace.json.gz", "1.trace.json.gz"]
    assert report["traced_case"] == {"context": 256, "concurrency": 2}
    assert len(commands) == 1
    _, again, _, commands = bench(*flags, configs=configs)
    assert commands == [] and again[configs[0]] == report


@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8])
def test_every_pool_has_the_same_bytes(dcp_size):
    dims = preset_dims("glm-5.2")
    rows = cases.pool_rows(dims, 8, dcp_size, 5.5)
    taken = rows * dcp_size * bytes_per_token(dims, "fp8_e4m3", dcp_size).total
    one_page = 64 * dcp_size * bytes_per_token(dims, "fp8_e4m3", dcp_size).total
    assert 0 <= 5.5 * 2**30 - taken < one_page
    assert rows % 64 == 0


@pytest.mark.parametrize(
    ("config", "present", "absent"),
    [
        ("tp2-dcp1", ["--max-total-tokens 640", "--cuda-graph-bs-decode 1 16 64"], ["--disable-custom-all-reduce"]),
        ("tp2-dcp2-a2a-nocar", ["--disable-custom-all-reduce", "--enforce-disable-flashinfer"], []),
        ("tp2-dcp2-a2a-fuse", [], ["--enforce-disable-flashinfer", "--disable-custom-all-reduce"]),
        ("tp2-dcp2-cpi-slice", ["--enable-cp-decode-attn-tp", "--attn-cp-size 2"], ["--enable-fp32-lm-head"]),
        ("tp2-dcp2-shared", ["--disable-custom-all-reduce"], []),
    ],
)
def test_a_command_overrides_what_is_for_tiny_models(config, present, absent, tmp_path):
    command, _ = cases.bench_command(tmp_path, config, 31000, 640, [16, 1, 64])
    line = " ".join(command)
    assert all(words in line for words in present)
    assert not any(words in line for words in absent)
    # The last value counts.
    assert line.rindex("--max-total-tokens 640") > line.index("--max-total-tokens")
    assert line.rindex("--chunked-prefill-size 8192") > line.index("--chunked-prefill-size")


def test_a_stock_server_has_random_weights_too(tmp_path):
    assert cases.bench_command(tmp_path, "tp2-dcp1-stock", 1, 64, [1])[1]["SGLANG_PLUGINS"] == "random_weights"


@pytest.mark.parametrize("config", ["dcp2", "tp2", "tp2-dcp", "tp2-dcp2x"])
def test_a_config_without_sizes_is_refused(config):
    with pytest.raises(ValueError, match="config must begin with tpN-dcpM"):
        ask_servers.parse_sizes(config)


def test_cases_over_the_pool_are_skipped_with_the_reason_and_the_largest_batch_is_added():
    chosen, skipped = cases.choose_cases([4096], [1, 16, 64], 40 * 4608, 2, 64)
    assert [(case.concurrency, case.largest) for case in chosen] == [(1, False), (16, False), (40, True)]
    (one,) = skipped
    assert (one["context"], one["concurrency"]) == (4096, 64)
    assert str(64 * 4608) in one["reason"] and str(40 * 4608) in one["reason"]


def test_a_shorter_prompt_is_the_beginning_of_a_longer_one_and_no_two_are_alike():
    prompts = cases.Prompts(1000)
    short, other = list(prompts.take(3, 50)), prompts.take(4, 50)
    assert prompts.take(3, 500)[:50] == short != other
    assert cases.Prompts(1000).take(3, 500)[:50] == short
    assert min(prompts.take(3, 5000)) >= cases.FIRST_TOKEN and max(prompts.take(3, 5000)) < 1000


def test_a_log_s_decode_lines_are_read_and_others_are_not():
    text = (
        "[2026-11-29 10:00:00 TP0] Prefill batch, #new-seq: 1, #queue-req: 0, input throughput (token/s): 5.00\n"
        "[2026-11-29 10:00:00 TP0] Decode batch, #running-req: 8, #token: 9, token usage: 0.01, cuda graph: False, "
        "gen throughput (token/s): 400.00, #queue-req: 2\n"
        "[2026-11-29 10:00:00 TP0] Decode batch, #running-req: 8, #token: 9, token usage: 0.01, cuda graph: True, "
        "gen throughput (token/s): 0.00, #queue-req: 0\n"
        "[2026-11-29 10:00:00 TP0] Decode batch, #running-req: 8, #tok"
    )
    (line,) = probe.parse_decode_lines(text)
    assert (line.running, line.graph, line.queued, line.step_us) == (8, False, 2, 20000.0)


def test_a_short_prefill_says_nothing_about_a_long_one_and_a_hopeless_case_is_not_begun(monkeypatch):
    class Instant:
        asked = 0

        def generate(self, ids, new_tokens, timeout_s):
            self.asked += len(ids)
            return [{"cached_tokens": 0} for _ in ids]

    server = Instant()
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=itertools.count(step=0.01).__next__))
    asking = probe.ServerProbe(server, cases.Prompts(1000), 10**9, 30)
    asking.time_prefill(64)
    assert asking.tokens_per_s == 0
    asking.time_prefill(8192)
    assert asking.tokens_per_s > 0
    asking.tokens_per_s = 1000.0
    before = server.asked
    with pytest.raises(TimeoutError, match="40960 tokens to prefill take 41 s"):
        asking.time_decode(cases.ServerCase(4096, 10), 3)
    assert server.asked == before


def test_an_empty_set_of_reports_says_so():
    assert server_bench_report.format_report([]) == "No config has a report.\n"


def test_the_mid_size_model_has_the_preset_s_layers():
    config = mid_size_model.mid_size_config(num_layers=14, num_experts=16)
    dims, preset = dims_from_config(config, name="mid-size"), preset_dims("glm-5.2")
    assert dims.indexer_layers == preset.indexer_layers[: len(dims.indexer_layers)] == (0, 1, 2, 6, 10)
    kept = "hidden_size num_attention_heads q_lora_rank v_head_dim index_n_heads num_experts_per_tok index_topk"
    assert [getattr(dims, name) for name in kept.split()] == [getattr(preset, name) for name in kept.split()]
    assert mid_size_model.count_parameters(config) == pytest.approx(10.4e9, rel=0.01)


@pytest.mark.parametrize(("sizes", "message"), [((3, 16), "layers must be more"), ((4, 7), "experts must be at least")])
def test_a_mid_size_model_that_makes_no_sense_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        mid_size_model.mid_size_config(*sizes)


def test_random_weights_have_the_size_of_trained_ones_and_repeat():
    def build():
        model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(64), "up": torch.nn.Linear(256, 512)}).bfloat16()
        random_weights.fill_weights(model)
        return model

    first, second = build(), build()
    assert (first["norm"].weight == 1).all() and (first["up"].bias == 0).all()
    assert first["up"].weight.float().std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert torch.equal(first["up"].weight, second["up"].weight)
