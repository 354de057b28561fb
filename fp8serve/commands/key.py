"""Create, list, revoke and limit the API keys of servers: in a file (`serve --api-keys`), or in the PostgreSQL database
of several servers. Both store only hashes of the keys.

\b
Examples:
  fp8serve key new --name ci --tenant research --scope generate --file keys.toml
  fp8serve key list keys.toml
  fp8serve key new --name ci --tenant research --scope generate --database postgresql://db.internal/fp8serve
  fp8serve key revoke ci --database postgresql://db.internal/fp8serve
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.commands.state import Url, opened
from fp8serve.errors import MachineError, RequestError
from fp8serve.server.access.keys import (
    SCOPES,
    Caller,
    TenantLimits,
    format_key_line,
    new_key,
    parse_keys,
    read_keys,
)
from fp8serve.terminal import AsJson, print_json, print_table, remark

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)
RequiredUrl = Annotated[str, typer.Option("--database", metavar="URL", help="PostgreSQL database of servers.")]


@app.command()
def new(
    name: Annotated[str, typer.Option(help="Name of the key in lists and in the server's log.")],
    tenant: Annotated[str, typer.Option(help="Owner of the key; the keys of a tenant share its limits.")],
    scope: Annotated[
        list[str], typer.Option(metavar="|".join(SCOPES), help="Permission of the key; repeat for several.")
    ],
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key file to which the key is added; it is created if necessary."),
    ] = None,
    database: Url = None,
    json: AsJson = False,
) -> None:
    """Create a key. Only this command prints the key; the file or database stores its hash.

    \b
    Examples:
      fp8serve key new --name ci --tenant research --scope generate
      KEY=$(fp8serve key new --name ci --tenant research --scope generate --file keys.toml)
      fp8serve key new --name ci --tenant research --scope generate --database postgresql://db.internal/fp8serve
    """
    if file is not None and database is not None:
        raise RequestError("Give --file or --database, not both.")
    key = new_key()
    line = format_key_line(name, tenant, scope, key)
    if file is not None:
        _add(name, line, file)
    if database is not None:
        from fp8serve.server.finetuning.stored_keys import create_key

        with opened(database) as db:
            create_key(db, name, tenant, scope, key)
    if json:
        print_json({"key": key, "line": line})
        return
    print(key)
    if file is None and database is None:
        print(line)
        remark(
            "The first line is the key, which is not printed again. Add the second line to the server's file of keys."
        )


def _add(name: str, line: str, file: Path) -> None:
    """Appends a line to the file of keys. Raises RequestError if the file would become invalid, or MachineError."""
    if file.exists() and any(caller.name == name for caller in read_keys(file).digests.values()):
        raise RequestError(f"{file} already has a key named {name}; choose another --name, or remove its line.")
    try:
        content = file.read_text(encoding="utf-8") if file.exists() else ""
        addition = ("" if content.endswith("\n") or not content else "\n") + line + "\n"
        try:
            parse_keys((content + addition).encode())
        except RequestError as error:
            raise RequestError(f"The key cannot be added to {file}: {error}") from None
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as out:
            out.write(addition)
    except OSError as error:
        raise MachineError(f"The file of keys {file} cannot be written: {error.strerror}.") from None


@app.command("list")
def list_keys(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The server's file of keys.", show_default=False)
    ] = None,
    database: Url = None,
    json: AsJson = False,
) -> None:
    """List the valid keys of a file or a database with their scopes and limits.

    \b
    Examples:
      fp8serve key list keys.toml
      fp8serve key list --database postgresql://db.internal/fp8serve
    """
    rows: list[dict[str, Any]] = [
        {"name": caller.name, "tenant": caller.tenant, "scopes": list(caller.scopes), **vars(caller.limits)}
        for caller in _callers(file, database)
    ]
    if json:
        print_json(rows)
    else:
        columns = ("name", "tenant", "scopes", "requests/min", "tokens/min", "concurrent")
        print_table(columns, [(*(_cell(value) for value in row.values()),) for row in rows])


def _callers(file: Path | None, database: str | None) -> list[Caller]:
    if file is not None and database is None:
        return list(read_keys(file).digests.values())
    if database is None or file is not None:
        raise RequestError("Give FILE or --database, one of them.")
    from fp8serve.server.finetuning.stored_keys import load_keys

    with opened(database) as db:
        keys = load_keys(db)
    return [] if keys is None else list(keys.digests.values())


def _cell(value: Any) -> str:
    return "-" if value is None else ", ".join(value) if isinstance(value, list) else str(value)


@app.command()
def revoke(name: Annotated[str, typer.Argument(help="Name of the key.")], database: RequiredUrl) -> None:
    """Make a key of a database invalid. Servers refuse it within about a second. Remove a key of a file with its line.

    \b
    Examples:
      fp8serve key revoke ci --database postgresql://db.internal/fp8serve
    """
    from fp8serve.server.finetuning.stored_keys import revoke_key

    with opened(database) as db:
        revoke_key(db, name)


Limit = Annotated[int | None, typer.Option(help="Limit of all keys of the tenant together.", show_default="no limit")]


@app.command()
def limit(
    tenant: Annotated[str, typer.Argument(help="Owner of keys.")],
    database: RequiredUrl,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrent_requests: Limit = None,
) -> None:
    """Replace the limits of a tenant whose keys are in a database. Each server applies them by itself.

    \b
    Examples:
      fp8serve key limit research --requests-per-minute 60 --database postgresql://db.internal/fp8serve
      fp8serve key limit research --database postgresql://db.internal/fp8serve   # no limits any more
    """
    limits = TenantLimits(requests_per_minute, tokens_per_minute, concurrent_requests)
    from fp8serve.server.finetuning.stored_keys import set_limits

    with opened(database) as db:
        set_limits(db, tenant, limits)
