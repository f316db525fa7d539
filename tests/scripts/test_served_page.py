"""The page of servers that were asked, the rows it is written from, and the tool that reads reports and writes rows."""

import copy
import functools
import io
import itertools
import json
import math
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts.served_checks import ask_servers, write_page
from scripts.served_checks import compare_answers as compare
from scripts.served_checks import measure_rounding as rounding
from scripts.served_checks.reports import page_tables
from scripts.served_checks.reports.answers import alternatives, log_probability
from scripts.served_checks.reports.kept_rows import check_row, keep_rows, read_rows

ROOT = Path(__file__).parents[2]
FOLDER, PAGE = ROOT / "docs" / "served_on_h200", ROOT / "docs" / "served_on_h200.md"
# Where the reports of all rows so far are, and in which folder those of a revision's host.
REPORTS_REVISION = "6d681cb"
REPORT_FOLDERS = {
    ("ac661dc", 1): ".",
    ("3b25f0a", 1): "second-host",
    ("baf8c47", 1): "third-host",
    ("5796ed8", 1): "fourth-host",
    ("5796ed8", 2): "fifth-host",
}
LOGPROBS = {"a": [[-0.10, -0.70, -0.30], [-0.20, -0.40, -0.90]], "b": [[-0.14, -0.70, -0.20], [-0.20, -0.43, -0.90]]}


@pytest.fixture(scope="module")
def rows():
    return write_page.load_rows(FOLDER)


def report(name, config="tp4-dcp4", logprobs=None, scene="first"):
    """Answers of three tokens; each generated token has an alternative that is far behind."""
    answers = [
        {
            "name": f"request {number}",
            "prompt_tokens": 9,
            "cached_tokens": 0,
            "tokens": [7, 8, 9],
            "logprobs": values,
            "top": [[[token, value], [99, -20.0]] for token, value in zip((7, 8, 9), values)],
        }
        for number, values in enumerate(logprobs or LOGPROBS[name])
    ]
    return {
        "config": config,
        "model": "/models/glm",
        "command": ["--max-total-tokens", "64"],
        "max_total_num_tokens": 256,
        "logged_capacity": [256],
        "retractions": 0,
        "misuse": {"malformed": 400, "over the pool": 400, "afterwards": 200},
        "host": {"date": "2026-12-01T10:00:00+00:00"},
        "scenes": {scene: answers},
    }


def leave_out(found, how):
    """A report as speculation, or a kept one, leaves alternatives out."""
    found = copy.deepcopy(found)
    for answer in itertools.chain(*found["scenes"].values()):
        if how == "absent":
            del answer["top"]
        elif how == "none":
            answer["top"] = None
        elif how == "empty":
            answer["top"] = []
        elif how == "shorter":
            answer["top"] = answer["top"][:1]
        elif how == "holes":
            answer["top"][0], answer["top"][2] = [], None
    return found


HOWS = ["kept", "absent", "none", "empty", "shorter", "holes"]
PAIRS = list(itertools.product(HOWS, HOWS))


# --- what reports say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hows", PAIRS, ids=lambda hows: "-".join(hows))
def test_differences_are_the_same_with_and_without_alternatives(hows):
    a, b = (leave_out(report(name), how) for name, how in zip("ab", hows))
    result = compare.compare_reports(a, b, 0.11)
    assert (result.tokens, result.identical, result.failures, result.parted) == (6, 6, [], [])
    assert result.largest == pytest.approx(0.10)
    assert sorted(result.moved) == pytest.approx([0.0, 0.0, 0.0, 0.03, 0.04, 0.10])
    tight = compare.compare_reports(a, b, 0.05)
    assert tight.failures == ["first: request 0, token 2: log-probabilities differ by 0.1000"]


@pytest.mark.parametrize("hows", PAIRS, ids=lambda hows: "-".join(hows))
def test_a_place_that_parts_is_excused_by_alternatives_alone(hows):
    a, b = report("a"), report("a")
    answer = b["scenes"]["first"][1]
    answer["tokens"][1], answer["top"][1] = 5, [[5, -0.40], [8, -0.41]]
    a["scenes"]["first"][1]["top"][1] = [[8, -0.40], [5, -0.42]]
    a, b = (leave_out(found, how) for found, how in zip((a, b), hows))
    result = compare.compare_reports(a, b, 0.05)
    assert (result.tokens, result.identical) == (5, 4)
    (place,) = result.parted
    at = {"scene": "first", "request": "request 1", "position": 1, "tokens": [8, 5]}
    if all(how in ("kept", "holes") for how in hows):
        assert (result.failures, place) == ([], at | {"margins": [0.02, 0.01]})
        assert len(result.flips) == 1 and result.largest == pytest.approx(0.02)
    else:
        assert (result.flips, result.failures, place) == ([], ["first: request 1, token 1: 8 and 5"], at)


