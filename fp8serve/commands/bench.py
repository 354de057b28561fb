"""`fp8serve bench`: measures speed, and prints the results with the machine, the versions and the commit."""

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from fp8serve.bench.options import EngineLoad, Load, MonitorOptions, Shape, SpeculationLoad, StepOptions
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.commands.serve import find_key
from fp8serve.commands.server_options import KeyFile, OtherServer, Served, exit_on_sigterm, refuse_options
from fp8serve.terminal import AsJson, Model, on_device, print_json, print_table, printable, progress

Report = Callable[[str, int, int], None]  # reports progress: (label, done, total)
Print = Callable[[Mapping[str, Any]], None]
Chart = Callable[[Mapping[str, Any]], Mapping[str, str]]  # returns SVG by name


def writable(out: Path | None) -> Path | None:
    """Returns the directory of an option. Raises MachineError, before the measurement, if it cannot be written."""
    from fp8serve.model.storage.files import check_writable

    if out is not None:
        check_writable(out)
    return out


Out = Annotated[
    Path | None,
    typer.Option(
        help="Directory for the results as JSON, and for plots.",
        show_default="nowhere",
        file_okay=False,
        callback=writable,
    ),
]


def no_charts(result: Mapping[str, Any]) -> Mapping[str, str]:
    return {}


