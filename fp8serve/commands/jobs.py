"""Fine-tune jobs of a server: start, watch, end and delete them.

\b
Examples:
  fp8serve jobs submit chats.jsonl --epochs 3 --follow
  fp8serve jobs list --server http://127.0.0.1:8000
  fp8serve jobs follow JOB
  fp8serve jobs plot JOB
  fp8serve models activate JOB
"""

import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import field, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.charts import text_chart
from fp8serve.client import jobs as client
from fp8serve.client.api import Api, member
from fp8serve.commands.connecting import URL, KeyFile, Server, connected, given_options
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.errors import MachineError
from fp8serve.model.text.data_files import DATA, local_file
from fp8serve.options import options_of
from fp8serve.terminal import AsJson, print_json, print_table, printable, progress, remark
from fp8serve.train.config import NOT_ON_THE_WIRE, WIRE_NAMES, TrainConfig
from fp8serve.train.events import FIRST_COLUMNS, Metrics, Points, as_csv, curves_of, series_of_run

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)
JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as list shows it.")]
JOB_OPTIONS = [option for option in options_of(TrainConfig) if option.name not in NOT_ON_THE_WIRE]
JobOptions: Any = make_dataclass(
    "JobOptions", [(o.name, o.kind, field(default_factory=partial(copy, o.default))) for o in JOB_OPTIONS]
)
"""The options of training that a server's clients may set; the server checks them."""
Run = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as list shows it, or the directory of a run.")]
WIDEST = 100  # characters of a chart
LEARNT = ("»", "«")


@app.command("list")
def list_jobs(
    server: Server = URL,
    api_key_file: KeyFile = None,
    most: Annotated[int, typer.Option("--limit", min=1, help="Jobs to list, newest first.")] = 20,
    json: AsJson = False,
) -> None:
    """List the server's jobs, newest first.

    \b
    Examples:
      fp8serve jobs list
      fp8serve jobs list --limit 100 --json
    """
    with connected(server, api_key_file) as api:
        result = client.jobs(api, most)
    if json:
        print_json(result)
    else:
        print_table(("job", "status", "step", "loss", "model"), [_row(job) for job in result])