@pytest.mark.parametrize("value", [math.nan, -math.inf, None], ids=str)
@pytest.mark.parametrize("how", ["kept", "absent"])
def test_a_log_probability_that_is_none_is_no_agreement(value, how):
    broken = leave_out(report("a", logprobs=[[-0.1, value, -0.3], [-0.2, -0.4, -0.9]]), how)
    for pair in ((report("a"), broken), (broken, report("a")), (broken, broken)):
        result = compare.compare_reports(*pair, math.inf)
        assert result.failures == ["first: request 0, token 1: has no log-probability"]
        assert result.largest == 0
        with pytest.raises(ValueError, match="request 0, token 1: generated, and without a log-probability"):
            rounding.measure_spread(rounding.pair_reports(*pair), 2048)


@pytest.mark.parametrize("value", [math.nan, None], ids=str)
@pytest.mark.parametrize("token", [5, 8])
def test_a_margin_that_is_no_number_excuses_nothing(token, value):
    a, b = report("a"), report("a")
    answer = b["scenes"]["first"][1]
    answer["tokens"][1] = 5
    answer["top"][1] = [[found, value if found == token else -0.40] for found in (5, 8)]
    a["scenes"]["first"][1]["top"][1] = [[8, -0.40], [5, -0.42]]
    for pair in ((a, b), (b, a)):
        result = compare.compare_reports(*pair, 0.05)
        assert result.flips == [] and len(result.failures) == 1


def test_a_generated_token_that_is_not_among_the_best_has_no_log_probability():
    answer = {"tokens": [7, 7], "logprobs": [-0.1, -0.2], "top": [[[8, -0.3]], []]}
    assert (log_probability(answer, 0), log_probability(answer, 1)) == (None, -0.2)
    assert (alternatives(answer, 0), alternatives(answer, 1), alternatives(answer, 2)) == ({8: -0.3}, None, None)


@pytest.mark.parametrize("hows", PAIRS, ids=lambda hows: "-".join(hows))
def test_spreads_move_alike_and_say_where_gaps_are_not_known(hows):
    pair = [leave_out(report(name), how) for name, how in zip("ab", hows)]
    spread = rounding.measure_spread(rounding.pair_reports(*pair), 2048)
    assert (spread.tokens, spread.parted) == (6, 0)
    assert sorted(spread.moved) == pytest.approx([0.0, 0.0, 0.0, 0.03, 0.04, 0.10])
    unknown = {"kept": set(), "shorter": {1, 2}, "holes": {0, 2}}
    positions = set().union(*(unknown.get(how, {0, 1, 2}) for how in hows))
    assert spread.without_alternatives == 2 * len(positions)
    assert ("no alternatives" in rounding.format_row("a, b", spread)) == (len(positions) == 3)


def test_alternatives_that_a_server_leaves_out_are_no_fault_of_an_answer():
    class Speculating:
        def post(self, body, timeout_s):
            found = [[-0.5, 7, None], [-0.6, 8, None]]
            return 200, {
                "meta_info": {"output_token_logprobs": found, "output_top_logprobs": [None, [[-0.6, 8, None]]]}
            }

    answer = ask_servers.ask(Speculating(), "x", [1, 2])
    assert answer["top"] == [[], [(8, -0.6)]]
    assert [log_probability(answer, position) for position in (0, 1)] == [-0.5, -0.6]


# --- from reports to rows to the page ---------------------------------------------------------------------------------


def run(script, *words, status=0):
    command = [sys.executable, "-m", f"scripts.served_checks.{script}", *words]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_reports(folder, how):
    contents = {"tp1-dcp1": report("a", "tp1-dcp1"), "tp2-dcp1": report("b", "tp2-dcp1"), "tp4-dcp4": report("b")}
    contents["tp1-dcp1"]["command"][1] = contents["tp2-dcp1"]["command"][1] = "256"
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(leave_out(content, how)))
    return [folder / f"{name}.json" for name in contents]


