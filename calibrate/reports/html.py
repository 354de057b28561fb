"""Functions that return HTML elements as text. Arguments named `content` or `rows` are HTML and are
inserted as they are; all other arguments are text and are escaped.

A page is one self-contained file without scripts, fonts or external addresses. It can be mailed, archived, and opened
without a network. style.css has light and dark colours; the colours of series (s0 to s6) can be distinguished with
red-green colour blindness.
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
    """Returns a section with a title and an explanation, or an empty string if there is no content."""
    if not any(content):
        return ""
    return f'<section><h2>{escape(title)}</h2><p class="why">{escape(explanation)}</p>{"".join(content)}</section>'


def paragraph(text: str, kind: str = "") -> str:
    css_class = f' class="{kind}"' if kind else ""
    return f"<p{css_class}>{escape(text)}</p>"


def figures(drawings: Mapping[str, str], kind: str = "") -> str:
    """Returns SVG drawings with their captions, side by side; drawings that are empty strings are omitted."""
    content = "".join(
        f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" for caption, svg in drawings.items() if svg
    )
    return f'<div class="charts{" " + kind if kind else ""}">{content}</div>' if content else ""


def cards(contents: Mapping[str, tuple[str, str]]) -> str:
    """Returns cards, side by side, each with a name, a value and a note."""
    content = (
        f"<div><b>{escape(name)}</b><strong>{escape(value)}</strong><small>{escape(note)}</small></div>"
        for name, (value, note) in contents.items()
    )
    return f'<div class="cards">{"".join(content)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table, which scrolls horizontally if it is wider than the page."""
    head_cells = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head_cells}</tr></thead><tbody>{body}</tbody></table></div>'


def details(summary: str, content: str) -> str:
    """Returns a section that is collapsed until the reader opens it."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def bar(share: float, largest: float) -> str:
    """Returns a bar for a table's cell; a share equal to `largest` fills the cell."""
    width = 100 * share / largest if largest > 0 else 0.0
    return f'<span class="bar"><i style="width:{width:.1f}%"></i></span>'


def coded(text: str) -> str:
    """Returns escaped text in which parts between backticks are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def titled(text: str, title: str) -> str:
    """Returns text with a tooltip."""
    return f'<span title="{escape(title)}">{escape(text)}</span>'
