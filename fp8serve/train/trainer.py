"""The training loop: it turns rows into checkpoints and one servable model. `finetune` is `fp8serve.finetune`.

A run is a pure function of its configuration, its data and the machine's arithmetic. A checkpoint holds all state that
one step passes to the next (`train.checkpoint`), and the data order is a function of (seed, epoch). A run that is
killed at any instant and started again therefore ends with the same bytes. This needs the same torch build, thread
count and kernels. A run that resumes on another machine reports that its bits may differ.

    out/checkpoints/step-N/   checkpoints; each can be resumed, loaded as a model, and exported by `train.export`
    out/model/                the result: an FP8 model with the scales of the training, or an adapter
    out/run.lock              a file lock, so that two runs cannot share a directory

Several processes may share the steps of a run (`Ranks`). Each holds the whole model; they divide the microbatches of a
step (`train.train_step`), the validation rows and the reference scores. Only rank 0 writes files and reports events.
The bytes do not depend on the number of processes, so a run may resume with another number.

The method defines the loss (`methods.interface`). The modules of the loop share a `TrainingRun` (`train.run`): steps
(`train.train_step`), and checkpoints and the recovery of a diverged run (`train.checkpointing`). A run fails if its
model is worse at the end than at the start. Other problems are only reported (`train.health`).

With delayed scaling, a base model without amax histories is first observed for one microbatch in high precision. At
scale 1 most of a gradient would underflow in E5M2. The layers before it would receive zeros, so only one more layer
would get a right scale in each step.

A finished run continues if it is started again with more steps. Its learning rate then follows the longer schedule, so
the result differs from that of a run with this length from the start; an event says so. The earlier model is renamed to
`model-step-N`.
"""

import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fp8serve.errors import DataError, JobError
from fp8serve.model.compatibility import compatibility_notes
from fp8serve.model.device import resolve_device
from fp8serve.model.storage.files import acquire_lock, atomic_file, check_writable, read_json
from fp8serve.model.stored_checkpoint import open_checkpoint
from fp8serve.model.text.chat_rows import non_json_value
from fp8serve.options import AUTO
from fp8serve.ranks import ALONE, Ranks
from fp8serve.train import checkpoint, events, state
from fp8serve.train.checkpointing import (
    Checkpointer,
    config_after,
    identity_of,
    load_state,
    recovery_configs,
    required_disk_bytes,
    resume,
    return_to_good_checkpoint,
    with_template_date,
)
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import iterate_steps
from fp8serve.train.events import OnEvent, check_installed, check_optimizer_package, ignore, reporting_to_tools
from fp8serve.train.export import export
from fp8serve.train.health import Health
from fp8serve.train.methods.interface import RunContext
from fp8serve.train.run import (
    DivergenceError,
    Outcome,
    Progress,
    TrainingRun,
    check_divergence,
    evaluate_run,
    first_rows_loss,
    outcome_of,
)
from fp8serve.train.setup import check_format, prepare
from fp8serve.train.train_step import take_step


def initialize(run: TrainingRun) -> None:
    """Prepares a new run for its first step: scales, reference scores and initial losses. Raises JobError if the loss
    is not finite."""
    initialize_scales(run)
    run.setup = run.setup.with_reference(run.ranks)
    if run.setup.reference_tensors():
        text = f"Computed the reference scores of {len(run.setup.items)} items with the initial model"
        run.on_event(events.message("reference", text))
    loss = first_rows_loss(run)
    if not math.isfinite(loss):
        raise JobError(f"The loss of the first rows is {loss} before any step; check the model's weights and scales.")
    run.progress.first_loss = loss if run.setup.method.is_supervised else None
    if run.setup.eval_items:
        loss = run.progress.held_out.first = evaluate_run(run)["valid_loss"]
        run.on_event(events.message("validated", f"Validation loss before the first step: {loss:.4f}", loss=loss))


def initialize_scales(run: TrainingRun) -> None:
    """Observes one microbatch in high precision if an amax history is empty."""
    if not any(entry.amax_history.count_nonzero() == 0 for _, entry in state.scaling_states(run.setup.forward)):
        return
    step, _ = next(iterate_steps(run.lengths, run.config, run.progress.cursor, 1))
    method, microbatches = run.setup.method, run.microbatches(step)
    terms = method.count_loss_terms([item for items in microbatches for item in items])
    run.setup.observe(lambda logits: method.compute_sums(logits, microbatches[0])[0] / terms)
    text = "Scales start from the amaxes of one pass in high precision"
    run.on_event(events.message("scales_observed", text))


