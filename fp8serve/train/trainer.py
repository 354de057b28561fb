"""The training loop: rows in, checkpoints and one servable model out.

A run is a pure function of its configuration, its data and the machine's arithmetic. Everything it carries from one
step to the next is in a checkpoint (`train.checkpoint`), and data order is a function of (seed, epoch), so that a run
killed at any instant and started again ends with the same bytes. That holds for the same torch build, thread count and
kernels; a resume on a different machine works and says that the bits may differ.

    out/checkpoints/step-N/   each one resumable, loadable as a model, and convertible by `train.export`
    out/model/                the result: FP8, servable, its scales those that training kept; or an adapter
    out/run.lock              held while a run lives: two cannot share a directory

The loss of a step is the mean over all targets of all its microbatches, so neither packing nor accumulation changes
what is minimised. With delayed scaling, a base model that brings no histories is first observed for one microbatch in
high precision: no step is taken at scale 1. A gradient that is not finite is never applied: the step is skipped with an
event, the moments stay, and ten in a row end the job. A run that ends worse than it began fails (`train.divergence`).

A run may be taken further by starting it again with more steps. Its learning rate then follows the longer schedule from
there on, so it is not the run that had been told so from the start, and says so; the model of the earlier end is kept
as `model-step-N`.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from fp8serve.errors import JobError
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.readers import reader_notes
from fp8serve.model.storage.files import read_json
from fp8serve.model.storage.lock import take_lock
from fp8serve.model.stored import open_checkpoint
from fp8serve.train import checkpoint, events, state
from fp8serve.train.batch import collate
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Row
from fp8serve.train.divergence import Outcome
from fp8serve.train.events import OnEvent
from fp8serve.train.export import export
from fp8serve.train.forward import summed_loss
from fp8serve.train.held_out import HeldOut, held_out_metrics
from fp8serve.train.identity import check_same_job, dated, identity_of
from fp8serve.train.optimizer import learning_rate
from fp8serve.train.order import Cursor, Step, walk
from fp8serve.train.setup import Setup, environment, prepare

MAX_SKIPPED_IN_A_ROW = 10


@dataclass(frozen=True)
class TrainResult:
    """status "succeeded" (then `model` is the servable directory) or "stopped" (then starting again goes on)."""

    status: Literal["succeeded", "stopped"]
    step: int
    total_steps: int
    trained_tokens: int
    skipped_steps: int
    metrics: dict[str, Any]
    checkpoint: str | None
    model: str | None
    seconds: float

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)


@dataclass
class Progress:
    """Where a run stands between two steps; all of it is in the checkpoint."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    trained_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    total_steps: int | None = None
    first_loss: float | None = None
    held_out: HeldOut = field(default_factory=HeldOut)
    metrics: dict[str, Any] = field(default_factory=dict)


def _ignore(event: events.Event) -> None:
    """For callers who want only the result."""


def _never() -> bool:
    return False


