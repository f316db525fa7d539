"""The one-GPU serving check: what it takes for a failure, and that it ends what it starts. Runs without sglang and a
GPU."""

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.servers import summarise_trace as profile
from scripts.served_checks import ask_servers as serve
from scripts.served_checks import compare_answers as compare
from scripts.served_checks import write_checkpoint
from scripts.served_checks.servers import server_process, shared_gpu

ROOT = Path(__file__).parents[3]
ROUNDING = 0.05


def report(**changes):
    top = [[(7, -0.10), (8, -2.40), (9, -4.00)], [(8, -0.70), (7, -0.72), (9, -5.00)]]
    answer = {"name": "9 tokens", "tokens": [7, 8], "logprobs": [-0.10, -0.70], "top": top, "cached_tokens": 4}
    return {
        "config": "tp4-dcp4",
        "model": "models/glm",
        "command": ["--max-total-tokens", "64"],
        "max_total_num_tokens": 256,
        "logged_capacity": [256],
        "retractions": 0,
        "misuse": {"malformed": 400, "over the pool": 400, "afterwards": 200},
        "scenes": {"first": [answer]},
    } | changes


def updated(status, said="nsa-dcp: online weight updates are not supported here", tokens_kept=True, **more):
    return {"config": "tp4-dcp4-update", "update": {"status": status, "said": said, "tokens_kept": tokens_kept} | more}


def answer_of(other):
    return other["scenes"]["first"][0]


def test_the_same_answers_pass():
    result = compare.compare_reports(report(), copy.deepcopy(report()), ROUNDING)
    assert (result.tokens, result.identical, result.flips, result.failures) == (2, 2, [], [])
    assert result.largest == 0


def test_a_near_tie_that_falls_the_other_way_is_shown_with_both_values():
    other = report()
    answer_of(other)["tokens"][1] = 7
    answer_of(other)["top"][1] = [(7, -0.70), (8, -0.71), (9, -5.0)]
    result = compare.compare_reports(report(), other, ROUNDING)
    assert result.failures == []
    (flip,) = result.flips
    assert "-0.70000 / -0.72000, -0.71000 / -0.70000" in flip


def test_another_token_that_is_no_near_tie_fails():
    other = report()
    answer_of(other)["tokens"][0] = 8
    result = compare.compare_reports(report(), other, ROUNDING)
    assert len(result.failures) == 1
    assert "7 and 8" in result.failures[0]


def test_the_same_tokens_with_other_log_probabilities_fail():
    other = report()
    answer_of(other)["top"][0] = [(7, -0.20), (8, -2.40), (9, -4.0)]
    result = compare.compare_reports(report(), other, ROUNDING)
    assert result.failures == ["first: 9 tokens, token 0: log-probabilities differ by 0.1000"]


def test_without_alternatives_only_the_same_tokens_pass():
    other = report()
    answer_of(other)["top"] = []
    assert compare.compare_reports(report(), copy.deepcopy(other), ROUNDING).failures == []
    answer_of(other)["tokens"][1] = 7
    assert compare.compare_reports(report(), other, ROUNDING).failures == ["first: 9 tokens, token 1: 8 and 7"]


def test_nothing_after_a_flip_is_compared():
    other = report()
    answer_of(other)["tokens"] = [8, 3]
    answer_of(other)["top"] = [[(8, -0.10), (7, -0.11)], [(3, -0.1)]]
    reference = report()
    answer_of(reference)["top"][0] = [(7, -0.10), (8, -0.12)]
    result = compare.compare_reports(reference, other, ROUNDING)
    assert result.failures == []
    assert result.tokens == 1


