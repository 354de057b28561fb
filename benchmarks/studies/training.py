"""Trains one model from the same weights, on the same text in the same order, under every recipe.

The question is whether FP8 training ends where BF16 training ends. Everything but the recipe is equal: initial weights,
rows, order, learning rates, FP32 master weights and moments. The product's own `Trainer` runs, as a user would run it.
Each run leaves a checkpoint half-way; one of them is afterwards continued in a directory of its own, and its last
checkpoint must have the bytes of the uninterrupted run.

Three losses are compared. The *final loss* is that of the final weights on 1,024 of the training rows, the same ones
for every recipe. The *running loss* is the mean over the last steps of each step's own batch, taken while the weights
still move: a twentieth of the steps sees few rows. The *held-out loss* is that of the final weights on other text. A
study that was stopped resumes: finished runs are read from their curve file. The twin of the BF16 run shows how far
apart two almost identical runs end.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from annotated_types import Ge, Gt, Le, Len

from benchmarks.studies.corpus import corpus, digest
from fp8serve.bench.options import Checked, Shape
from fp8serve.commands.bench import measured, publish, show, writable
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.errors import JobError
from fp8serve.fp8.recipe import RecipeName
from fp8serve.options import About, check
from fp8serve.terminal import AsJson, print_table
from fp8serve.train import checkpoint, state
from fp8serve.train.config import TrainConfig
from fp8serve.train.run import evaluate
from fp8serve.train.scratch import write_random_model, write_texts
from fp8serve.train.setup import prepare
from fp8serve.train.trainer import Trainer

TWIN = "twin"  # a second run in BF16 whose rate differs so little that only chance separates the two
TWIN_RATE = 1.0001


@dataclass(frozen=True)
class StudyPlan(Checked):
    """The model and the length of the training. A step reads `batch_size` rows of at most `seq_len` tokens, packed.

    model: directory of the initial weights; None: random ones of `shape`. lr: the peak, reached after `warmup_steps`
    (None: 3 % of all) and falling along a cosine to `final_lr` of it. With so few tokens per step a rate above the
    default does not help: at 1e-3 BF16 itself ends 7 % higher (docs/studies.md).
    """

    recipes: Annotated[
        tuple[str, ...],
        Len(1),
        About("Recipe, or twin: BF16 at a rate 0.01 % higher; the first one is the baseline.", flag="--recipe"),
    ] = (
        "bf16",
        "delayed",
        "current",
        "rowwise",
        "block",
    )
    resumed: str = "delayed"
    steps: Annotated[int, Ge(4), About("Optimizer steps of each run; an even number.")] = 1000
    batch_size: Annotated[int, Ge(1), About("Rows in a step.")] = 4
    seq_len: Annotated[int, Ge(2), About("Longest row, in tokens.")] = 128
    lr: Annotated[float, Gt(0), About("Peak learning rate.")] = 3e-4
    warmup_steps: Annotated[
        int | None, Ge(0), About("Steps in which the rate rises to its peak.", unset="3 % of all")
    ] = None
    final_lr: Annotated[float, Ge(0), Le(1), About("Final rate as a fraction of the peak.")] = 0.1
    seed: Annotated[int, Ge(0), About("Seed of random weights and of the order of rows.")] = 0
    shape: Shape = field(default_factory=Shape)
    model: str | None = None

    def __post_init__(self) -> None:
        check(self, JobError)
        if unknown := [r for r in self.recipes if r not in (*get_args(RecipeName), TWIN)]:
            raise JobError(
                f"There is no recipe {unknown[0]!r}; choose from {', '.join((*get_args(RecipeName), TWIN))}."
            )
        if self.steps % 2:
            raise JobError(f"steps must be an even number, found {self.steps}.")

    @property
    def averaged(self) -> int:
        """Steps at the end whose mean is the final training loss."""
        return max(1, self.steps // 20)


Progress = Callable[[str, int, int], None]  # (recipe, step, steps)
FINAL_ROWS = 1024  # of the training data, on which final weights are compared


@dataclass(frozen=True)
class Curve:
    """One run: the training loss of every step, (step, loss) on held-out text, and the median of tokens per second.

    final: the loss of the final weights on FINAL_ROWS training rows; NaN if it was not computed.
    """

    train: list[float]
    valid: list[tuple[int, float]]
    tokens_per_second: float
    final: float = math.nan


def study(out: Path, plan: StudyPlan, report: Progress) -> dict[str, Any]:
    """Does every run of `plan` below `out`; returns the figures, which `_print` and `chart` show.

    JobError: `out` holds a study of another plan.
    """
    out.mkdir(parents=True, exist_ok=True)
    _same_plan(out / "plan.json", plan)
    text = _write_text(out, plan)
    curves = {recipe: _curve(out, plan, recipe, report) for recipe in plan.recipes}
    return {
        "plan": asdict(plan),
        "text": text,
        "parameters": _parameters(_model(out, plan)),
        "runs": {recipe: _figures(curve, curves[plan.recipes[0]], plan) for recipe, curve in curves.items()},
        "resumed": _resume(out, plan, report) if plan.resumed in plan.recipes else None,
        "curves": {recipe: asdict(curve) for recipe, curve in curves.items()},
    }


def _same_plan(path: Path, plan: StudyPlan) -> None:
    """Raises JobError if `path` holds another plan. The recipes may differ from call to call, so that two calls can
    share the work."""
    shared = _shared(asdict(plan))
    if path.exists() and _shared(asdict(StudyPlan()) | json.loads(path.read_text())) != shared:
        raise JobError(f"{path.parent} holds a study with other settings; use another directory.")
    path.write_text(json.dumps(shared, indent=2))


def _shared(plan: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in plan.items() if k not in ("recipes", "resumed")}


def _write_text(out: Path, plan: StudyPlan) -> dict[str, Any]:
    """Makes the model directory and the text files, once; returns a description of the text."""
    train, held_out = corpus()
    write_texts(out / "train.jsonl", train)
    write_texts(out / "held-out.jsonl", held_out)
    if not _model(out, plan).exists():
        write_random_model(out / "model", train, context=max(256, plan.seq_len), seed=plan.seed, **asdict(plan.shape))
    return {
        "source": "pydoc_data.topics and the docstrings of the standard library",
        "characters": sum(map(len, train)),
        "held_out_characters": sum(map(len, held_out)),
        "digest": digest(train + held_out),
    }


def _model(out: Path, plan: StudyPlan) -> Path:
    return out / "model" if plan.model is None else Path(plan.model)


def _config(out: Path, plan: StudyPlan, recipe: str, run: str) -> TrainConfig:
    return TrainConfig(
        model=str(_model(out, plan)),
        data=(str(out / "train.jsonl"),),
        eval_data=(str(out / "held-out.jsonl"),),
        eval_every=max(1, plan.steps // 10),
        out=str(out / run),
        recipe="bf16" if recipe == TWIN else recipe,
        on_divergence="keep",
        max_steps=plan.steps,
        batch_size=plan.batch_size,
        seq_len=plan.seq_len,
        packing="tokens",
        lr=plan.lr * (TWIN_RATE if recipe == TWIN else 1),
        warmup_steps=plan.warmup_steps,
        min_lr_ratio=plan.final_lr,
        weight_decay=0.1,
        seed=plan.seed,
        save_every=plan.steps // 2,
        keep_last=2,
    )


def _curve(out: Path, plan: StudyPlan, recipe: str, report: Progress) -> Curve:
    """Train, or continue training, and read the curve back from the file to which the events were appended."""
    file = out / f"{recipe}.jsonl"
    if not (out / recipe / "model").exists():
        with file.open("a", encoding="utf-8") as lines:

            def follow(event: dict[str, Any]) -> None:
                if event["type"] == "metrics":
                    lines.write(json.dumps(event) + "\n")
                    lines.flush()
                    report(recipe, event["step"], event["total_steps"])

            Trainer(_config(out, plan, recipe, recipe)).run(follow)
    return replace(read_curve(file, plan.steps), final=_final_loss(out, plan, recipe))


def _final_loss(out: Path, plan: StudyPlan, recipe: str) -> float:
    """The loss of a finished run's last checkpoint under its recipe, with frozen scales. Computed once and stored in a
    file beside the run."""
    cache = out / f"{recipe}-final.json"
    if not cache.exists():
        config, source = _config(out, plan, recipe, recipe), out / recipe / "checkpoints" / f"step-{plan.steps}"
        setup = prepare(config, source, lambda event: None)
        state.restore(setup.forward, setup.optimizer, checkpoint.read_checkpoint(source))
        items = setup.items[:: max(1, len(setup.items) // FINAL_ROWS)][:FINAL_ROWS]  # from everywhere in the text
        results = evaluate(setup.method, setup.forward, items, plan.batch_size)
        tokens = sum(item.trainable_tokens for item in items)
        cache.write_text(json.dumps({"rows": len(items), "tokens": tokens, "loss": results["valid_loss"]}))
    return float(json.loads(cache.read_text())["loss"])


def read_curve(file: Path, steps: int) -> Curve:
    """The curve in a file of metrics events. Of a step that a stopped run took twice, only the last time counts."""
    events = {e["step"]: e for e in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
    if missing := [s for s in range(1, steps + 1) if s not in events]:
        raise JobError(f"{file} lacks step {missing[0]}; remove the directory and run the study again.")
    losses = [_number(events[s]["train_loss"]) for s in range(1, steps + 1)]
    valid = [(s, _number(events[s]["valid_loss"])) for s in sorted(events) if "valid_loss" in events[s]]
    speeds = sorted(e["tokens_per_second"] for e in events.values())
    return Curve(losses, valid, speeds[len(speeds) // 2])


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _figures(curve: Curve, baseline: Curve, plan: StudyPlan) -> dict[str, float]:
    """Returns the three losses in nats per token, and their distance from the first recipe's in percent."""
    losses = {
        "final": (curve.final, baseline.final),
        "running": (_tail(curve, plan), _tail(baseline, plan)),
        "valid": (curve.valid[-1][1], baseline.valid[-1][1]),
    }
    results = {f"{name}_loss": loss for name, (loss, _) in losses.items()}
    apart = {f"{name}_difference_percent": 100 * (loss / base - 1) for name, (loss, base) in losses.items()}
    return {**results, **apart, "tokens_per_second": curve.tokens_per_second}


