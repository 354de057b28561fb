"""The training loop: rows in, checkpoints and one servable model out.

A run is a pure function of its configuration, its data and the machine's arithmetic. Everything it carries from one
step to the next is in a checkpoint (`train.checkpoint`), and data order is a function of (seed, epoch), so that a run
killed at any instant and started again ends with the same bytes. That holds for the same torch build, thread count and
kernels; a resume on a different machine works and says that the bits may differ.

    out/checkpoints/step-N/   each one resumable, loadable as a model, and convertible by `train.export`
    out/model/                the result: FP8, servable, its scales those that training kept; or an adapter
    out/run.lock              held while a run lives: two cannot share a directory

Several processes may take the steps of a run together (`Ranks`). All hold the whole model; they divide the microbatches
of a step (`train.gradients`), held-out rows and references. Only rank 0 writes files, reports events, and tells the
others what it finds on the disk. The bytes do not depend on the number of processes, so a run may continue with another
number.

The method defines what is minimised (`methods.interface`). With delayed scaling, a base model that brings no histories
is first observed for one microbatch in high precision: no step is taken at scale 1. A gradient that is not finite is
never applied: the step is skipped with an event, the moments stay, and ten in a row end the job. A run that ends worse
than it began fails (`train.divergence`). With on_divergence="return" one that diverges goes back to its last good
checkpoint and on with other scales (`train.fallback`): then every checkpoint is judged before it is written, and the
run may go back to those of the multiples of `save_every`. Other trouble is only reported (`train.health`).

A finished run continues if it is started again with more steps. From there on its learning rate follows the longer
schedule, so the result differs from that of a run which had this length from the start; an event says so. The model of
the earlier end is kept as `model-step-N`.
"""

import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fp8serve.errors import JobError
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.storage.files import read_json
from fp8serve.model.storage.lock import take_lock
from fp8serve.ranks import ALONE, Ranks
from fp8serve.train import checkpoint, events, fallback, state
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Item
from fp8serve.train.divergence import DivergenceError, Outcome
from fp8serve.train.events import OnEvent
from fp8serve.train.finishing import chosen_of, judge, published
from fp8serve.train.gradients import accumulate
from fp8serve.train.health import Health
from fp8serve.train.held_out import HeldOut, held_out_metrics
from fp8serve.train.identity import check_same_job, dated, identity_of
from fp8serve.train.methods.interface import Scene
from fp8serve.train.optimizer import learning_rate
from fp8serve.train.order import Cursor, Step, walk
from fp8serve.train.packages import check_states
from fp8serve.train.reporting import check_installed, reported
from fp8serve.train.setup import Setup, check_format, environment, prepare

if TYPE_CHECKING:  # importing FSDP2 takes 0.4 s
    from fp8serve.train.sharded.asking import Asking

MAX_SKIPPED_IN_A_ROW = 10


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


