"""Reads the names of series and the labels in a PromQL expression. It knows only the part of the language that our
files use, and does not parse it: functions, operators and aggregations are recognised by their position. An expression
that Prometheus would refuse may pass.
"""

import re
from typing import NamedTuple

WORDS = frozenset(
    (
        "and",
        "or",
        "unless",
        "by",
        "without",
        "on",
        "ignoring",
        "group_left",
        "group_right",
        "bool",
        "offset",
        "inf",
        "nan",
    )
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"(?<![\w.])([A-Za-z_:][\w:]*)\s*(?:\{([^}]*)\})?(?!\w|\s*\()")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')


class Selector(NamedTuple):
    """A series, and what its labels must be: (name, operator, value)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


class Query(NamedTuple):
    """The series of an expression; `grouped`: the labels by which it groups."""

    selectors: tuple[Selector, ...]
    grouped: frozenset[str]


def parse_query(expression: str) -> Query:
    """Reads an expression. ValueError: it names no series, or its brackets do not match."""
    plain = _STRING.sub('""', expression)
    for one, other in ("()", "{}", "[]"):
        if plain.count(one) != plain.count(other):
            raise ValueError(f"{expression}: {one} and {other} do not match")
    grouped = {
        label.strip() for selectors in _GROUPING.findall(plain) for label in selectors.split(",") if label.strip()
    }
    rest = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", expression))
    selectors = [
        Selector(name, tuple(_MATCHER.findall(labels)))
        for name, labels in _SELECTOR.findall(rest)
        if name.lower() not in WORDS
    ]
    if not selectors:
        raise ValueError(f"{expression}: it asks for no series")
    return Query(tuple(selectors), frozenset(grouped))
