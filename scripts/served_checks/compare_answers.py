"""Compare the answers of two or more servers that ask_servers.py asked the same requests.

    python -m scripts.served_checks.compare_answers REFERENCE.json OTHER.json ...
        --stock-pair STOCK.json STOCK.json [--out MD] [--keep docs/served_on_h200/REVISION.jsonl [--host 1]]

Tokens must be identical. Where they part, both servers' log-probabilities of both tokens are shown. The difference
passes only if it is within rounding, and so must that of every generated token before it be. Rounding is twice the
largest difference between two servers of stock sglang that divide the same model differently (--stock-pair), or a
number of nats (--rounding). Where a report has no alternatives (speculation may leave them out), the generated tokens'
log-probabilities are compared all the same, and nothing that parts is excused.

--keep adds what the comparison found to a revision's rows, from which write_page.py writes the tables of
docs/served_on_h200.md.
"""

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from scripts.served_checks.ask_crowd import ALL_AT_ONCE
from scripts.served_checks.ask_servers import SELECTED, UPDATED
from scripts.served_checks.measure_rounding import measure_spread, pair_halves, root_mean_square
from scripts.served_checks.reports.answers import alternatives, log_probability
from scripts.served_checks.reports.kept_rows import keep_rows, round_nats
from scripts.served_checks.servers.server_config import parse_sizes

# Nats. Stock servers that differ by more tell nothing about rounding.
LARGEST_ROUNDING = 0.25


@dataclass
class Comparison:
    """What two reports have in common, and where they part.

    tokens, identical: generated tokens compared, and those that are the same.
    largest: the largest difference between the log-probabilities of a generated token after the same tokens, in nats.
    moved: those differences where both servers generated the token.
    parted: where answers part, as rows keep it.
    flips: descriptions of near ties that fell the other way; failures: everything that is not rounding.
    """

    tokens: int = 0
    identical: int = 0
    largest: float = 0.0
    moved: list[float] = field(default_factory=list)
    parted: list[dict] = field(default_factory=list)
    flips: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def compare_reports(reference: dict, other: dict, rounding: float) -> Comparison:
    """Compare every request of two reports.

    Args:
        reference, other: reports of ask_servers.py.
        rounding: the largest difference in log-probability that is taken for rounding, in nats.
    """
    result = Comparison()
    for scene, requests in reference["scenes"].items():
        if scene == UPDATED and scene not in other["scenes"]:
            # Its weights were not updated, or that was refused: `check_report` looks at which.
            continue
        answers = {answer["name"]: answer for answer in other["scenes"].get(scene, [])}
        for request in requests:
            if request["name"] not in answers:
                result.failures.append(f"{scene}: {request['name']}: not answered")
                continue
            _compare_answers(scene, request, answers[request["name"]], rounding, result)
    return result


def _compare_answers(scene: str, a: dict, b: dict, rounding: float, result: Comparison) -> None:
    name = f"{scene}: {a['name']}"
    if len(a["tokens"]) != len(b["tokens"]):
        result.failures.append(f"{name}: {len(a['tokens'])} tokens and {len(b['tokens'])}")
        return
    for position, (token_a, token_b) in enumerate(zip(a["tokens"], b["tokens"])):
        result.tokens += 1
        where, tops = f"{name}, token {position}", [alternatives(answer, position) for answer in (a, b)]
        if token_a != token_b:
            # What follows was generated after other tokens.
            place = {"scene": scene, "request": a["name"], "position": position, "tokens": [token_a, token_b]}
            result.parted.append(place)
            if None in tops:
                # Without alternatives nothing can be excused.
                result.failures.append(f"{where}: {token_a} and {token_b}")
            elif token_a not in tops[0] or token_b not in tops[1]:
                result.failures.append(f"{where}: generated, and not among the best")
            else:
                _judge_flip(where, token_a, token_b, tops, rounding, result)
            return
        found = [log_probability(answer, position) for answer in (a, b)]
        if None in found:
            best = tops[found.index(None)]
            why = "has no log-probability" if best is None or token_a in best else "generated, and not among the best"
            result.failures.append(f"{where}: {why}")
            return
        result.identical += 1
        difference = abs(found[0] - found[1])
        result.moved.append(difference)
        result.largest = max(result.largest, difference)
        if difference > rounding:
            result.failures.append(f"{where}: log-probabilities differ by {difference:.4f}")
            return


