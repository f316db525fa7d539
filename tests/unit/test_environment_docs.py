"""The runbook's table of environment variables has what the code reads, and nothing else."""

import re
from pathlib import Path

from nsa_dcp.sglang_plugin.startup.agreement import OWN_VARIABLES

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"\bNSA_DCP_[A-Z0-9_]*[A-Z0-9]\b")
HEADING = "| variable | values, the default first | what it decides |"
SOURCES = [
    path
    for folder in ("nsa_dcp", "kernels", "scripts")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".sh", ".json")
]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("kernels/*.md")]


def named_in(paths):
    return {name for path in paths for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}


def rows():
    """Values of each variable, in order."""
    _, _, table = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8").partition(HEADING)
    found = {}
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        name, values, _ = (cell.strip() for cell in line.strip("|").split("|", 2))
        assert name.strip("`") not in found, f"{name} has two rows"
        found[name.strip("`")] = re.findall(r"`([^`]+)`", values)
    return found


def test_every_variable_that_is_read_has_a_row_and_every_row_is_read():
    assert named_in(SOURCES) == set(rows())


def test_no_page_names_a_variable_that_has_no_row():
    assert named_in(PAGES) == set(rows())


def test_the_default_stands_first():
    """What the ranks take an unset variable for, when they compare."""
    assert {name for name, _ in OWN_VARIABLES} <= set(rows())
    for name, unset in OWN_VARIABLES:
        assert rows()[name][0] == unset
