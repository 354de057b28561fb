"""Fine-tune jobs of a server: start, watch, end and delete them.

\b
Examples:
  fp8serve jobs submit chats.jsonl --epochs 3 --follow
  fp8serve jobs list --server http://127.0.0.1:8000
  fp8serve jobs follow JOB
  fp8serve jobs plot JOB
  fp8serve models activate JOB
"""

from copy import copy
from dataclasses import field, make_dataclass
from functools import partial
from typing import Annotated, Any

import typer

from fp8serve.client import jobs as client
from fp8serve.client.api import Api, member
from fp8serve.commands import dry_runs, job_series
from fp8serve.commands.connecting import URL, KeyFile, Server, connected, given
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.model.text.data_files import DATA, local_file
from fp8serve.options import options_of
from fp8serve.server.schemas.wire_names import NOT_ON_THE_WIRE, WIRE_NAMES
from fp8serve.terminal import AsJson, print_json, print_table, printable, progress, remark
from fp8serve.train.config import TrainConfig

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)
JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as list shows it.")]
JOB_OPTIONS = [option for option in options_of(TrainConfig) if option.name not in NOT_ON_THE_WIRE]
JobOptions: Any = make_dataclass(
    "JobOptions", [(o.name, o.kind, field(default_factory=partial(copy, o.default))) for o in JOB_OPTIONS]
)
"""The options of training that a server's clients may set; the server checks them."""


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
        found = client.jobs(api, most)
    if json:
        print_json(found)
    else:
        print_table(("job", "status", "step", "loss", "model"), [_row(job) for job in found])


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
    chosen = given(context, (option.name for option in JOB_OPTIONS))
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


for command in (job_series.metrics, job_series.plot):
    app.command()(command)


# -- what is shown -----------------------------------------------------------------------------------------------------


def _watch(api: Api, job_id: str, json: bool) -> None:
    """Events on standard error, the job as it ended on standard output. Exit status 1 unless it succeeded."""
    with progress("Training") as advance:

        def tell(event: dict[str, Any]) -> None:
            remark(printable(str(event.get("message"))))
            data = event.get("data")
            if event.get("type") == "metrics" and isinstance(data, dict):
                advance(int(data.get("step", 0)), int(data.get("total_steps", 0)))

        try:
            status = client.follow(api, job_id, tell)
        except KeyboardInterrupt:
            remark(f"The job goes on; fp8serve jobs cancel {printable(job_id)} ends it.")
            raise
    _print(client.one_job(api.get(client.place(job_id))), json)
    if not json:
        job_series.show_chart(list(client.series(api, job_id)))
    if status != "succeeded":
        raise typer.Exit(1)


def _print_dry_run(report: Any, json: bool) -> None:
    """What `POST /finetune/validate` answers. Exit status 1 when a row is wrong."""
    if json:
        print_json(report)
    else:
        dry_runs.show(report)
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
