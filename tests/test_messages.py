"""Error messages for users do not present another library's text as our own.

The tests read the source. A message may quote an exception of Python or of a library if it names the source and
shortens the text to one line (`errors.one_line`, `json_fault`, `os_reason`).
"""

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8serve import errors
from fp8serve.errors import Fp8ServeError, json_fault, json_kind, shown
from tests.test_imports import ROOT

OURS = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Fp8ServeError)}
SENTENCES = OURS | {"Fault"}
SOURCES = sorted(path for folder in ("fp8serve", "calibrate") for path in (ROOT / folder).rglob("*.py"))


def caught(handler: ast.ExceptHandler) -> set[str]:
    """Returns the names of the classes that the clause catches."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind).rpartition(".")[2] for kind in kinds if kind is not None}


def raw_quotations(tree: ast.AST) -> Iterator[str]:
    """Yields every message of ours that contains the unshortened text of another library's exception."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None or caught(handler) & OURS:
            continue
        if f"isinstance({handler.name}, Fp8ServeError)" in ast.unparse(handler):
            continue  # other exceptions are raised again
        for statement in ast.walk(handler):
            if isinstance(statement, ast.Call) and ast.unparse(statement.func) in SENTENCES:
                for part in ast.walk(statement):
                    if isinstance(part, ast.FormattedValue) and ast.unparse(part.value) in (
                        handler.name,
                        f"str({handler.name})",
                        f"repr({handler.name})",
                    ):
                        yield f"line {statement.lineno}: {ast.unparse(statement)[:80]}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_message_contains_a_raw_exception_of_another_library(path: Path) -> None:
    assert list(raw_quotations(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_raw_quotations_finds_raw_exceptions() -> None:
    source = "try: f()\nexcept {} as e: raise DataError(f'It failed: {{{}}}.') from None"
    for kind, quoted, count in (
        ("ValueError", "e", 1),
        ("(OSError, KeyError)", "str(e)", 1),
        ("ValueError", "one_line(e)", 0),
        ("ModelError", "e", 0),  # an exception of fp8serve
    ):
        assert len(list(raw_quotations(ast.parse(source.format(kind, quoted))))) == count, (kind, quoted)


@pytest.mark.parametrize("value", [None, True, False, 1, 1.5, "a", [1], (1,), {"a": 1}])
def test_values_are_named_as_json_names_them(value: object) -> None:
    text = f"{json_kind(value)} {shown(value)}"
    for word in ("NoneType", "None", "True", "False", "dict", "str", "tuple", "float"):
        assert word not in text


ROW = '{"messages": [{"role": "user", "content": 1}]}'


@pytest.mark.parametrize("length", range(1, len(ROW)))
def test_truncated_json_is_reported_as_cut_off(length: int) -> None:
    with pytest.raises(json.JSONDecodeError) as caught_error:
        json.loads(ROW[:length])
    assert json_fault(caught_error.value).startswith("it is cut off ")
    assert json_fault(caught_error.value, located=False).startswith("it is cut off")


def test_a_json_fault_before_the_end_is_not_reported_as_cut_off() -> None:
    with pytest.raises(json.JSONDecodeError) as caught_error:
        json.loads('{"a": 1 "b": 2}')
    assert json_fault(caught_error.value) == "a comma is missing at character 9"


@pytest.mark.parametrize("text", ["", "{", "[1,", "{'a': 1}", '{"a" 1}', '"a', "[1] 2", "[" * 100_000, "9" * 5000])
def test_json_faults_are_described_without_pythons_words(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)) as caught_error:
        json.loads(text)
    fault = json_fault(caught_error.value)
    for word in ("Expecting", "delimiter", "char ", "sys.", "recursion", "Extra data", "column"):
        assert word not in fault
