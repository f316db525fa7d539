"""Ask a real sglang server with N ranks a fixed set of requests, and keep every token and log-probability.

    python -m scripts.served_checks.ask_servers MODEL OUT --config tp1-dcp1 --config tp4-dcp2-ag_rs-nograph

One server is started per config, asked, and ended; OUT/CONFIG.json is its report, and a config that has one is skipped.
Compare reports with compare_answers.py. All ranks share the first visible GPU (shared_gpu.py; NCCL 2.30 or later) and
take turns on it; under a CUDA MPS daemon they run beside each other, and 8 ranks answer in seconds. A config is
`tpN-dcpM`, then any of

    a2a, ag_rs     the exchange between ranks
    qrep, noqrep   --dcp-replicate-q-proj on or off
    dpN            attention data parallelism
    ppN            N pipeline stages of tpN ranks each
    cN             contexts of at most N tokens: a context-parallel server has room for the pages of one such request,
                   and gathers those of a batch in parts
    cpi, cpz       prefill context parallelism over all ranks, tokens dealt by interleave or zigzag
    slice          with those, decode runs a slice of the attention weights on each rank
    mixed          prefill batches take decode tokens along
    bf16           a bfloat16 cache; FP8 without it
    nograph        no decode graphs
    nextn          speculation with the model's own draft layer
    retract        a small pool, and requests are retracted every few steps
    update         at the end the weights are updated to those of the checkpoint MODEL-updated, or that is refused, and
                   then so is an update between /begin_weight_update and /end_weight_update
    kill           at the end one rank is killed
    profile        at the end eight decode steps of eight requests are traced, into OUT/CONFIG-trace
    gpus           each rank has a GPU of its own, and sglang's own all-reduce
    epN            expert parallelism over N ranks
    triton         FP8 projections by Triton, where sglang's choice is DeepGEMM, which compiles each shape for minutes
    stock          without nsa-dcp

Every wait is bounded, and every process is ended by its id.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from scripts.served_checks.servers import shared_gpu
from scripts.served_checks.servers.server_config import parse_sizes, server_command
from scripts.served_checks.servers.server_process import (
    ASKING_ERRORS,
    Server,
    describe_host,
    python_path,
    write_entry_points,
)

VOCAB, BOS = 16384, 2
NEW_TOKENS = 16
# Tokens that a query of the checkpoints attends to at most.
SELECTED = 2048
PROFILED_STEPS, PROFILED_TOKENS = 8, 1000
SINGLES = (1, 63, 64, 65, 2047, 2049, 9000)
MIXED = (5, 17, 64, 65, 129, 300, 511, 512, 513, 700, 1000, 1500, 2047, 2048, 2300, 3000)
# Fewer tokens than ranks, among long ones: a context-parallel rank then has no token of some requests.
UNEVEN = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 100, 640, 1025, 2047, 3000, 9000)
# At DCP 8 a page of the radix cache is 512 tokens: four of them.
PREFIX, AFTER_PREFIX = 2100, 100
# The scene of answers with other weights.
UPDATED = "updated"
START_TIMEOUT_S, FIRST_REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_S = 300, 400, 180
# sglang waits 5 s after a rank's death and, while another rank lives on, 60 s more for core dumps.
EXIT_TIMEOUT_S = 120


def prompt(length: int, seed: int) -> list[int]:
    """Token ids of a fixed prompt: different ones of some neighbourhood, of which it holds two thirds.

    The model looks up tokens at small distances (lookup_weights.py): it finds some of them, and others not.
    """
    draw = random.Random(1000003 * seed + length)
    width = length * 3 // 2 + 4
    first = draw.randrange(BOS + 1, VOCAB - width)
    return [BOS, *draw.sample(range(first, first + width), length - 1)]


def ask(
    server: Server, name: str, ids: list[int], timeout_s: float = REQUEST_TIMEOUT_S, new_tokens: int = NEW_TOKENS
) -> dict:
    """Generate greedily; return tokens, their log-probabilities, the best alternatives, and how much was cached."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 5}
    status, answer = server.post(body, timeout_s)
    if status != 200:
        raise RuntimeError(f"{name}: status {status}: {answer}")
    meta = answer["meta_info"]
    return {
        "name": name,
        "prompt_tokens": len(ids),
        "cached_tokens": meta.get("cached_tokens"),
        "tokens": [entry[1] for entry in meta["output_token_logprobs"]],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        # Speculation may leave them out.
        "top": [[(entry[1], entry[0]) for entry in best or []] for best in meta.get("output_top_logprobs") or []],
        "accepted_drafts": meta.get("spec_accept_length"),
    }


