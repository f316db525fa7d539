"""Pages for people: links lead somewhere, the front pages stay short, and their figures are the measurements'."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "kernels", "scripts", "tests", "nsa_dcp", ".github")
PAGES = [*sorted(ROOT.glob("*.md")), *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md")))]
SOURCES = [path for name in FOLDERS[:5] for path in sorted((ROOT / name).rglob("*.py"))]
PERFORMANCE = ROOT / "docs" / "performance.md"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"#{1,6} (.*)")


def prose_lines(text: str) -> list[str]:
    """Lines outside fenced blocks, with what stands in `code` left out."""
    kept, fenced = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            kept.append(re.sub(r"`[^`]*\]\([^`]*`", "", line))
    return kept


def anchors(text: str) -> set[str]:
    """The anchors that a heading gets where pages are shown: lower case, words joined, punctuation left out."""
    found: set[str] = set()
    for line in prose_lines(text):
        heading = HEADING.fullmatch(line)
        if heading:
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1)).strip().lower()
            name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            found.add(name if name not in found else f"{name}-{sum(one.startswith(name) for one in found)}")
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page whose file or anchor is not there."""
    broken = []
    for target in LINK.findall("\n".join(prose_lines(text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        inside = place == ROOT or ROOT in place.parents
        missing = bool(name) and not (inside and place.exists())
        shown = text if not name else place.read_text() if place.suffix == ".md" and not missing else ""
        if missing or (anchor and anchor not in anchors(shown)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page):
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](runbook.md) and [b](runbook.md#6-what-does-each-refusal-mean)", []),
        ("[a](nowhere.md)", ["nowhere.md"]),
        ("[a](runbook.md#nowhere)", ["runbook.md#nowhere"]),
        ("# Here, and `now`\n[a](#here-and-now) [b](#there)", ["#there"]),
        ("![a](nowhere.svg)", ["nowhere.svg"]),
        ("[a](../../outside.md)", ["../../outside.md"]),
        ("[a](https://example.org/nowhere.md)", []),
        ("```\n# no heading\n[a](nowhere.md)\n```\n[b](#no-heading)", ["#no-heading"]),
        ("`[a](nowhere.md)`", []),
    ],
)
def test_a_broken_link_is_found(text, broken):
    assert broken_links(ROOT / "docs" / "page.md", text) == broken


def test_every_page_is_reached_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for target in LINK.findall("\n".join(prose_lines(page.read_text(encoding="utf-8")))):
            if not re.match(r"[a-z]+:", target) and target.partition("#")[0]:
                waiting.append((page.parent / target.partition("#")[0]).resolve())
    assert [page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in seen] == []


def test_pages_that_code_names_are_there():
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in SOURCES
        for page in re.findall(r"\b(?:docs|kernels)/[\w/]+\.(?:md|svg)\b", path.read_text(encoding="utf-8"))
    }
    assert named
    assert sorted((path, page) for path, page in named if not (ROOT / page).is_file()) == []


@pytest.mark.parametrize(
    ("name", "most"), [("README.md", 120), ("docs/performance.md", 60), ("docs/architecture.md", 110)]
)
def test_the_front_pages_stay_short(name, most):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


