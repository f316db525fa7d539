"""Write the tables of docs/served_on_h200.md from the rows that docs/served_on_h200/ keeps.

    python -m scripts.served_checks.write_page [--check] [--page docs/served_on_h200.md] [--rows docs/served_on_h200]

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; what is between them is replaced. --check
writes nothing and ends with 1 where the page differs from its rows.
"""

import argparse
import re
import sys
from pathlib import Path

from scripts.served_checks.reports.kept_rows import read_rows
from scripts.served_checks.reports.page_tables import TABLES

ROOT = Path(__file__).resolve().parents[2]
BETWEEN = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def load_rows(folder: Path) -> list[dict]:
    """Every revision's rows, each with its "revision", in the order of their dates. ValueError: as `read_rows`."""
    rows = [row | {"revision": path.stem} for path in sorted(folder.glob("*.jsonl")) for row in read_rows(path)]
    return sorted(rows, key=lambda row: row["date"])


def fill_page(text: str, rows: list[dict]) -> str:
    """The page with its tables as the rows have them. ValueError: a table is unknown, missing or there twice."""
    names = [name for _, name, _, _ in BETWEEN.findall(text)]
    if sorted(names) != sorted(TABLES):
        raise ValueError(f"the page must have each of the tables {', '.join(TABLES)} once, got {', '.join(names)}")
    return BETWEEN.sub(lambda found: f"{found[1]}\n{TABLES[found[2]](rows)}\n\n{found[4]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "served_on_h200.md")
    parser.add_argument("--rows", type=Path, default=ROOT / "docs" / "served_on_h200")
    arguments = parser.parse_args()
    try:
        rows = load_rows(arguments.rows)
        if not rows:
            raise ValueError(f"--rows must be a folder with .jsonl files, got {arguments.rows}")
        text = arguments.page.read_text(encoding="utf-8")
        filled = fill_page(text, rows)
    except (OSError, ValueError) as error:
        sys.exit(f"write_page: {error}")
    if arguments.check:
        sys.exit(f"write_page: the tables of {arguments.page} are not those of its rows" if filled != text else 0)
    arguments.page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
