"""Real English text that every Python installation carries, about 2 MB: the language reference and all docstrings.

The reference is `pydoc_data.topics`; the docstrings are those of the standard library's modules, one text per module.
The text is that of the running Python version, so a study names the version and a digest of what it read.
"""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

_SKIPPED = {"site-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "ensurepip"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
HELD_OUT_EVERY = 64


def corpus(docstrings_too: bool = True) -> tuple[list[str], list[str]]:
    """(texts to train on, held-out texts): every 64th text is held out. Reading the docstrings takes some seconds."""
    from pydoc_data.topics import topics

    texts = [text for _, text in sorted(topics.items())] + (list(docstrings()) if docstrings_too else [])
    return [t for i, t in enumerate(texts) if i % HELD_OUT_EVERY], texts[::HELD_OUT_EVERY]


def docstrings() -> Iterator[str]:
    """The docstrings of each standard library module that has some, joined by blank lines, in the order of paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED & set(path.relative_to(root).parts) and (text := _docstrings_of(path)):
            yield text


def _docstrings_of(path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes in other sources
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            return ""
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    return "\n\n".join(text for text in texts if text)


def digest(texts: Iterable[str]) -> str:
    """Returns the first 16 hex digits of a hash of the texts, by which a study shows what it read."""
    sha = hashlib.sha256()
    for text in texts:
        sha.update(text.encode() + b"\0")
    return sha.hexdigest()[:16]
