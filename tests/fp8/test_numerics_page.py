"""The table of edge cases in docs/numerics.md: a test cites every row, and tests cite no other rows."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rows_of_the_page() -> set[str]:
    page = (ROOT / "docs" / "numerics.md").read_text()
    return set(re.findall(r"^\| ([A-Z]\d+) \|", page, re.MULTILINE))


def rows_cited(text: str) -> set[str]:
    """Rows in docstrings that say "Row X1", "Rows X1 to X3", "Rows X1 to X4 and X6"."""
    cited: set[str] = set()
    for sentence in re.findall(r"[Rr]ows? ([A-Z]\d+(?:(?:,| to| and)+ [A-Z]\d+)*)", text):
        for first, last in re.findall(r"([A-Z]\d+)(?: to ([A-Z]\d+))?", sentence):
            letter, low, high = first[0], int(first[1:]), int((last or first)[1:])
            cited |= {f"{letter}{i}" for i in range(low, high + 1)}
    return cited


def test_every_row_is_cited_by_a_test() -> None:
    rows = rows_of_the_page()
    cited = set().union(*(rows_cited(path.read_text()) for path in Path(__file__).parent.glob("test_*.py")))
    assert len(rows) > 25
    assert cited - {"X1", "X2", "X3", "X4", "X6"} == rows
