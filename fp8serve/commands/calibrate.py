"""`fp8serve calibrate`: sample data in, an FP8 directory with its scales out."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fp8serve.errors import RecipeError
from fp8serve.fp8.amax_rules import RuleName
from fp8serve.fp8.recipe import Fp8Name
from fp8serve.terminal import AsJson, print_rich, progress, remark


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face-format directory, or a name on the hub.")],
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text or JSON-lines file; repeat for several.", show_default="passages that ship with fp8serve"
        ),
    ] = None,
    holdout: Annotated[
        list[Path] | None,
        typer.Option(
            help="File to measure quality on, never calibrated on; repeat for several.",
            show_default="passages that ship with fp8serve",
        ),
    ] = None,
    recipe: Annotated[Fp8Name, typer.Option(help="How tensors are scaled.")] = "delayed",
    samples: Annotated[int, typer.Option(min=1, help="Sequences to observe.")] = 128,
    seq_len: Annotated[int, typer.Option(min=2, help="Longest sequence, in tokens.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 4,
    history_len: Annotated[
        int | None, typer.Option(min=1, help="Length of the amax history (delayed).", show_default="1024")
    ] = None,
    algo: Annotated[
        RuleName | None,
        typer.Option(help="How a history becomes one amax (delayed).", show_default="max"),
    ] = None,
    margin: Annotated[
        int | None, typer.Option(min=0, help="Powers of two left free below the maximum (delayed).", show_default="0")
    ] = None,
    kv_cache: Annotated[bool, typer.Option("--kv-cache", help="Also find scales for an FP8 KV cache.")] = False,
    gradients: Annotated[bool, typer.Option("--gradients", help="Also observe gradients, for training.")] = False,
    format: Annotated[
        Literal["compressed-tensors", "fp8", "modelopt"],
        typer.Option(help="Spelling of the FP8 weights; docs/formats.md says who reads it."),
    ] = "compressed-tensors",
    scales_only: Annotated[
        bool, typer.Option("--scales-only", help="Write scales.safetensors and no weights.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the choice of samples.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: AsJson = False,
) -> None:
    """Write MODEL in FP8, with scales from sample data.

    Writes a directory that every FP8 server can load, scales.safetensors, calibration.json and report.html.
    All of --data makes scales, whatever the order of files and lines; quality is measured on other text: --holdout,
    or passages that ship with fp8serve.

    \b
    Examples:
      fp8serve calibrate ./llama --out ./llama-fp8
      fp8serve calibrate ./llama --out ./llama-fp8 --data chats.jsonl --holdout test.jsonl --kv-cache
      fp8serve calibrate ./llama --out ./scales --scales-only --json
    """
    from fp8serve.hub import find_model

    directory = find_model(model)
    options = {"amax_history_len": history_len, "amax_compute_algo": algo, "margin": margin}
    chosen = recipe_from(recipe, {name: value for name, value in options.items() if value is not None})
    from fp8serve.calibration.pipeline import calibrate
    from fp8serve.calibration.report import summary_table

    with progress("Calibrating") as advance:
        report = calibrate(
            directory,
            out=out,
            recipe=chosen,
            data=data,
            holdout=holdout,
            samples=samples,
            seq_len=seq_len,
            batch_size=batch_size,
            format=format,
            seed=seed,
            device=device,
            kv_cache=kv_cache,
            gradients=gradients,
            scales_only=scales_only,
            progress=lambda stage, done, total: advance(done, total, stage),
        )
    for note in report.notes:
        remark(note)
    print(report.to_json()) if json else print_rich(summary_table(report))


def recipe_from(name: str, options: dict[str, Any]) -> Any:
    """The recipe of that name; options that it does not have are refused, not ignored."""
    from fp8serve.fp8.recipe import from_name

    if options and name != "delayed":
        raise RecipeError(
            f"--history-len, --algo and --margin belong to the delayed recipe, not to {name}; leave them out."
        )
    return from_name(name, **options)