@pytest.mark.parametrize("how", HOWS)
def test_a_comparison_is_kept_as_rows_that_the_page_is_written_from(tmp_path, how):
    one, two, four = write_reports(tmp_path, how)
    kept = tmp_path / "abc1234.jsonl"
    words = [one, four, "--stock-pair", one, two, "--keep", kept, "--host", 2]
    assert "Rounding: 0.2000 nats." in run("compare_answers", *words)
    first = kept.read_text()
    run("compare_answers", *words)
    assert kept.read_text() == first
    assert [(row["server"], bool(row["reference"])) for row in read_rows(kept)] == [
        ("tp1-dcp1", False),
        ("tp2-dcp1", True),
        ("tp4-dcp4", True),
    ]
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- table: {name} -->\n<!-- end of table -->\n" for name in page_tables.TABLES))
    options = ["--page", page, "--rows", tmp_path]
    assert "are not those of its rows" in run("write_page", "--check", *options, status=1)
    run("write_page", *options)
    run("write_page", "--check", *options)
    text = page.read_text()
    assert "| tp4-dcp4 | `abc1234` | 6 of 6 | tp1-dcp1 | 256 | 0 | 0.1000 | 0.2000 | same tokens |" in text
    assert "| tp2-dcp1, stock | `abc1234` | 6 of 6 | tp1-dcp1 | 256 | 0 | 0.1000 |  | same tokens |" in text
    assert "| GLM | TP-DCP | 4 | FP8 | 1 | 6 of 6 |" in text
    assert "| `abc1234` | 2 | 2026-12-01 | 3 | 2 |" in text


def test_a_failure_stays_one_in_the_rows_and_on_the_page(tmp_path):
    one, _, four = write_reports(tmp_path, "absent")
    kept = tmp_path / "abc1234.jsonl"
    run("compare_answers", one, four, "--rounding", "0.05", "--keep", kept, status=1)
    (row,) = (row for row in read_rows(kept) if row["reference"])
    assert row["failures"] == ["first: request 0, token 2: log-probabilities differ by 0.1000"]
    found = write_page.load_rows(tmp_path)
    assert "| FAILED |" in page_tables.TABLES["glm-fp8"](found)
    assert "and 1 failed" in page_tables.TABLES["answer"](found)