def ask_at_once(server: Server, requests: dict[str, list[int]], new_tokens: int = NEW_TOKENS) -> list[dict]:
    """Ask everything at the same time; the answers come in the order of the requests."""
    answers, failures = {}, []

    def work(name: str, ids: list[int]) -> None:
        try:
            answers[name] = ask(server, name, ids, new_tokens=new_tokens)
        except ASKING_ERRORS as error:
            failures.append(f"{name}: {error}")

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in requests.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(REQUEST_TIMEOUT_S + 30)
    if failures or len(answers) < len(requests):
        raise RuntimeError(f"{len(requests) - len(answers)} requests failed: {failures}")
    return [answers[name] for name in requests]


def ask_everything(server: Server, retract: bool) -> dict[str, list[dict]]:
    """The fixed set of requests, by scene."""
    scenes = {"first": [ask(server, "9 tokens", prompt(9, 0), FIRST_REQUEST_TIMEOUT_S)]}
    if retract:
        scenes["retracted"] = ask_at_once(server, {f"{n}: 1016 tokens": prompt(1016, n) for n in range(12)})
        return scenes
    scenes["singles"] = [ask(server, f"{length} tokens", prompt(length, 1)) for length in SINGLES]
    whole = prompt(PREFIX + AFTER_PREFIX, 2)
    scenes["prefix"] = [
        ask(server, "a prefix", whole[:PREFIX]),
        ask(server, "and more", whole),
    ]
    scenes["at once"] = ask_at_once(server, {f"{length} tokens at once": prompt(length, 4) for length in MIXED})
    scenes["uneven"] = ask_at_once(server, {f"{length} tokens uneven": prompt(length, 7) for length in UNEVEN})
    # By now more slots than one rank has rows were handed out; what the first answers left behind may be overwritten.
    scenes["again"] = [ask(server, f"{length} tokens again", prompt(length, 1)) for length in (2049, 65)]
    return scenes


def misuse(server: Server, times: int = 8) -> dict[str, object]:
    """What a malformed request and a prompt of 5,000 times `times` tokens are answered, and what one more is then."""
    small = {"temperature": 0, "max_new_tokens": 2}
    return {
        "malformed": server.post({"input_ids": "these are no ids", "sampling_params": small}, 60)[0],
        "over the pool": server.post({"input_ids": times * prompt(5000, 5), "sampling_params": small}, 60)[0],
        "afterwards": server.post({"input_ids": prompt(7, 6), "sampling_params": small}, 60)[0],
    }


def update_weights(server: Server, model: Path) -> tuple[dict[str, object], list[dict]]:
    """Have the server take another checkpoint's weights; return what it said, and how it then answers.

    Where it refuses, a session is begun, asked for the same and ended: of itself that undoes and repeats what a
    quantisation makes of the weights, and it must leave them as they are too.
    """

    def answers() -> list[dict]:
        return [ask(server, f"{length} tokens updated", prompt(length, 8)) for length in (64, 2500, 5000)]

    before = answers()
    other = model.with_name(f"{model.name}-updated")
    update = {"model_path": str(other)}, REQUEST_TIMEOUT_S, "/update_weights_from_disk"
    status, said = server.post(*update)
    found: dict[str, object] = {"status": status, "said": said}
    if status != 200:
        session = [server.post({}, REQUEST_TIMEOUT_S, "/begin_weight_update"), server.post(*update)]
        session.append(server.post({}, REQUEST_TIMEOUT_S, "/end_weight_update"))
        found["session"] = [status for status, _ in session]
        # The prompts are then computed again, by what the weights are now.
        server.post({}, REQUEST_TIMEOUT_S, "/flush_cache")
    after = answers()
    found["tokens_kept"] = [answer["tokens"] for answer in before] == [answer["tokens"] for answer in after]
    return found, after


def kill_a_rank(server: Server) -> dict[str, object]:
    """Kill one scheduler; the server must end by itself."""
    names = {child: Path(f"/proc/{child}/cmdline").read_text() for child in server.children()}
    schedulers = sorted(child for child, name in names.items() if "scheduler" in name)
    if not schedulers:
        return {"killed": None, "processes": sorted(names.values())}
    os.kill(schedulers[-1], signal.SIGKILL)
    started = time.monotonic()
    while server.process.poll() is None and time.monotonic() - started < EXIT_TIMEOUT_S:
        time.sleep(0.2)
    return {"killed": schedulers[-1], "exit": server.process.poll(), "seconds": time.monotonic() - started}


