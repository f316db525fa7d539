"""Decode steps, prefill and throughput of real sglang servers on several GPUs, with pools of equal bytes per rank.

    python -m scripts.benchmarks.servers.mid_size_model MODEL
    python -m scripts.benchmarks.servers.bench MODEL OUT --config tp2-dcp1 --config tp2-dcp2-a2a-profile

One server is started per config (ask_servers.py lists them; besides: `shared`, ranks share a GPU; `nocar`, no custom
all-reduce; `fuse`, a fused all-reduce and norm; `profile`, eight steps are traced), asked by token ids, and ended.
The first config is what the others are compared with. The step time is what the server logs for a full steady batch.
Prompts are distinct; what an earlier case has prefilled comes from the prefix cache.

OUT/CONFIG.json, OUT/bench.json and OUT/bench.md are written after every case. A config whose report is complete is not
run again. Every wait is bounded; one failed case or server does not lose the others.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from nsa_dcp.command_line import make_output_folder
from nsa_dcp.planning.dimensions import ModelDims, read_config
from scripts.benchmarks.servers.cases import (
    Prompts,
    ServerCase,
    bench_command,
    choose_cases,
    pool_rows,
    token_bytes,
)
from scripts.benchmarks.servers.probe import ServerProbe
from scripts.benchmarks.servers.random_weights import INITIALISED
from scripts.benchmarks.servers.report import format_report
from scripts.served_checks.servers import shared_gpu
from scripts.served_checks.servers.server_config import parse_sizes
from scripts.served_checks.servers.server_process import (
    ASKING_ERRORS,
    Server,
    describe_host,
    python_path,
    write_entry_points,
)

# What the server resolved, from /server_info.
RESOLVED = (
    "dcp_comm_backend dcp_replicate_q_proj disable_custom_all_reduce flashinfer_allreduce_fusion_backend "
    "enable_symm_mem dsa_prefill_backend dsa_decode_backend kv_cache_dtype moe_runner_backend chunked_prefill_size "
    "cp_strategy enable_cp_decode_attn_tp max_total_num_tokens version"
)
_PROFILED_STEPS, _TRACE_WAIT_S = 8, 40


class ConfigRun:
    """One config's server, from its start to its end. `report` is on disk after every step."""

    def __init__(self, config: str, dims: ModelDims, arguments: argparse.Namespace, port: int, host: dict) -> None:
        self.config, self.arguments, self.port = config, arguments, port
        self.dims = dims
        self.out = arguments.out
        self.tp_size, self.dcp_size = parse_sizes(config)
        self.rows = pool_rows(dims, self.tp_size, self.dcp_size, arguments.pool_gib)
        self.cases, skipped = self._choose_cases()
        self.report: dict[str, object] = {
            "config": config,
            "model": str(arguments.model),
            "complete": False,
            "host": host,
            "pool": {
                "gib_per_rank": arguments.pool_gib,
                "rows_per_rank": self.rows,
                "tokens": self.rows * self.dcp_size,
                "bytes_per_token_and_rank": token_bytes(dims, self.dcp_size),
            },
            "prefill": [],
            "decode": [],
            "skipped": skipped,
            "failures": [],
        }

    def _choose_cases(self) -> tuple[list[ServerCase], list[dict[str, object]]]:
        arguments, most = self.arguments, max(self.arguments.concurrencies)
        capacity = self.rows * self.dcp_size
        if arguments.case is None:
            return choose_cases(arguments.contexts, arguments.concurrencies, capacity, self.dcp_size, most)
        cases, skipped = [], []
        for context, concurrency in arguments.case:
            chosen, left_out = choose_cases([context], [concurrency], capacity, self.dcp_size, concurrency)
            cases += [case for case in chosen if case.concurrency == concurrency]
            skipped += left_out
        return cases, skipped

    def save(self) -> None:
        path = self.out / f"{self.config}.json"
        path.with_suffix(".part").write_text(json.dumps(self.report, indent=1))
        path.with_suffix(".part").replace(path)
        write_summary(self.out, self.arguments.config)

    def run(self) -> None:
        """Start, ask, end."""
        batches = sorted({case.concurrency for case in self.cases} | {1})
        command, environment = bench_command(
            self.arguments.model, self.config, self.port, self.rows, batches, self.arguments.server_flag
        )
        plugins = {"random_weights": "scripts.benchmarks.servers.random_weights:register"}
        if "shared" in self.config.split("-"):
            plugins |= shared_gpu.PLUGIN
        environment["PYTHONPATH"] = python_path(write_entry_points(self.out / f"{self.config}-site", **plugins))
        self.report |= {"server_command": command, "server_environment": environment}
        self.save()
        started = time.monotonic()
        log = self.out / f"{self.config}.log"
        try:
            with Server(command, environment, self.port, log) as server:
                self.report["ready_s"] = server.wait_until_ready(self.arguments.start_limit)
                print(f"{self.config}: ready in {self.report['ready_s']:.0f} s", flush=True)
                self.save()
                self._ask(server)
        except ASKING_ERRORS as error:
            self._fail("server", error)
        self.report["random_weights"] = INITIALISED in log.read_text(errors="replace")
        self.report["seconds"] = time.monotonic() - started
        # What failed by itself is not tried again; what the end of a server cut short is.
        self.report["complete"] = "ready_s" in self.report and not any(
            failure["case"] == "server" for failure in self.report["failures"]
        )
        self.save()
        print(f"{self.config}: done in {self.report['seconds']:.0f} s", flush=True)

    def _ask(self, server: Server) -> None:
        info = server.get("/server_info", 30)
        self.report["resolved"] = {name: info.get(name) for name in RESOLVED.split()}
        deadline = time.monotonic() + self.arguments.ask_limit
        capacity = self.rows * self.dcp_size
        probe = ServerProbe(server, Prompts(self.dims.vocab_size), capacity, deadline)
        steps = [("first request", lambda: probe.time_prefill(64))]
        steps += [
            (f"prefill {length}", lambda length=length, first=not number: self._prefill(probe, length, first))
            for number, length in enumerate(self.arguments.prefill)
        ]
        traced = self.arguments.profile if "profile" in self.config.split("-") else None
        traced_step = ("profile", lambda: self._profile(probe, ServerCase(*traced)))
        for case in self.cases:
            steps.append((case.name, lambda case=case: self._decode(probe, case)))
            if (case.context, case.concurrency) == traced:
                # Its prompts are cached now.
                steps.append(traced_step)
        if traced and traced_step not in steps:
            steps.append(traced_step)
        for name, step in steps:
            if server.process.poll() is not None:
                raise RuntimeError(f"the server ended with {server.process.returncode}:\n{server.tail(25)}")
            if not probe.seconds_left:
                self.report["skipped"].append({"case": name, "reason": "the time to ask this server is up"})
                continue
            try:
                step()
            except ASKING_ERRORS as error:
                self._fail(name, error)
            self.save()

    def _prefill(self, probe: ServerProbe, length: int, first: bool) -> None:
        if length > 0.95 * probe.capacity:
            self.report["skipped"].append({"case": f"prefill {length}", "reason": "longer than the pool"})
            return
        # Kernels are compiled for the first one.
        result = probe.time_prefill(length, 2 if first else 1)
        self.report["prefill"].append(result)
        print(f"{self.config}: prefill {length}: {result['tokens_per_s']:.0f} tokens/s", flush=True)

    def _decode(self, probe: ServerProbe, case: ServerCase) -> None:
        result = probe.time_decode(case, self.arguments.samples)
        self.report["decode"].append(result)
        print(
            f"{self.config}: {case.name}: {result['step_us'] / 1e3:.2f} ms, {result['tokens_per_s']:.0f} tokens/s, "
            f"{probe.seconds_left:.0f} s left",
            flush=True,
        )

    def _profile(self, probe: ServerProbe, case: ServerCase) -> None:
        folder = self.out / f"{self.config}-trace"

        def trace() -> None:
            timeout_s = min(_TRACE_WAIT_S, probe.seconds_left)
            self.report["traces"] = probe.server.trace_steps(folder, _PROFILED_STEPS, self.tp_size, timeout_s)

        probe.time_decode(case, 3, during=trace)
        self.report["traced_case"] = {"context": case.context, "concurrency": case.concurrency}

    def _fail(self, case: str, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [""]
        self.report["failures"].append({"case": case, "error": "\n".join(lines[-30:])})
        print(f"{self.config}: {case} failed: {type(error).__name__}: {lines[0]}", file=sys.stderr, flush=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("--pool-gib", type=float, default=6.0, help="each rank's KV pool; default 6")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072], help="ascending")
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--case", type=_case, nargs="+", help="CONTEXTxCONCURRENCY, instead of the grid")
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[8192, 32768, 131072], help="lengths, one prompt each"
    )
    parser.add_argument("--profile", type=_case, default=(4096, 64), help="what is traced with the option `profile`")
    parser.add_argument("--samples", type=int, default=10, help="log lines of ten steps each; default 10")
    parser.add_argument("--start-limit", type=float, default=180, help="seconds for a server to be ready")
    parser.add_argument("--ask-limit", type=float, default=150, help="seconds to ask each server")
    parser.add_argument("--budget", type=float, default=570, help="seconds; no server is started in the last quarter")
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--server-flag", action="append", default=[], help="one more word of the server's command")
    return parser.parse_args(argv)