def choose_result_checkpoint(config: TrainConfig, latest: Path, best_step: int | None, on_event: OnEvent) -> Path:
    """Returns the checkpoint that becomes the result: the best one if the job asks for it and it is intact, else
    `latest`."""
    best = latest.with_name(f"step-{best_step}")
    if config.result == "last" or best == latest:
        return latest
    if (damage := checkpoint.find_damage(best)) is not None:
        text = f"The best checkpoint, {best.name}, cannot be used ({damage}): the result is made of the last one"
        on_event(events.message("best_lost", text, level="warn"))
        return latest
    return best


def check_outcome(config: TrainConfig, checkpoint_dir: Path, outcome: Outcome, on_event: OnEvent) -> None:
    """Raises JobError if the run made the model worse, or reports a warning with on_divergence="keep"."""
    if outcome.failure is None:
        return
    if config.on_divergence != "keep":
        raise JobError(
            f"{outcome.failure}; lower lr ({config.lr}), or make a model of {checkpoint_dir} by starting again with "
            'on_divergence="keep" (--on-divergence keep).'
        )
    on_event(events.message("diverged", outcome.failure, level="warn"))


def export_result(config: TrainConfig, checkpoint_dir: Path, on_event: OnEvent) -> Path:
    """Exports the checkpoint `checkpoint_dir` to `out/model/`, unless it is there already. Returns that directory."""
    model = Path(config.out) / "model"
    if (
        model.exists()
        and f"step-{(step := read_json(model / 'training.json', JobError)['step'])}" != checkpoint_dir.name
    ):
        model.rename(model.with_name(f"model-step-{step}"))  # not deleted, because a server may be using it
    if not model.exists():
        export(checkpoint_dir, model)
        on_event(events.message("exported", f"The trained model is in {model}", path=str(model)))
        for note in () if config.lora_rank else compatibility_notes(open_checkpoint(model)):
            on_event(events.message("readers", note, level="warn"))
    return model


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. With status "succeeded", `model` is the servable directory. With status "stopped", the same
    job started again continues the run."""

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


class Trainer:
    """Runs a job: `Trainer(config).run()`. The same call again resumes from the newest checkpoint.

    `ranks` are the processes that share the steps. Each of them creates a trainer with the same configuration.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.ranks = replace(ranks, is_sharded=config.fsdp and ranks.size > 1)

    def check(self) -> None:
        """Raises the errors of `run` that depend on neither the data nor the output directory. Writes nothing."""
        check_processes(self.config, self.ranks.size)
        check_installed(self.config.report_to)
        check_optimizer_package(self.config)
        may_recover = self.config.on_divergence == "return"
        for config in recovery_configs(self.config) if may_recover else [self.config]:
            check_format(config)

    def run(self, on_event: OnEvent = events.ignore, stop: Callable[[], bool] = lambda: False) -> TrainResult:
        """Trains to the end, or until `stop()` returns True on any rank between two steps. Only rank 0 reports events.

        Raises DataError, ModelError, ScalesError or RecipeError for invalid input, and JobError if the run cannot
        continue or made the model worse.
        """
        self.check()
        return self.run_checked(on_event, stop)

    def run_checked(self, on_event: OnEvent, stop: Callable[[], bool]) -> TrainResult:
        """Does the same as `run`, for a caller that has called `check`."""
        with self.ranks.shared_errors():
            lock = self._take_lock() if self.ranks.is_first else nullcontext()
        reporting = reporting_to_tools(self.config, on_event) if self.ranks.is_first else nullcontext(events.ignore)
        returns = None
        with lock, reporting as report, torch.random.fork_rng(devices=[]):
            while True:
                torch.manual_seed(self.config.seed)
                attempt = _Attempt(self.config, report, self.ranks, returns)
                try:
                    return attempt.train(stop)
                except DivergenceError as divergence:
                    reason = str(divergence)
                finally:
                    attempt.close()
                returns = attempt.return_to_good_checkpoint(reason)
                del attempt  # the models of two attempts would not fit into memory
                gc.collect()

    def _take_lock(self) -> AbstractContextManager[Any]:
        out = Path(self.config.out)
        if out.exists() and not out.is_dir():
            raise JobError(f"{out} exists and is not a directory; choose another output directory.")
        check_writable(out)
        out.mkdir(parents=True, exist_ok=True)
        message = f"Another run uses {out}; wait for it, or use another output directory."
        return acquire_lock(out / "run.lock", message)


