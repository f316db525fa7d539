"""How far servers' answers to the same prompts lie apart, in numbers: for ask_crowd.py, where near ties part.

    python -m scripts.served_checks.measure_rounding REFERENCE.json OTHER.json ... [--selected 2048]

One row for each other report against the reference, and one for each report against itself: the prompts asked all at
once against the same ones in halves. Rounding moves all log-probabilities alike; a wrong selection moves those of
contexts that are longer than one, and leaves the others alone. Nothing after a place where answers part is counted.
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.served_checks.ask_crowd import ALL_AT_ONCE, IN_HALVES
from scripts.served_checks.ask_servers import SELECTED
from scripts.served_checks.reports.answers import alternatives, log_probability

# The two best tokens are a near tie within so many nats.
NEAR_TIE = 1.0


@dataclass
class Spread:
    """tokens: compared; parted: answers that part; without_alternatives: tokens that one of two reports has none for.

    moved: differences of generated tokens' log-probabilities, nats. short_ties, long_ties: by how much the gap between
    the two best tokens moves where they are nearly tied, for contexts of which everything is selected, and others.
    """

    tokens: int = 0
    parted: int = 0
    without_alternatives: int = 0
    moved: list[float] = field(default_factory=list)
    short_ties: list[float] = field(default_factory=list)
    long_ties: list[float] = field(default_factory=list)


def measure_spread(pairs: Iterable[tuple[Mapping, Mapping]], selected: int) -> Spread:
    """Compare answers of the same prompts, token by token.

    Args:
        pairs: two answers to one prompt, as ask_servers.py reports them.
        selected: tokens that a query attends to at most.

    Raises:
        ValueError: a token that both generated has no finite log-probability.
    """
    spread = Spread()
    for a, b in pairs:
        for position, (token_a, token_b) in enumerate(zip(a["tokens"], b["tokens"])):
            spread.tokens += 1
            tops = [alternatives(answer, position) for answer in (a, b)]
            if None in tops:
                spread.without_alternatives += 1
            else:
                _measure_tie(tops, a["prompt_tokens"] + position <= selected, spread)
            if token_a != token_b:
                spread.parted += 1
                break
            found = [log_probability(answer, position) for answer in (a, b)]
            if None in found:
                raise ValueError(f"{a['name']}, token {position}: generated, and without a log-probability")
            spread.moved.append(abs(found[0] - found[1]))
    return spread


def _measure_tie(tops: list[dict[int, float]], is_short: bool, spread: Spread) -> None:
    best = sorted(tops[0], key=tops[0].get)[-2:]
    if len(best) < 2 or not all(token in tops[1] for token in best):
        return
    gaps = [top[best[1]] - top[best[0]] for top in tops]
    if gaps[0] < NEAR_TIE:
        (spread.short_ties if is_short else spread.long_ties).append(abs(gaps[0] - gaps[1]))


def pair_reports(a: Mapping, b: Mapping) -> list[tuple[Mapping, Mapping]]:
    """Answers of two servers to the same request. ValueError: one has a request that the other has not."""
    answers = [
        {(scene, answer["name"]): answer for scene, found in report["scenes"].items() for answer in found}
        for report in (a, b)
    ]
    if answers[0].keys() != answers[1].keys():
        raise ValueError(f"{a['config']} and {b['config']} were not asked the same")
    return [(answer, answers[1][key]) for key, answer in answers[0].items()]


def pair_halves(report: Mapping) -> list[tuple[Mapping, Mapping]]:
    """Answers of one server to the same prompts asked all at once and in halves; empty if it was not asked both."""
    halves = {answer["name"]: answer for answer in report["scenes"].get(IN_HALVES, [])}
    return [(answer, halves[answer["name"]]) for answer in report["scenes"].get(ALL_AT_ONCE, []) if halves]


def root_mean_square(values: list[float]) -> float:
    """nan for no values."""
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else math.nan


def format_row(name: str, spread: Spread) -> str:
    cells = [name, f"{spread.tokens:,}", str(spread.parted), f"{root_mean_square(spread.moved):.4f}"]
    for ties in (spread.short_ties, spread.long_ties):
        known = spread.without_alternatives < spread.tokens or not spread.tokens
        cells.append(f"{root_mean_square(ties):.3f} ({len(ties)})" if known else "no alternatives")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    parser.add_argument("--selected", type=int, default=SELECTED)
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in (arguments.reference, *arguments.others)]
    print(
        "| servers | tokens compared | answers that part | log-probabilities move, RMS nats "
        f"| gaps of near ties move, contexts up to {arguments.selected:,} (how many) | longer contexts |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for other in reports[1:]:
        spread = measure_spread(pair_reports(reports[0], other), arguments.selected)
        print(format_row(f"{reports[0]['config']}, {other['config']}", spread))
    for report in reports:
        if pairs := pair_halves(report):
            print(format_row(f"{report['config']}: at once, in halves", measure_spread(pairs, arguments.selected)))


if __name__ == "__main__":
    main()
