"""What a run has reported, step by step: as a table, JSON, CSV, a chart in the terminal, or a picture.

A run is a job of a server, by its id, or the directory that `fp8serve finetune --out` made.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fp8serve.charts import text_chart
from fp8serve.client import jobs as client
from fp8serve.commands.connecting import URL, KeyFile, Server, connected
from fp8serve.errors import MachineError
from fp8serve.terminal import AsJson, print_json, print_table, printable
from fp8serve.train.events import FIRST_COLUMNS, Metrics, Points, as_csv, curves_of, series_of_run

Run = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as list shows it, or the directory of a run.")]
WIDEST = 100  # characters of a chart


def metrics(
    job: Run,
    server: Server = URL,
    api_key_file: KeyFile = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with every metric.")] = False,
    json: AsJson = False,
) -> None:
    """Show a job's metrics, a line for each step that was reported.

    \b
    Examples:
      fp8serve jobs metrics JOB
      fp8serve jobs metrics JOB --csv > losses.csv
      fp8serve jobs metrics ./run --json
    """
    if csv and json:
        raise typer.BadParameter("--csv and --json are two forms of one result; give one of them.")
    found = series_of(job, server, api_key_file)
    if csv:
        print(as_csv(found), end="")
    elif json:
        print_json(found)
    else:
        print_table(FIRST_COLUMNS, [[_cell(row.get(name)) for name in FIRST_COLUMNS] for row in found])


def plot(
    job: Run,
    server: Server = URL,
    api_key_file: KeyFile = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Metric to draw; repeat for several.", show_default="the losses"),
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture (SVG) instead.")] = None,
) -> None:
    """Draw a job's losses by step, or other metrics of it.

    \b
    Examples:
      fp8serve jobs plot JOB
      fp8serve jobs plot ./run --svg loss.svg
      fp8serve jobs plot JOB --metric reward --metric kl
    """
    found = series_of(job, server, api_key_file)
    if svg is None:
        print(chart(found, metric or []))
        return
    try:
        svg.write_text(picture(f"{Path(job).name}, by step", found, metric or []), encoding="utf-8")
    except OSError as problem:
        raise MachineError(f"{svg} cannot be written: {problem.strerror}.") from None


def series_of(job: str, server: str, key_file: Path | None) -> list[Metrics]:
    """What a server's job, or the run in a directory, has reported."""
    if Path(job).is_dir():
        return series_of_run(Path(job))
    with connected(server, key_file) as api:
        return list(client.series(api, job))


def chart(series: list[Metrics], metric: list[str]) -> str:
    """For a terminal. JobError: nothing was reported."""
    import shutil

    width = max(min(WIDEST, shutil.get_terminal_size().columns) - 14, 20)
    return printable("\n\n".join(text_chart(frame, width) for frame in _frames(series, metric).values()))


def picture(title: str, series: list[Metrics], metric: list[str]) -> str:
    """An SVG file's text. JobError: nothing was reported."""
    from fp8serve.charts import Panel, svg_file

    return svg_file(title, [Panel(name, frame) for name, frame in _frames(series, metric).items()], "step")


def _frames(series: list[Metrics], metric: list[str]) -> dict[str, dict[str, Points]]:
    """The curves of each frame, by its name: the losses in one, or each metric, which has a range of its own."""
    found = curves_of(series, metric)
    return {name: {name: points} for name, points in found.items()} if metric else {"loss": found}


def show_chart(series: list[Metrics]) -> None:
    """The losses, below the result, for a person at a terminal; nothing in a pipe, or where none was reported."""
    if sys.stdout.isatty() and any(row.get("train_loss") is not None for row in series):
        print(chart(series, []))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value))
