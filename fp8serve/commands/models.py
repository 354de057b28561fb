"""The models of a server: what it serves, and what it could. What changes them needs a key with the scope admin.

\b
Examples:
  fp8serve models list
  fp8serve models list --server http://127.0.0.1:8000 --json
  fp8serve models activate JOB
  fp8serve models activate base
  fp8serve models load small minilm --option recipe=bf16
  fp8serve models unload small
  fp8serve models alias small gpt-4o-mini
"""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from fp8serve.client.api import Api, member, model_names
from fp8serve.commands.connecting import URL, KeyFile, Server, connected
from fp8serve.commands.from_options import pairs
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
        print_table(("model", "source", "served", "state"), [_row(row) for row in rows])


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    shown = (row["model"], row["source"] or "-", "yes" if row["served"] else "no", row["state"] or "-")
    return tuple(map(printable, shown))


def _models(api: Api) -> list[dict[str, Any]]:
    """Of ours also what is not served; another server has only /v1/models."""
    try:
        return _of_ours(api.get("/models"))
    except (ServerError, AttributeError, KeyError, TypeError) as problem:
        if isinstance(problem, ServerError) and problem.status not in (404, 405):
            raise
    names = model_names(api.get("/v1/models"))
    return [{"model": name, "source": None, "served": True, "state": None} for name in names]


def _of_ours(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The weights behind the default, then what else has a name, what could be activated, and what could be loaded."""
    served = {(m["served"] or {}).get("source") for m in found["models"] if m["default"]}
    rows = [{**entry, "served": entry["source"] in served} for entry in found["available"]]
    rows[1:1] = [
        {"model": m["name"], "source": m["served"] and m["served"]["source"], "served": m["state"] == "ready"} | _why(m)
        for m in found["models"]
        if not m["default"]
    ]
    rows += [{"model": alias, "source": name, "served": True, "state": "alias"} for alias, name in _aliases(found)]
    rows += [{"model": name, "source": name, "served": False, "state": "loadable"} for name in found["loadable"]]
    return [{"state": found["state"] if row["served"] else "available"} | row for row in rows]


def _why(model: dict[str, Any]) -> dict[str, Any]:
    return {"state": f"{model['state']}: {model['problem']}" if model["problem"] else model["state"]}


def _aliases(found: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted(found["aliases"].items())


Name = Annotated[str, typer.Argument(help="The model's own name.")]


@app.command()
def activate(
    source: Annotated[str, typer.Argument(help="A fine-tune job that succeeded, or base: as list names them.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose weights are changed.", show_default="the job's own, or the default"),
    ] = None,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Serve a job's result, or the base model again; requests in flight end where they began.

    \b
    Examples:
      fp8serve models activate JOB
      fp8serve models activate base --model small
    """
    with connected(server, api_key_file) as api:
        if model is None and source != "base":
            swapped = api.post(f"/finetune/{quote(source, safe='')}/activate", {})
        else:
            name = model or member(api.get("/models"), "alias", "model")
            swapped = api.post(_path(name, "activate"), {"source": source})
    name = member(swapped.get("served") if isinstance(swapped, dict) else None, "model", "model")
    _tell(swapped, f"{printable(name)} is served.", json)


@app.command()
def load(
    name: Name,
    source: Annotated[
        str | None,
        typer.Argument(
            help="A fine-tune job that succeeded, or a directory of the server's --models-dir.",
            show_default="what the name stood for before",
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="OPTION=VALUE", help="Of the engine; repeat for several.")
    ] = None,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Serve a further model; returns when it answers.

    \b
    Examples:
      fp8serve models load small minilm --option recipe=bf16
      fp8serve models load tuned JOB
    """
    body = {} if source is None else {"source": source, "options": pairs("--option", option or [])}
    if source is None and option:
        raise typer.BadParameter("--option is for a SOURCE; say which.")
    with connected(server, api_key_file) as api:
        found = api.post(_path(name, "load"), body)
    _tell(found, f"{printable(member(found, 'name', 'model'))} is served.", json)


@app.command()
def unload(
    name: Name,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="How long answers under way may take.", show_default="the server's --drain-seconds"),
    ] = None,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Stop serving a further model; returns when its memory is free.

    \b
    Examples:
      fp8serve models unload small
      fp8serve models unload small --seconds 0
    """
    with connected(server, api_key_file) as api:
        found = api.post(_path(name, "unload"), {} if seconds is None else {"seconds": seconds})
    _tell(found, f"{printable(member(found, 'name', 'model'))} is not served any more.", json)


@app.command()
def alias(
    name: Name,
    other: Annotated[str, typer.Argument(metavar="ALIAS", help="The other name for it.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take the other name away.")] = False,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Give a model another name, or take it away.

    \b
    Examples:
      fp8serve models alias small text-embedding-3-small
      fp8serve models alias small text-embedding-3-small --remove
    """
    with connected(server, api_key_file) as api:
        found = api.post(_path(name, "alias"), {"alias": other, "remove": remove})
    does = "is no name" if remove else "is a name"
    _tell(found, f"{printable(other)} {does} of {printable(member(found, 'name', 'model'))}.", json)


def _path(name: str, change: str) -> str:
    return f"/models/{quote(name, safe='')}/{change}"


def _tell(found: Any, sentence: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print(sentence)
