#!/usr/bin/env python3
"""Ask a real sglang server with N ranks a fixed set of requests, and keep every token and log-probability.

    one_gpu_serve.py MODEL OUT --config tp1-dcp1 --config tp4-dcp4 --config tp4-dcp2-ag_rs-nograph

One server is started per config, asked, and ended; OUT/CONFIG.json is its report, and a config that has one is skipped.
Compare reports with one_gpu_compare.py. All ranks share the first visible GPU (shared_gpu.py; NCCL 2.30 or later) and
take turns on it; under a CUDA MPS daemon they run beside each other, and 8 ranks answer in seconds. A config is
`tpN-dcpM`, then any of

    a2a, ag_rs     the exchange between ranks
    qrep, noqrep   --dcp-replicate-q-proj on or off
    dpN            attention data parallelism
    cpi, cpz       prefill context parallelism over all ranks, tokens dealt by interleave or zigzag
    slice          with those, decode runs a slice of the attention weights on each rank
    mixed          prefill batches take decode tokens along
    bf16           a bfloat16 cache; FP8 without it
    nograph        no decode graphs
    nextn          speculation with the model's own draft layer
    retract        a small pool, and requests are retracted every few steps
    kill           at the end one rank is killed
    profile        at the end eight decode steps of eight requests are traced, into OUT/CONFIG-trace
    gpus           each rank has a GPU of its own, and sglang's own all-reduce
    stock          without nsa-dcp

Every wait is bounded, and every process is ended by its id.
"""

import argparse
import datetime
import http.client
import importlib.metadata
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import shared_gpu

ROOT = Path(__file__).resolve().parents[1]
SHARED_GPU = {"shared_gpu": "shared_gpu:register"}
VOCAB, BOS = 16384, 2
NEW_TOKENS = 16
PROFILED_STEPS, PROFILED_TOKENS = 8, 1000
# Slots of all ranks together: fewer than all requests need, so that old ones are taken again, more than any one needs.
POOL_TOKENS = {False: 24576, True: 8192}
SINGLES = (1, 63, 64, 65, 2047, 2049, 9000)
MIXED = (5, 17, 64, 65, 129, 300, 511, 512, 513, 700, 1000, 1500, 2047, 2048, 2300, 3000)
# Fewer tokens than ranks, among long ones: a context-parallel rank then has no token of some requests.
UNEVEN = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 100, 640, 1025, 2047, 3000, 9000)
# At DCP 8 a page of the radix cache is 512 tokens: four of them.
PREFIX, AFTER_PREFIX = 2100, 100
START_TIMEOUT_S, FIRST_REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_S, EXIT_TIMEOUT_S = 300, 400, 180, 60