@dataclass
class Progress:
    """Where a run stands between two steps; all of it is in the checkpoint. returns: how often it went back."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    trained_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    total_steps: int | None = None
    first_loss: float | None = None
    held_out: HeldOut = field(default_factory=HeldOut)
    metrics: dict[str, Any] = field(default_factory=dict)
    returns: int = 0


def _ignore(event: events.Event) -> None:
    """For callers who want only the result."""


def _never() -> bool:
    return False


class Trainer:
    """`Trainer(config).run()`; started again with the same configuration it resumes by itself.

    ranks: the processes that take the steps together; each makes a trainer of the same configuration and runs it.
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
            lock = self._taken() if self.ranks.first else nullcontext()
        telling = reported(self.config, on_event) if self.ranks.first else nullcontext(_ignore)
        returns = None
        with lock, telling as tell, torch.random.fork_rng(devices=[]):
            while True:
                torch.manual_seed(self.config.seed)
                run = _Run(self.config, tell, self.ranks, returns)
                try:
                    return run.to_end(stop)
                except DivergenceError as found:
                    why = str(found)
                finally:
                    run.close()
                returns = run.go_back(why)
                del run  # two do not fit into memory
                gc.collect()

    def _taken(self) -> AbstractContextManager[Any]:
        """The lock of the directory, which rank 0 holds for all."""
        out = Path(self.config.out)
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

    returns: how often it has gone back, if its checkpoint does not say so yet. `asked` is the job's own configuration,
    `config` the one that is in effect.
    """

    def __init__(self, config: TrainConfig, on_event: OnEvent, ranks: Ranks, returns: int | None = None) -> None:
        self.on_event = on_event
        self.ranks = ranks
        self.out = Path(config.out)
        self.root = self.out / "checkpoints"
        self.started = time.monotonic()
        self.saved_at = self.started
        self.latest = ranks.by_first(self._sweep)
        self.asked = ranks.by_first(lambda: dated(config, self.latest))
        saved = ranks.by_first(self._saved_returns)
        self.progress = Progress(returns=saved if returns is None else returns)
        self.config = fallback.attempt(self.asked, self.progress.returns)
        with ranks.together():
            self._prepare()
        if self.latest is None:
            self._warm_scales()
            self._begin()
            first_loss = self._finite_first_loss()
            self.progress.first_loss = first_loss if self.setup.method.is_supervised else None
            self._validate_first()
        self.began = self.progress.step
        self.came_back = returns is not None
        self.health = Health(self.setup.forward, self.on_event, self.progress.first_loss) if ranks.first else None

    def close(self) -> None:
        """Ends what the run has opened."""
        self.setup.method.close()
        if self.health is not None:
            self.health.close()

    def _saved_returns(self) -> int:
        """How often the run had gone back when its newest checkpoint was written."""
        if self.latest is None:
            return 0
        return int(read_json(self.latest / "trainer.json", JobError)["progress"].get("returns", 0))

    def _prepare(self) -> None:
        """Reads from the disk what the first step needs."""
        for tried in fallback.attempts(self.asked) if self._may_go_back else ():
            check_format(tried)
        self.setup: Setup = prepare(self.config, self.latest or Path(self.config.model), self.on_event, self.ranks)
        self.identity = identity_of(self.asked, self.setup.data_fingerprint, self.latest)
        self.lengths = [item.tokens for item in self.setup.items]
        if self.latest is not None:
            self._resume(self.latest)

    def _sweep(self) -> Path | None:
        self.root.mkdir(parents=True, exist_ok=True)
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
        values = dict(saved.meta["progress"])
        before = fallback.attempt(self.asked, values.pop("returns", 0))  # an older version has none
        if before != self.config:  # another attempt, which counts its skipped steps from 0
            saved.scaling = fallback.rescaled(saved.scaling, before, self.config)
            values["skipped_in_a_row"] = 0
        self._restore(saved)
        self.setup = self.setup.recalled(saved.method)
        held_out = HeldOut(**values.pop("held_out", {}))  # a checkpoint of an older version has none
        values |= {"cursor": Cursor(**values["cursor"]), "held_out": held_out, "returns": self.progress.returns}
        self.progress = Progress(**values)
        self.on_event(events.message("resumed", f"Resumed from step {self.progress.step}", step=self.progress.step))

    def _restore(self, saved: checkpoint.TrainState) -> None:
        state.restore(self.setup.forward, self.setup.optimizer, saved, self.setup.sharded)

    def _warm_scales(self) -> None:
        """Before the first step, fill the histories that the base model does not bring with one observed microbatch.

        A gradient quantized at scale 1 is mostly below E5M2's smallest number, and zero gradients teach the layers
        before them no scale either: without this, scales would become right one layer a step.
        """
        if not any(entry.amax_history.count_nonzero() == 0 for _, entry in self._states()):
            return
        step, _ = next(walk(self.lengths, self.config, self.progress.cursor, 1))
        method, microbatches = self.setup.method, self._items(step)
        weight = method.weight([item for items in microbatches for item in items])
        self.setup.observe(lambda logits: method.sums(logits, microbatches[0])[0] / weight)
        text = "Scales start from the amaxes of one pass in high precision"
        self.on_event(events.message("scales_observed", text))

    def _begin(self) -> None:
        """Computes what the method needs to know about the model before its first step."""
        self.setup = self.setup.begun(self.ranks)
        if self.setup.kept():
            text = f"The reference: what the model computes for {len(self.setup.items)} items before its first step"
            self.on_event(events.message("reference", text))

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
        if self.came_back:
            self._go_back_if_diverged()  # its checkpoint may be older than on_divergence="return"
        left = self.setup.total_steps - self.progress.step
        if left:
            source = self.latest or Path(self.config.model)
            self.setup.method.start(Scene(self.setup.forward, source, self.out, self.latest is None))
        for step, cursor in walk(self.lengths, self.config, self.progress.cursor, left):
            if self.ranks.any(stop()):
                return self._stopped()
            if self._is_early_end():
                break
            self._take(step)
            self.progress.cursor = cursor
            if self.ranks.any(self._time_to_save()):
                self._go_back_if_diverged()
                self._save()
        self._go_back_if_diverged()
        latest, held_out = self._save(), self.progress.held_out
        chosen = self._chosen(latest)
        outcome = self._outcome(held_out.last if chosen == latest else held_out.best)
        return self.ranks.by_first(lambda: self._finished(chosen, outcome))

    @property
    def _may_go_back(self) -> bool:
        return self.asked.on_divergence == "return"

    def _go_back_if_diverged(self) -> None:
        """Raises DivergenceError, on all ranks."""
        found = self.ranks.gather(self._outcome(None).divergence) if self._may_go_back else []
        if (why := next(filter(None, found), None)) is not None:
            raise DivergenceError(why)

    def go_back(self, why: str) -> int:
        """Removes what was written since the last good checkpoint, where the next run begins. Returns how often the run
        has gone back now. JobError when everything has been tried.

        If the model had already diverged at that checkpoint, the run goes back to the one before it; this counts as the
        same return.
        """
        tried = fallback.attempts(self.asked)
        returns = self.progress.returns + (self.progress.step > self.began or not self.came_back)
        if returns == len(tried):
            names = " nor ".join(fallback.described(config) for config in tried[1:])
            raise JobError(f"{why}, and neither {names} helped; lower lr ({self.config.lr}), or look at the data.")
        to = self.ranks.by_first(self._removed_since_good)
        with_ = fallback.described(tried[returns])
        text = f"{why}. Going back from step {self.progress.step} to step {to}, and on with {with_}"
        details = {"step": to, "from_step": self.progress.step, "returns": returns, "tried": with_}
        self.on_event(events.message("returned", text, level="warn", **details))
        return returns

    def _removed_since_good(self) -> int:
        """The step that the run goes back to; 0: it begins anew."""
        good = checkpoint.last_multiple(self.root, self._save_every, self.progress.step)
        checkpoint.remove_after(self.root, good)
        return good

    @property
    def _save_every(self) -> int:
        return self.asked.save_every or 1

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
        microbatches = self.setup.method.collect(self.progress.step, self._items(step))
        means, norm = self._update(microbatches, rate)
        tokens = sum(item.tokens for items in microbatches for item in items)
        self.progress.step += 1
        self.progress.trained_tokens += tokens
        if math.isfinite(norm):
            self.progress.skipped_in_a_row = 0
            self._measured(means, rate, norm, tokens / (time.monotonic() - began))
        else:
            self._skipped(norm)
        if self.health is not None:
            self.health.step(self.progress.step, means[0])

    def _update(self, microbatches: Sequence[Sequence[Item]], rate: float) -> tuple[list[float], float]:
        """Makes all updates of a step; returns the means that the step reports, and the norm of the last gradient. A
        norm that is not finite ends the updates."""
        method, forward, optimizer = self.setup.method, self.setup.forward, self.setup.optimizer
        seed, found, norm = f"{self.config.seed}:{self.progress.step}", list[list[float]](), 0.0
        while len(found) < method.updates and math.isfinite(norm):
            found.append(
                accumulate(
                    method,
                    forward,
                    optimizer,
                    microbatches,
                    ranks=self.ranks,
                    seed=f"{seed}:{len(found)}",
                    sharded=self.setup.sharded,
                )
            )
            norm = optimizer.step(rate)
        of_first = [False, *(measure.of_first for measure in method.measures)]
        return [a if is_first else b for a, b, is_first in zip(found[0], found[-1], of_first, strict=True)], norm

    def _items(self, step: Step) -> list[list[Item]]:
        """The items of every microbatch of a step."""
        return [[self.setup.items[i] for i in items] for items in step]

    def _skipped(self, norm: float) -> None:
        self.progress.skipped += 1
        self.progress.skipped_in_a_row += 1
        text = f"Step {self.progress.step} was skipped: its gradient norm is {norm}"
        self.on_event(events.message("step_skipped", text, level="warn", step=self.progress.step))
        if self.progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            why = (
                f"Training diverged: the gradients of {MAX_SKIPPED_IN_A_ROW} steps in a row up to step "
                f"{self.progress.step} were not finite"
            )
            if self._may_go_back:
                raise DivergenceError(why)
            raise JobError(f"{why}; lower lr ({self.config.lr}) or clip ({self.config.clip}).")

    def _measured(self, means: Sequence[float], rate: float, norm: float, speed: float) -> None:
        measures = self.setup.method.measures
        values = {
            "step": self.progress.step,
            "total_steps": self.setup.total_steps,
            "epoch": self.progress.cursor.epoch,
            "train_loss": means[0],
            **{measure.name: mean for measure, mean in zip(measures, means[1:], strict=True)},
            "learning_rate": rate,
            "grad_norm": norm,
            "trained_tokens": self.progress.trained_tokens,
            **({"returns": self.progress.returns} if self.progress.returns else {}),
        }
        if self.setup.eval_items and (
            self._due(self.config.eval_every) or self.progress.step == self.setup.total_steps
        ):
            values |= self._validated()
            self.progress.held_out.note(values["valid_loss"], self.progress.step)
        self.progress.metrics = {k: v if math.isfinite(v) else None for k, v in values.items()}
        if self._due(self.config.log_every) or "valid_loss" in values or self.progress.step == self.setup.total_steps:
            words = {measure.name: measure.words for measure in measures if measure.words}
            self.on_event(events.metrics({**self.progress.metrics, "tokens_per_second": speed}, words))

    def _validated(self) -> dict[str, float]:
        setup, size = self.setup, self.config.batch_size
        return held_out_metrics(setup.method, setup.forward, setup.eval_items, size, self.ranks)

    def _validate_first(self) -> None:
        """Validates before the first step; at its end the run is judged by this loss."""
        if self.setup.eval_items:
            loss = self.progress.held_out.first = self._validated()["valid_loss"]
            self.on_event(events.message("validated", f"Validation loss before the first step: {loss:.4f}", loss=loss))

    def _save(self) -> Path:
        """The newest checkpoint, of the step where the run stands."""
        if self.latest is None or self.latest.name != f"step-{self.progress.step}":
            self.latest = self._written_by_first()
            self.saved_at = time.monotonic()
        self.ranks.by_first(self._remove_old)  # also those left by a run that was killed after writing
        return self.latest

    def _written_by_first(self) -> Path:
        if self.setup.sharded is None:
            return self.ranks.by_first(self._written)
        asking = state.asking_for(self.setup.sharded, self.setup.optimizer)
        return asking.by_first(lambda: self._written(asking))

    def _written(self, asking: "Asking | None" = None) -> Path:
        meta = {
            "step": self.progress.step,
            "config": json.loads(self.config.to_json()),
            "progress": {**dataclasses.asdict(self.progress), "total_steps": self.setup.total_steps},
            "identity": self.identity,
            "environment": environment(self.config),
            "kept": self.setup.kept_linears,
        }
        saved = state.capture(self.setup.forward, self.setup.optimizer, self.setup.kept(), meta, asking)
        path = checkpoint.write_checkpoint(self.root, saved, self.setup.carry)
        self.on_event(events.checkpoint(str(path), {**self.progress.metrics, "step": self.progress.step}))
        return path

    def _remove_old(self) -> None:
        needed = {self.progress.held_out.best_step if self.config.result == "best" else None}
        if self._may_go_back:
            good = checkpoint.last_multiple(self.root, self._save_every, self.progress.step + 1)
            needed |= {good, self._best_at(good)}
        checkpoint.keep_last(self.root, self.config.keep_last, needed)

    def _best_at(self, step: int) -> int | None:
        """If the result is made of the best checkpoint: its step, as of the time when `step` was written."""
        if self.config.result != "best" or step == 0:
            return None
        saved = read_json(self.root / f"step-{step}" / "trainer.json", JobError)["progress"]["held_out"]["best_step"]
        return None if saved is None else int(saved)

    def _stopped(self) -> TrainResult:
        if self.progress.step:
            self._save()
        self.on_event(events.message("stopped", f"Stopped at step {self.progress.step}", step=self.progress.step))
        return self._result("stopped", None)

    def _finished(self, chosen: Path, outcome: Outcome) -> TrainResult:
        judge(self.asked, chosen, outcome, self.on_event)
        return self._result("succeeded", str(published(self.config, chosen, self.on_event)))

    def _chosen(self, latest: Path) -> Path:
        """The checkpoint that the result is made of. From here on the model computes with its weights."""
        best = self.progress.held_out.best_step
        chosen = self.ranks.by_first(lambda: chosen_of(self.config, latest, best, self.on_event))
        if chosen != latest:
            with self.ranks.together():
                self._restore(checkpoint.read_checkpoint(chosen))
        return chosen

    def _outcome(self, held_out_after: float | None) -> Outcome:
        """Compares the model now with the model before the run."""
        before, held_out_before = self.progress.first_loss, self.progress.held_out.first
        after, steps, skipped = self._first_loss(), self.progress.step, self.progress.skipped
        return Outcome(before, after, steps, skipped, held_out_before, held_out_after)

    def _first_loss(self) -> float:
        """The mean loss of the first microbatch, with the weights as they are; changes nothing."""
        step, _ = next(walk(self.lengths, self.config, Cursor(), 1))
        items = self._items(step)[0]
        return held_out_metrics(self.setup.method, self.setup.forward, items, len(items))["valid_loss"]

    def _finite_first_loss(self) -> float:
        loss = self._first_loss()
        if not math.isfinite(loss):
            raise JobError(
                f"The loss of the first rows is {loss} before any step; check the model's weights and scales."
            )
        return loss

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
