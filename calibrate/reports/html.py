"""The elements that pages are made of, as text. Arguments named `content` or `rows` are HTML already; others are
escaped here.

A page is one self-contained file without scripts, fonts or external addresses, so it can be mailed, archived, and
opened on a phone or without a network. style.css: light and dark; the colours of series (s0 to s6) can be told apart
without seeing red or green.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

META = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'


def document(title: str, content: Iterable[str]) -> str:
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    head = f"{META}<title>{escape(title)}</title><style>\n{style}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(content)}</body></html>\n'


def section(title: str, explanation: str, *content: str) -> str:
    """A section with one line that explains it; empty if there is no content."""
    if not any(content):
        return ""
    return f'<section><h2>{escape(title)}</h2><p class="why">{escape(explanation)}</p>{"".join(content)}</section>'


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{escape(text)}</p>"


def figures(drawings: Mapping[str, str], kind: str = "") -> str:
    """Drawings by their captions, side by side where there is room. Empty ones are left out."""
    displayed = (f"<figure><figcaption>{escape(t)}</figcaption>{svg}</figure>" for t, svg in drawings.items() if svg)
    inside = "".join(displayed)
    return f'<div class="charts{" " + kind if kind else ""}">{inside}</div>' if inside else ""


def cards(contents: Mapping[str, tuple[str, str]]) -> str:
    """A value and a note by their names, side by side."""
    inside = (
        f"<div><b>{escape(name)}</b><strong>{escape(value)}</strong><small>{escape(note)}</small></div>"
        for name, (value, note) in contents.items()
    )
    return f'<div class="cards">{"".join(inside)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """It scrolls on its own where it is wider than the page."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def details(summary: str, content: str) -> str:
    """A collapsed section."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def bar(share: float, largest: float) -> str:
    """A share as a bar in a table's cell; `largest` fills the cell."""
    width = 100 * share / largest if largest > 0 else 0.0
    return f'<span class="bar"><i style="width:{width:.1f}%"></i></span>'


def coded(text: str) -> str:
    """Text in which parts between backticks are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def titled(text: str, title: str) -> str:
    """Text with a tooltip."""
    return f'<span title="{escape(title)}">{escape(text)}</span>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
