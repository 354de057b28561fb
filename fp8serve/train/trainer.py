"""The training loop: rows in, checkpoints and one servable model out.

A run is a pure function of its configuration, its data and the machine's arithmetic. Everything it carries from one
step to the next is in a checkpoint (`train.checkpoint`), and data order is a function of (seed, epoch), so that a run
killed at any instant and started again ends with the same bytes. That holds for the same torch build, thread count and
kernels; a resume on a different machine works and says that the bits may differ.

    out/checkpoints/step-N/   each one resumable, loadable as a model, and convertible by `train.export`
    out/model/                the result: FP8, servable, its scales those that training kept; or an adapter
    out/run.lock              held while a run lives: two cannot share a directory

Several processes may take the steps of a run together (`Ranks`). All hold the whole model; they divide the microbatches
of a step (`train.train_step`), held-out rows and references. Only rank 0 writes files, reports events, and sends the
others what it reads from the disk. The bytes do not depend on the number of processes, so a run may continue with
another number.

The method defines what is minimised (`methods.interface`). The parts of a run share a `Course` (`train.run`): a step
(`train.train_step`), `train.validation`, checkpoints (`train.checkpointing`), and `train.recovery` of a run that has
diverged, with on_divergence="return". A run that ends worse than it began fails. Other trouble is only reported
(`train.health`).

With delayed scaling, a base model that brings no histories is first observed for one microbatch in high precision. A
gradient quantized at scale 1 is mostly below E5M2's smallest number, and zero gradients teach the layers before them no
scale either: without this, scales would become right one layer a step.

A finished run continues if it is started again with more steps. From there on its learning rate follows the longer
schedule, so the result differs from that of a run which had this length from the start; an event says so. The model of
the earlier end is kept as `model-step-N`.
"""

import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fp8serve.errors import JobError
from fp8serve.model.readers import reader_notes
from fp8serve.model.storage.files import check_writable, read_json, take_lock
from fp8serve.model.stored import open_checkpoint
from fp8serve.ranks import ALONE, Ranks
from fp8serve.train import checkpoint, events, recovery, state
from fp8serve.train.checkpointing import Saving, dated, identity_of, restore, resume
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import walk
from fp8serve.train.events import OnEvent
from fp8serve.train.export import export
from fp8serve.train.health import Health
from fp8serve.train.methods.interface import Scene
from fp8serve.train.recovery import go_back, go_back_if_diverged
from fp8serve.train.reporting import check_installed, check_states, reported
from fp8serve.train.run import Course, Progress
from fp8serve.train.setup import check_format, prepare
from fp8serve.train.train_step import take_step
from fp8serve.train.validation import DivergenceError, Outcome, first_loss, outcome, validate_run


def begin(course: Course) -> None:
    """Raises JobError where the model has no finite loss."""
    warm_scales(course)
    _begin_method(course)
    loss = _finite_first_loss(course)
    course.progress.first_loss = loss if course.setup.method.is_supervised else None
    _validate_first(course)


def warm_scales(course: Course) -> None:
    """Fills the histories that the base model does not bring with one observed microbatch."""
    if not any(entry.amax_history.count_nonzero() == 0 for _, entry in state.states(course.setup.forward)):
        return
    step, _ = next(walk(course.lengths, course.config, course.progress.cursor, 1))
    method, microbatches = course.setup.method, course.items(step)
    weight = method.weight([item for items in microbatches for item in items])
    course.setup.observe(lambda logits: method.sums(logits, microbatches[0])[0] / weight)
    text = "Scales start from the amaxes of one pass in high precision"
    course.on_event(events.message("scales_observed", text))


def _begin_method(course: Course) -> None:
    """Computes what the method needs to know about the model before its first step."""
    course.setup = course.setup.begun(course.ranks)
    if course.setup.tensors_of_items():
        text = f"The reference: what the model computes for {len(course.setup.items)} items before its first step"
        course.on_event(events.message("reference", text))


def _finite_first_loss(course: Course) -> float:
    loss = first_loss(course)
    if not math.isfinite(loss):
        raise JobError(f"The loss of the first rows is {loss} before any step; check the model's weights and scales.")
    return loss


def _validate_first(course: Course) -> None:
    """At its end the run is judged by this loss."""
    if course.setup.eval_items:
        loss = course.progress.held_out.first = validate_run(course)["valid_loss"]
        course.on_event(events.message("validated", f"Validation loss before the first step: {loss:.4f}", loss=loss))