def server_command(model: Path, config: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a config's server, and what it adds to the environment."""
    parts = config.split("-")
    tp_size, dcp_size = (int(re.fullmatch(f"{name}(\\d+)", part)[1]) for name, part in zip(("tp", "dcp"), parts))
    options = set(parts[2:])
    bf16, retract = "bf16" in options, "retract" in options
    # A stock flashmla_kv packs a bfloat16 cache into FP8 in every call: without DCP, the bfloat16 kernel then.
    sparse = "flashmla_sparse" if bf16 and dcp_size == 1 else "flashmla_kv"
    flags = [
        f"--host 127.0.0.1 --port {port} --skip-tokenizer-init --skip-server-warmup --random-seed 1",
        f"--tp-size {tp_size} --dcp-size {dcp_size} --watchdog-timeout 300",
        f"--attention-backend nsa --dsa-prefill-backend {sparse} --dsa-decode-backend {sparse}",
        f"--kv-cache-dtype {'bfloat16' if bf16 else 'fp8_e4m3'} --page-size 64 --mem-fraction-static 0.3",
        f"--max-total-tokens {POOL_TOKENS[retract] // dcp_size} --max-running-requests 32 --chunked-prefill-size 2048",
        "--schedule-conservativeness 0.1 --cuda-graph-max-bs-decode 16 --enable-fp32-lm-head",
        # The same prefill everywhere.
        "--cuda-graph-backend-prefill disabled --enforce-disable-flashinfer-allreduce-fusion",
    ]
    if "gpus" not in options:
        # Ranks that share a GPU cannot map each other's memory.
        flags.append("--disable-custom-all-reduce")
    optional = {
        "nograph": "--cuda-graph-backend-decode disabled",
        "a2a": "--dcp-comm-backend a2a",
        "ag_rs": "--dcp-comm-backend ag_rs",
        "qrep": "--dcp-replicate-q-proj",
        "noqrep": "--no-dcp-replicate-q-proj",
        "cpi": f"--enable-prefill-cp --cp-strategy interleave --attn-cp-size {tp_size}",
        "cpz": f"--enable-prefill-cp --cp-strategy zigzag --attn-cp-size {tp_size}",
        "slice": "--enable-cp-decode-attn-tp",
        "mixed": "--enable-mixed-chunk",
        "nextn": "--speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 3",
    }
    flags += [flag for option, flag in optional.items() if option in options]
    flags += [f"--attn-dp-size {option[2:]}" for option in options if re.fullmatch(r"dp\d+", option)]
    # Without DCP too, short prompts are attended to by the sparse kernels.
    environment = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}
    if "gpus" not in options:
        environment |= shared_gpu.ENVIRONMENT
    if retract:
        environment |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    if "stock" in options:
        # The plugins that are loaded, by name.
        environment["SGLANG_PLUGINS"] = "none" if "gpus" in options else "shared_gpu"
    words = " ".join(flags).split()
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *words], environment


def write_entry_points(folder: Path, **more: str) -> Path:
    """Write what pip would install to make plugins known, for a tree that is on PYTHONPATH; return the folder.

    Args:
        folder: made if it is not there; what an earlier call wrote is replaced.
        more: plugins beside nsa-dcp's own, name to target.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dist_info = folder / "nsa_dcp-0.dist-info"
    dist_info.mkdir(parents=True, exist_ok=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: nsa-dcp\nVersion: 0\n")
    plugins = project["entry-points"]["sglang.srt.plugins"] | more
    lines = [f"{name} = {target}" for name, target in plugins.items()]
    (dist_info / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines, ""]))
    return folder


class Server:
    """A server process and its children. Used as a context: whatever happens inside, all of them are ended."""

    def __init__(self, command: list[str], environment: dict[str, str], port: int, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
            )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc_info: object) -> None:
        ids = [self.process.pid, *self.children()]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process_id in ids:
                try:
                    os.kill(process_id, number)
                except ProcessLookupError:
                    continue
            deadline = time.monotonic() + 15
            while any(_is_running(process_id) for process_id in ids) and time.monotonic() < deadline:
                self.process.poll()
                time.sleep(0.2)

    def children(self) -> list[int]:
        """Process ids of everything that the server started, by their session."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid and int(stat.parent.name) != self.process.pid:
                found.append(int(stat.parent.name))
        return found

    def wait_until_ready(self, timeout_s: float) -> float:
        """Wait for the server to answer; return the seconds it took."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            try:
                self.get("/model_info", timeout_s=5)
            except (OSError, http.client.HTTPException):
                time.sleep(1)
            else:
                return time.monotonic() - started
        raise TimeoutError(f"the server did not answer within {timeout_s} s:\n{self.tail()}")

    def get(self, path: str, timeout_s: float) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as response:
            return json.load(response)

    def post(self, body: object, timeout_s: float, path: str = "/generate") -> tuple[int, object]:
        """POST; return the status and the decoded answer (its text where it is no JSON)."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                text = response.read().decode()
                return response.status, json.loads(text) if text.startswith(("{", "[")) else text
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()[:300]

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
        "top": [[(entry[1], entry[0]) for entry in best] for best in meta.get("output_top_logprobs") or []],
        "accepted_drafts": meta.get("spec_accept_length"),
    }


def ask_at_once(server: Server, requests: dict[str, list[int]], new_tokens: int = NEW_TOKENS) -> list[dict]:
    """Ask everything at the same time; the answers come in the order of the requests."""
    answers, failures = {}, []

    def work(name: str, ids: list[int]) -> None:
        try:
            answers[name] = ask(server, name, ids, new_tokens=new_tokens)
        except (OSError, RuntimeError) as error:
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