def _judge_flip(
    where: str, token_a: int, token_b: int, tops: list[dict[int, float]], rounding: float, result: Comparison
) -> None:
    if not all(math.isfinite(top.get(token, math.nan)) for token in (token_a, token_b) for top in tops):
        result.failures.append(f"{where}: {token_a} and {token_b}, and not among each other's best")
        return
    gaps = [tops[0][token_a] - tops[0][token_b], tops[1][token_b] - tops[1][token_a]]
    result.largest = max(result.largest, *(abs(tops[0][token] - tops[1][token]) for token in (token_a, token_b)))
    result.parted[-1]["margins"] = [round_nats(gap) for gap in gaps]
    shown = ", ".join(f"{top[token_a]:.5f} / {top[token_b]:.5f}" for top in tops)
    text = f"{where}: {token_a} and {token_b}; log-probabilities {shown}; margins {gaps[0]:.5f} and {gaps[1]:.5f}"
    (result.flips if max(gaps) <= rounding else result.failures).append(text)


def check_report(report: dict) -> list[str]:
    """Return what a report says about its own server that should not be."""
    config, problems = report["config"], []
    _, dcp_size = parse_sizes(config)
    rows = int(report["command"][report["command"].index("--max-total-tokens") + 1])
    for source in ("max_total_num_tokens", "logged_capacity"):
        found = report.get(source)
        if found not in (rows * dcp_size, [rows * dcp_size]):
            problems.append(f"{source} is {found}, not {rows} rows x {dcp_size} ranks")
    misuse = report["misuse"]
    if misuse["afterwards"] != 200 or not all(400 <= misuse[key] < 500 for key in ("malformed", "over the pool")):
        problems.append(f"misuse was answered {misuse}")
    if "retract" in config.split("-") and not report["retractions"]:
        problems.append("nothing was retracted")
    # Attention data parallelism deals requests in turn, and each part has a cache of its own.
    in_turn = any(re.fullmatch(r"dp\d+", option) for option in config.split("-"))
    for answer in report["scenes"].get("prefix", [])[1:]:
        if not answer["cached_tokens"] and not in_turn:
            problems.append("no prefix was found in the cache")
    if "update" in config.split("-"):
        problems += _check_update(report["update"])
    if "kill" in config.split("-") and report["kill"].get("exit") is None:
        problems.append(f"the server lived on after a rank was killed: {report['kill']}")
    return problems


def _check_update(update: dict) -> list[str]:
    """An update changes the answers (whether to the right ones, its scene tells), or is refused and changes none."""
    if update["status"] == 200:
        return ["the weights were updated, and the answers are the old ones"] * update["tokens_kept"]
    if "online weight updates are not supported here" not in str(update["said"]):
        return [f"an update of the weights was answered {update['status']}: {update['said']}"]
    # Reports of earlier servers have no session.
    if update.get("session", [200, 400, 200]) != [200, 400, 200]:
        return [f"a session's beginning, load and end were answered {update['session']}"]
    return [] if update["tokens_kept"] else ["an update of the weights was refused, and the answers changed"]


HEADER = (
    "| server | identical tokens | reference | capacity | retractions | largest difference, nats | |\n"
    "|---|---:|---|---:|---:|---:|---|"
)


def summarise(report: dict, reference: str, result: Comparison, problems: list[str]) -> str:
    """One server's row of the summary."""
    verdict = (
        "FAILED" if result.failures or problems else "same tokens" if not result.flips else "same but for near ties"
    )
    cells = [
        report["config"],
        f"{result.identical} of {result.tokens}",
        reference,
        f"{report['max_total_num_tokens']:,}",
        str(report["retractions"]),
        f"{result.largest:.4f}",
        verdict,
    ]
    return f"| {' | '.join(cells)} |"


def list_findings(report: dict, result: Comparison, problems: list[str]) -> list[str]:
    """What a row does not say: failures, and near ties that fell the other way."""
    lines = [f"- {report['config']}: FAILED {text}" for text in [*problems, *result.failures]]
    return lines + [f"- {report['config']}: near tie {text}" for text in result.flips]