def profile(server: Server, folder: Path, num_ranks: int) -> list[str]:
    """Trace decode steps of eight running requests; return the trace files."""
    prompts = [prompt(1500, 10 + n) for n in range(8)]
    # Afterwards the prompts are cached, and what runs a second later are decode steps.
    server.generate(prompts, 1, REQUEST_TIMEOUT_S)
    asking = threading.Thread(target=server.generate, args=(prompts, PROFILED_TOKENS, REQUEST_TIMEOUT_S), daemon=True)
    asking.start()
    time.sleep(1)
    traces = server.trace_steps(folder, PROFILED_STEPS, num_ranks, 60)
    asking.join(REQUEST_TIMEOUT_S)
    return traces


def run_server(
    model: Path, config: str, out: Path, port: int, command: list[str], environment: dict, ask_all: Callable
) -> tuple[dict, str]:
    """Start a server and ask; return its report, which is not written yet, and its log.

    Args:
        command, environment: as `server_command` returns them.
        ask_all: called with the server; returns what the report has of its answers.
    """
    plugins = {} if "gpus" in config.split("-") else shared_gpu.PLUGIN
    environment["PYTHONPATH"] = python_path(write_entry_points(out / f"{config}-site", **plugins))
    report = {"config": config, "model": str(model), "command": command, "environment": environment}
    report["host"] = describe_host()
    path = out / f"{config}.log"
    started = time.monotonic()
    with Server(command, environment, port, path) as server:
        report["ready_s"] = server.wait_until_ready(START_TIMEOUT_S)
        report["max_total_num_tokens"] = server.get("/server_info", 30).get("max_total_num_tokens")
        report |= ask_all(server)
    log = path.read_text(errors="replace")
    logged = re.findall(r"max_total_num_tokens=(\d+), chunked_prefill_size", log)
    report["logged_capacity"] = sorted({int(found) for found in logged})
    report["retractions"] = len(re.findall(r"Retract(?:ed)? requests|#retracted", log))
    report["seconds"] = time.monotonic() - started
    return report, log


def run(model: Path, config: str, out: Path, port: int) -> str:
    """Start a config's server, ask, and write its report; return what to print."""
    options = config.split("-")

    def ask_all(server: Server) -> dict:
        found = {"scenes": ask_everything(server, "retract" in options), "misuse": misuse(server)}
        if "profile" in options:
            found["traces"] = profile(server, out / f"{config}-trace", parse_sizes(config)[0])
        if "update" in options:
            found["update"], answers = update_weights(server, model)
            if found["update"]["status"] == 200:
                found["scenes"][UPDATED] = answers
        if "kill" in options:
            found["kill"] = kill_a_rank(server)
        return found

    report, _ = run_server(model, config, out, port, *server_command(model, config, port), ask_all)
    (out / f"{config}.json").write_text(json.dumps(report, indent=1))
    return f"ready in {report['ready_s']:.0f} s, done in {report['seconds']:.0f} s"


def run_configs(run_one: Callable[[Path, str, Path, int], str], description: str) -> None:
    """Run the configs of the command line that have no report yet; exit with 1 if one of them then has none.

    Args:
        run_one: called with the model, the config, the folder for its report, and a port; returns what to print.
        description: for --help.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("--port", type=int, default=21000)
    parser.add_argument("--budget", type=float, default=570, help="seconds; no server is started in the last quarter")
    arguments = parser.parse_args()
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"out must be a folder, or a place for one, got {arguments.out}: {error.strerror}")
    started, failed = time.monotonic(), []
    for number, config in enumerate(arguments.config):
        if (arguments.out / f"{config}.json").exists():
            continue
        if time.monotonic() - started > 0.75 * arguments.budget:
            failed.append(f"{config}: not started, the time is up")
            continue
        try:
            told = run_one(arguments.model, config, arguments.out, arguments.port + 100 * number)
        except ASKING_ERRORS as error:
            failed.append(f"{config}: {error}")
            print(failed[-1], flush=True)
        else:
            print(f"{config}: {told}", flush=True)
    if failed:
        names = ", ".join(line.partition(":")[0] for line in failed)
        sys.exit(f"{len(failed)} of {len(arguments.config)} configs have no report: {names}")


if __name__ == "__main__":
    run_configs(run, __doc__)