@pytest.mark.parametrize("missing", ["request", "token", "common-token"])
def test_what_is_missing_fails(missing):
    other = report()
    if missing == "request":
        other["scenes"] = {"first": []}
    elif missing == "token":
        answer_of(other)["tokens"].pop()
    else:
        answer_of(other)["top"][0] = [(1, -0.1)]
    assert len(compare.compare_reports(report(), other, ROUNDING).failures) == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_total_num_tokens": 64}, "64 rows x 4 ranks"),
        ({"logged_capacity": [64]}, "64 rows x 4 ranks"),
        ({"misuse": {"malformed": 500, "over the pool": 400, "afterwards": 200}}, "misuse"),
        ({"misuse": {"malformed": 400, "over the pool": 400, "afterwards": 503}}, "misuse"),
        ({"config": "tp4-dcp4-retract"}, "nothing was retracted"),
        ({"config": "tp4-dcp4-kill", "kill": {"killed": 7, "exit": None}}, "lived on"),
        ({"scenes": {"prefix": [{"cached_tokens": 0}, {"cached_tokens": 0}]}}, "no prefix was found"),
        (updated(200, tokens_kept=True), "the answers are the old ones"),
        (updated(400, tokens_kept=False), "refused, and the answers changed"),
        (updated(500, "a traceback"), "500: a traceback"),
        (updated(400, session=[200, 200, 200]), "a session's beginning, load and end were answered [200, 200, 200]"),
        (updated(400, session=[200, 400, 200], tokens_kept=False), "refused, and the answers changed"),
    ],
    ids=[
        *["capacity", "logged-capacity", "malformed", "afterwards", "retract", "kill", "prefix"],
        *["update-without-effect", "update-with-half-an-effect", "update-fails"],
        *["session-that-loads", "session-with-an-effect"],
    ],
)
def test_a_report_that_contradicts_itself_is_a_problem(changes, problem):
    (found,) = compare.check_report(report(**changes))
    assert problem in found


def test_requests_that_are_dealt_in_turn_need_not_find_a_prefix():
    scenes = {"prefix": [{"cached_tokens": 0}, {"cached_tokens": 0}]}
    assert compare.check_report(report(config="tp8-dcp4-dp2", scenes=scenes)) == []


def test_a_good_report_has_no_problem():
    assert compare.check_report(report()) == []


def test_answers_with_other_weights_are_compared_where_both_have_them():
    reference, other = report(), report()
    reference["scenes"] = {scene: [answer_of(report())] for scene in ("first", serve.UPDATED)}
    assert compare.compare_reports(reference, other, ROUNDING).tokens == 2
    answer = copy.deepcopy(answer_of(other))
    other["scenes"] = other["scenes"] | {serve.UPDATED: [answer | {"tokens": [8, 8]}]}
    assert len(compare.compare_reports(reference, other, ROUNDING).failures) == 1


@pytest.mark.parametrize("status", [200, 400])
def test_an_update_may_change_the_answers_or_be_refused(status):
    assert compare.check_report(report(**updated(status, tokens_kept=status != 200))) == []


def test_rounding_comes_from_two_stock_servers(tmp_path):
    other = report()
    answer_of(other)["top"][0] = [(7, -0.13), (8, -2.40), (9, -4.0)]
    paths = []
    for number, content in enumerate([report(), other]):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(content))
    command = [sys.executable, "-m", "scripts.served_checks.compare_answers", *map(str, paths)]
    command += ["--stock-pair", *map(str, paths)]
    run = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    done = run([*command, "--out", str(tmp_path / "summary.md")], check=True)
    assert "Rounding: 0.0600 nats" in done.stdout
    assert "| tp4-dcp4 | 2 of 2 | tp4-dcp4 | 256 | 0 | 0.0300 | same tokens |" in done.stdout
    assert (tmp_path / "summary.md").read_text() == done.stdout
    rows = tmp_path / "kept.jsonl"
    kept = run([*command, "--keep", str(rows)], check=True)
    assert kept.stdout == done.stdout
    reference, compared = map(json.loads, rows.read_text().splitlines())
    assert reference["reference"] is None and compared["reference"]["server"] == "tp4-dcp4"
    assert (compared["identical"], compared["tokens"], compared["largest_difference"]) == (2, 2, 0.03)
    strict = run([*command[:5], "--rounding", "0.01"])
    assert strict.returncode == 1
    assert "differ by 0.0300" in strict.stdout


