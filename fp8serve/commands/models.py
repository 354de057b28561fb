"""Manage the models of a server. Changes need a key with the scope admin.

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
from fp8serve.errors import RequestError, ServerError
from fp8serve.terminal import AsJson, print_json, print_table, printable

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)
UNKNOWN: dict[str, Any] = {"model": None, "source": None, "served": None, "state": None, "base": None, "rank": None}


@app.command("list")
def list_models(server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """List the models that a server serves and, if it is fp8serve, could serve. Adapters follow their model.

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
        print_table(("model", "source", "served", "state", "base", "rank"), [_row(row) for row in rows])


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    base = None if row["base"] == row["model"] else row["base"]
    reported = (row["model"], row["source"], "yes" if row["served"] else "no", row["state"], base, row["rank"])
    return tuple(printable(str(one or "-")) for one in reported)


def _models(api: Api) -> list[dict[str, Any]]:
    """Lists models that are not served only for an fp8serve server; other servers have only /v1/models."""
    try:
        return _of_ours(api.get("/models"))
    except (ServerError, AttributeError, KeyError, TypeError) as problem:
        if isinstance(problem, ServerError) and problem.status not in (404, 405):
            raise
    names = model_names(api.get("/v1/models"))
    return [UNKNOWN | {"model": name, "served": True} for name in names]


def _of_ours(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The weights of the default model, then the other names, what could be activated, and what could be loaded."""
    default = [m for m in answer["models"] if m["default"]]
    served = {(m["served"] or {}).get("source") for m in default}
    first, *results = [{**entry, "served": entry["source"] in served} for entry in answer["available"]]
    rows = [first, *(adapter for m in default for adapter in _adapters(m))]
    for m in answer["models"]:
        if not m["default"]:
            source = m["served"] and m["served"]["source"]
            rows += [{"model": m["name"], "source": source, "served": m["state"] == "ready"} | _why(m), *_adapters(m)]
    rows += results
    rows += [{"model": alias, "source": name, "served": True, "state": "alias"} for alias, name in _aliases(answer)]
    rows += [{"model": name, "source": name, "served": False, "state": "loadable"} for name in answer["loadable"]]
    return [UNKNOWN | {"state": answer["state"] if row["served"] else "available"} | row for row in rows]


def _adapters(model: dict[str, Any]) -> list[dict[str, Any]]:
    """The adapters of a model; `source` is the directory or the job that each was loaded from."""
    shared = {"served": model["state"] == "ready", "state": "adapter", "base": model["name"]}
    return [shared | {"model": a["name"], "source": a["root"], "rank": a["rank"]} for a in model["adapters"]]


def _why(model: dict[str, Any]) -> dict[str, Any]:
    return {"state": f"{model['state']}: {model['problem']}" if model["problem"] else model["state"]}


def _aliases(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted(answer["aliases"].items())


Name = Annotated[str, typer.Argument(help="The model's own name.")]


@app.command()
def activate(
    source: Annotated[str, typer.Argument(help="A fine-tune job that succeeded, or base, as list names them.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Model whose weights are replaced.", show_default="the job's own, or the default"
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Serve the checkpoint of this step.", show_default="the job's result"),
    ] = None,
    max_perplexity_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="RATIO",
            min=1,
            help="Largest perplexity, as a multiple of that of the present weights.",
            show_default="the server's: 2",
        ),
    ] = None,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Serve a job's result, or the base model again; requests in flight end where they began.

    A job's weights serve only if they are finite, write, and know the job's held-out rows about as well as what serves.

    \b
    Examples:
      fp8serve models activate JOB
      fp8serve models activate JOB --step 40 --max-perplexity-ratio 1.1
      fp8serve models activate base --model small
    """
    ratio = {} if max_perplexity_ratio is None else {"max_perplexity_ratio": max_perplexity_ratio}
    with connected(server, api_key_file) as api:
        if model is None and source != "base":
            at = {} if step is None else {"step": step}
            swapped = api.post(f"/finetune/{quote(source, safe='')}/activate", at | ratio)
        elif step is not None:
            raise RequestError("--step names a checkpoint of a job; leave --model out.")
        else:
            name = model or member(api.get("/models"), "alias", "model")
            swapped = api.post(_path(name, "activate"), {"source": source} | ratio)
    name = member(swapped.get("served") if isinstance(swapped, dict) else None, "model", "model")
    _report(swapped, f"{printable(name)} is served.", json)


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
        list[str] | None, typer.Option(metavar="OPTION=VALUE", help="Option of the engine; repeat for several.")
    ] = None,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Serve another model; returns when it is ready.

    \b
    Examples:
      fp8serve models load small minilm --option recipe=bf16
      fp8serve models load tuned JOB
    """
    body = {} if source is None else {"source": source, "options": pairs("--option", option or [])}
    if source is None and option:
        raise typer.BadParameter("--option is for a SOURCE; say which.")
    with connected(server, api_key_file) as api:
        result = api.post(_path(name, "load"), body)
    _report(result, f"{printable(member(result, 'name', 'model'))} is served.", json)


@app.command()
def unload(
    name: Name,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Time for running answers to finish.", show_default="the server's --drain-seconds"),
    ] = None,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Stop serving a model other than the default; returns when its memory is free.

    \b
    Examples:
      fp8serve models unload small
      fp8serve models unload small --seconds 0
    """
    with connected(server, api_key_file) as api:
        result = api.post(_path(name, "unload"), {} if seconds is None else {"seconds": seconds})
    _report(result, f"{printable(member(result, 'name', 'model'))} is not served any more.", json)


@app.command()
def alias(
    name: Name,
    other: Annotated[str, typer.Argument(metavar="ALIAS", help="The other name for it.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the other name.")] = False,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Give a model another name, or remove it.

    \b
    Examples:
      fp8serve models alias small text-embedding-3-small
      fp8serve models alias small text-embedding-3-small --remove
    """
    with connected(server, api_key_file) as api:
        result = api.post(_path(name, "alias"), {"alias": other, "remove": remove})
    does = "is no name" if remove else "is a name"
    _report(result, f"{printable(other)} {does} of {printable(member(result, 'name', 'model'))}.", json)


def _path(name: str, change: str) -> str:
    return f"/models/{quote(name, safe='')}/{change}"


def _report(answer: Any, sentence: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print(sentence)
