"""How `make docs` builds the site from the pages in this folder: Sphinx, with MyST for Markdown and Furo for the look.

The pages are plain Markdown that reads as well on GitHub, so links are ordinary relative links. A link to a file of the
repository outside this folder becomes a download; one to a folder has no page here and becomes its text.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = _PROJECT["name"]
release = version = _PROJECT["version"]
author = copyright = "the fp8serve authors"  # noqa: A001 - Sphinx's name for it

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["constraints.txt"]
nitpicky = True  # a reference that leads nowhere is a warning, and `make docs` takes warnings for errors
default_role = "code"  # docstrings put names in single backticks
smartquotes = False  # the search finds a question as it is typed, with straight apostrophes
highlight_language = "text"

myst_heading_anchors = 4  # headings have the anchors that GitHub gives them
suppress_warnings = ["misc.highlighting_failure"]  # JSON with an ellipsis in it is an example, not JSON

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures name the types of torch, which this site has no pages for
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"fp8serve {version}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = str(ROOT / "fp8serve/server/console/icon.svg")
html_search_scorer = str(ROOT / "docs/static/scorer.js")  # the section with the closest heading first
html_theme_options = {"navigation_with_keys": True}


_LINK_OUT = re.compile(r"\[([^\]]+)\]\((\.\./(?:\.\./)?[^)#]+)\)")


def _links_out(app: Sphinx, page: str, source: list[str]) -> None:
    """What MyST would look for among the pages: a folder of the repository becomes its name, a file a download."""

    def instead(link: re.Match[str]) -> str:
        target = (Path(app.srcdir, page).parent / link[2]).resolve()
        if target.is_relative_to(Path(app.srcdir)) or not target.exists():
            return link[0]
        return link[1] if target.is_dir() else f"[{link[1]}](path:{link[2]})"

    source[0] = _LINK_OUT.sub(instead, source[0])


_CELL = re.compile(r"<td>.*?</td>", re.S)
_LONG_WORD = re.compile(r"[^\s<>]{20,}(?=[^<>]*<)")
_BREAK = re.compile(r"(?<=::)|(?<=[/_])|(?<=[a-z0-9])(?=[A-Z])")


def _breakable(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Long words in tables, such as names of tests, may break between their parts, so that tables stay narrow."""
    if "body" in context:
        context["body"] = _CELL.sub(lambda cell: _LONG_WORD.sub(_broken, cell[0]), context["body"])


def _broken(word: re.Match[str]) -> str:
    return _BREAK.sub("<wbr>", word[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _links_out)
    app.connect("html-page-context", _breakable)