@pytest.mark.parametrize(
    ("config", "present", "absent"),
    [
        ("tp1-dcp1", ["--tp-size 1", "--dcp-size 1", "fp8_e4m3", "--max-total-tokens 24576"], ["--dcp-comm-backend"]),
        ("tp8-dcp8-ag_rs-nograph", ["--max-total-tokens 3072", "ag_rs", "--cuda-graph-backend-decode disabled"], []),
        ("tp1-dcp1-bf16", ["--dsa-decode-backend flashmla_sparse"], ["flashmla_kv"]),
        ("tp4-dcp2-bf16-dp2", ["flashmla_kv", "--kv-cache-dtype bfloat16", "--attn-dp-size 2"], ["fp8_e4m3"]),
        ("tp2-dcp2-a2a-noqrep-nextn", ["--no-dcp-replicate-q-proj", "NEXTN"], []),
        ("tp4-dcp4-retract", ["--max-total-tokens 2048"], []),
        ("tp4-dcp4-cpi-slice", ["--cp-strategy interleave --attn-cp-size 4", "--enable-cp-decode-attn-tp"], ["zigzag"]),
        ("tp2-dcp2-pp2-c4096", ["--tp-size 2", "--pp-size 2", "--context-length 4096"], ["--attn-dp-size"]),
        ("tp8-dcp8-cpz-mixed", ["--cp-strategy zigzag --attn-cp-size 8", "--enable-mixed-chunk"], ["decode-attn-tp"]),
    ],
)
def test_a_config_says_how_its_server_is_started(config, present, absent):
    command, environment = serve.server_command(Path("model"), config, 31000)
    line = " ".join(command)
    assert all(word in line for word in present)
    assert not any(word in line for word in absent)
    assert ("SGLANG_TEST_RETRACT" in environment) == ("retract" in config)
    assert environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_ranks_with_gpus_of_their_own_use_sglang_s_all_reduce():
    command, environment = serve.server_command(Path("model"), "tp2-dcp2-gpus", 31000)
    assert "--disable-custom-all-reduce" not in command
    assert not any(name.startswith("NCCL") for name in environment)


def test_a_trace_is_summed_by_step():
    events = [
        {"ph": "X", "cat": "kernel", "name": "void attend<float>(int)", "ts": 0, "dur": 30},
        {"ph": "X", "cat": "kernel", "name": "attend", "ts": 30, "dur": 10},
        {"ph": "X", "cat": "kernel", "name": "merge", "ts": 40, "dur": 2},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "dur": 5},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "dur": 5},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "dur": 5},
        {"ph": "M", "name": "process_name"},
    ]
    lines = profile.summarise_trace(events, steps=2, top=1)
    assert lines[0] == (
        "1.5 kernels a step, 0.50 graph launches, 0.50 copies to the host, host waits: cudaStreamSynchronize 0.50"
    )
    assert lines[-1] == "| `attend` | 1.0 | 20.0 |"