def names_from_kernels(tree: ast.AST) -> set[str]:
    """What a tree imports from `nsa_dcp_kernels`."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "nsa_dcp_kernels"]
    return {alias.name for node in imports for alias in node.names}


def ops_of_servers() -> set[str]:
    """Ops that the plugin calls, itself or through the functions of cp_dcp.py that it imports."""
    found, borrowed = set(), set()
    for path in sorted((ROOT / "nsa_dcp" / "sglang_plugin").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= names_from_kernels(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "nsa_dcp.cp_dcp":
                borrowed |= {alias.name for alias in node.names}
    tree = ast.parse((ROOT / "nsa_dcp" / "cp_dcp.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if getattr(node, "name", None) in borrowed:
            called = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            found |= called & names_from_kernels(tree)
    return {name for name in found if name.islower()}


def test_the_page_of_the_kernels_says_which_ops_servers_run():
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    said: dict[str, str] = {}
    for row in table_rows(text, "| op | shapes | servers |"):
        ops = re.findall(r"`(\w+)`", row[0])
        singled_out = re.findall(r"`([a-z]+_\w+)`", row[2])
        said |= {op: "-" if singled_out and op not in singled_out else row[2] for op in ops}
    assert {op for op, servers in said.items() if servers != "-"} == ops_of_servers()


def test_the_page_of_the_architecture_says_what_servers_and_engine_share():
    """Of the modules beside `planning`, the plugin imports `cp_dcp` alone, and what the page names."""
    found = set()
    for path in sorted((ROOT / "nsa_dcp" / "sglang_plugin").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and re.match(
                r"nsa_dcp\.(?!sglang_plugin|planning|command_line|choices)", node.module or ""
            ):
                found |= {(node.module, alias.name) for alias in node.names}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert {module for module, _ in found} == {"nsa_dcp.cp_dcp"}
    (said,) = re.findall(r"of `cp_dcp` three names, (.*?)\.", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", said)) == {name for _, name in found}


def table_rows(text: str, first: str) -> list[list[str]]:
    """Cells of the table whose heading starts with these words."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(first))
    rows = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.fixture(scope="module")
def measured():
    """The reports of the three servers that the page's table shows."""
    kept = json.loads((ROOT / "docs" / "measured_on_two_h200" / "bench.json").read_text())["reports"]
    reports = {report["config"]: report for report in kept}
    return [reports[name] for name in ("tp2-dcp1-profile", "tp2-dcp2-a2a-profile", "tp2-dcp2-cpi-slice-profile")]


def best_output(report, context: int) -> str:
    best = max((one for one in report["decode"] if one["context"] == context), key=lambda one: one["tokens_per_s"])
    return f"{best['tokens_per_s']:,.0f} at {best['running']}"


def step(report, requests: int) -> str:
    (one,) = [one for one in report["decode"] if (one["context"], one["running"]) == (4096, requests)]
    return f"{one['step_us'] / 1e3:.2f}"


def prefill(report) -> str:
    (rate,) = [one["tokens_per_s"] for one in report["prefill"] if one["tokens"] == 32768]
    return f"{round(rate, -2):,.0f}"


def expected_cells(report) -> list[str]:
    """A column of docs/performance.md's table."""
    pool = f"{report['pool']['tokens']:,}"
    outputs = [best_output(report, context) for context in (4096, 32768, 131072)]
    return [pool, *outputs, *(step(report, requests) for requests in (16, 64, 128)), prefill(report)]


def test_the_table_of_the_performance_page_is_the_measurements(measured):
    rows = table_rows(PERFORMANCE.read_text(encoding="utf-8"), "| | TP | TP-DCP 2 | CP-DCP 2 |")
    assert len(rows) <= 8
    for column, report in enumerate(measured, start=1):
        assert [row[column] for row in rows] == expected_cells(report), report["config"]


def test_the_numbers_of_the_readme_are_the_measurements(measured):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tp, tp_dcp, cp_dcp = (expected_cells(report) for report in measured)
    number = [[float(cell.split()[0].replace(",", "")) for cell in cells] for cells in (tp, tp_dcp, cp_dcp)]
    for shown in (tp[0], tp_dcp[0], tp[1].split()[0], tp_dcp[1].split()[0], tp[5], tp_dcp[5]):
        assert shown in text
    assert f"{number[1][1] / number[0][1]:.2f} times" in text
    assert f"{number[2][7] / number[0][7]:.2f} times" in text
    losses = [
        one["step_us"] / other["step_us"] - 1
        for one in measured[1]["decode"]
        for other in measured[0]["decode"]
        if one["context"] == other["context"] and 2 <= one["running"] == other["running"] <= 19
    ]
    assert f"{min(losses):.0%} to {max(losses):.0%}".replace("% to", " to") + " longer" in text
