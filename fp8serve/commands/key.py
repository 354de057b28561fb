"""Create and list the API keys of a server's file of keys (`serve --api-keys`), which stores only their hashes.

\b
Examples:
  fp8serve key new --name ci --tenant research --scope generate
  fp8serve key new --name ops --tenant ops --scope read --scope admin --file keys.toml
  fp8serve key list keys.toml
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.errors import MachineError, RequestError
from fp8serve.server.access.keys import SCOPES, format_key_line, new_key, parse_keys, read_keys
from fp8serve.terminal import AsJson, print_json, print_table, remark

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)


@app.command()
def new(
    name: Annotated[str, typer.Option(help="Name of the key in the file of keys and in the server's log.")],
    tenant: Annotated[str, typer.Option(help="Owner of the key; the keys of a tenant share its limits.")],
    scope: Annotated[
        list[str], typer.Option(metavar="|".join(SCOPES), help="Permission of the key; repeat for several.")
    ],
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key file to which the key is added; it is created if necessary."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Create a key. Only this command prints the key; the file of keys stores its hash.

    \b
    Examples:
      fp8serve key new --name ci --tenant research --scope generate
      KEY=$(fp8serve key new --name ci --tenant research --scope generate --file keys.toml)
    """
    key = new_key()
    line = format_key_line(name, tenant, scope, key)
    if file is not None:
        _add(name, line, file)
    if json:
        print_json({"key": key, "line": line})
        return
    print(key)
    if file is None:
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The server's file of keys.")], json: AsJson = False
) -> None:
    """List the keys of a file of keys with their scopes and limits.

    \b
    Examples:
      fp8serve key list keys.toml
    """
    rows: list[dict[str, Any]] = [
        {"name": caller.name, "tenant": caller.tenant, "scopes": list(caller.scopes), **vars(caller.limits)}
        for caller in read_keys(file).digests.values()
    ]
    if json:
        print_json(rows)
    else:
        columns = ("name", "tenant", "scopes", "requests/min", "tokens/min", "concurrent")
        print_table(columns, [(*(_cell(value) for value in row.values()),) for row in rows])


def _cell(value: Any) -> str:
    return "-" if value is None else ", ".join(value) if isinstance(value, list) else str(value)