def chosen_of(config: TrainConfig, latest: Path, best_step: int | None, on_event: OnEvent) -> Path:
    """The checkpoint that the result is made of: the last one, where that was asked for or the best one is damaged."""
    best = latest.with_name(f"step-{best_step}")
    if config.result == "last" or best == latest:
        return latest
    if (why := checkpoint.verify(best)) is not None:
        text = f"The best checkpoint, {best.name}, cannot be used ({why}): the result is made of the last one"
        on_event(events.message("best_lost", text, level="warn"))
        return latest
    return best


def judge(config: TrainConfig, chosen: Path, outcome: Outcome, on_event: OnEvent) -> None:
    """When the run made the model worse: JobError, or a warning if the job keeps the model all the same."""
    if outcome.problem is None:
        return
    if config.on_divergence != "keep":
        raise JobError(
            f"{outcome.problem}; lower lr ({config.lr}), or make a model of {chosen} by starting again with "
            'on_divergence="keep" (--on-divergence keep).'
        )
    on_event(events.message("diverged", outcome.problem, level="warn"))


def published(config: TrainConfig, chosen: Path, on_event: OnEvent) -> Path:
    """The model of a checkpoint, in `out/model/`."""
    model = Path(config.out) / "model"
    _set_aside(model, chosen)
    if not model.exists():
        export(chosen, model)
        on_event(events.message("exported", f"The trained model is in {model}", path=str(model)))
        for note in () if config.lora_rank else reader_notes(open_checkpoint(model)):
            on_event(events.message("readers", note, level="warn"))
    return model


def _set_aside(model: Path, chosen: Path) -> None:
    """A model of another step of this run keeps its files under another name, because a server may be using them."""
    if model.exists() and f"step-{(step := read_json(model / 'training.json', JobError)['step'])}" != chosen.name:
        model.rename(model.with_name(f"model-step-{step}"))


@dataclass(frozen=True)
class TrainResult:
    """status "succeeded" (then `model` is the servable directory) or "stopped" (then another start continues)."""

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


def _ignore(event: events.Event) -> None:
    """For callers who want only the result."""


def _never() -> bool:
    return False


