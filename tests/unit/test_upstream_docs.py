"""docs/upstream.md has exactly one row for each symbol in compat.py, and for each change in patches.py. Runs without
sglang."""

import ast
import re
from pathlib import Path

from nsa_dcp.sglang_plugin import patches
from nsa_dcp.sglang_plugin.compat import SGLANG_VERSION, SYMBOLS

TEXT = (Path(__file__).parents[2] / "docs" / "upstream.md").read_text()
CHANGED = TEXT[TEXT.index("## What is changed") : TEXT.index("## Every dependency")]


def functions():
    """The public functions of patches.py, in order."""
    tree = ast.parse(Path(patches.__file__).read_text())
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def changes(function):
    """Names that a function sets on objects, and registries of sglang's that it writes to."""
    nodes = list(ast.walk(function))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    calls = {getattr(node.func, "id", "") for node in nodes if isinstance(node, ast.Call)}
    return attributes | {name for name in calls if name.startswith("register_")}


def change_rows():
    """The table's rows: lists of five cells."""
    rows = re.findall(r"^\| `\w+` \|.*\|$", CHANGED, flags=re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_symbol_has_one_row_and_every_row_a_symbol():
    rows = re.findall(r"^\| `(\S+:\S+)` \|", TEXT, flags=re.MULTILINE)
    assert rows == [symbol.path for symbol in SYMBOLS]


def test_every_row_says_why_and_when_it_goes():
    for row in re.findall(r"^\| `\S+:\S+` \|.*$", TEXT, flags=re.MULTILINE):
        why, when = row.strip("|").split("|")[1:]
        assert why.strip()
        assert when.strip()


def test_every_change_has_one_row_in_its_order_and_every_row_a_change():
    assert [row[0].strip("`") for row in change_rows()] == [function.name for function in functions()]


def test_a_row_names_what_its_function_sets_and_nothing_else():
    for row, function in zip(change_rows(), functions(), strict=True):
        named = {name.split(".")[-1] for name in re.findall(r"`(\w+(?:\.\w+)*)`", row[1])} - set(patches.BACKEND_NAMES)
        assert named == changes(function) != set(), function.name


def test_a_change_says_where_why_and_when_it_goes():
    for row in change_rows():
        assert len(row) == 5
        assert all(row), row[0]


def test_the_order_in_the_code_names_every_change_once():
    """The numbered list at the top of patches.py, which is what an operator reads first."""
    (order,) = re.findall(r"^1\. .*?\n\n", patches.__doc__, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", order) == [function.name for function in functions()]


def test_the_version_is_the_one_that_is_checked():
    assert f"sglang {SGLANG_VERSION}" in TEXT