def _tail(curve: Curve, plan: StudyPlan) -> float:
    return sum(curve.train[-plan.averaged :]) / plan.averaged


def _parameters(model: Path) -> int:
    from fp8serve.model.storage.shards import open_shards

    return sum(math.prod(entry.shape) for entry in open_shards(model).entries.values())


def _resume(out: Path, plan: StudyPlan, report: Progress) -> dict[str, Any]:
    """Resume from the half-way checkpoint in another directory and compare every byte of the last checkpoint."""
    half, run = plan.steps // 2, f"{plan.resumed}-resumed"
    source, target = out / plan.resumed / "checkpoints", out / run / "checkpoints"
    if not (target / f"step-{half}").exists():
        shutil.copytree(source / f"step-{half}", target / f"step-{half}")

    def follow(event: dict[str, Any]) -> None:
        if event["type"] == "metrics":
            report(run, event["step"], event["total_steps"])

    Trainer(_config(out, plan, plan.resumed, run)).run(follow)
    differing = _differing(source / f"step-{plan.steps}", target / f"step-{plan.steps}")
    return {"recipe": plan.resumed, "from_step": half, "identical": not differing, "differing_files": differing}


def _differing(one: Path, other: Path) -> list[str]:
    """Tensor files of a checkpoint whose bytes differ."""
    names = [p.name for p in sorted(one.glob("*.safetensors"))]
    return [n for n in names if (one / n).read_bytes() != (other / n).read_bytes()]


