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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fp8serve.bench.corpus import corpus, digest
from fp8serve.bench.options import TWIN, TWIN_RATE, StudyPlan
from fp8serve.errors import JobError
from fp8serve.train import checkpoint, state
from fp8serve.train.config import TrainConfig
from fp8serve.train.held_out import held_out_metrics
from fp8serve.train.scratch import write_random_model, write_texts
from fp8serve.train.setup import prepare
from fp8serve.train.trainer import Trainer

Tell = Callable[[str, int, int], None]  # (recipe, step, steps)
FINAL_ROWS = 1024  # of the training data, on which final weights are compared


@dataclass(frozen=True)
class Curve:
    """One run: the training loss of every step, (step, loss) on held-out text, and tokens per second of the median.

    final: the loss of the final weights on FINAL_ROWS training rows; NaN if it was not computed.
    """

    train: list[float]
    valid: list[tuple[int, float]]
    tokens_per_second: float
    final: float = math.nan


def study(out: Path, plan: StudyPlan, tell: Tell) -> dict[str, Any]:
    """Every run of `plan` below `out`; returns the figures, which `summary` and `chart` show.

    A directory that holds a study of another plan is refused with JobError.
    """
    out.mkdir(parents=True, exist_ok=True)
    _same_plan(out / "plan.json", plan)
    text = _write_text(out, plan)
    curves = {recipe: _curve(out, plan, recipe, tell) for recipe in plan.recipes}
    return {
        "plan": asdict(plan),
        "text": text,
        "parameters": _parameters(_model(out, plan)),
        "runs": {recipe: _figures(curve, curves[plan.recipes[0]], plan) for recipe, curve in curves.items()},
        "resumed": _resume(out, plan, tell) if plan.resumed in plan.recipes else None,
        "curves": {recipe: asdict(curve) for recipe, curve in curves.items()},
    }


def _same_plan(path: Path, plan: StudyPlan) -> None:
    """The recipes may differ from call to call, so that two calls can share the work."""
    here = _shared(asdict(plan))
    if path.exists() and _shared(asdict(StudyPlan()) | json.loads(path.read_text())) != here:
        raise JobError(f"{path.parent} holds a study with other settings; use another directory.")
    path.write_text(json.dumps(here, indent=2))


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


def _curve(out: Path, plan: StudyPlan, recipe: str, tell: Tell) -> Curve:
    """Train, or continue training, and read the curve back from the file to which the events were appended."""
    file = out / f"{recipe}.jsonl"
    if not (out / recipe / "model").exists():
        with file.open("a", encoding="utf-8") as lines:

            def follow(event: dict[str, Any]) -> None:
                if event["type"] == "metrics":
                    lines.write(json.dumps(event) + "\n")
                    lines.flush()
                    tell(recipe, event["step"], event["total_steps"])

            Trainer(_config(out, plan, recipe, recipe)).run(follow)
    return replace(read_curve(file, plan.steps), final=_final_loss(out, plan, recipe))


def _final_loss(out: Path, plan: StudyPlan, recipe: str) -> float:
    """The loss of a finished run's last checkpoint under its recipe, scales frozen; computed once and kept beside
    it."""
    kept = out / f"{recipe}-final.json"
    if not kept.exists():
        config, source = _config(out, plan, recipe, recipe), out / recipe / "checkpoints" / f"step-{plan.steps}"
        setup = prepare(config, source, lambda event: None)
        state.restore(setup.forward, setup.optimizer, checkpoint.read_checkpoint(source))
        items = setup.items[:: max(1, len(setup.items) // FINAL_ROWS)][:FINAL_ROWS]  # from everywhere in the text
        found = held_out_metrics(setup.method, setup.forward, items, plan.batch_size)
        tokens = sum(item.trainable for item in items)
        kept.write_text(json.dumps({"rows": len(items), "tokens": tokens, "loss": found["valid_loss"]}))
    return float(json.loads(kept.read_text())["loss"])


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
    """The three losses in nats per token, and their distance from the first recipe's in percent."""
    losses = {
        "final": (curve.final, baseline.final),
        "running": (_tail(curve, plan), _tail(baseline, plan)),
        "valid": (curve.valid[-1][1], baseline.valid[-1][1]),
    }
    found = {f"{name}_loss": loss for name, (loss, _) in losses.items()}
    apart = {f"{name}_difference_percent": 100 * (loss / base - 1) for name, (loss, base) in losses.items()}
    return {**found, **apart, "tokens_per_second": curve.tokens_per_second}


def _tail(curve: Curve, plan: StudyPlan) -> float:
    return sum(curve.train[-plan.averaged :]) / plan.averaged


def _parameters(model: Path) -> int:
    from fp8serve.model.storage.shards import open_shards

    return sum(math.prod(entry.shape) for entry in open_shards(model).entries.values())


def _resume(out: Path, plan: StudyPlan, tell: Tell) -> dict[str, Any]:
    """Resume from the half-way checkpoint in another directory and compare every byte of the last checkpoint."""
    half, run = plan.steps // 2, f"{plan.resumed}-resumed"
    source, target = out / plan.resumed / "checkpoints", out / run / "checkpoints"
    if not (target / f"step-{half}").exists():
        shutil.copytree(source / f"step-{half}", target / f"step-{half}")

    def follow(event: dict[str, Any]) -> None:
        if event["type"] == "metrics":
            tell(run, event["step"], event["total_steps"])

    Trainer(_config(out, plan, plan.resumed, run)).run(follow)
    differing = _differing(source / f"step-{plan.steps}", target / f"step-{plan.steps}")
    return {"recipe": plan.resumed, "from_step": half, "identical": not differing, "differing_files": differing}


def _differing(one: Path, other: Path) -> list[str]:
    """Tensor files of a checkpoint whose bytes differ."""
    names = [p.name for p in sorted(one.glob("*.safetensors"))]
    return [n for n in names if (one / n).read_bytes() != (other / n).read_bytes()]


def smoothed(values: Sequence[float], width: int) -> list[tuple[float, float]]:
    """(step, mean of the `width` steps around it), one point for every half width, for plots."""
    stride = max(1, width // 2)
    return [
        (start + width / 2, sum(values[start : start + width]) / width)
        for start in range(0, len(values) - width + 1, stride)
    ]


def chart(result: Mapping[str, Any]) -> str:
    """The training curves, smoothed, and below them each recipe's distance from the first one, in percent."""
    from fp8serve.bench.plot import Panel, svg

    steps = result["plan"]["steps"]
    width = max(1, steps // 50)
    curves = {name: smoothed(run["train"], width) for name, run in result["curves"].items()}
    base = next(iter(curves.values()))
    apart = {
        name: [(x, 100 * (y / b - 1)) for (x, y), (_, b) in zip(points, base, strict=True)]
        for name, points in curves.items()
    }
    return svg(
        f"Training loss, {result['parameters'] / 1e6:.1f} M parameters, mean of {width} steps",
        [Panel("loss, nats per token", curves), Panel(f"distance from {next(iter(curves))}, %", apart)],
        "step",
    )