def measured(title: str, measure: Callable[[Report], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the results of `measure`, which reports its progress to a progress bar."""
    with progress(title) as advance:
        return measure(lambda label, completed, total: advance(completed, total, label))


def publish(name: str, figures: Mapping[str, Any], out: Path | None, chart: Chart = no_charts) -> dict[str, Any]:
    """Returns the figures with their provenance. If `out` is given, writes them and the charts into that directory."""
    from fp8serve.bench.figures import provenance

    module = sys.modules["__main__"].__spec__  # None for a script
    program = f"python -m {module.parent}" if module else "fp8serve"
    result = {"study": name, "made": provenance(f"{program} {shlex.join(sys.argv[1:])}"), **figures}
    if out is not None:
        _write(out, name, result, chart(result))
    return result


def show(result: Mapping[str, Any], as_json: bool, print_tables: Print) -> None:
    """Prints the result as JSON, or as a line with its provenance and tables."""
    from fp8serve.bench.figures import one_line

    if as_json:
        print_json(result)
    else:
        print(one_line(result["made"]), "\n")
        print_tables(result)


def _write(out: Path, name: str, result: Mapping[str, Any], charts: Mapping[str, str]) -> None:
    """Writes `name.json`, and the charts as `name-*.svg`, into the directory `out`."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(result), indent=1, allow_nan=False)
    text = re.sub(
        r"\[[-+\d.e,\s]*\]", lambda numbers: "".join(numbers[0].split()), text
    )  # lists of numbers on one line
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    for chart, svg in charts.items():
        (out / f"{name}-{chart}.svg").write_text(svg, encoding="utf-8")


def _rounded(value: Any) -> Any:
    """Returns the value with all floats rounded to six significant digits, or None if they are not finite."""
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


HELP = """Measure ops, the engine, a server, or a training step.

\b
Examples:
  fp8serve bench ops
  fp8serve bench serve ./llama-fp8 --max-concurrency 8
"""
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)


@app.command("ops")
def ops(
    only: Annotated[
        str | None, typer.Option(help="Only ops whose names contain this text.", show_default="all", metavar="TEXT")
    ] = None,
    goals: Annotated[bool, typer.Option("--goals", help="Only ops with a performance goal.")] = False,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds for each op and size.")] = 0.5,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Measure every op at the sizes of real models: time, bandwidth, arithmetic, fraction of the machine's peak, and
    speed relative to torch in BF16.

    
    Examples:
      fp8serve bench ops
      fp8serve bench ops --only scaled_mm --json
      fp8serve bench ops --goals --seconds 3
    """
    from fp8serve.bench.ops import measure

    figures = measured("Ops", lambda report: measure(seconds, report, only, goals))
    show(publish("ops", figures, out), json, _print_ops)


def _print_ops(result: Mapping[str, Any]) -> None:
    peaks = result["peaks"]
    print(f"measured peaks: {peaks['gb_per_s']:.0f} GB/s read, {peaks['gflop_per_s']:.0f} GFLOP/s (torch BF16)\n")
    rows = [
        (r["op"], r["size"], f"{r['us']:.1f}", f"{r['gb_per_s']:.1f}", f"{r['gflop_per_s']:.0f}",
         f"{100 * r['share_of_peak']:.0f} %", "" if r["times_torch_bf16"] is None else f"{r['times_torch_bf16']:.2f}",
         "" if r["goal"] is None else f"{r['goal']:g} {'reached' if r['reached'] else 'not reached'}")
        for r in result["ops"]
    ]  # fmt: skip
    print_table(("op", "size", "us", "GB/s", "GFLOP/s", "of peak", "x torch BF16", "goal"), rows)


STEP_TIMES = ("fastest_ms", "p50_ms", "p90_ms", "p99_ms")


@app.command("engine")
@with_options()
def engine(model: Model, options: OptionValues[EngineLoad], out: Out = None, json: AsJson = False) -> None:
    """Measure the engine: loading, prefill, and decoding at several batch sizes.

    
    Examples:
      fp8serve bench engine ./llama-fp8
      fp8serve bench engine ./llama-fp8 --batch 1 --batch 8 --json
    """
    from fp8serve.hub import find_model

    directory, load = find_model(model), options()
    from fp8serve.bench.engine import measure_engine

    values = on_device(vars(load), directory)
    figures = measured("Engine", lambda report: measure_engine(directory, report, **values))
    show(publish("engine", figures, out), json, _print_engine)


def _print_engine(result: Mapping[str, Any]) -> None:
    prefill, model = result["prefill"], result["model"]
    print(
        f"{model['model']}: loaded in {result['load_seconds']:.2f} s, first token after "
        f"{result['first_token_seconds']:.2f} s, weights packed in {result['packing_seconds']:.2f} s more; "
        f"{model['weight_bytes'] / 1e6:.0f} MB of weights, at most {result['peak_resident_mb']:.0f} MB resident"
    )
    print(f"prefill of {prefill['tokens']}: {prefill['tokens_per_second']:.0f} tokens/s, {prefill['ms']:.1f} ms\n")
    rows = [
        (d["batch"], f"{d['tokens_per_second']:.1f}", *(f"{d[k]:.2f}" for k in STEP_TIMES))
        for d in result["decode"]
    ]  # fmt: skip
    print_table(("decode, batch", "tokens/s", "step ms: fastest", "p50", "p90", "p99"), rows)


STATISTICS = ("mean", "median", "p90", "p99")
LATENCIES = {
    "time to first token (TTFT)": "ttft_ms", "time per output token (TPOT)": "tpot_ms",
    "inter-token latency (ITL)": "itl_ms", "end-to-end latency (E2EL)": "e2el_ms",
}  # fmt: skip


@app.command("serve")
@with_options()
def serve(
    context: typer.Context,
    options: OptionValues[Load],
    model: Annotated[
        str | None, typer.Argument(help="Model to start a server for.", show_default="none: give --server")
    ] = None,
    server: OtherServer = None,
    served: Served = None,
    api_key_file: KeyFile = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory of the tokenizer that counts ShareGPT's tokens.", show_default="MODEL"),
    ] = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Measure a server under load, with the metrics of vllm bench serve.

    The server needs OpenAI's /v1/completions or /v1/chat/completions with streaming. Without
    --request-rate and --max-concurrency, all requests are sent at once.

    
    Examples:
      fp8serve bench serve ./llama-fp8 --max-concurrency 8
      fp8serve bench serve --server http://127.0.0.1:8000 --request-rate 2 --num-prompts 200
      fp8serve bench serve ./llama-fp8 --dataset sharegpt --dataset-path sharegpt.json --api chat
    """
    if (model is None) == (server is None):
        raise typer.BadParameter("give either a MODEL to start a server for, or a --server")
    if server is None:
        refuse_options(context, ("served", "api_key_file"), "is for --server")
    load = options()
    with exit_on_sigterm(), _server_to_measure(model, server, api_key_file) as (url, key, directory):
        from fp8serve.bench.serve import measure

        figures = measured(
            "Serve",
            lambda report: {
                "load": asdict(load),
                **measure(url, load, report, key=key, model=served, tokenizer=tokenizer or directory),
            },
        )
    show(publish("serve", figures, out), json, _print_serve)


@contextmanager
def _server_to_measure(
    model: str | None, server: str | None, key_file: Path | None
) -> Iterator[tuple[str, str | None, Path | None]]:
    """Yields the URL, the key and the model directory of `server`, or of a new server for `model`."""
    if server is not None:
        yield server, find_key(None, key_file), None
        return
    from fp8serve.hub import find_model
    from fp8serve.running import RunningServer

    directory = find_model(str(model))
    with TemporaryDirectory(prefix="fp8serve-bench-") as folder:
        options = ["--data-dir", str(Path(folder) / "data")]
        with RunningServer(directory, options, log=Path(folder) / "log") as running:
            yield running.url, None, directory


def _print_serve(result: Mapping[str, Any]) -> None:
    print(
        f"{printable(result['served_model'])}: {result['completed']} requests answered, {result['failed']} failed, in "
        f"{result['duration_seconds']:.1f} s; {result['input_tokens']} tokens in, {result['output_tokens']} out"
    )
    for error in result["errors"]:
        print(f"failed: {printable(error)}")
    print(
        f"{result['request_throughput']:.2f} requests/s, {result['output_throughput']:.1f} output tokens/s, "
        f"{result['total_token_throughput']:.1f} tokens/s in total\n"
    )
    rows = [(name, *(f"{result[key][column]:.1f}" for column in STATISTICS)) for name, key in LATENCIES.items()]
    print_table(("ms", *STATISTICS), rows)


@app.command("speculation")
@with_options()
def speculation(model: Model, options: OptionValues[SpeculationLoad], out: Out = None, json: AsJson = False) -> None:
    """Measure speculative decoding of one sequence: a summary, an edit, code, and a story.

    Draft tokens come from a prompt lookup, or from a draft model.

    
    Examples:
      fp8serve bench speculation ./llama-fp8
      fp8serve bench speculation ./llama-fp8 --speculative-tokens 4 --temperature 0.7 --out figures
      fp8serve bench speculation ./llama-fp8 --draft-model ./small-llama-fp8
    """
    from fp8serve.hub import find_model, resolve_draft

    directory, load = find_model(model), options()
    from fp8serve.bench.engine import measure_speculation

    arguments = resolve_draft(vars(load))
    figures = measured("Speculation", lambda report: measure_speculation(directory, report, **arguments))
    show(publish("speculation", figures, out), json, _print_speculation)


def _print_speculation(result: Mapping[str, Any]) -> None:
    rows = [
        (
            text["text"],
            f"{text['plain_tokens_per_second']:.1f}",
            f"{text['speculative_tokens_per_second']:.1f}",
            f"{text['times_plain']:.2f}",
            f"{text['accepted']} of {text['drafted']}",
            text["steps"],
            "yes" if text["same_answer"] else "NO",
        )
        for text in result["texts"]
    ]
    print_table(("text", "plain tokens/s", "speculative tokens/s", "speedup", "accepted", "steps", "same output"), rows)


@app.command("step")
@with_options(hidden_size=768, layers=16)
def step(
    shape: OptionValues[Shape],
    options: OptionValues[StepOptions],
    vocab_size: Annotated[int, typer.Option(min=256, help="Size of the vocabulary.")] = 32000,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Measure training steps in FP8 and in BF16, alternating, on one model.

    
    Examples:
      fp8serve bench step
      fp8serve bench step --recipe delayed --recipe block --rows 8
    """
    decoder, settings = replace(Shape.of(**shape.values), vocab_size=vocab_size), vars(options())
    from fp8serve.bench.training import measure_steps

    figures = measured("Training step", lambda report: measure_steps(report, shape=decoder, **settings))
    show(publish("step", figures, out), json, _print_step)


def _print_step(result: Mapping[str, Any]) -> None:
    print(f"{result['parameters']:,} parameters, {result['tokens']} tokens a step, {result['rounds']} rounds\n")
    table = [
        (name, f"{times['fastest_ms']:.0f}", f"{times['median_ms']:.0f}", f"{times['fastest_x_bf16']:.2f}",
         f"{times['median_x_bf16']:.2f}")
        for name, times in result["steps"].items()
    ]  # fmt: skip
    print_table(("step", "fastest, ms", "median", "fastest x BF16", "median x BF16"), table)


@app.command("monitor")
@with_options()
def monitor(
    shape: OptionValues[Shape], options: OptionValues[MonitorOptions], out: Out = None, json: AsJson = False
) -> None:
    """Measure the overhead of the monitor: training steps with and without it, alternating.

    
    Examples:
      fp8serve bench monitor
      fp8serve bench monitor --rounds 30 --out figures
    """
    decoder, settings = Shape.of(**shape.values), vars(options())
    from fp8serve.bench.training import measure_monitor

    figures = measured("Monitor", lambda report: measure_monitor(report, shape=decoder, **settings))
    show(publish("monitor", figures, out), json, _print_monitor)


def _print_monitor(result: Mapping[str, Any]) -> None:
    print(
        f"{result['parameters']:,} parameters, {result['linears']} FP8 linears, {result['tokens']} tokens a step; "
        f"codes counted every {result['every']} steps, {result['rounds']} rounds\n"
    )
    table = [
        (kind, f"{result[f'{kind}_without_ms']:.2f}", f"{result[f'{kind}_with_ms']:.2f}",
         f"{result[f'{kind}_share_percent']:+.2f} %")
        for kind in ("fastest", "median")
    ]  # fmt: skip
    print_table(("round", "without, ms a step", "with", "monitor"), table)


@app.command("casts")
def casts(
    all_values: Annotated[
        bool, typer.Option("--all", help="Test all 2^32 values of FP32, which takes an hour, instead of 2^24 values.")
    ] = False,
    op: Annotated[
        list[str] | None, typer.Option(help="Name of an op to compare; repeat for several.", show_default="all")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Compare every casting kernel with the reference bit for bit: FP8 data and scales.

    Casts all BF16 and FP16 values, and FP32 values of every sign and exponent, at every instruction-set level of this
    CPU. The exit status is 1 if a bit differs.

    
    Examples:
      fp8serve bench casts
      fp8serve bench casts --all --op quantize --out figures
    """
    from fp8serve.bench.casts import study

    request: dict[str, Any] = {"exhaustive": all_values, "probes": tuple(op or ()), "device": device}
    result = publish("casts", measured("Comparing", lambda report: study(report, **request)), out)
    show(result, json, _print_casts)
    if any(finding["differing"] for finding in result["findings"]):
        raise typer.Exit(1)


def _print_casts(result: Mapping[str, Any]) -> None:
    rows = [
        (f["probe"], f["level"], f["source"], f["target"], f"{f['values']:,}", f["differing"], f["first"] or "")
        for f in result["findings"]
    ]
    print_table(("op", "level", "from", "to", "values", "differing", "first"), rows)