def _case(text: str) -> tuple[int, int]:
    context, _, concurrency = text.partition("x")
    return int(context), int(concurrency)


def collect(out: Path, configs: list[str]) -> list[dict]:
    """The reports there are, in the order of the configs."""
    paths = [out / f"{config}.json" for config in dict.fromkeys(configs)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def write_summary(out: Path, configs: list[str]) -> None:
    """Write bench.json and bench.md from the reports there are."""
    reports = collect(out, configs)
    (out / "bench.json").write_text(json.dumps({"reports": reports}, indent=1))
    (out / "bench.md").write_text(format_report(reports))


def main() -> None:
    arguments = parse_args()
    try:
        make_output_folder("out", arguments.out)
        dims, host = read_config(arguments.model), describe_host()
    except (ValueError, NotImplementedError) as error:
        sys.exit(f"benchmarks.servers: {error}")
    started, failed = time.monotonic(), []
    for number, config in enumerate(arguments.config):
        done = collect(arguments.out, [config])
        if done and done[0]["complete"]:
            continue
        if time.monotonic() - started > 0.75 * arguments.budget:
            failed.append(config)
            print(f"{config}: not started, the time is up", file=sys.stderr, flush=True)
            continue
        run = ConfigRun(config, dims, arguments, arguments.port + 100 * number, host)
        run.run()
        if not run.report["complete"]:
            failed.append(config)
    write_summary(arguments.out, arguments.config)
    print((arguments.out / "bench.md").read_text())
    if failed:
        sys.exit(f"{len(failed)} of {len(arguments.config)} configs have no complete report: {', '.join(failed)}")


if __name__ == "__main__":
    main()