def check_processes(config: TrainConfig, count: int) -> None:
    """Raises JobError if a step cannot use `count` processes."""
    if count > 1 and not config.supports_processes:
        raise JobError(f"The method {config.method} runs in one process; start 1 process instead of {count}.")
    if count > 1 and config.compile:
        raise JobError(
            f"compile works in one process, and this run has {count}; leave compile out, or start 1 process."
        )
    if count > config.accumulate:
        raise JobError(
            f"Each process needs a microbatch, and a step has {config.accumulate} (accumulate) for {count} processes; "
            f"use {config.accumulate}, or --accumulate {count} or more, with a smaller --batch-size for an equal step."
        )


class _Attempt:
    """One attempt of a run, from its newest checkpoint to its end or to a divergence.

    In an attempt after a return, `returns` is the number of returns, which no checkpoint records yet. In the first
    attempt it is None.
    """

    def __init__(self, config: TrainConfig, on_event: OnEvent, ranks: Ranks, returns: int | None = None) -> None:
        self.start_time = time.monotonic()
        self.is_after_return = returns is not None
        self.checkpointer = Checkpointer(Path(config.out), ranks, on_event)
        job_config = ranks.run_on_first(lambda: with_template_date(config, self.checkpointer.latest))
        saved_returns = ranks.run_on_first(self.checkpointer.saved_returns)
        with ranks.shared_errors():
            self.run = self._load(job_config, on_event, ranks, saved_returns if returns is None else returns)
        if self.checkpointer.latest is None:
            initialize(self.run)
        self.first_step = self.run.progress.step
        first_loss = self.run.progress.first_loss
        self.health = Health(self.run.setup.forward, on_event, first_loss) if ranks.is_first else None

    def _load(self, job_config: TrainConfig, on_event: OnEvent, ranks: Ranks, returns: int) -> TrainingRun:
        latest, config = self.checkpointer.latest, config_after(job_config, returns)
        if latest is None and not config.lora_rank:
            check_writable(Path(config.out), required_disk_bytes(open_checkpoint(config.model), config))
        setup = prepare(config, latest or Path(config.model), on_event, ranks)
        identity = identity_of(job_config, setup.data_fingerprint, latest)
        run = TrainingRun(job_config, config, ranks, on_event, setup, identity, Progress(returns=returns))
        if latest is not None:
            resume(run, latest)
        return run

    def close(self) -> None:
        self.run.setup.method.close()
        if self.health is not None:
            self.health.close()

    def train(self, stop: Callable[[], bool]) -> TrainResult:
        """Takes the remaining steps and exports the result. Raises DivergenceError if the run must return."""
        run, ranks = self.run, self.run.ranks
        if self.is_after_return:
            check_divergence(run)  # the checkpoint may have been written before on_divergence="return" was set
        remaining_steps = run.setup.total_steps - run.progress.step
        if remaining_steps:
            model_dir = self.checkpointer.latest or Path(run.config.model)
            is_new_run = self.checkpointer.latest is None
            run.setup.method.start(RunContext(run.setup.forward, model_dir, run.out, is_new_run))
        for step, cursor in iterate_steps(run.lengths, run.config, run.progress.cursor, remaining_steps):
            if ranks.any(stop()):
                return self._stop()
            if self._is_patience_exhausted():
                break
            loss = take_step(run, step)
            if self.health is not None:
                self.health.step(run.progress.step, loss)
            run.progress.cursor = cursor
            if ranks.any(self.checkpointer.is_due(run)):
                check_divergence(run)
                self.checkpointer.save(run)
        check_divergence(run)
        latest, held_out = self.checkpointer.save(run), run.progress.held_out
        checkpoint_dir = self._load_result_checkpoint(latest)
        outcome = outcome_of(run, held_out.last if checkpoint_dir == latest else held_out.best)
        return ranks.run_on_first(lambda: self._finish(checkpoint_dir, outcome))

    def return_to_good_checkpoint(self, reason: str) -> int:
        """Removes the checkpoints after the last good one. Returns the new number of returns."""
        is_repeated = self.is_after_return and self.run.progress.step <= self.first_step
        return return_to_good_checkpoint(self.run, self.checkpointer, reason, is_repeated=is_repeated)

    def _is_patience_exhausted(self) -> bool:
        run = self.run
        held_out, patience = run.progress.held_out, run.config.patience
        if patience is None or held_out.since_best < patience:
            return False
        loss = "finite loss"
        if held_out.best is not None:
            loss = f"lower loss than the {held_out.best:.4f} of step {held_out.best_step}"
        text = f"Stopped early: {held_out.since_best} validations in a row had no {loss}"
        step = run.progress.step
        run.on_event(events.message("early_end", text, step=step, best_step=held_out.best_step))
        return True

    def _stop(self) -> TrainResult:
        if step := self.run.progress.step:
            self.checkpointer.save(self.run)
        self.run.on_event(events.message("stopped", f"Stopped at step {step}", step=step))
        return self._result("stopped", None)

    def _load_result_checkpoint(self, latest: Path) -> Path:
        """Returns the checkpoint that becomes the result, after loading its state into the run."""
        run, best_step = self.run, self.run.progress.held_out.best_step
        checkpoint_dir = run.ranks.run_on_first(
            lambda: choose_result_checkpoint(run.config, latest, best_step, run.on_event)
        )
        if checkpoint_dir != latest:
            with run.ranks.shared_errors():
                load_state(run, checkpoint.read_checkpoint(checkpoint_dir))
        return checkpoint_dir

    def _finish(self, checkpoint_dir: Path, outcome: Outcome) -> TrainResult:
        run = self.run
        check_outcome(run.job_config, checkpoint_dir, outcome, run.on_event)
        return self._result("succeeded", str(export_result(run.config, checkpoint_dir, run.on_event)))

    def _result(self, status: Literal["succeeded", "stopped"], model: str | None) -> TrainResult:
        progress, latest = self.run.progress, self.checkpointer.latest
        return TrainResult(
            status=status,
            step=progress.step,
            total_steps=self.run.setup.total_steps,
            trained_tokens=progress.trained_tokens,
            skipped_steps=progress.skipped,
            metrics=progress.metrics,
            checkpoint=str(latest) if latest else None,
            model=model,
            seconds=time.monotonic() - self.start_time,
        )


