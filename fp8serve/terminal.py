"""Output of the commands: results on standard output, progress bars and remarks on standard error.

Progress bars are only shown if standard error is a terminal. With --json, standard output is one JSON document.
"""

import json
import os
import shlex
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from fp8serve.errors import MachineError
from fp8serve.options import AUTO

MODEL = typer.Argument(
    metavar="MODEL", help="Directory in Hugging Face format, GGUF file, smollm2, or a hub name.", show_default=False
)
Model = Annotated[str, MODEL]
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", dir_okay=False, help="Write the report to this HTML file."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def check_report(file: Path | None) -> None:
    """Raises MachineError if the report cannot be written. Commands call it before the work, which may take long."""
    from fp8serve.model.storage.files import check_writable

    if file is not None and not file.absolute().parent.is_dir():
        raise MachineError(f"{file} cannot be written: there is no directory {file.parent}.")
    if file is not None:
        check_writable(file)


def write_report(file: Path | None, page: Callable[[], str]) -> None:
    """Writes a page to `file`, if it is not None."""
    if file is not None:
        file.write_text(page(), encoding="utf-8")


def command_line(context: typer.Context) -> str:
    """Returns the command line of the current command, quoted for a shell."""
    return shlex.join(["fp8serve", *(context.find_root().obj or sys.argv[1:])])


def on_device(values: Mapping[str, Any], model_dir: Path, processes: int = 1) -> dict[str, Any]:
    """Returns the options of a command with the device that "auto" stands for, and prints the choice if there is a
    GPU. `recipe`, `head_dtype` and `scales` of the options say how the model is loaded."""
    if values["device"] != AUTO:
        return dict(values)
    from fp8serve.model.device import find_device

    recipe, head = values.get("recipe", "bf16"), values.get("head_dtype", "bf16")
    choice = find_device(model_dir, recipe, head, values.get("scales"), processes)
    if choice.has_gpu and os.environ.get("RANK", "0") == "0":  # torchrun numbers its processes
        remark(choice.text)
    return {**values, "device": choice.device}


class Advance(Protocol):
    """A function that moves a progress bar to `done` of `total`, and relabels it if `label` is not None."""

    def __call__(self, completed: int, total: int, label: str | None = None) -> None: ...


def print_json(result: Any) -> None:
    """Prints one JSON document. NaN and infinity become null, because JSON has no such numbers."""
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
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Returns untrusted text with control characters replaced, so that it cannot control the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints left-aligned columns under a header. The columns are as wide as their content, also in a pipe."""
    cells = [[str(c) for c in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


@contextmanager
def progress(label: str, displayed: bool = True) -> Iterator[Advance]:
    """Shows a progress bar on standard error while the block runs. Shows nothing if standard error is no terminal or
    `displayed` is False."""
    if not (displayed and sys.stderr.isatty()):
        yield lambda completed, total, label=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)

        def advance(completed: int, total: int, label: str | None = None) -> None:
            bar.update(task, completed=completed, total=total, description=label)

        yield advance


@contextmanager
def stage_progress(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar for work in stages. Yields a function that takes the stage, the steps done and all steps."""
    with progress(label) as advance:
        yield lambda stage, completed, total: advance(completed, total, stage)


def print_report(report: Any, table: Callable[[Any], Any], as_json: bool, printed: Collection[str] = ()) -> None:
    """Prints a report as JSON or as a rich table, and its notes on standard error, except those that were `printed`
    before. In a pipe the table has up to 160 columns."""
    from rich.console import Console

    for note in report.notes:
        if note not in printed:
            remark(note)
    if as_json:
        print(report.to_json())
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(report))


def format_bytes(num_bytes: float) -> str:
    """Formats a number of bytes: 1536 becomes "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
