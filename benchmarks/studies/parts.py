"""The cost of each part of current scaling: trainings with parts left out, over several seeds.

Every arm starts from the same weights, and reads the same text in the same order. Two runs of BF16 whose rates differ
by one part in ten thousand differ only by chance. BF16 is the mean of three such runs, because a single one would add
its own chance to every distance. The final loss is that of the final weights on the same training rows, once under the
arm's recipe and once in BF16: the first includes the error of the forward pass, the second only the effect of training.
A study that was stopped continues with the next run.
"""

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer

from benchmarks.studies.arms import Arm, ArmsPlan, Training, write_model
from fp8serve.commands.bench import measured, publish, show, writable
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.model.storage.files import atomic_file
from fp8serve.terminal import AsJson, print_table


@dataclass(frozen=True)
class PartsPlan(ArmsPlan):
    """The trainings of `python -m benchmarks.studies parts`."""


Progress = Callable[[str, int, int], None]
Losses = dict[str, float]  # "own": under the arm's recipe, "bf16", "running": mean of the last steps


def _current(**options: Any) -> Arm:
    return Arm("current", options)


def _only(part: int) -> Arm:
    """Current scaling in one of fprop, dgrad, wgrad; the others in BF16."""
    return _current(override_linear_precision=[i != part for i in range(3)])


BF16 = {"bf16": Arm(), "bf16, rate +0.01 %": Arm(rate=1.0001), "bf16, rate -0.01 %": Arm(rate=0.9999)}
ARMS = BF16 | {
    "current": _current(),
    "current, forward only": _only(0),
    "current, input gradients only": _only(1),
    "current, weight gradients only": _only(2),
    "current, gradients in E4M3": _current(fp8_format="E4M3"),
    "delayed": Arm("delayed"),
    "rowwise": Arm("rowwise"),
    "block": Arm("block"),
}


def study(out: Path, plan: PartsPlan, report: Progress) -> dict[str, Any]:
    """{"arms": distances from BF16 over the seeds, "losses": those of every run}. The losses of finished runs are
    stored in `out`, and these runs are not repeated."""
    shared = {k: vars(v) if k == "shape" else v for k, v in vars(plan).items() if k != "seeds"}
    losses = {seed: _losses(out / f"seed-{seed}.json", shared, seed, plan, report) for seed in range(plan.seeds)}
    return {
        "plan": shared | {"seeds": plan.seeds},
        "arms": {name: {kind: distances(losses, name, kind) for kind in ("own", "bf16", "running")} for name in ARMS},
        "losses": {str(seed): by_arm for seed, by_arm in losses.items()},
    }


def _losses(file: Path, shared: Mapping[str, Any], seed: int, plan: PartsPlan, report: Progress) -> dict[str, Losses]:
    """The losses of one seed by arm. Those that an earlier call with the same plan wrote to `file` are not computed
    again."""
    record = json.loads(file.read_text()) if file.exists() else {}
    losses: dict[str, Losses] = record["losses"] if record.get("plan") == shared else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fp8serve-bench-") as name:
        folder = write_model(Path(name), plan, seed)
        for arm in (name for name in ARMS if name not in losses):
            report(f"seed {seed}, {arm}", seed * len(ARMS) + len(losses), plan.seeds * len(ARMS))
            losses[arm] = _run(Training(folder, plan, ARMS[arm], seed))
            with atomic_file(file) as new:  # the study may be stopped while it writes
                new.write_text(json.dumps({"plan": shared, "losses": losses}, indent=1), encoding="utf-8")
    return losses


def _run(training: Training) -> Losses:
    losses = [training.take(batch, training.rate(step)) for step, batch in enumerate(training.batches())]
    last = losses[-max(1, len(losses) // 20) :]
    return {"own": training.loss(), "bf16": training.loss(in_bf16=True), "running": fmean(last)}


def distances(losses: Mapping[int, Mapping[str, Losses]], name: str, kind: str) -> dict[str, Any]:
    """Returns "apart": each seed's distance from the mean of its BF16 runs, in percent; "mean": their mean; "error":
    the standard error of the mean, None for a single seed."""
    apart = [100 * (by_arm[name][kind] / fmean(by_arm[arm][kind] for arm in BF16) - 1) for by_arm in losses.values()]
    error = stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else None
    return {"apart": apart, "mean": fmean(apart), "error": error}


@with_options()
def command(
    out: Annotated[
        Path,
        typer.Option(
            help="Directory for the figures; continues with the next run if it exists.",
            file_okay=False,
            callback=writable,
        ),
    ],
    options: OptionValues[PartsPlan],
    json: AsJson = False,
) -> None:
    """Train a small model with parts of current scaling left out, and compare where the runs end.

    Trains with only the forward pass, the input gradients or the weight gradients in FP8, with gradients in E4M3,
    and under the other recipes. Shows the distance from BF16, which is trained three times at rates that differ by
    0.01 %.

    
    Examples:
      python -m benchmarks.studies parts --out parts
      python -m benchmarks.studies parts --out parts --seeds 6 --steps 1000
    """
    plan = options()
    figures = measured("Training", lambda report: study(out, plan, report))
    show(publish("parts", figures, out), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    plan = result["plan"]
    print(f"{plan['steps']} steps of {plan['batch_size'] * plan['seq_len']} tokens, {plan['seeds']} seeds; from BF16\n")
    rows = [(name, *(_apart(arm[kind]) for kind in ("own", "bf16", "running"))) for name, arm in result["arms"].items()]
    print_table(("arm", "final loss, its recipe", "final loss in BF16", "running loss"), rows)


def _apart(distance: Mapping[str, Any]) -> str:
    error = "" if distance["error"] is None else f" ± {distance['error']:.2f}"
    return f"{distance['mean']:+.2f}{error} %"
