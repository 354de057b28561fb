"""The output of commands: results on standard output, progress and remarks on standard error.

A progress bar appears only when standard error is a terminal; with --json standard output holds one JSON document.
"""

import json
import shlex
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from fp8serve.errors import MachineError

MODEL = typer.Argument(
    metavar="MODEL", help="Hugging Face-format directory, GGUF file, smollm2, or a name on the hub.", show_default=False
)
Model = Annotated[str, MODEL]
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", dir_okay=False, help="File to write the report to, as a page."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def check_report(file: Path | None) -> None:
    """Call it before the work whose result goes there. MachineError: the file cannot be written."""
    from fp8serve.model.storage.files import check_writable

    if file is not None and not file.absolute().parent.is_dir():
        raise MachineError(f"{file} cannot be written: there is no directory {file.parent}.")
    if file is not None:
        check_writable(file)


def write_report(file: Path | None, page: Callable[[], str]) -> None:
    """Write a page to the file, if one was asked for."""
    if file is not None:
        file.write_text(page(), encoding="utf-8")


def typed(context: typer.Context) -> str:
    """The command line of the current command, for a shell."""
    return shlex.join(["fp8serve", *(context.find_root().obj or sys.argv[1:])])


class Advance(Protocol):
    """Moves a progress bar to `done` of `total`; `what` renames it."""

    def __call__(self, done: int, total: int, what: str | None = None) -> None: ...


def print_json(result: Any) -> None:
    """One JSON document; NaN and infinity become null, as JSON has neither."""
    print(json.dumps(_finite(result), indent=2, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def remark(text: str) -> None:
    """A line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """`text` without terminal control: escape sequences from strangers lose their first character."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Left-aligned columns under a header, wide as their content: it also reads well in a pipe."""
    cells = [[str(c) for c in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def print_rich(table: Any) -> None:
    """A rich table on standard output, as wide as the terminal, or as it needs to be in a pipe."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(table)


@contextmanager
def progress(what: str, displayed: bool = True) -> Iterator[Advance]:
    """A bar on standard error while the block runs; nothing without a terminal, or if not `displayed`."""
    if not (displayed and sys.stderr.isatty()):
        yield _nowhere
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int, what: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield advance


@contextmanager
def stages(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that calibration moves: (stage, done, in all)."""
    with progress(what) as advance:
        yield lambda stage, done, total: advance(done, total, stage)


def print_report(report: Any, table: Callable[[Any], Any], as_json: bool, printed: Collection[str] = ()) -> None:
    """The figures of a `report` as JSON or as a `table`; its notes are remarks, without those `printed` before."""
    for note in report.notes:
        if note not in printed:
            remark(note)
    print(report.to_json()) if as_json else print_rich(table(report))


def _nowhere(done: int, total: int, what: str | None = None) -> None:
    """Does nothing, because there is no bar to move."""


def size(num_bytes: float) -> str:
    """Bytes for people: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
