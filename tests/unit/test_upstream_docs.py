"""docs/upstream.md has exactly one row for each symbol in compat.py. Runs without sglang."""

import re
from pathlib import Path

from nsa_dcp.sglang_plugin.compat import SGLANG_VERSION, SYMBOLS

TEXT = (Path(__file__).parents[2] / "docs" / "upstream.md").read_text()


def test_every_symbol_has_one_row_and_every_row_a_symbol():
    rows = re.findall(r"^\| `(\S+:\S+)` \|", TEXT, flags=re.MULTILINE)
    assert rows == [symbol.path for symbol in SYMBOLS]


def test_every_row_says_why_and_when_it_goes():
    for row in re.findall(r"^\| `\S+:\S+` \|.*$", TEXT, flags=re.MULTILINE):
        why, when = row.strip("|").split("|")[1:]
        assert why.strip()
        assert when.strip()


def test_the_version_is_the_one_that_is_checked():
    assert f"sglang {SGLANG_VERSION}" in TEXT