class Trainer:
    """`Trainer(config).run()`; started again with the same configuration it resumes by itself.

    ranks: the processes that take_step the steps together; each makes a trainer of the same configuration and runs it.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.ranks = replace(ranks, in_step=config.fsdp and ranks.size > 1)

    def run(self, on_event: OnEvent = _ignore, stop: Callable[[], bool] = _never) -> TrainResult:
        """Train to the end, or until `stop()` is true between two steps, on any rank. Events are rank 0's.

        Raises DataError, ModelError, ScalesError, RecipeError for bad input and JobError for a run that cannot go on.
        """
        check_processes(self.config, self.ranks.size)
        check_installed(self.config.report_to)
        check_states(self.config)
        with self.ranks.together():
            lock = self._take_lock() if self.ranks.first else nullcontext()
        reporting = reported(self.config, on_event) if self.ranks.first else nullcontext(_ignore)
        returns = None
        with lock, reporting as report, torch.random.fork_rng(devices=[]):
            while True:
                torch.manual_seed(self.config.seed)
                run = _Run(self.config, report, self.ranks, returns)
                try:
                    return run.to_end(stop)
                except DivergenceError as divergence:
                    why = str(divergence)
                finally:
                    run.close()
                returns = run.go_back(why)
                del run  # two do not fit into memory
                gc.collect()

    def _take_lock(self) -> AbstractContextManager[Any]:
        """The lock of the directory, which rank 0 holds for all."""
        out = Path(self.config.out)
        if out.exists() and not out.is_dir():
            raise JobError(f"{out} exists and is not a directory; choose another output directory.")
        check_writable(out)
        out.mkdir(parents=True, exist_ok=True)
        refusal = f"Another run is at work in {out}; wait for it, or use another output directory."
        return take_lock(out / "run.lock", refusal)


def check_processes(config: TrainConfig, count: int) -> None:
    """JobError for more processes than a step has work for."""
    if count > 1 and not config.divides:
        raise JobError(f"The method {config.method} draws its answers in one process; ask for one, and not {count}.")
    if count > config.accumulate:
        raise JobError(
            f"{count} processes divide the microbatches of a step, and it has {config.accumulate} (accumulate); use at "
            f"most that many processes, or --accumulate {count} or more, with a smaller --batch-size for an equal step."
        )


class _Run:
    """One run from wherever it stands to its end, or until it goes back.

    returns: how often it has gone back, if its checkpoint does not say so yet.
    """

    def __init__(self, config: TrainConfig, on_event: OnEvent, ranks: Ranks, returns: int | None = None) -> None:
        self.started = time.monotonic()
        self.came_back = returns is not None
        self.saving = Saving(Path(config.out), ranks, on_event)
        settings = ranks.by_first(lambda: dated(config, self.saving.latest))
        saved = ranks.by_first(self.saving.returns)
        with ranks.together():
            self.course = self._prepared(settings, on_event, ranks, saved if returns is None else returns)
        if self.saving.latest is None:
            begin(self.course)
        self.began = self.course.progress.step
        first_loss = self.course.progress.first_loss
        self.health = Health(self.course.setup.forward, on_event, first_loss) if ranks.first else None

    def _prepared(self, settings: TrainConfig, on_event: OnEvent, ranks: Ranks, returns: int) -> Course:
        """Reads from the disk what the first step needs."""
        latest, config = self.saving.latest, recovery.attempt(settings, returns)
        for tried in recovery.attempts(settings) if settings.on_divergence == "return" else ():
            check_format(tried)
        if latest is None and not config.lora_rank:  # a checkpoint has all weights in FP32, and the result in FP8
            check_writable(Path(config.out), 5 * open_checkpoint(config.model).num_weights)
        setup = prepare(config, latest or Path(config.model), on_event, ranks)
        identity = identity_of(settings, setup.data_fingerprint, latest)
        course = Course(settings, config, ranks, on_event, setup, identity, Progress(returns=returns))
        if latest is not None:
            resume(course, latest)
        return course

    def close(self) -> None:
        """Ends what the run has opened."""
        self.course.setup.method.close()
        if self.health is not None:
            self.health.close()

    def to_end(self, stop: Callable[[], bool]) -> TrainResult:
        course, ranks = self.course, self.course.ranks
        if self.came_back:
            go_back_if_diverged(course)  # its checkpoint may be older than on_divergence="return"
        left = course.setup.total_steps - course.progress.step
        if left:
            source = self.saving.latest or Path(course.config.model)
            course.setup.method.start(Scene(course.setup.forward, source, course.out, self.saving.latest is None))
        for step, cursor in walk(course.lengths, course.config, course.progress.cursor, left):
            if ranks.any(stop()):
                return self._stopped()
            if self._is_early_end():
                break
            loss = take_step(course, step)
            if self.health is not None:
                self.health.step(course.progress.step, loss)
            course.progress.cursor = cursor
            if ranks.any(self.saving.is_due(course)):
                go_back_if_diverged(course)
                self.saving.save(course)
        go_back_if_diverged(course)
        latest, held_out = self.saving.save(course), course.progress.held_out
        chosen = self._chosen(latest)
        result = outcome(course, held_out.last if chosen == latest else held_out.best)
        return ranks.by_first(lambda: self._finished(chosen, result))

    def go_back(self, why: str) -> int:
        """See `recovery.go_back`."""
        again = self.came_back and self.course.progress.step <= self.began
        return go_back(self.course, self.saving, why, again=again)

    def _is_early_end(self) -> bool:
        course = self.course
        held_out, patience = course.progress.held_out, course.config.patience
        if patience is None or held_out.since_best < patience:
            return False
        text = (
            f"Ended early: {held_out.since_best} validations in a row had no lower loss than the {held_out.best:.4f} "
            f"of step {held_out.best_step}"
        )
        step = course.progress.step
        course.on_event(events.message("early_end", text, step=step, best_step=held_out.best_step))
        return True

    def _stopped(self) -> TrainResult:
        if step := self.course.progress.step:
            self.saving.save(self.course)
        self.course.on_event(events.message("stopped", f"Stopped at step {step}", step=step))
        return self._result("stopped", None)

    def _chosen(self, latest: Path) -> Path:
        """The checkpoint that the result is made of. From here on the model computes with its weights."""
        course, best = self.course, self.course.progress.held_out.best_step
        chosen = course.ranks.by_first(lambda: chosen_of(course.config, latest, best, course.on_event))
        if chosen != latest:
            with course.ranks.together():
                restore(course, checkpoint.read_checkpoint(chosen))
        return chosen

    def _finished(self, chosen: Path, final: Outcome) -> TrainResult:
        course = self.course
        judge(course.job, chosen, final, course.on_event)
        return self._result("succeeded", str(published(course.config, chosen, course.on_event)))

    def _result(self, status: Literal["succeeded", "stopped"], model: str | None) -> TrainResult:
        progress, latest = self.course.progress, self.saving.latest
        return TrainResult(
            status=status,
            step=progress.step,
            total_steps=self.course.setup.total_steps,
            trained_tokens=progress.trained_tokens,
            skipped_steps=progress.skipped,
            metrics=progress.metrics,
            checkpoint=str(latest) if latest else None,
            model=model,
            seconds=time.monotonic() - self.started,
        )
