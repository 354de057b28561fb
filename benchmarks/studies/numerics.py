"""`python -m benchmarks.studies numerics`: three studies of the casts and recipes, on synthetic values and on a model.

Without a model it makes one: a Llama of 4 layers, trained for a short while on text that every Python carries. The
activations of random weights have no outliers and would show nothing.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from annotated_types import Ge

from benchmarks.studies import quantization, spikes
from benchmarks.studies.corpus import corpus
from benchmarks.studies.quantization import activations
from fp8serve.bench.options import Checked
from fp8serve.calibration.compare import compare
from fp8serve.calibration.data import calibration_batches
from fp8serve.calibration.observe import final_states, make_observer, observe
from fp8serve.calibration.options import SHIPPED, Files
from fp8serve.calibration.pipeline import load_for_calibration
from fp8serve.charts import Panel, svg_file
from fp8serve.commands.bench import Out, measured, publish, show
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.options import About
from fp8serve.terminal import AsJson, print_table


@dataclass(frozen=True)
class NumericsOptions(Checked):
    data: Annotated[Files | None, About("Text or JSON-lines file.", unset=SHIPPED, metavar="PATH")] = None
    samples: Annotated[int, Ge(2), About("Sequences to calibrate on; an eighth more is measured.")] = 64
    seq_len: Annotated[int, Ge(2), About("Longest sequence, in tokens.")] = 256
    own_steps: Annotated[int, Ge(2), About("Training steps of the small model; unused with MODEL.")] = 200


Progress = Callable[[str, int, int], None]
RECIPES = ("delayed", "current", "rowwise", "block")


@contextmanager
def _model(model: Path | None, steps: int, report: Progress) -> Iterator[tuple[Path, str]]:
    """(the model's directory, its description); without a model, one that is trained now."""
    if model is not None:
        yield model, str(model)
        return
    with tempfile.TemporaryDirectory(prefix="fp8serve-bench-") as folder:
        yield trained(Path(folder), steps, report), f"a Llama of 4 layers trained for {steps} steps in BF16"


def trained(folder: Path, steps: int, report: Progress) -> Path:
    """Returns a small model with realistic activations, below `folder`."""
    from fp8serve.train.config import TrainConfig
    from fp8serve.train.scratch import write_random_model, write_texts
    from fp8serve.train.trainer import Trainer

    texts, _ = corpus(docstrings_too=False)
    config = TrainConfig(
        model=str(write_random_model(folder / "untrained", texts)),
        data=(str(write_texts(folder / "train.jsonl", texts)),),
        out=str(folder / "run"),
        recipe="bf16",
        on_divergence="keep",
        max_steps=steps,
        batch_size=8,
        seq_len=128,
        lr=2e-3,
        weight_decay=0.1,
    )

    def follow(event: dict[str, Any]) -> None:
        if event["type"] == "metrics":
            report("training a model", event["step"], event["total_steps"])

    result = Trainer(config).run(follow)
    return Path(str(result.model))


def recipes_by_layer(
    model: Path, data: Sequence[Path] | None, samples: int, seq_len: int, report: Progress
) -> dict[str, Any]:
    """Calibrates `model` on `samples` sequences of `data`, and returns the SQNR of every linear under each recipe.

    The result is {"activations": rows of `quantization`, "recipes": {name: {"layers": {linear: dB}, ...}}}. The delayed
    recipe gets its scales from text other than the measured one. Each linear is compared with the same layer in high
    precision on the input that it has in the FP8 model, so its SQNR shows its own error only. Raises ModelError or
    DataError for an input that cannot be read.
    """
    decoder, linears = load_for_calibration(model, "cpu")
    batches = calibration_batches(
        data, Tokenizer.from_dir(model), decoder.config.vocab_size,
        samples=samples, seq_len=min(seq_len, decoder.config.max_position_embeddings), batch_size=4, seed=0,
        holdout=data,
    )  # fmt: skip
    states = final_states(observe(decoder, make_observer(decoder, linears, DelayedScaling()), batches.calibration))
    results = {}
    for index, name in enumerate(RECIPES):
        report(name, index, len(RECIPES))
        recipe = from_name(name)
        assert recipe is not None  # RECIPES has no bf16
        quality, layers = compare(decoder, linears, batches.held_out, recipe, states)
        sqnr = {linear: tally.sqnr_db for linear, tally in layers.items()}
        finite = [value for value in sqnr.values() if value is not None]
        results[name] = {
            "layers": sqnr,
            "median_db": median(finite),
            "worst_db": min(finite),
            "perplexity": quality.perplexity,
            "perplexity_bf16": quality.reference_perplexity,
            "top1_agreement": quality.top1_agreement,
        }
    return {"activations": list(activations(decoder, linears, batches.held_out[0])), "recipes": results}


def study(
    model: Path | None, data: Sequence[Path] | None, *, samples: int, seq_len: int, own_steps: int, report: Progress
) -> dict[str, Any]:
    """The figures of all three studies. ModelError, DataError: `model` or `data` (None: our passages) is unusable."""
    with _model(model, own_steps, report) as (directory, description):
        results = recipes_by_layer(directory, data, samples, seq_len, report)
    casts = [*quantization.synthetic(), *results.pop("activations")]
    return {"model": description, "casts": casts, **results, "spikes": spikes.study()}


def charts(result: Mapping[str, Any]) -> dict[str, str]:
    """SVG files by name."""
    by_recipe = {
        name: [(float(i), value) for i, value in enumerate(figures["layers"].values()) if value is not None]
        for name, figures in result["recipes"].items()
    }
    return {
        "layers": svg_file(
            "Output SQNR of every linear", [Panel("SQNR, dB", by_recipe)], "linear, in the order of the model"
        ),
        "spikes": spikes.chart(result["spikes"]["cases"]),
        "margins": spikes.margin_chart(result["spikes"]["margins"]),
    }


@with_options()
def command(
    options: OptionValues[NumericsOptions],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Hugging Face-format directory in high precision, GGUF file, smollm2, or a name on the hub.",
            show_default="a small one, trained for the purpose",
        ),
    ] = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Measure what FP8 costs: formats on one tensor, recipes on a model, delayed scaling after a spike.

    Measures E4M3, E5M2 and INT8 on Gaussian values, outliers and activations; the noise of every linear under each
    recipe; and the saturation and recovery of delayed scaling when values get 100 times larger.

    
    Examples:
      python -m benchmarks.studies numerics
      python -m benchmarks.studies numerics ./llama --data held-out.jsonl --out figures
    """
    from fp8serve.hub import find_model

    settings, directory = options(), find_model(model) if model else None
    figures = measured("Measuring", lambda report: study(directory, report=report, **vars(settings)))
    show(publish("numerics", figures, out, charts), json, _print)


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _print(result: Mapping[str, Any]) -> None:
    print("One cast and back, SQNR in dB; of activations the median linear")
    casts = [
        (r["tensor"], r["granularity"], r["format"],
         *(_db(r.get(name)) for name in ("sqnr_db", "ordinary_sqnr_db", "worst_sqnr_db")))
        for r in result["casts"]
    ]  # fmt: skip
    print_table(("values", "scale per", "format", "all", "without outliers", "worst linear"), casts)
    print(f"\nEach linear's output, SQNR in dB: {result['model']}")
    recipes = [
        (name, _db(r["median_db"]), _db(r["worst_db"]), f"{r['perplexity']:.3f}", f"{r['perplexity_bf16']:.3f}",
         f"{100 * r['top1_agreement']:.1f} %")
        for name, r in result["recipes"].items()
    ]  # fmt: skip
    print_table(("recipe", "median linear", "worst linear", "perplexity", "in BF16", "same top token"), recipes)
    print("\nDelayed scaling, values 100 times larger at one step or from then on")
    spikes = [
        (s["scenario"], s["history"], s["margin"], f"{100 * s['spike_saturated']:.1f} %", _db(s["before_db"]),
         _db(s["spike_db"]), _db(s["worst_after_db"]), s["steps_to_recover"] if s["recovered"] else "never")
        for s in result["spikes"]["cases"]
    ]  # fmt: skip
    heading = ("spike", "history", "margin", "saturated", "before", "at the spike", "worst after", "steps to recover")
    print_table(heading, spikes)
