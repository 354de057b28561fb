"""Loss under delayed scaling when a model's activations jump while it trains, with and without a margin.

Delayed scaling quantizes a step with the largest values of the steps before, so larger values are cut off; a margin
leaves room for them. There are two kinds of jumps, at step JUMP of a short training:

    rate     the step before takes a learning rate FACTOR times as high, and every weight moves
    batch    the step reads random tokens, which no model expects, so its gradients are larger

Values that are cut off are counted on all elements of every linear's input, weight and gradient, in all steps. The loss
is compared with that of BF16 with the same seed and the same jump; current scaling shows the result without delay.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from benchmarks.studies.arms import Arm, ArmsPlan, Training, write_model
from fp8serve.bench.options import Shape
from fp8serve.charts import Panel, svg_file
from fp8serve.commands.bench import Out, measured, publish, show
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.errors import JobError
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.monitor import tally
from fp8serve.fp8.ops.arithmetic import expand
from fp8serve.fp8.spec import LINEAR_TENSORS
from fp8serve.options import About, check
from fp8serve.terminal import AsJson, print_table
from fp8serve.train.forward import PackedBatch


@dataclass(frozen=True)
class JumpsPlan(ArmsPlan):
    """The trainings of `python -m benchmarks.studies jumps`. jump: the step at which the activations jump, from 0."""

    steps: Annotated[int, Ge(2), About("Optimizer steps of each run.")] = 160
    lr: Annotated[float, Gt(0), About("Peak learning rate.")] = 1e-3
    jump: Annotated[int, Ge(1), About("Step at which activations jump.")] = 100
    shape: Shape = field(default_factory=lambda: Shape.of(128, 2))

    def __post_init__(self) -> None:
        check(self, JobError)
        if self.jump + 1 >= self.steps:
            raise JobError(f"The jump at step {self.jump} leaves nothing to look at in {self.steps} steps.")


Progress = Callable[[str, int, int], None]
FACTOR = 30.0
SOON = 10  # steps from the jump on, whose mean loss is compared
HISTORIES, MARGINS, JUMPS = (1, 16, 1024), (0, 1, 2), ("rate", "batch")
ARMS = {"bf16": Arm(), "current": Arm("current")} | {
    f"history {history}, margin {margin}": Arm("delayed", {"amax_history_len": history, "margin": margin})
    for history in HISTORIES
    for margin in MARGINS
}


@dataclass
class Run:
    """One training: the loss of every step and, for each role of a tensor, the share of elements cut off in it."""

    losses: list[float] = field(default_factory=list)
    cut_off: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LINEAR_TENSORS})


Runs = dict[str, dict[str, list[Run]]]  # by jump, then by arm: a run for each seed


def study(plan: JumpsPlan, report: Progress) -> dict[str, Any]:
    """{"rows": a row for every jump and arm, means over the seeds; "curves": the losses of their steps}."""
    runs: Runs = {jump: {arm: [] for arm in ARMS} for jump in JUMPS}
    for seed in range(plan.seeds):
        _seed(plan, seed, runs, report)
    rows = [
        {"jump": jump, "arm": arm, **_figures(repeats, arms["bf16"], plan.jump)}
        for jump, arms in runs.items()
        for arm, repeats in arms.items()
    ]
    curves = {
        jump: {arm: _mean([r.losses for r in repeats]) for arm, repeats in arms.items()} for jump, arms in runs.items()
    }
    settings = {k: vars(v) if k == "shape" else v for k, v in vars(plan).items()}
    return {"plan": settings, "factor": FACTOR, "rows": rows, "curves": curves}


def _seed(plan: JumpsPlan, seed: int, runs: Runs, report: Progress) -> None:
    total = len(JUMPS) * len(ARMS)
    with tempfile.TemporaryDirectory(prefix="fp8serve-bench-") as name:
        folder = write_model(Path(name), plan, seed)
        for index, (jump, arm) in enumerate((jump, arm) for jump in JUMPS for arm in ARMS):
            report(f"seed {seed}, {jump}, {arm}", seed * total + index, plan.seeds * total)
            runs[jump][arm].append(_run(Training(folder, plan, ARMS[arm], seed), jump, plan.jump, seed))


def _run(training: Training, jump: str, at: int, seed: int) -> Run:
    run = Run()
    for step, batch in enumerate(training.batches()):
        faster = FACTOR if (jump, step) == ("rate", at - 1) else 1.0
        if (jump, step) == ("batch", at):
            batch = _random(batch, training.setup.decoder.config.vocab_size, seed)
        with _counting(training.setup.decoder, run):
            run.losses.append(training.take(batch, faster * training.rate(step)))
    return run


def _random(batch: PackedBatch, vocab_size: int, seed: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    return replace(batch, token_ids=torch.randint(vocab_size, batch.token_ids.shape, generator=generator))


@contextmanager
def _counting(model: torch.nn.Module, run: Run) -> Iterator[None]:
    """Inside the context, values of the linears' tensors that are cut off are counted; at the end the step's shares go
    into `run`."""
    saturated, counts = dict.fromkeys(LINEAR_TENSORS, 0), dict.fromkeys(LINEAR_TENSORS, 0)

    def count(name: str, values: Tensor, q: Tensor, scale_inv: Tensor) -> None:
        saturated[name] += int(tally(values, q, expand(scale_inv, *q.shape)).saturated)
        counts[name] += q.numel()

    linears = [m for m in model.modules() if isinstance(m, Linear)]
    for linear in linears:
        linear.observer = count
    try:
        yield
    finally:
        for linear in linears:
            linear.observer = None
    for name in LINEAR_TENSORS:
        run.cut_off[name].append(saturated[name] / max(1, counts[name]))


def _figures(runs: Sequence[Run], baseline: Sequence[Run], at: int) -> dict[str, Any]:
    """In percent: the values cut off at the jump, by role, and by how much the loss exceeds BF16's in several spans of
    steps."""
    pairs = list(zip(runs, baseline, strict=True))

    def apart(begin: int, end: int) -> list[float]:
        return [100 * (fmean(one.losses[begin:end]) / fmean(base.losses[begin:end]) - 1) for one, base in pairs]

    end = len(runs[0].losses)
    spans = {"before": (at - SOON, at), "jump": (at, at + 1), "soon": (at + 1, at + 1 + SOON), "end": (end - SOON, end)}
    losses = {name: apart(max(0, begin), stop) for name, (begin, stop) in spans.items()}
    return {
        "cut_off": {name: 100 * fmean(run.cut_off[name][at] for run in runs) for name in LINEAR_TENSORS},
        "cut_off_steps": fmean(_lasting(run, at) for run in runs),
        "apart": {name: fmean(percents) for name, percents in losses.items()},
        "largest": {name: max(map(abs, percents)) for name, percents in losses.items()},
        "loss": fmean(run.losses[at] for run in runs),
    }


def _lasting(run: Run, at: int) -> int:
    """Steps from the jump on until fewer than one value in 10,000 is cut off in every role."""
    steps = zip(*(run.cut_off[name][at:] for name in LINEAR_TENSORS), strict=True)
    return next((step for step, shares in enumerate(steps) if max(shares) < 1e-4), len(run.losses) - at)


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*curves, strict=True)]


def chart(result: Mapping[str, Any]) -> str:
    """The loss around the jump: BF16, current scaling, and delayed scaling with each margin at the longest history."""
    longest = HISTORIES[-1]
    labels = {"bf16": "bf16", "current": "current"} | {f"history {longest}, margin {m}": f"margin {m}" for m in MARGINS}
    at, panels = result["plan"]["jump"], []
    for jump, curves in result["curves"].items():
        around = range(max(0, at - SOON), min(at + 3 * SOON, len(curves["bf16"])))
        lines = {name: [(float(step), curves[arm][step]) for step in around] for arm, name in labels.items()}
        panels.append(Panel(f"loss, jump of the {jump}", lines))
    return svg_file(f"Training loss around a jump at step {at}; delayed scaling with history {longest}", panels, "step")


ROLES = {"input": "inputs", "weight": "weights", "grad_output": "gradients"}
SPANS = {"jump": "at the jump", "soon": "10 steps after", "end": "at the end"}


@with_options()
def command(options: OptionValues[JumpsPlan], out: Out = None, json: AsJson = False) -> None:
    """Train a small model whose activations jump at one step, under delayed scaling with and without a margin.

    The learning rate of one step is 30 times as high, or one batch consists of random tokens. Shows which share of
    values is cut off at the jump and how far the loss is from BF16's, for three histories and three margins, beside
    current scaling.

    
    Examples:
      python -m benchmarks.studies jumps
      python -m benchmarks.studies jumps --seeds 5 --out figures
    """
    plan = options()
    figures = measured("Training", lambda report: study(plan, report))
    show(publish("jumps", figures, out, lambda result: {"loss": chart(result)}), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    print("Cut off at the jump, and the loss's distance from that of BF16 (largest of a seed)\n")
    rows = [
        (r["jump"], r["arm"], f"{r['loss']:.3f}", *(f"{r['cut_off'][role]:.3f} %" for role in ROLES),
         f"{r['cut_off_steps']:.1f}", *(f"{r['apart'][s]:+.2f} % ({r['largest'][s]:.2f})" for s in SPANS))
        for r in result["rows"]
    ]  # fmt: skip
    heading = (f"{name} cut off" for name in ROLES.values())
    print_table(("jump", "arm", "loss", *heading, "steps", *SPANS.values()), rows)