Data = str | Path | Sequence[str | Path | Mapping[str, Any]]
"""A file, several files, or rows: dicts such as `{"prompt": ..., "completion": ...}` or `{"messages": [...]}`."""


def finetune(
    model_dir: Path | str,
    *,
    data: Data,
    out: Path | str,
    eval_data: Data = (),
    on_event: OnEvent = ignore,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> TrainResult:
    """Fine-tunes the Hugging Face model in `model_dir` in FP8, and writes the servable result to `out/model`.

    The same call again resumes from the newest checkpoint in `out`.

    Args:
        model_dir: A model in high precision or in FP8. Training starts from the scales of an FP8 model.
        data: Files or rows to train on (docs/data.md). Rows are written into `out` as JSON lines.
        out: The output directory.
        eval_data: Files or rows for validation.
        on_event: A function that receives every event, a dict with `type` and `message`: losses, checkpoints, warnings.
        stop: A function that is called between steps. If it returns True, the run ends after a checkpoint, with the
            status "stopped".
        options: The other fields of `TrainConfig`, such as `recipe="rowwise"` or `lora_rank=8`. The device is a GPU if
            there is one that fits the model, unless `device` says otherwise.

    Returns the last metrics, the newest checkpoint and the model's directory. Raises ModelError, DataError, RecipeError
    or ScalesError for an invalid input, and JobError for an invalid option or a run that diverged.
    """
    out = Path(out)
    data_files, data_rows = _files_and_rows(data, out / "data.jsonl")
    eval_files, eval_rows = _files_and_rows(eval_data, out / "eval_data.jsonl")
    options["device"] = resolve_device(options.get("device", AUTO), Path(model_dir))
    config = TrainConfig.from_dict(
        {"model": str(model_dir), "out": str(out), "data": data_files, "eval_data": eval_files, **options}
    )
    trainer = Trainer(config)
    trainer.check()
    for rows, files in ((data_rows, data_files), (eval_rows, eval_files)):
        if rows:
            _write_rows(rows, Path(files[0]))
    return trainer.run_checked(on_event, stop)


def _files_and_rows(data: Data, path: Path) -> tuple[list[str], Sequence[Any]]:
    """Returns the files of `data` and no rows, or `path` and the rows of `data`, which must be written there."""
    if isinstance(data, str | Path):
        return [str(data)], ()
    items = list(data)
    if all(isinstance(item, str | Path) for item in items):
        return [str(item) for item in items], ()
    if not all(isinstance(item, Mapping) for item in items):
        raise DataError("Data are files or rows (dicts), not a mixture of both.")
    return [str(path)], items


def _write_rows(rows: Iterable[Any], path: Path) -> None:
    """Writes rows to a file atomically. Raises DataError that names a row that is not JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as new, new.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
            except (TypeError, ValueError, RecursionError):
                value = non_json_value(dict(row)) or "a list or an object that contains itself"
                raise DataError(f"Row {number} cannot be written as JSON: it contains {value}.") from None
