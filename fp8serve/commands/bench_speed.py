"""`fp8serve bench ops | engine | serve`: speed, printed with the machine, the versions and the commit."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from fp8serve.commands.bench import publish
from fp8serve.terminal import AsJson, print_json, print_table, progress

Tell = Callable[[str, int, int], None]  # (what, done, in all)
Out = Annotated[Path | None, typer.Option(help="Directory for the figures as JSON.", show_default="nowhere")]
Model = Annotated[str, typer.Argument(help="Hugging Face-format directory, or a name on the hub.")]
Prompt = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
New = Annotated[int, typer.Option(min=2, help="Tokens of each answer.")]


def measured(
    name: str, title: str, measure: Callable[[Tell], Mapping[str, Any]], out: Path | None, json: bool
) -> dict[str, Any] | None:
    """Measures behind a bar, and publishes the figures as `name`; None when all was said, as JSON."""
    from fp8serve.bench.provenance import one_line

    with progress(title) as advance:
        figures = measure(lambda what, done, total: advance(done, total, what))
    result = publish(name, figures, out)
    print_json(result) if json else print(one_line(result["made"]), "\n")
    return None if json else result


def ops(
    only: Annotated[
        str | None, typer.Option(help="Ops whose names contain this.", show_default="all", metavar="TEXT")
    ] = None,
    goals: Annotated[bool, typer.Option("--goals", help="Only what a goal is set for.")] = False,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time for each op and size.")] = 0.5,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Every op at the sizes of real models: time, bandwidth, arithmetic, share of this machine's peak, x torch BF16.

    \b
    Examples:
      fp8serve bench ops
      fp8serve bench ops --only scaled_mm --json
      fp8serve bench ops --goals --seconds 3
    """
    from fp8serve.bench import ops as bench

    result = measured("ops", "Ops", lambda tell: bench.measure(seconds, tell, only, goals), out, json)
    if result is None:
        return
    peaks = result["peaks"]
    print(f"measured peaks: {peaks['gb_per_s']:.0f} GB/s read, {peaks['gflop_per_s']:.0f} GFLOP/s (torch BF16)\n")
    rows = [
        (r["op"], r["size"], f"{r['us']:.1f}", f"{r['gb_per_s']:.1f}", f"{r['gflop_per_s']:.0f}",
         f"{100 * r['share_of_peak']:.0f} %", "" if r["times_torch_bf16"] is None else f"{r['times_torch_bf16']:.2f}",
         "" if r["goal"] is None else f"{r['goal']:g} {'reached' if r['reached'] else 'not reached'}")
        for r in result["ops"]
    ]  # fmt: skip
    print_table(("op", "size", "us", "GB/s", "GFLOP/s", "of peak", "x torch BF16", "goal"), rows)


def engine(
    model: Model,
    recipe: Annotated[str, typer.Option(help="Recipe, or bf16.", show_default="what the directory stores")] = "stored",
    kv_cache_dtype: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences decoded together; repeat.", show_default="1, 4, 8, 16")
    ] = None,
    prompt: Prompt = 256,
    new: New = 64,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """The engine in this process: time to load, prefill, and decode at several batch sizes.

    \b
    Examples:
      fp8serve bench engine ./llama-fp8
      fp8serve bench engine ./llama-fp8 --batch 1 --batch 8 --json
    """
    from fp8serve.hub import find_model

    directory = find_model(model)
    from fp8serve.bench import engine as bench

    measure = partial(
        bench.measure, batches=batch or (1, 4, 8, 16), prompt=prompt, new=new, recipe=recipe,
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    result = measured("engine", "Engine", lambda tell: measure(directory, tell), out, json)
    if result is not None:
        _print_engine(result)


def _print_engine(result: Mapping[str, Any]) -> None:
    prefill, made = result["prefill"], result["model"]
    print(
        f"{made['model']}: loaded in {result['load_seconds']:.2f} s, first token after "
        f"{result['first_token_seconds']:.2f} s, weights packed in {result['packing_seconds']:.2f} s more; "
        f"{made['weight_bytes'] / 1e6:.0f} MB of weights, at most {result['peak_resident_mb']:.0f} MB resident"
    )
    print(f"prefill of {prefill['tokens']}: {prefill['tokens_per_second']:.0f} tokens/s, {prefill['ms']:.1f} ms\n")
    rows = [
        (d["batch"], f"{d['tokens_per_second']:.1f}", *(f"{d[k]:.2f}" for k in _STEP))
        for d in result["decode"]
    ]  # fmt: skip
    print_table(("decode, batch", "tokens/s", "step ms: fastest", "p50", "p90", "p99"), rows)


_STEP = ("fastest_ms", "p50_ms", "p90_ms", "p99_ms")


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Model to start a server for.", show_default="none: give --url")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A server that runs, ours or another's.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 8,
    prompt: Prompt = 256,
    new: New = 64,
    api_key: Annotated[str | None, typer.Option(help="The server's key.")] = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """A server under load: time to first token and between tokens, as clients see them.

    Works with any server that has OpenAI's /v1/completions with streaming and ignore_eos.

    \b
    Examples:
      fp8serve bench serve ./llama-fp8
      fp8serve bench serve --url http://127.0.0.1:8000 --concurrency 16
    """
    if (model is None) == (url is None):
        raise typer.BadParameter("give either a MODEL to start a server for, or the --url of one that runs")
    from fp8serve.bench import serve as bench

    load = bench.Load(requests, concurrency, prompt, new, api_key=api_key)
    asked = {"requests": requests, "concurrency": concurrency, "prompt": prompt, "new": new}
    with nullcontext(url) if url is not None else _started(str(model)) as place:
        result = measured("serve", "Serve", lambda tell: {"load": asked, **bench.measure(place, load, tell)}, out, json)
    if result is not None:
        _print_serve(result)


@contextmanager
def _started(model: str) -> Iterator[str]:
    """The URL of a server of ours for `model`, while the block runs."""
    from fp8serve.hub import find_model
    from fp8serve.running import RunningServer

    with TemporaryDirectory(prefix="fp8serve-bench-") as folder:
        options = ["--data-dir", str(Path(folder) / "data")]
        with RunningServer(find_model(model), options, log=Path(folder) / "log") as server:
            yield server.url


def _print_serve(result: Mapping[str, Any]) -> None:
    load = result["load"]
    print(
        f"{result['served_model']}: {load['requests']} requests, {load['concurrency']} at a time, {load['prompt']} "
        f"tokens in and {load['new']} out: {result['generated_tokens_per_second']:.1f} tokens/s\n"
    )
    names = {"first token": "time_to_first_token", "between tokens": "between_tokens", "whole answer": "whole_answer"}
    rows = [(name, *(f"{result[key][p]:.1f}" for p in _STEP[1:])) for name, key in names.items()]
    print_table(("ms", "p50", "p90", "p99"), rows)
