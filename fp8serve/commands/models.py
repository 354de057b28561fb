"""List, activate, load and unload the models of a server. Changes need a key with the scope admin.

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

from fp8serve.client.api import Api, model_names, text_field
from fp8serve.commands.dataclass_options import parse_assignments
from fp8serve.commands.server_options import URL, KeyFile, Server, connected
from fp8serve.errors import RequestError, ServerError
from fp8serve.terminal import AsJson, print_json, print_table, printable

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)
EMPTY_ROW: dict[str, Any] = {"model": None, "source": None, "served": None, "state": None, "base": None, "rank": None}


@app.command("list")
def list_models(server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """List the models of a server, and for fp8serve also those that it can load. Adapters follow their model.

    \b
    Examples:
      fp8serve models list
      fp8serve models list --server https://example.com/v1 --api-key-file key.txt
    """
    with connected(server, api_key_file) as api:
        rows = _model_rows(api)
    if json:
        print_json(rows)
    else:
        shown = [row | {"served": "yes" if row["served"] else "no"} for row in rows]
        shown = [row | ({"base": None} if row["base"] == row["model"] else {}) for row in shown]
        columns = ("model", "source", "served", "state", "base", "rank")
        print_table(columns, [[printable(str(row[name] or "-")) for name in columns] for row in shown])


def _model_rows(api: Api) -> list[dict[str, Any]]:
    """Returns the rows of an fp8serve server, which include models that can be loaded, or those of /v1/models."""
    try:
        return _fp8serve_rows(api.get("/models"))
    except (ServerError, AttributeError, KeyError, TypeError) as problem:
        if isinstance(problem, ServerError) and problem.status not in (404, 405):
            raise
    names = model_names(api.get("/v1/models"))
    return [EMPTY_ROW | {"model": name, "served": True} for name in names]


def _fp8serve_rows(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns rows for the default model, the other models, weights to activate, aliases, and models to load."""
    default = [m for m in response["models"] if m["default"]]
    active_sources = {(m["served"] or {}).get("source") for m in default}
    first, *activatable = [{**entry, "served": entry["source"] in active_sources} for entry in response["available"]]
    rows = [first, *(adapter for m in default for adapter in _adapter_rows(m))]
    for m in response["models"]:
        if not m["default"]:
            source = m["served"] and m["served"]["source"]
            state = f"{m['state']}: {m['problem']}" if m["problem"] else m["state"]
            row = {"model": m["name"], "source": source, "served": m["state"] == "ready", "state": state}
            rows += [row, *_adapter_rows(m)]
    rows += activatable
    aliases = sorted(response["aliases"].items())
    rows += [{"model": alias, "source": name, "served": True, "state": "alias"} for alias, name in aliases]
    rows += [{"model": name, "source": name, "served": False, "state": "loadable"} for name in response["loadable"]]
    return [EMPTY_ROW | {"state": response["state"] if row["served"] else "available"} | row for row in rows]


def _adapter_rows(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns rows for the adapters of a model. `source` is the directory or the job of an adapter."""
    shared = {"served": model["state"] == "ready", "state": "adapter", "base": model["name"]}
    return [shared | {"model": a["name"], "source": a["root"], "rank": a["rank"]} for a in model["adapters"]]


Name = Annotated[str, typer.Argument(help="Name of the model.")]


@app.command()
def activate(
    source: Annotated[str, typer.Argument(help="Id of a fine-tune job that succeeded, or base for the base model.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model whose weights are replaced.",
            show_default="the model of the job, or the default model",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Activate the checkpoint of this step.", show_default="the job's result"),
    ] = None,
    max_perplexity_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="RATIO",
            min=1,
            help="Maximum perplexity as a multiple of that of the current weights.",
            show_default="the server's: 2",
        ),
    ] = None,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Activate the weights of a job, or the base model. Requests in flight finish with the previous weights.

    The server first verifies the weights of a job: they must be finite and generate text, and their perplexity on the
    job's validation rows must be about as low as that of the current weights.

    \b
    Examples:
      fp8serve models activate JOB
      fp8serve models activate JOB --step 40 --max-perplexity-ratio 1.1
      fp8serve models activate base --model small
    """
    ratio = {} if max_perplexity_ratio is None else {"max_perplexity_ratio": max_perplexity_ratio}
    with connected(server, api_key_file) as api:
        if model is None and source != "base":
            body = {} if step is None else {"step": step}
            response = api.post(f"/finetune/{quote(source, safe='')}/activate", body | ratio)
        elif step is not None:
            raise RequestError("--step needs a job without --model; leave --step or --model out.")
        else:
            name = model or text_field(api.get("/models"), "alias", "model")
            response = api.post(_path(name, "activate"), {"source": source} | ratio)
    name = text_field(response.get("served") if isinstance(response, dict) else None, "model", "model")
    _print(response, f"{printable(name)} is served.", json)


@app.command()
def load(
    name: Name,
    source: Annotated[
        str | None,
        typer.Argument(
            help="A fine-tune job that succeeded, or a directory of the server's --models-dir.",
            show_default="the source that the name had before",
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="OPTION=VALUE", help="Engine option; repeat for several.")
    ] = None,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Load another model. The command returns when the model is ready.

    \b
    Examples:
      fp8serve models load small minilm --option recipe=bf16
      fp8serve models load tuned JOB
    """
    body = {} if source is None else {"source": source, "options": parse_assignments("--option", option or [])}
    if source is None and option:
        raise typer.BadParameter("--option needs a SOURCE; give one, or leave --option out.")
    with connected(server, api_key_file) as api:
        result = api.post(_path(name, "load"), body)
    _print(result, f"{printable(text_field(result, 'name', 'model'))} is served.", json)


@app.command()
def unload(
    name: Name,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds for requests in flight to finish.", show_default="the server's --drain-seconds"
        ),
    ] = None,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Unload a model other than the default one. The command returns when its memory is free.

    \b
    Examples:
      fp8serve models unload small
      fp8serve models unload small --seconds 0
    """
    with connected(server, api_key_file) as api:
        result = api.post(_path(name, "unload"), {} if seconds is None else {"seconds": seconds})
    _print(result, f"{printable(text_field(result, 'name', 'model'))} was unloaded.", json)


@app.command()
def alias(
    name: Name,
    other: Annotated[str, typer.Argument(metavar="ALIAS", help="Another name for the model.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Add an alias of a model, or remove it.

    \b
    Examples:
      fp8serve models alias small text-embedding-3-small
      fp8serve models alias small text-embedding-3-small --remove
    """
    with connected(server, api_key_file) as api:
        result = api.post(_path(name, "alias"), {"alias": other, "remove": remove})
    relation = "is no longer an alias" if remove else "is an alias"
    _print(result, f"{printable(other)} {relation} of {printable(text_field(result, 'name', 'model'))}.", json)


def _path(name: str, change: str) -> str:
    return f"/models/{quote(name, safe='')}/{change}"


def _print(response: Any, sentence: str, as_json: bool) -> None:
    if as_json:
        print_json(response)
    else:
        print(sentence)
