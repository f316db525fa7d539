#!/usr/bin/env python3
"""The result file of eval_gsm8k.sh: add a server's score, show all scores and their differences from the first."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def ping(url: str) -> None:
    """RuntimeError: the server does not answer at `/v1/models`."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=30) as answer:
            answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise RuntimeError(f"the server must answer at {url}/v1/models, got {error}; start it first") from error


def add_score(out: Path, name: str, url: str, questions: int, metrics: Path) -> dict[str, object]:
    """Put the runner's metrics into the result file under `name`; returns the whole result.

    ValueError: a file is not as the runner or this script writes it.
    """
    score = _read_json(metrics, "metrics")
    accuracy = score.get("score", score.get("mean"))
    if isinstance(accuracy, bool) or not isinstance(accuracy, int | float) or not 0 <= accuracy <= 1:
        raise ValueError(f"metrics must hold a score between 0 and 1, got {score} in {str(metrics)!r}")
    result = _read_json(out, "out") if out.exists() else {}
    servers = result.setdefault("servers", {})
    servers[name] = {
        "url": url,
        "questions": questions,
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / questions),
        "latency_s": score.get("latency"),
        "output_tokens_per_s": score.get("output_throughput"),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    result["differences"] = differences(servers)
    out.write_text(json.dumps(result, indent=2), encoding="utf-8")
    return result


def differences(servers: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    """Each later server's accuracy minus the first one's, with the standard error of two independent samples.

    Both answer the same questions, so the true error is smaller.
    """
    names = list(servers)
    first = servers[names[0]] if names else None
    return [
        {
            "from": names[0],
            "to": name,
            "accuracy": servers[name]["accuracy"] - first["accuracy"],
            "standard_error": math.hypot(first["standard_error"], servers[name]["standard_error"]),
        }
        for name in names[1:]
    ]


def format_result(result: dict[str, object]) -> str:
    """The result as text."""
    lines = []
    for name, score in result["servers"].items():
        speed = score["output_tokens_per_s"]
        lines.append(
            f"{name:<12} {score['accuracy']:.4f} +- {score['standard_error']:.4f} of {score['questions']} questions"
            + ("" if speed is None else f", {speed:,.0f} output tokens/s")
        )
    for entry in result["differences"]:
        lines.append(f"{entry['to']} - {entry['from']}: {entry['accuracy']:+.4f} +- {entry['standard_error']:.4f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """`ping URL`, `add ...` or `show ...`; 0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("ping").add_argument("url")
    add = actions.add_parser("add")
    for flag, kind in (("--out", Path), ("--name", str), ("--url", str), ("--questions", int), ("--metrics", Path)):
        add.add_argument(flag, type=kind, required=True)
    actions.add_parser("show").add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        if args.action == "ping":
            ping(args.url)
        elif args.action == "add":
            add_score(args.out, args.name, args.url, args.questions, args.metrics)
        else:
            print(format_result(_read_json(args.out, "out")))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"gsm8k_report: {error}", file=sys.stderr)
        return 2
    return 0


def _read_json(path: Path, name: str) -> dict[str, object]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} must be a readable JSON file, got {str(path)!r}: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{name} must hold a JSON object, got {type(read).__name__} in {str(path)!r}")
    return read


if __name__ == "__main__":
    sys.exit(main())