def smoothed(values: Sequence[float], width: int) -> list[tuple[float, float]]:
    """Returns (step, mean of the `width` steps around it), one point for every half width, for plots."""
    stride = max(1, width // 2)
    return [
        (start + width / 2, sum(values[start : start + width]) / width)
        for start in range(0, len(values) - width + 1, stride)
    ]


def chart(result: Mapping[str, Any]) -> str:
    """Returns the training curves, smoothed, and below them each recipe's distance from the first one, in percent."""
    from fp8serve.charts import Panel, svg_file

    steps = result["plan"]["steps"]
    width = max(1, steps // 50)
    curves = {name: smoothed(run["train"], width) for name, run in result["curves"].items()}
    base = next(iter(curves.values()))
    apart = {
        name: [(x, 100 * (y / b - 1)) for (x, y), (_, b) in zip(points, base, strict=True)]
        for name, points in curves.items()
    }
    return svg_file(
        f"Training loss, {result['parameters'] / 1e6:.1f} M parameters, mean of {width} steps",
        [Panel("loss, nats per token", curves), Panel(f"distance from {next(iter(curves))}, %", apart)],
        "step",
    )


LOSSES = {"final": "final loss", "running": "running loss", "valid": "held-out loss"}


@with_options()
def command(
    out: Annotated[
        Path,
        typer.Option(
            help="Directory for the runs, the figures and the plot; continues if it exists.",
            file_okay=False,
            callback=writable,
        ),
    ],
    options: OptionValues[StudyPlan],
    shape: OptionValues[Shape],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Hugging Face-format directory in high precision, GGUF file, smollm2, or a name on the hub.",
            show_default="random weights",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Train one model under every recipe from the same seed, and compare where they end.

    It trains on text that every Python installation carries. One run is also resumed half-way and must end with the
    same bytes.

    
    Examples:
      python -m benchmarks.studies training --out study
      python -m benchmarks.studies training --out study --recipe bf16 --recipe delayed --steps 200
      python -m benchmarks.studies training smollm2 --out study --recipe bf16 --recipe twin --recipe delayed --steps 300
    """
    from fp8serve.hub import find_model

    random = Shape.of(**shape.values)
    if model and random != Shape():
        raise JobError("MODEL has its own width and layers; leave out --hidden-size and --layers.")
    plan = options(shape=random, model=str(find_model(model)) if model else None)
    figures = measured("Training", lambda report: study(out, plan, report))
    show(publish("training", figures, out, lambda result: {"curves": chart(result)}), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    plan, resumed = result["plan"], result["resumed"]
    print(
        f"{result['parameters']:,} parameters, {plan['steps']} steps of {plan['batch_size'] * plan['seq_len']} tokens, "
        f"seed {plan['seed']}; {result['text']['source']}, {result['text']['characters']:,} characters\n"
    )
    rows = [
        (name, *(cell for kind in LOSSES for cell in (f"{r[kind + '_loss']:.4f}", _apart(r, kind))),
         f"{r['tokens_per_second']:.0f}")
        for name, r in result["runs"].items()
    ]  # fmt: skip
    heading = (column for title in LOSSES.values() for column in (title, "apart"))
    print_table(("recipe", *heading, "tokens/s"), rows)
    if resumed:
        bytes_ = "the same bytes" if resumed["identical"] else f"other bytes in {', '.join(resumed['differing_files'])}"
        print(f"\n{resumed['recipe']} resumed from step {resumed['from_step']}: {bytes_} at the end")


def _apart(run: Mapping[str, Any], kind: str) -> str:
    return f"{run[kind + '_difference_percent']:+.2f} %"
