"""docs/compatibility.md is the output of `make compatibility` if all tests pass, and has a column for every test."""

from pathlib import Path

from tests.compatibility import test_calibrated, test_compatibility
from tests.compatibility.page import CHECKS, complete, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


def test_the_page_is_up_to_date() -> None:
    assert page(complete()) == PAGE.read_text(), "run: make compatibility"


def test_a_failed_test_changes_the_page() -> None:
    key = ("test_logits", "phi3")
    assert page(complete() | {key: False}) != page(complete())


def test_every_test_has_a_column() -> None:
    tests = [*vars(test_compatibility), *vars(test_calibrated)]
    assert {name for name in tests if name.startswith("test_")} == set(CHECKS)