def profile(server: Server, folder: Path) -> list[str]:
    """Trace decode steps of eight running requests; return the trace files."""
    prompts = [prompt(1500, 10 + n) for n in range(8)]

    def generate(new_tokens: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        server.post({"input_ids": prompts, "sampling_params": sampling}, REQUEST_TIMEOUT_S)

    # Afterwards the prompts are cached, and what runs a second later are decode steps.
    generate(1)
    asking = threading.Thread(target=generate, args=(PROFILED_TOKENS,), daemon=True)
    asking.start()
    time.sleep(1)
    body = {"output_dir": str(folder), "num_steps": PROFILED_STEPS, "activities": ["CPU", "GPU"], "with_stack": False}
    server.post(body, REQUEST_TIMEOUT_S, "/start_profile")
    asking.join(REQUEST_TIMEOUT_S)
    deadline = time.monotonic() + 60
    while not list(folder.glob("*.json.gz")) and time.monotonic() < deadline:
        time.sleep(1)
    # The last bytes of the slowest rank's file.
    time.sleep(5)
    return sorted(str(path) for path in folder.glob("*.json.gz"))


def describe_host() -> dict[str, object]:
    """The day, the GPUs, and the versions of what serves."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        gpus = [f"nvidia-smi: {error}"]
    versions = {}
    for package in ("sglang", "torch", "triton", "sgl-flash-mla", "sgl-deep-gemm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {"date": datetime.date.today().isoformat(), "gpus": gpus, "versions": versions}


def run(model: Path, config: str, out: Path, port: int) -> None:
    """Start a config's server, ask, and write its report."""
    command, environment = server_command(model, config, port)
    site = write_entry_points(out / f"{config}-site", **({} if "gpus" in config.split("-") else SHARED_GPU))
    path = [str(site), str(ROOT), str(ROOT / "kernels"), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    report = {"config": config, "model": str(model), "command": command, "environment": environment}
    report |= describe_host()
    started = time.monotonic()
    with Server(command, environment, port, out / f"{config}.log") as server:
        report["ready_s"] = server.wait_until_ready(START_TIMEOUT_S)
        info = server.get("/server_info", 30)
        report["max_total_num_tokens"] = info.get("max_total_num_tokens")
        report["scenes"] = ask_everything(server, "retract" in config.split("-"))
        report["misuse"] = misuse(server)
        if "profile" in config.split("-"):
            report["traces"] = profile(server, out / f"{config}-trace")
        if "kill" in config.split("-"):
            report["kill"] = kill_a_rank(server)
    log = (out / f"{config}.log").read_text(errors="replace")
    logged = re.findall(r"max_total_num_tokens=(\d+), chunked_prefill_size", log)
    report["logged_capacity"] = sorted({int(found) for found in logged})
    report["retractions"] = len(re.findall(r"Retract(?:ed)? requests|#retracted", log))
    report["seconds"] = time.monotonic() - started
    (out / f"{config}.json").write_text(json.dumps(report, indent=1))
    print(f"{config}: ready in {report['ready_s']:.0f} s, done in {report['seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("--port", type=int, default=21000)
    parser.add_argument("--budget", type=float, default=570, help="seconds; no server is started in the last quarter")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started, failed = time.monotonic(), []
    for number, config in enumerate(arguments.config):
        if (arguments.out / f"{config}.json").exists():
            continue
        if time.monotonic() - started > 0.75 * arguments.budget:
            failed.append(f"{config}: not started, the time is up")
            continue
        try:
            run(arguments.model, config, arguments.out, arguments.port + 100 * number)
        except (RuntimeError, OSError) as error:
            failed.append(f"{config}: {error}")
            print(failed[-1], flush=True)
    if failed:
        names = ", ".join(line.partition(":")[0] for line in failed)
        sys.exit(f"{len(failed)} of {len(arguments.config)} configs have no report: {names}")


if __name__ == "__main__":
    main()