def test_a_crowd_is_kept_with_its_halves(tmp_path):
    crowd = report("a", scene=page_tables.AT_ONCE)
    crowd["scenes"][page_tables.IN_HALVES] = report("b")["scenes"]["first"]
    crowd["decode_sizes"] = {"96": 46}
    row = compare.kept_row(crowd, 1, [])
    assert row["asked"] == "crowd" and row["decode_sizes"] == {"96": 46}
    moved = math.sqrt((0.04**2 + 0.10**2 + 0.03**2) / 6)
    expected = {"tokens": 6, "parted": 0, "moved_rms": round(moved, 5), "near_tie_gaps": None}
    assert compare.kept_row(leave_out(crowd, "absent"), 1, [])["halves"] == expected
    assert row["halves"] == expected | {"near_tie_gaps": {"short": [None, 0], "long": [None, 0]}}
    result = compare.compare_reports(crowd, crowd, 0.0)
    keep_rows(tmp_path / "a.jsonl", [row, compare.kept_row(crowd, 1, [], compare.kept_comparison(crowd, 1, result, 0))])
    table = page_tables.TABLES["crowds"](write_page.load_rows(tmp_path))
    assert table.count("`a`") == 1 and "12 of 12" not in table, "its reference is no stock server"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"identical": 7}, "7 of 6 tokens cannot be identical"),
        ({"tokens": None}, "a row must have tokens"),
        ({"parted": [{}]}, "1 answers part, and only 6"),
        ({"asked": "once"}, "asked must be set or crowd"),
        ({"largest_difference": math.nan}, "largest difference is nan"),
        ({"notes": ""}, "no row has notes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_row_that_contradicts_itself_is_not_kept(change, message, tmp_path):
    result = compare.compare_reports(report("a"), report("b"), 1.0)
    row = compare.kept_row(report("b"), 1, [], compare.kept_comparison(report("a"), 1, result, 1.0))
    check_row(row)
    broken = {name: value for name, value in (row | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        keep_rows(tmp_path / "a.jsonl", [broken])
    assert not (tmp_path / "a.jsonl").exists()


def test_two_rows_of_the_same_servers_are_refused(tmp_path):
    line = json.dumps(compare.kept_row(report("a"), 1, [])) + "\n"
    (tmp_path / "a.jsonl").write_text(2 * line)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: there is a row of the same servers"):
        read_rows(tmp_path / "a.jsonl")


# --- the page as it is -----------------------------------------------------------------------------------------------


def test_the_page_has_the_tables_of_its_rows(rows):
    text = PAGE.read_text(encoding="utf-8")
    assert write_page.fill_page(text, rows) == text


def test_every_figure_of_a_row_is_held(rows):
    """Whichever of a comparison's figures is changed, the page is found to differ."""
    text = PAGE.read_text(encoding="utf-8")
    shown = ("tokens", "identical", "largest_difference", "rounding", "capacity", "retractions", "server")
    row = next(row for row in rows if row["reference"] and row["rounding"] and row["asked"] == "set")
    for name in shown:
        changed = row[name] + 1 if isinstance(row[name], int | float) else f"{row[name]}9"
        others = [row | {name: changed} if other is row else other for other in rows]
        assert write_page.fill_page(text, others) != text, name


def test_every_comparison_stands_in_one_table_and_its_reference_has_a_row(rows):
    compared = [row for row in rows if row["reference"]]
    assert len(compared) > 100
    served = {(row["revision"], *(row[name] for name in ("host", "checkpoint", "asked", "server"))) for row in rows}
    for row in compared:
        assert page_tables.table_of(row) in page_tables.TABLES
        reference = row["reference"]
        key = (row["revision"], reference["host"], reference["checkpoint"], row["asked"], reference["server"])
        assert key in served, row["server"]
    placed = functools.reduce(
        lambda found, name: found + [id(row) for row in page_tables.compared(rows, name)], page_tables.TABLES, []
    )
    assert sorted(placed) == sorted(id(row) for row in compared)


def test_nothing_that_was_served_failed(rows):
    """Of comparisons; what a reference's report has against itself, the page says."""
    compared = [row for row in rows if row["reference"]]
    assert [row["server"] for row in compared if row["failures"] or row["problems"]] == []
    assert [row["server"] for row in compared if row["asked"] == "set" and row["identical"] != row["tokens"]] == []


def test_rows_are_what_the_reports_of_the_history_say(rows, tmp_path):
    """Each comparison of the request set and of crowds, by the tool that the page names."""
    archive = ["git", "archive", "--format=tar", REPORTS_REVISION, "docs/served_on_h200"]
    done = subprocess.run(archive, cwd=ROOT, capture_output=True)
    if done.returncode:
        pytest.skip(f"needs the history: {REPORTS_REVISION}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as reports:
        reports.extractall(tmp_path, filter="data")
    folder = tmp_path / "docs" / "served_on_h200"

    @functools.cache
    def read(revision, host, checkpoint, asked, server):
        crowd = "crowd-mtp" if checkpoint == "glm-mtp" else "crowd"
        place = folder / REPORT_FOLDERS[revision, host] / (crowd if asked == "crowd" else checkpoint)
        return json.loads((place / f"{server}.json").read_text())

    compared = [row for row in rows if row["reference"] and (row["revision"], row["host"]) in REPORT_FOLDERS]
    assert len(compared) > 100
    for row in compared:
        other = {name: row[name] for name in ("host", "checkpoint", "asked", "server")}
        reports = [read(row["revision"], **(other | change)) for change in (row["reference"], {})]
        result = compare.compare_reports(*reports, math.inf)
        found = {"tokens": result.tokens, "identical": result.identical, "parted": result.parted}
        found |= {"largest_difference": round(result.largest, 5)}
        found |= {"moved_rms": round(rounding.root_mean_square(result.moved), 5)}
        assert {name: row[name] for name in found} == found, row["server"]
        assert compare.check_report(reports[1]) == row["problems"]
        assert reports[1]["max_total_num_tokens"] == row["capacity"]
        assert reports[1]["retractions"] == row["retractions"]


@pytest.mark.parametrize("text", ["", "<!-- table: glm-fp8 -->\n<!-- end of table -->\n"], ids=["none", "one"])
def test_a_page_that_lacks_a_table_is_refused(text, rows):
    with pytest.raises(ValueError, match="the page must have each of the tables answer, summary"):
        write_page.fill_page(text, rows)