def kept_row(report: dict, host: int, problems: list[str], reference: dict | None = None) -> dict:
    """What a revision's rows keep of one server: kept_rows.py.

    Args:
        report: of ask_servers.py or ask_crowd.py.
        host: number of the host, of those that served the revision.
        problems: as `check_report` returns them.
        reference: what `kept_comparison` returns, if the server was compared.
    """
    row = {
        "checkpoint": Path(report["model"]).name,
        "asked": "crowd" if ALL_AT_ONCE in report["scenes"] else "set",
        "server": report["config"],
        "host": host,
        "reference": None,
        "date": report.get("host", {}).get("date", ""),
        "requests": sum(len(answers) for answers in report["scenes"].values()),
        "capacity": report["max_total_num_tokens"],
        "retractions": report["retractions"],
        "problems": problems,
    }
    if "update" in report:
        row["update"] = {key: report["update"][key] for key in ("status", "tokens_kept")}
    if "kill" in report:
        row["kill_s"] = round(report["kill"]["seconds"], 1)
    if "decode_sizes" in report:
        row["decode_sizes"] = report["decode_sizes"]
    if pairs := pair_halves(report):
        spread = measure_spread(pairs, SELECTED)
        gaps = None
        if spread.without_alternatives < spread.tokens:
            ties = {"short": spread.short_ties, "long": spread.long_ties}
            gaps = {name: [round_nats(root_mean_square(values)), len(values)] for name, values in ties.items()}
        row["halves"] = {
            "tokens": spread.tokens,
            "parted": spread.parted,
            "moved_rms": round_nats(root_mean_square(spread.moved)),
            "near_tie_gaps": gaps,
        }
    return row | (reference or {})


def kept_comparison(reference: dict, host: int, result: Comparison, rounding: float | None) -> dict:
    """What `kept_row` adds of a comparison. `rounding`: nats that were taken for rounding, None for a stock pair."""
    return {
        "reference": {"checkpoint": Path(reference["model"]).name, "server": reference["config"], "host": host},
        "tokens": result.tokens,
        "identical": result.identical,
        "largest_difference": round_nats(result.largest),
        "moved_rms": round_nats(root_mean_square(result.moved)),
        "rounding": None if rounding is None else round_nats(rounding),
        "parted": result.parted,
        "failures": result.failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--stock-pair", type=Path, nargs=2)
    source.add_argument("--rounding", type=float)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="the .jsonl file of the revision's rows, which are added to")
    parser.add_argument("--host", type=int, default=1, help="which of the hosts that served the revision")
    arguments = parser.parse_args()
    if arguments.out and not arguments.out.parent.is_dir():
        sys.exit(f"compare_answers: --out must be a file in a folder that exists, got {arguments.out}")
    if arguments.keep and (arguments.keep.suffix != ".jsonl" or not arguments.keep.parent.is_dir()):
        sys.exit(f"compare_answers: --keep must be a .jsonl file in a folder that exists, got {arguments.keep}")
    rounding, rows, findings, kept = arguments.rounding, [], [], []
    if arguments.stock_pair:
        stock = [json.loads(path.read_text()) for path in arguments.stock_pair]
        pair = compare_reports(*stock, rounding=float("inf"))
        rounding = 2 * pair.largest
        if pair.failures or rounding > LARGEST_ROUNDING:
            sys.exit(f"the stock pair differs by {pair.largest:.4f}: {pair.failures or 'more than rounding'}")
        rows.append(summarise(stock[1], stock[0]["config"], pair, []))
        findings += list_findings(stock[1], pair, [])
        compared = kept_comparison(stock[0], arguments.host, pair, None)
        kept += [kept_row(report, arguments.host, check_report(report)) for report in stock[:1]]
        kept.append(kept_row(stock[1], arguments.host, check_report(stock[1]), compared))
    reference = json.loads(arguments.reference.read_text())
    kept.append(kept_row(reference, arguments.host, check_report(reference)))
    failed = False
    for path in arguments.others:
        other = json.loads(path.read_text())
        result, problems = compare_reports(reference, other, rounding), check_report(other)
        failed = failed or bool(result.failures or problems)
        rows.append(summarise(other, reference["config"], result, problems))
        findings += list_findings(other, result, problems)
        compared = kept_comparison(reference, arguments.host, result, rounding)
        kept.append(kept_row(other, arguments.host, problems, compared))
    text = "\n".join([HEADER, *rows, "", f"Rounding: {rounding:.4f} nats.", *findings])
    print(text)
    if arguments.keep:
        keep_rows(arguments.keep, kept)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
