"""Short trainings in memory that differ only in the recipe: the common part of the studies of parts and of jumps.

All trainings of a seed share one small model, one text, and one order of rows. The steps are the product's
(`train.setup`, `train.optimizer`), without checkpoints, so that a study may raise the rate of one step, exchange a
batch, and look at the model in between.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt

from benchmarks.studies.corpus import corpus
from fp8serve.bench.options import Checked, Shape
from fp8serve.fp8.recipe import as_delayed
from fp8serve.options import About
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Cursor, iterate_steps
from fp8serve.train.events import Event
from fp8serve.train.forward import Forward, PackedBatch, collate, mean_loss, summed_loss
from fp8serve.train.optimizer import learning_rate
from fp8serve.train.run import evaluate
from fp8serve.train.scratch import write_random_model, write_texts
from fp8serve.train.setup import prepare


@dataclass(frozen=True)
class ArmsPlan(Checked):
    """Short trainings of a small model that differ only in the recipe."""

    steps: Annotated[int, Ge(1), About("Optimizer steps of each run.")] = 600
    batch_size: Annotated[int, Ge(1), About("Rows in a step.")] = 2
    seq_len: Annotated[int, Ge(2), About("Longest row, in tokens.")] = 128
    lr: Annotated[float, Gt(0), About("Peak learning rate.")] = 3e-4
    seeds: Annotated[int, Ge(1), About("Number of repetitions, with other weights and in another order.")] = 3
    shape: Shape = field(default_factory=lambda: Shape.of(192, 4))


FINAL_ROWS = 256  # of the training data, on which final weights are compared


@dataclass(frozen=True)
class Arm:
    """One way to train: a recipe by name, its options, and a factor of the learning rate."""

    recipe: str = "bf16"
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 1.0


def write_model(folder: Path, plan: ArmsPlan, seed: int) -> Path:
    """Writes a random model and the text to train it on into `folder`; returns `folder`."""
    texts, _ = corpus(docstrings_too=False)
    write_texts(folder / "train.jsonl", texts)
    sizes = vars(plan.shape)
    write_random_model(folder / "model", texts, context=max(256, plan.seq_len), seed=seed, **sizes)
    return folder


class Training:
    """One running arm, on the model in `folder`."""

    def __init__(self, folder: Path, plan: ArmsPlan, arm: Arm, seed: int) -> None:
        self.config = _config(folder, plan, arm, seed)
        self.setup = prepare(self.config, folder / "model", _ignore)
        if as_delayed(self.config.fp8_recipe):
            first = next(self.batches())
            self.setup.forward.observe(mean_loss(first))

    def batches(self) -> Iterator[PackedBatch]:
        """The input of each step, the same for every arm."""
        for step, _ in iterate_steps(
            [item.tokens for item in self.setup.items], self.config, Cursor(), self.setup.total_steps
        ):
            yield collate([self.setup.items[i] for i in step[0]], self.config.device)

    def rate(self, step: int) -> float:
        """Returns the learning rate of step `step`, from 0."""
        return learning_rate(self.config, step, self.setup.total_steps)

    def take(self, batch: PackedBatch, rate: float) -> float:
        """One step; returns its loss, in nats per token."""
        loss, _ = summed_loss(self.setup.forward.logits(batch), batch.targets)
        (loss / len(batch.targets)).backward()  # type: ignore[no-untyped-call]
        self.setup.optimizer.step(rate)
        return float(loss.detach()) / len(batch.targets)

    def loss(self, in_bf16: bool = False) -> float:
        """Returns the loss of the current weights on FINAL_ROWS rows, under the arm's recipe or in BF16."""
        items = self.setup.items[:: max(1, len(self.setup.items) // FINAL_ROWS)][:FINAL_ROWS]
        forward = Forward(self.setup.decoder, None) if in_bf16 else self.setup.forward
        return evaluate(self.setup.method, forward, items, self.config.batch_size)["valid_loss"]


def _config(folder: Path, plan: ArmsPlan, arm: Arm, seed: int) -> TrainConfig:
    return TrainConfig(
        model=str(folder / "model"),
        data=(str(folder / "train.jsonl"),),
        out=str(folder),
        recipe=arm.recipe,
        recipe_options=arm.options,
        max_steps=plan.steps,
        batch_size=plan.batch_size,
        seq_len=plan.seq_len,
        packing="tokens",
        lr=plan.lr * arm.rate,
        min_lr_ratio=0.1,
        weight_decay=0.1,
        seed=seed,
    )


def _ignore(event: Event) -> None:
    """Ignores events."""
