#!/usr/bin/env python3
"""As one_gpu_serve.py, with 96 requests at once: enough rows a step that ranks split the selecting of decode.

    one_gpu_crowd.py MODEL OUT --config tp1-dcp1 --config tp8-dcp8

Most contexts are longer than a selection. Afterwards the same prompts are asked in halves, of fewer rows than are
split: the same server then answers without splitting. A report also has the sizes of the decode steps that the server
logged; one in which fewer than 64 requests were decoded at once says nothing about split rows, and is a failure.
Compare with one_gpu_compare.py, and with one_gpu_rounding.py where near ties part.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import one_gpu_serve as serve
import shared_gpu
from server_process import ASKING_ERRORS, Server, describe_host, python_path, write_entry_points

REQUESTS, SPLIT_ROWS = 96, 64
# Of the same prompts, which are cached from the second on: then steps are full from the first token.
NEW_TOKENS = (16, 32)
# Scenes of the same prompts and lengths of answers.
ALL_AT_ONCE, IN_HALVES = f"{NEW_TOKENS[-1]} new tokens", f"{NEW_TOKENS[-1]} new tokens, in halves"
LENGTHS = (5, 700, 2047, 2049, 2300, 2600, 3000, 3300)
# Of all ranks together, more than all requests need. Too long a prompt is refused for the model's context.
POOL_TOKENS = 393216
CHANGED_FLAGS = {
    "--max-running-requests": str(REQUESTS),
    "--cuda-graph-max-bs-decode": str(REQUESTS),
    "--decode-log-interval": "1",
}


def crowd_command(model: Path, config: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Return one_gpu_serve's command and environment for a config, with room for all requests at once."""
    command, environment = serve.server_command(model, config, port)
    dcp_size = int(config.split("-")[1].removeprefix("dcp"))
    for flag, value in (CHANGED_FLAGS | {"--max-total-tokens": str(POOL_TOKENS // dcp_size)}).items():
        if flag in command:
            command[command.index(flag) + 1] = value
        else:
            command += [flag, value]
    return command, environment


def ask_crowd(server: Server) -> dict[str, list[dict]]:
    """Ask everything at once; return the answers by scene."""
    scenes = {"first": [serve.ask(server, "9 tokens", serve.prompt(9, 0), serve.FIRST_REQUEST_TIMEOUT_S)]}
    lengths = [LENGTHS[n % len(LENGTHS)] for n in range(REQUESTS)]
    requests = {f"{n}: {length} tokens": serve.prompt(length, 100 + n) for n, length in enumerate(lengths)}
    for new_tokens in NEW_TOKENS:
        scenes[f"{new_tokens} new tokens"] = serve.ask_at_once(server, requests, new_tokens)
    names = list(requests)
    scenes[IN_HALVES] = []
    for half in (names[: REQUESTS // 2], names[REQUESTS // 2 :]):
        asked = {name: requests[name] for name in half}
        scenes[IN_HALVES] += serve.ask_at_once(server, asked, NEW_TOKENS[-1])
    return scenes


def decode_sizes(log: str) -> dict[int, int]:
    """Return how many decode steps the log has, by the number of requests in them."""
    sizes: dict[int, int] = {}
    for found in re.findall(r"Decode batch.*?#running-req: (\d+)", log):
        sizes[int(found)] = sizes.get(int(found), 0) + 1
    return dict(sorted(sizes.items()))


def run(model: Path, config: str, out: Path, port: int) -> None:
    """Start a config's server, ask, and write its report.

    Raises:
        RuntimeError: it did not start or answer, or never decoded enough requests at once.
    """
    command, environment = crowd_command(model, config, port)
    plugins = {} if "gpus" in config.split("-") else shared_gpu.PLUGIN
    environment["PYTHONPATH"] = python_path(write_entry_points(out / f"{config}-site", **plugins))
    report = {"config": config, "model": str(model), "command": command, "environment": environment}
    report["host"] = describe_host()
    log = out / f"{config}.log"
    started = time.monotonic()
    with Server(command, environment, port, log) as server:
        report["ready_s"] = server.wait_until_ready(serve.START_TIMEOUT_S)
        report["max_total_num_tokens"] = server.get("/server_info", 30).get("max_total_num_tokens")
        report["scenes"] = ask_crowd(server)
        report["misuse"] = serve.misuse(server, times=16)
    text = log.read_text(errors="replace")
    logged = re.findall(r"max_total_num_tokens=(\d+), chunked_prefill_size", text)
    report |= {"logged_capacity": sorted({int(found) for found in logged}), "retractions": 0}
    report |= {"decode_sizes": decode_sizes(text), "seconds": time.monotonic() - started}
    if max(report["decode_sizes"], default=0) < SPLIT_ROWS:
        raise RuntimeError(f"no decode step of {SPLIT_ROWS} requests or more: {report['decode_sizes']}")
    (out / f"{config}.json").write_text(json.dumps(report, indent=1))
    print(f"{config}: done in {report['seconds']:.0f} s, decode steps by size {report['decode_sizes']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("--port", type=int, default=21000)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, config in enumerate(arguments.config):
        if (arguments.out / f"{config}.json").exists():
            continue
        try:
            run(arguments.model, config, arguments.out, arguments.port + 100 * number)
        except ASKING_ERRORS as error:
            failed.append(f"{config}: {error}")
            print(failed[-1], flush=True)
    if failed:
        sys.exit(f"{len(failed)} of {len(arguments.config)} configs have no report")


if __name__ == "__main__":
    main()