class Trainer:
    """`Trainer(config).run()`; started again with the same configuration it resumes by itself."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def run(self, on_event: OnEvent = _ignore, stop: Callable[[], bool] = _never) -> TrainResult:
        """Train to the end, or until `stop()` is true between two steps.

        Raises DataError, ModelError, ScalesError, RecipeError for bad input and JobError for a run that cannot go on.
        """
        out = Path(self.config.out)
        out.mkdir(parents=True, exist_ok=True)
        refusal = f"Another run is at work in {out}; wait for it, or use another output directory."
        with take_lock(out / "run.lock", refusal), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return _Run(self.config, on_event).to_end(stop)


class _Run:
    """One run from wherever it stands to its end."""

    def __init__(self, config: TrainConfig, on_event: OnEvent) -> None:
        self.on_event = on_event
        self.out = Path(config.out)
        self.root = self.out / "checkpoints"
        self.root.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.saved_at = self.started
        self.latest = self._sweep()
        self.config = dated(config, self.latest)
        self.progress = Progress()
        self.setup: Setup = prepare(self.config, self.latest or Path(config.model), on_event)
        self.identity = identity_of(self.config, self.setup.data_fingerprint, self.latest)
        self.lengths = [row.tokens for row in self.setup.rows]
        if self.latest is not None:
            self._resume(self.latest)
        else:
            self._warm_scales()
            self.progress.first_loss = self._finite_first_loss()
            self._validate_first()

    def _sweep(self) -> Path | None:
        for root in (self.root, self.out):
            if removed := checkpoint.sweep(root):
                self.on_event(events.message("sweep", f"Removed {len(removed)} unfinished directories", names=removed))
        return checkpoint.newest_whole(self.root, self._broken)

    def _broken(self, path: Path, why: str) -> None:
        text = f"{path.name} is damaged ({why}) and was set aside; going on from the one before it"
        self.on_event(events.message("checkpoint_broken", text, level="warn"))

    def _resume(self, path: Path) -> None:
        saved = checkpoint.read_checkpoint(path)
        check_same_job(self.identity, saved.meta["identity"], path)
        self._tell_changes(saved.meta)
        state.restore(self.setup.forward, self.setup.optimizer, saved)
        values = dict(saved.meta["progress"])
        held_out = HeldOut(**values.pop("held_out", {}))  # a checkpoint of an older version has none
        self.progress = Progress(**{**values, "cursor": Cursor(**values["cursor"]), "held_out": held_out})
        self.on_event(events.message("resumed", f"Resumed from step {self.progress.step}", step=self.progress.step))

    def _warm_scales(self) -> None:
        """Before the first step, fill the histories that the base model does not bring with one observed microbatch.

        A gradient quantized at scale 1 is mostly below E5M2's smallest number, and zero gradients teach the layers
        before them no scale either: without this, scales would become right one layer a step.
        """
        if not any(entry.amax_history.count_nonzero() == 0 for _, entry in self._states()):
            return
        step, _ = next(walk(self.lengths, self.config, self.progress.cursor, 1))
        targets = sum(self.setup.rows[i].trainable for rows in step for i in rows)
        self.setup.forward.observe(collate([self.setup.rows[i] for i in step[0]], self.config.device), targets)
        text = "Scales start from the amaxes of one pass in high precision"
        self.on_event(events.message("scales_observed", text))

    def _states(self) -> Iterator[tuple[str, ScalingState]]:
        return state.states(self.setup.forward)

    def _tell_changes(self, meta: dict[str, Any]) -> None:
        then, total = meta["progress"].get("total_steps"), self.setup.total_steps
        if total < meta["step"]:
            raise JobError(
                f"The run in {self.out} is at step {meta['step']} already, this job says {total}; ask for more."
            )
        if then is not None and total != then:
            text = f"The run was to end at step {then}, now at {total}: its learning rate follows that from here on"
            self.on_event(events.message("length_changed", text, level="warn", total_steps=total))
        if (here := environment(self.config)) != meta["environment"]:
            changed = [k for k in here if here[k] != meta["environment"].get(k)]
            text = (
                f"{', '.join(changed)} changed since the checkpoint was written: the result may differ in its last bits"
            )
            self.on_event(events.message("machine_changed", text, level="warn"))

    def to_end(self, stop: Callable[[], bool]) -> TrainResult:
        left = self.setup.total_steps - self.progress.step
        for step, cursor in walk(self.lengths, self.config, self.progress.cursor, left):
            if stop():
                return self._stopped()
            if self._is_early_end():
                break
            self._take(step)
            self.progress.cursor = cursor
            if self._time_to_save():
                self._save()
        self._save()
        return self._finished()

    def _is_early_end(self) -> bool:
        held_out, patience = self.progress.held_out, self.config.patience
        if patience is None or held_out.since_best < patience:
            return False
        text = (
            f"Ended early: {held_out.since_best} validations in a row had no lower loss than the {held_out.best:.4f} "
            f"of step {held_out.best_step}"
        )
        self.on_event(events.message("early_end", text, step=self.progress.step, best_step=held_out.best_step))
        return True

    def _time_to_save(self) -> bool:
        if self.config.result == "best" and self.progress.held_out.best_step == self.progress.step:
            return True
        if self.config.save_every is not None:
            return self._due(self.config.save_every)
        return time.monotonic() - self.saved_at >= 60 * self.config.save_minutes

    def _due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _take(self, step: Step) -> None:
        began = time.monotonic()
        rate = learning_rate(self.config, self.progress.step, self.setup.total_steps)
        loss, accuracy, tokens = self._gradients(step)
        norm = self.setup.optimizer.step(rate)
        self.progress.step += 1
        self.progress.trained_tokens += tokens
        if not math.isfinite(norm):
            self._skipped(norm)
            return
        self.progress.skipped_in_a_row = 0
        seconds = time.monotonic() - began
        self._measured(loss, accuracy, rate, norm, tokens / seconds)

    def _gradients(self, step: Step) -> tuple[float, float, int]:
        """Accumulate the gradients of all microbatches; returns (mean loss, token accuracy, input tokens)."""
        microbatches = [[self.setup.rows[i] for i in rows] for rows in step]
        targets = sum(row.trainable for rows in microbatches for row in rows)
        # FP64 where the model is: reading each microbatch would wait for a GPU, once for all is soon enough
        sums = torch.zeros(2, dtype=torch.float64, device=self.config.device)
        for i, rows in enumerate(microbatches):
            first = i == 0 if len(microbatches) > 1 else None  # nothing is kept where nothing follows
            sums += torch.stack(self._microbatch(rows, targets, first))
        loss, hits = sums.tolist()
        return loss / targets, hits / targets, sum(row.tokens for rows in microbatches for row in rows)

    def _microbatch(self, rows: list[Row], targets: int, first: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        batch = collate(rows, self.config.device)
        loss, hits = summed_loss(self.setup.forward.logits(batch, first), batch.targets)
        (loss / targets).backward()  # type: ignore[no-untyped-call]
        self.setup.optimizer.collect()
        return loss.detach().double(), hits.double()

    def _skipped(self, norm: float) -> None:
        self.progress.skipped += 1
        self.progress.skipped_in_a_row += 1
        text = f"Step {self.progress.step} was skipped: its gradient norm is {norm}"
        self.on_event(events.message("step_skipped", text, level="warn", step=self.progress.step))
        if self.progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise JobError(
                f"Training diverged: the gradients of {MAX_SKIPPED_IN_A_ROW} steps in a row up to step "
                f"{self.progress.step} were not finite; lower lr ({self.config.lr}) or clip ({self.config.clip})."
            )

    def _measured(self, loss: float, accuracy: float, rate: float, norm: float, speed: float) -> None:
        values = {
            "step": self.progress.step,
            "total_steps": self.setup.total_steps,
            "epoch": self.progress.cursor.epoch,
            "train_loss": loss,
            "train_mean_token_accuracy": accuracy,
            "learning_rate": rate,
            "grad_norm": norm,
            "trained_tokens": self.progress.trained_tokens,
        }
        if self.setup.eval_rows and (self._due(self.config.eval_every) or self.progress.step == self.setup.total_steps):
            values |= self._validated()
            self.progress.held_out.note(values["valid_loss"], self.progress.step)
        self.progress.metrics = {k: v if math.isfinite(v) else None for k, v in values.items()}
        if self._due(self.config.log_every) or "valid_loss" in values or self.progress.step == self.setup.total_steps:
            self.on_event(events.metrics({**self.progress.metrics, "tokens_per_second": speed}))

    def _validated(self) -> dict[str, float]:
        return held_out_metrics(self.setup.forward, self.setup.eval_rows, self.config.batch_size, self.config.device)

    def _validate_first(self) -> None:
        """What the model says of the held-out rows before any step: the run is judged by it at its end."""
        if self.setup.eval_rows:
            loss = self.progress.held_out.first = self._validated()["valid_loss"]
            self.on_event(events.message("validated", f"Validation loss before the first step: {loss:.4f}", loss=loss))

    def _save(self) -> None:
        if self.latest is not None and self.latest.name == f"step-{self.progress.step}":
            return
        meta = {
            "step": self.progress.step,
            "config": json.loads(self.config.to_json()),
            "progress": {**dataclasses.asdict(self.progress), "total_steps": self.setup.total_steps},
            "identity": self.identity,
            "environment": environment(self.config),
            "kept": self.setup.kept,
        }
        saved = state.capture(self.setup.forward, self.setup.optimizer, meta)
        self.latest = checkpoint.write_checkpoint(self.root, saved, self.setup.carry)
        self.on_event(events.checkpoint(str(self.latest), {**self.progress.metrics, "step": self.progress.step}))
        best = self.progress.held_out.best_step if self.config.result == "best" else None
        checkpoint.keep_last(self.root, self.config.keep_last, best)
        self.saved_at = time.monotonic()

    def _stopped(self) -> TrainResult:
        if self.progress.step:
            self._save()
        self.on_event(events.message("stopped", f"Stopped at step {self.progress.step}", step=self.progress.step))
        return self._result("stopped", None)

    def _finished(self) -> TrainResult:
        chosen = self._chosen()
        self._judge(chosen)
        model = self.out / "model"
        self._set_aside(model, chosen)
        if not model.exists():
            export(chosen, model)
            self.on_event(events.message("exported", f"The trained model is in {model}", path=str(model)))
            for note in () if self.config.lora_rank else reader_notes(open_checkpoint(model)):
                self.on_event(events.message("readers", note, level="warn"))
        return self._result("succeeded", str(model))

    def _chosen(self) -> Path:
        """The checkpoint that the result is made of; it is what the model computes with from here on."""
        best = self.root / f"step-{self.progress.held_out.best_step}"
        if self.config.result == "last" or self.latest is None or best == self.latest:
            return self._newest()
        if (why := checkpoint.verify(best)) is not None:
            text = f"The best checkpoint, {best.name}, cannot be used ({why}): the result is made of the last one"
            self.on_event(events.message("best_lost", text, level="warn"))
            return self.latest
        state.restore(self.setup.forward, self.setup.optimizer, checkpoint.read_checkpoint(best))
        return best

    def _judge(self, chosen: Path) -> None:
        """JobError, or a warning where the owner asked for the model all the same, when the run made it worse."""
        held_out = self.progress.held_out
        outcome = Outcome(
            self.progress.first_loss, self._first_loss(), self.progress.step, self.progress.skipped, held_out.first,
            held_out.best if chosen != self.latest else held_out.last,
        )  # fmt: skip
        if outcome.problem is None:
            return
        if self.config.on_divergence == "fail":
            raise JobError(
                f"{outcome.problem}; lower lr ({self.config.lr}), or make a model of {chosen} by starting again with "
                'on_divergence="keep" (--on-divergence keep).'
            )
        self.on_event(events.message("diverged", outcome.problem, level="warn"))

    def _first_loss(self) -> float:
        """Nats per target of the first microbatch, with the weights as they are; changes nothing."""
        step, _ = next(walk(self.lengths, self.config, Cursor(), 1))
        rows = [self.setup.rows[i] for i in step[0]]
        return held_out_metrics(self.setup.forward, rows, len(rows), self.config.device)["valid_loss"]

    def _finite_first_loss(self) -> float:
        loss = self._first_loss()
        if not math.isfinite(loss):
            raise JobError(
                f"The loss of the first rows is {loss} before any step; check the model's weights and scales."
            )
        return loss

    def _set_aside(self, model: Path, chosen: Path) -> None:
        """A model of another step of this run keeps its files under another name: somebody may be serving them."""
        if model.exists() and f"step-{(step := read_json(model / 'training.json', JobError)['step'])}" != chosen.name:
            model.rename(model.with_name(f"model-step-{step}"))

    def _newest(self) -> Path:
        if self.latest is None:
            raise JobError(f"{self.root} holds no checkpoint to make a model from.")
        return self.latest

    def _result(self, status: Literal["succeeded", "stopped"], model: str | None) -> TrainResult:
        return TrainResult(
            status=status,
            step=self.progress.step,
            total_steps=self.setup.total_steps,
            trained_tokens=self.progress.trained_tokens,
            skipped_steps=self.progress.skipped,
            metrics=self.progress.metrics,
            checkpoint=str(self.latest) if self.latest else None,
            model=model,
            seconds=time.monotonic() - self.started,
        )