FAKE_SERVER = """
import http.server, json, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer({"max_total_num_tokens": 1})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        entry = [-0.5, sum(body["input_ids"]) % 97, None]
        meta = {"cached_tokens": 0, "output_token_logprobs": [entry], "output_top_logprobs": [[entry]]}
        self.answer({"meta_info": meta})
    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_and_its_children_are_ended_whatever_happens(tmp_path, unused_port):
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        server_process.Server(
            [sys.executable, "-c", FAKE_SERVER, str(unused_port)], {}, unused_port, tmp_path / "log"
        ) as server,
    ):
        server.wait_until_ready(900)
        processes = [server.process.pid, *server.children()]
        assert len(processes) == 2
        answers = serve.ask_at_once(server, {"a": [1, 2], "b": [5]})
        assert [answer["tokens"] for answer in answers] == [[3], [5]]
        raise RuntimeError("on purpose")
    assert not any(server_process.is_running(process_id) for process_id in processes)


def test_a_server_that_dies_at_its_start_is_reported_with_its_log(tmp_path, unused_port):
    command = [sys.executable, "-c", "print('no such flag'); raise SystemExit(3)"]
    with (
        server_process.Server(command, {}, unused_port, tmp_path / "log") as server,
        pytest.raises(RuntimeError, match=r"(?s)ended with 3.*no such flag"),
    ):
        server.wait_until_ready(900)


def test_the_entry_point_is_found_as_if_it_were_installed(tmp_path):
    folder = server_process.write_entry_points(tmp_path / "site")
    program = "import importlib.metadata as m; print([e.value for e in m.entry_points(group='sglang.srt.plugins')])"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "nsa_dcp.sglang_plugin.plugin:register" in done.stdout


@pytest.mark.sglang
@pytest.mark.parametrize("module", ["entrypoints.engine", "managers.data_parallel_controller"])
def test_every_rank_is_given_the_first_gpu(tmp_path, module):
    folder = server_process.write_entry_points(tmp_path / "site", **shared_gpu.PLUGIN)
    program = f"""
from sglang.srt import {module.partition(".")[0]}
from sglang.srt.{module} import load_plugins
import sglang.srt.{module} as starter
load_plugins()
with starter.maybe_reindex_device_id(5) as gpu_id:
    print("gpu", gpu_id)
"""
    path = [str(folder), str(ROOT), str(ROOT / "kernels")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "gpu 0" in done.stdout, done.stderr


@pytest.mark.sglang
@pytest.mark.usefixtures("registered", "on_hopper")
@pytest.mark.parametrize("model", ["glm", "deepseek-mtp"])
@pytest.mark.parametrize(
    "config",
    [
        "tp1-dcp1",
        "tp8-dcp8-ag_rs-nograph",
        "tp4-dcp2-bf16",
        "tp4-dcp2-dp2",
        "tp2-dcp2-pp2",
        "tp2-dcp2-nextn-noqrep",
        "tp4-dcp4-a2a-qrep",
        "tp4-dcp4-cpi-c4096",
        "tp2-dcp2-cpi-mixed-nextn-bf16-nograph",
    ],
)
def test_sglang_accepts_the_command(parse_server_args, tmp_path, config, model):
    assert_accepted(parse_server_args, tmp_path, config, model)


@pytest.mark.sglang
@pytest.mark.usefixtures("registered", "on_hopper")
@pytest.mark.parametrize("config", ["tp8-dcp8-cpi-slice-ag_rs", "tp8-dcp8-cpz-slice", "tp4-dcp4-cpi-slice-nextn"])
def test_sglang_accepts_the_command_for_glm(parse_server_args, tmp_path, config):
    assert_accepted(parse_server_args, tmp_path, config, "glm-mtp" if "nextn" in config else "glm")


def assert_accepted(parse_server_args, tmp_path, config, model):
    from sglang.srt.arg_groups.overrides import resolving_view

    fields = write_checkpoint.COMMON | {"num_nextn_predict_layers": 0} | write_checkpoint.MODELS[model]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    command, _ = serve.server_command(tmp_path, config, 31000)
    server_args = parse_server_args([*command[3:], "--device", "cuda"])
    server_args.resolve_once()
    view = resolving_view(server_args)
    assert view.dcp_size == int(config.split("-")[1][3:])
    assert (view.dsa_prefill_backend, view.dsa_decode_backend) == ("flashmla_kv", "flashmla_kv")
    assert view.kv_cache_dtype == ("bfloat16" if "bf16" in config else "fp8_e4m3")
    assert view.context_length == (4096 if "c4096" in config else None)
    assert view.cuda_graph_config.prefill.backend == "disabled"
    assert view.cuda_graph_config.decode.backend == ("disabled" if "nograph" in config else "full")
    assert view.flashinfer_allreduce_fusion_backend is None
