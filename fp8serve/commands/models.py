"""The models of a server: what it serves, and what it could.

\b
Examples:
  fp8serve models list
  fp8serve models list --server http://127.0.0.1:8000 --json
  fp8serve models activate JOB
  fp8serve models activate base
"""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from fp8serve.client.api import Api, member, model_names
from fp8serve.commands.connecting import URL, KeyFile, Server, connected
from fp8serve.errors import ServerError
from fp8serve.terminal import AsJson, print_json, print_table, printable

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)


@app.command("list")
def list_models(server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """What the server serves, and of a server of ours what it could serve.

    \b
    Examples:
      fp8serve models list
      fp8serve models list --server https://example.com/v1 --api-key-file key.txt
    """
    with connected(server, api_key_file) as api:
        rows = _models(api)
    if json:
        print_json(rows)
    else:
        print_table(("model", "source", "served"), [_row(row) for row in rows])


def _row(row: dict[str, Any]) -> tuple[str, str, str]:
    return printable(row["model"]), printable(row["source"] or "-"), "yes" if row["served"] else "no"


def _models(api: Api) -> list[dict[str, Any]]:
    """Of ours also what is not served; another server has only /v1/models."""
    try:
        found = api.get("/models")
        served = (found["served"] or {}).get("source")
        return [{**entry, "served": entry["source"] == served} for entry in found["available"]]
    except (ServerError, AttributeError, KeyError, TypeError) as problem:
        if isinstance(problem, ServerError) and problem.status not in (404, 405):
            raise
    return [{"model": name, "source": None, "served": True} for name in model_names(api.get("/v1/models"))]


@app.command()
def activate(
    source: Annotated[str, typer.Argument(help="A fine-tune job that succeeded, or base: as list names them.")],
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Serve a job's result, or the base model again; requests in flight end where they began.

    \b
    Examples:
      fp8serve models activate JOB
      fp8serve models activate base
    """
    with connected(server, api_key_file) as api:
        alias = member(api.get("/models"), "alias", "model")
        swapped = api.post(f"/models/{quote(alias, safe='')}/activate", {"source": source})
    name = member(swapped.get("served") if isinstance(swapped, dict) else None, "model", "model")
    if json:
        print_json(swapped)
    else:
        print(f"{printable(name)} is served.")
