"""Write a synthetic agent trace with the published statistics of Inferact/codex_swebenchpro_traces.

That dataset (Codex on SWE-bench Pro, 20,230 calls) must be brought by the user. What is published about it, and kept
here: a first call of 12,278 tokens in the median, about 2,242 more each call, 30 calls a session in the median and 57
at the 90th percentile, input to output 131 to 1, and a preamble of about 8% of the first call that all sessions share.

A token is one of a few common short English words, which most tokenisers keep whole; a server counts a few percent more
or less.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path

FIRST_CALL_TOKENS = 12_278
TOKENS_PER_CALL = 2_242
CALLS_P50, CALLS_P90 = 30, 57
PREAMBLE_SHARE = 0.08
# Gives 131 tokens of input for each of output, with the numbers above.
OUTPUT_TOKENS = 462
_SPREAD_FIRST, _SPREAD_TURN = 0.25, 0.6  # of the logarithm; assumed, nothing is published
_Z90 = 1.2816
_SENTENCE = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an they you "
    "were her she there been one all we their has would when if so no can more will out up about time them some could"
)
_WORDS = _SENTENCE.split()


def make_sessions(
    num_sessions: int, seed: int, scale: float = 1.0, max_calls: int | None = None
) -> list[dict[str, object]]:
    """Rows in the ShareGPT form.

    Args:
        scale: multiplies every token count, for a small server.
        max_calls: longest session, in calls.

    ValueError: a count or the scale is not positive.
    """
    for name, value in (
        ("sessions", num_sessions),
        ("scale", scale),
        ("max_calls", 1 if max_calls is None else max_calls),
    ):
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
    draw = random.Random(seed)
    preamble = _text(draw, FIRST_CALL_TOKENS * PREAMBLE_SHARE * scale)
    return [_session(draw, preamble, scale, max_calls) for _ in range(num_sessions)]


def main(argv: list[str] | None = None) -> int:
    """Write the trace; 0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every token count; default 1")
    parser.add_argument("--max-calls", type=int, help="longest session, in calls")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        if not args.out.parent.is_dir():  # said before the trace is made
            raise ValueError(f"--out must be a file in a folder that exists, got {args.out}")
        rows = make_sessions(args.sessions, args.seed, args.scale, args.max_calls)
        args.out.write_text(json.dumps(rows), encoding="utf-8")
    except ValueError as error:
        print(f"make_trace: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"make_trace: --out must be a file that can be written, got {args.out}: {error.strerror}", file=sys.stderr
        )
        return 2
    print(f"{args.out}: {len(rows)} sessions, {sum((len(row['conversations']) + 1) // 2 for row in rows)} calls")
    return 0


def _session(draw: random.Random, preamble: str, scale: float, max_calls: int | None) -> dict[str, object]:
    sigma = math.log(CALLS_P90 / CALLS_P50) / _Z90
    calls = max(1, round(draw.lognormvariate(math.log(CALLS_P50), sigma)))
    calls = min(calls, max_calls) if max_calls else calls
    own = FIRST_CALL_TOKENS * (draw.lognormvariate(0, _SPREAD_FIRST) - PREAMBLE_SHARE)
    turns = [{"from": "human", "value": f"{preamble} {_text(draw, own * scale)}"}]
    for _ in range(calls - 1):
        turns.append({"from": "gpt", "value": _text(draw, _around(draw, OUTPUT_TOKENS) * scale)})
        turns.append({"from": "human", "value": _text(draw, _around(draw, TOKENS_PER_CALL - OUTPUT_TOKENS) * scale)})
    turns.append({"from": "gpt", "value": _text(draw, _around(draw, OUTPUT_TOKENS) * scale)})
    return {"conversations": turns}


def _around(draw: random.Random, mean: float) -> float:
    return mean * draw.lognormvariate(-(_SPREAD_TURN**2) / 2, _SPREAD_TURN)


def _text(draw: random.Random, tokens: float) -> str:
    return " ".join(draw.choices(_WORDS, k=max(1, round(tokens))))


if __name__ == "__main__":
    sys.exit(main())
