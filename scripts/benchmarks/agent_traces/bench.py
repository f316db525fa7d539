"""Replay multi-turn agent traces against any OpenAI-compatible server; report latency, throughput, cache hits, errors.

    python -m scripts.benchmarks.agent_traces.make_trace --sessions 50 --out trace.json
    python -m scripts.benchmarks.agent_traces.bench --url http://127.0.0.1:30100 --trace trace.json
        --concurrency 8 --out results/

`--out` gets `calls.jsonl`, a line as each call ends, and `report.json`. Exit status: 0 when every call succeeded, 1
when some failed, 2 when nothing was run, 130 when interrupted; every status but 2 leaves a report. For cache hits
start sglang with `--enable-cache-report`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from scripts.benchmarks.agent_traces.dataset import read_trace
from scripts.benchmarks.agent_traces.replay import CallResult, Server, list_models, replay
from scripts.benchmarks.agent_traces.report import check_summary, format_summary, summarise, write_summary


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; see the exit statuses above."""
    args = _parser().parse_args(argv)
    try:
        for name in ("concurrency", "max_tokens", "turns", "sessions"):
            value = getattr(args, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not args.timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0, got {args.timeout_s}")
        if args.summary:
            check_summary(args.summary)
        sessions, skipped = read_trace(args.trace)
        key = args.api_key_file.read_text(encoding="utf-8").strip() if args.api_key_file else ""
        server = Server(args.url, args.model or "", args.max_tokens, args.ignore_eos, args.timeout_s, key)
        if not args.model:
            models = list_models(server)
            if not models:
                raise RuntimeError("the server lists no model; name one with --model")
            server = Server(args.url, models[0], args.max_tokens, args.ignore_eos, args.timeout_s, key)
        server.connect()  # refuses a malformed URL before anything runs
        _make_places(args.out, args.summary)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"benchmarks.agent_traces: {error}", file=sys.stderr)
        return 2
    for row in skipped[:5]:
        print(f"benchmarks.agent_traces: skipped {row.where}: {row.reason}", file=sys.stderr)
    if skipped:
        print(
            f"benchmarks.agent_traces: skipped {len(skipped)} unreadable row(s) of {len(skipped) + len(sessions)}",
            file=sys.stderr,
        )
    sessions = sessions[: args.sessions]
    planned = sum(min(session.num_calls, args.turns or session.num_calls) for session in sessions)
    setup = {
        "url": args.url,
        "model": server.model,
        "trace": str(args.trace),
        "sessions": len(sessions),
        "rows_skipped": len(skipped),
        "concurrency": args.concurrency,
        "turns": args.turns,
        "max_tokens": args.max_tokens,
        "ignore_eos": args.ignore_eos,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    results, wall_s, interrupted = _run(sessions, server, args, planned)
    report = summarise(results, wall_s=wall_s, planned_calls=planned, setup=setup)
    report["rows_skipped"] = [asdict(row) for row in skipped]
    (args.out / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    if args.summary:
        write_summary(report, results, args.summary)
    print(format_summary(report))
    if interrupted:
        return 130
    return 1 if report["calls"]["failed"] else 0


def _make_places(out: Path, summary: Path | None) -> None:
    """Make the folder of results, and see that the summary has one. ValueError: one of them cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with open(out / "calls.jsonl", "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ValueError(f"--out must be a folder that can be written, got {out}: {error.strerror}") from error
    if summary and (summary.is_dir() or not summary.parent.is_dir()):
        raise ValueError(f"--summary must be a file in a folder that exists, got {summary}")


def _run(sessions, server: Server, args: argparse.Namespace, planned: int) -> tuple[list[CallResult], float, bool]:
    results: list[CallResult] = []
    stop, interrupted, writing = threading.Event(), False, threading.Lock()
    began = time.perf_counter()
    with open(args.out / "calls.jsonl", "w", encoding="utf-8") as lines:

        def on_result(result: CallResult) -> None:
            with writing:
                if lines.closed:  # interrupted, and this thread was still blocked in a read
                    return
                results.append(result)
                lines.write(json.dumps(asdict(result)) + "\n")
                lines.flush()

        progress, threads = _Progress(planned, began), []
        try:
            threads = replay(
                sessions, server, concurrency=args.concurrency, max_turns=args.turns, on_result=on_result, stop=stop
            )
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.05)
                progress.show(results)
        except KeyboardInterrupt:
            interrupted = True
            stop.set()
            given_up = time.perf_counter() + 5
            for thread in threads:
                thread.join(timeout=max(0.0, given_up - time.perf_counter()))
        wall_s = time.perf_counter() - began
        progress.show(results, last=True)
        with writing:
            lines.close()
    return results, wall_s, interrupted


class _Progress:
    """A line on stderr: rewritten in place on a terminal, one every 10 s elsewhere."""

    def __init__(self, planned: int, began: float) -> None:
        self._planned, self._began, self._shown = planned, began, began
        self._live = sys.stderr.isatty()

    def show(self, results: list[CallResult], last: bool = False) -> None:
        now = time.perf_counter()
        if not last and now - self._shown < (0.5 if self._live else 10):
            return
        self._shown = now
        failed = sum(1 for result in results if result.error)
        text = f"{len(results)}/{self._planned} calls, {failed} failed, {now - self._began:.0f} s"
        print(
            f"\r{text}" if self._live else text, end="\n" if last or not self._live else "", file=sys.stderr, flush=True
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--url", required=True, help="http://host:port of the server")
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="ShareGPT rows: a JSON list or JSON lines"
    )
    parser.add_argument("--model", help="model name to send; default: the first that the server lists")
    parser.add_argument("--concurrency", type=int, default=8, help="sessions in flight; default 8")
    parser.add_argument("--turns", type=int, help="calls of each session; default: all")
    parser.add_argument("--sessions", type=int, help="sessions to replay; default: all")
    parser.add_argument("--max-tokens", type=int, default=512, help="output tokens of a call; default 512")
    parser.add_argument("--ignore-eos", action="store_true", help="ask for exactly --max-tokens (sglang, vLLM)")
    parser.add_argument("--timeout-s", type=float, default=600, help="longest silence of the server; default 600")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the bearer token")
    parser.add_argument("--out", type=Path, default=Path("trace_results"), metavar="DIR")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="also write a page: .html or .png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
