"""Back up and restore the job database of servers: jobs, their events, the list of uploads, and active weights.

\b
Examples:
  fp8serve state backup jobs.jsonl --data-dir DIR
  fp8serve state restore jobs.jsonl --database postgresql://db.internal/fp8serve
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8serve.errors import MachineError, RequestError
from fp8serve.model.storage.files import acquire_lock, make_private
from fp8serve.server.data_directory import JOB_DATABASE, SERVER_LOCK
from fp8serve.server.settings import check_database_url
from fp8serve.terminal import remark

if TYPE_CHECKING:
    from fp8serve.server.finetuning.database import Database

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)
File = Annotated[Path, typer.Argument(metavar="FILE", help="File of the backup.")]
DataDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Data directory of a server with an SQLite file.", show_default=False)
]
Url = Annotated[
    str | None, typer.Option("--database", metavar="URL", help="PostgreSQL database of servers.", show_default=False)
]


@app.command()
def backup(file: File, data_dir: DataDir = None, database: Url = None) -> None:
    """Write all rows of a job database to a file. Servers may run meanwhile.

    The files of jobs are not part of it: copy the data directory or the bucket afterwards.

    \b
    Examples:
      fp8serve state backup jobs.jsonl --data-dir ~/.local/share/fp8serve/model-1a2b3c4d
      fp8serve state backup jobs.jsonl --database postgresql://db.internal/fp8serve
    """
    location = _location(data_dir, database)
    if isinstance(location, Path) and not location.exists():
        raise MachineError(f"{location.parent} has no job database; --data-dir is the data directory of a server.")
    from fp8serve.server.finetuning.backup import back_up
    from fp8serve.server.finetuning.connections import is_older

    with ExitStack() as stack:
        if isinstance(location, Path) and is_older(location):  # a server of an earlier version may use it
            stack.enter_context(_locked(location))
        jobs = stack.enter_context(opened(location))
        remark(f"{back_up(jobs, file)} jobs were written to {file}.")


@app.command()
def restore(file: File, data_dir: DataDir = None, database: Url = None) -> None:
    """Write a backup into an empty job database, SQLite or PostgreSQL. No server may use it meanwhile.

    \b
    Examples:
      fp8serve state restore jobs.jsonl --data-dir ./data
      fp8serve state restore jobs.jsonl --database postgresql://db.internal/fp8serve
    """
    location = _location(data_dir, database)
    from fp8serve.server.finetuning import backup

    with _locked(location), opened(location) as empty:
        remark(f"{backup.restore(empty, file)} jobs were restored from {file}.")


def _location(data_dir: Path | None, url: str | None) -> Path | str:
    """Returns the path of an SQLite file or the URL of a PostgreSQL database."""
    if (url is None) == (data_dir is None):
        raise RequestError("Give --data-dir or --database, one of them.")
    return url or Path(data_dir or "") / JOB_DATABASE


@contextmanager
def opened(location: Path | str) -> Iterator["Database"]:
    """Opens a job database. Raises RequestError for a URL of another kind, and MachineError if the database cannot be
    used, or no longer, within the block."""
    if isinstance(location, str):
        check_database_url(location)
    from fp8serve.server.faults import Fault
    from fp8serve.server.finetuning.database import Database

    try:
        with closing(Database(location)) as database:
            yield database
    except Fault as fault:
        raise MachineError(fault.full_message) from None


@contextmanager
def _locked(location: Path | str) -> Iterator[None]:
    """Refuses a data directory that a server uses, and creates it if there is none."""
    if isinstance(location, str):
        yield
        return
    try:
        make_private(location.parent)
    except OSError as error:
        raise MachineError(f"{location.parent} cannot be written: {error.strerror}.") from None
    refusal = f"A server uses the data directory {location.parent}; stop it first."
    with acquire_lock(location.with_name(SERVER_LOCK), refusal, MachineError):
        yield