@app.command()
def show(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Show one job: its state, its numbers, and the error if it failed.

    \b
    Examples:
      fp8serve jobs show JOB
      fp8serve jobs show JOB --json
    """
    with connected(server, api_key_file) as api:
        _print(client.one_job(api.get(client.place(job))), json)


@app.command()
@with_options()
def submit(
    context: typer.Context,
    data: Annotated[str, typer.Argument(metavar="FILE", help=DATA)],
    options: Chosen[JobOptions],
    validation: Annotated[str | None, typer.Option(metavar="FILE", help="Data to validate on.")] = None,
    suffix: Annotated[str, typer.Option(help="Part of the result's name.")] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Watch the job until it ends.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the data, and print what the job would take.")
    ] = False,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Start a fine-tune on a file of data; options that are not given have the server's defaults.

    \b
    Examples:
      fp8serve jobs submit chats.jsonl --epochs 3 --lr 1e-5
      fp8serve jobs submit chats.jsonl --validation held-out.jsonl --follow
      fp8serve jobs submit rows.parquet --dry-run
    """
    chosen = given_options(context, (option.name for option in JOB_OPTIONS))
    body = {WIRE_NAMES.get(name, name): options.values[name] for name in chosen}
    with connected(server, api_key_file) as api:
        body["file_id"] = api.upload(local_file(data))
        if validation is not None:
            body["validation_file_id"] = api.upload(local_file(validation))
        body |= {"suffix": suffix} if suffix else {}
        if dry_run:
            return _print_dry_run(api.post("/finetune/validate", body), json)
        job = client.one_job(api.post("/finetune", body))
        if follow:
            remark(f"Job {printable(job['id'])}")
            _watch(api, job["id"], json)
        else:
            _print(job, json)
    return None


@app.command()
def follow(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Watch a job until it ends: its steps with their loss, and its other events. Ctrl-C leaves the job running.

    \b
    Examples:
      fp8serve jobs follow JOB
      fp8serve jobs follow JOB --json
    """
    with connected(server, api_key_file) as api:
        _watch(api, job, json)


@app.command()
def cancel(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Cancel a job; the files that it wrote stay.

    \b
    Examples:
      fp8serve jobs cancel JOB
    """
    with connected(server, api_key_file) as api:
        _print(client.one_job(api.post(client.place(job, "/cancel"))), json)


@app.command()
def pause(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Stop a job at a checkpoint until it is resumed; its process ends.

    \b
    Examples:
      fp8serve jobs pause JOB
    """
    with connected(server, api_key_file) as api:
        _print(client.one_job(api.post(client.place(job, "/pause"))), json)


@app.command()
def resume(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Continue a job that failed or is paused, from its last checkpoint.

    \b
    Examples:
      fp8serve jobs resume JOB
    """
    with connected(server, api_key_file) as api:
        _print(client.one_job(api.post(client.place(job, "/resume"))), json)


@app.command()
def delete(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Delete a job that has ended, with its result and its checkpoints.

    \b
    Examples:
      fp8serve jobs delete JOB
    """
    with connected(server, api_key_file) as api:
        answer = api.delete(client.place(job))
    if json:
        print_json(answer)
    else:
        print(f"{printable(member(answer, 'id', 'job'))} is deleted.")


def _watch(api: Api, job_id: str, json: bool) -> None:
    """Events on standard error, the job as it ended on standard output. Exit status 1 unless it succeeded."""
    with progress("Training") as advance:

        def print_event(event: dict[str, Any]) -> None:
            remark(printable(str(event.get("message"))))
            data = event.get("data")
            if event.get("type") == "metrics" and isinstance(data, dict):
                advance(int(data.get("step", 0)), int(data.get("total_steps", 0)))

        try:
            status = client.follow(api, job_id, print_event)
        except KeyboardInterrupt:
            remark(f"The job goes on; fp8serve jobs cancel {printable(job_id)} ends it.")
            raise
    _print(client.one_job(api.get(client.place(job_id))), json)
    if not json:
        show_chart(list(client.series(api, job_id)))
    if status != "succeeded":
        raise typer.Exit(1)


def _print_dry_run(report: Any, json: bool) -> None:
    """What `POST /finetune/validate` answers. Exit status 1 when a row is wrong."""
    if json:
        print_json(report)
    else:
        show_dry_run(report)
    if not report["ok"]:
        raise typer.Exit(1)


def _print(job: dict[str, Any], json: bool) -> None:
    if json:
        print_json(job)
        return
    facts = {"job": job["id"], "status": job["status"], "base model": job.get("base_model")}
    facts |= {"result": job.get("fine_tuned_model"), "error": (job.get("error") or {}).get("message")}
    facts |= {name.replace("_", " "): value for name, value in (job.get("progress") or {}).items()}
    for name, value in facts.items():
        if value is not None and not isinstance(value, dict | list):
            print(f"{printable(name):25} {printable(_number(value))}")


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    done = job.get("progress") or {}
    steps = f"{done['step']}/{done['total_steps']}" if {"step", "total_steps"} <= done.keys() else "-"
    loss = _number(done["train_loss"]) if isinstance(done.get("train_loss"), float) else "-"
    named = job.get("fine_tuned_model") or job.get("base_model")
    return tuple(printable(str(cell)) for cell in (job.get("id"), job.get("status"), steps, loss, named))


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command()
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
    result = series_of(job, server, api_key_file)
    if csv:
        print(as_csv(result), end="")
    elif json:
        print_json(result)
    else:
        print_table(FIRST_COLUMNS, [[_cell(row.get(name)) for name in FIRST_COLUMNS] for row in result])


@app.command()
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
    result = series_of(job, server, api_key_file)
    if svg is None:
        print(chart(result, metric or []))
        return
    try:
        svg.write_text(picture(f"{Path(job).name}, by step", result, metric or []), encoding="utf-8")
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
    result = curves_of(series, metric)
    return {name: {name: points} for name, points in result.items()} if metric else {"loss": result}


def show_chart(series: list[Metrics]) -> None:
    """The losses, below the result, for a person at a terminal; nothing in a pipe, or where none was reported."""
    if sys.stdout.isatty() and any(row.get("train_loss") is not None for row in series):
        print(chart(series, []))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value))


def show_dry_run(report: Mapping[str, Any]) -> None:
    """`report`: the fields of `train.validate.ValidationReport`."""
    for bad in report["bad_lines"]:
        print(printable(bad["message"]))
    if more := report["bad_line_count"] - len(report["bad_lines"]):
        print(f"... and {more} more rows that are wrong")
    data, memory = report["data"], report["memory_bytes"]["total"]
    print(
        f"{data['rows']} rows, {data['tokens']} tokens, {report['trainable_fraction']:.0%} of them learnt; "
        f"{report['steps']} steps; about {memory / 2**30:.1f} GiB of memory"
    )
    if report["sample"]:
        print(f"The first row, with what is learnt between {LEARNT[0]} and {LEARNT[1]}:")
        pieces = (f"{LEARNT[0]}{text}{LEARNT[1]}" if learnt else text for text, learnt in report["sample"])
        print(printable("".join(pieces)))
