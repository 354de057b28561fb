"""The checkpoints of a run: which is the newest, when the next is due, which stay, and how a run continues from one.

Only rank 0 touches the disk; all ranks know the newest checkpoint. A run continues only as the same job; what else has
changed since is reported.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fp8serve import __version__
from fp8serve.errors import JobError
from fp8serve.fp8.ops import backends
from fp8serve.model.formats.scales import FILE_NAME, fingerprint
from fp8serve.model.storage.files import CARRIED, MAX_CARRIED_BYTES, read_json
from fp8serve.model.storage.opening import open_member, regular_file
from fp8serve.ranks import Ranks
from fp8serve.train import checkpoint, events, recovery, state
from fp8serve.train.config import LENGTH, TrainConfig
from fp8serve.train.data import Cursor
from fp8serve.train.events import OnEvent
from fp8serve.train.run import Course, HeldOut, Progress

if TYPE_CHECKING:
    from fp8serve.train.sharded.shards import Asking


def dated(config: TrainConfig, latest: Path | None) -> TrainConfig:
    """The configuration with the date for templates: its own, else the checkpoint's, else today's."""
    if config.template_date is not None:
        return config
    saved = read_json(latest / "trainer.json", JobError)["config"].get("template_date") if latest else None
    return dataclasses.replace(config, template_date=saved or date.today().isoformat())


def identity_of(config: TrainConfig, data: str, latest: Path | None) -> dict[str, Any]:
    """{"config", "data", "model"} of a run; "model" comes from the checkpoint if the base model is gone."""
    model = model_digest(Path(config.model))
    if model is None and latest is not None:
        model = read_json(latest / "trainer.json", JobError)["identity"].get("model")
    return {"config": config.defines(), "data": data, "model": model}


def model_digest(directory: Path) -> str | None:
    """32 hex digits of everything that a run reads from a base model: weights, scales, tokenizer; None if it is
    gone."""
    if not (directory / "config.json").exists():
        return None
    digest = hashlib.sha256(fingerprint(directory).encode())
    for name in sorted({*CARRIED, FILE_NAME}):
        if regular_file(directory / name):
            limit = None if name == FILE_NAME else MAX_CARRIED_BYTES
            with open_member(directory / name, limit) as file:
                digest.update(f"{name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def check_same_job(now: Mapping[str, Any], then: Mapping[str, Any], path: Path) -> None:
    """Raises JobError, naming the first difference, when the checkpoint `path` is of another job.

    Values that an older version did not record are not compared.
    """
    for key, value in now["config"].items():
        if key not in LENGTH and key in then["config"] and then["config"][key] != value:
            raise JobError(
                f"{path} was written with {key}={then['config'][key]!r}, this job says {value!r}; "
                "use the same value or another output directory."
            )
    if now["model"] != then.get("model", now["model"]):
        raise JobError(f"{path} was trained from another model than this job names; use another output directory.")
    if now["data"] != then["data"]:
        raise JobError(f"The training data differ from those {path} was trained on; use another output directory.")


class Saving:
    """Begins by removing what an interrupted write left in `out`, and setting broken checkpoints aside.

    latest: the newest checkpoint, or None.
    """

    def __init__(self, out: Path, ranks: Ranks, on_event: OnEvent) -> None:
        self.root = out / "checkpoints"
        self._saved_at = time.monotonic()
        self._on_event = on_event
        self.latest = ranks.by_first(self._swept)

    def _swept(self) -> Path | None:
        self.root.mkdir(parents=True, exist_ok=True)
        for root in (self.root, self.root.parent):
            if removed := checkpoint.sweep(root):
                text = f"Removed {len(removed)} unfinished directories"
                self._on_event(events.message("sweep", text, names=removed))
        return checkpoint.newest_whole(self.root, self._broken)

    def _broken(self, path: Path, why: str) -> None:
        text = f"{path.name} is damaged ({why}) and was set aside; going on from the one before it"
        self._on_event(events.message("checkpoint_broken", text, level="warn"))

    def returns(self) -> int:
        """How often the run had gone back when the newest checkpoint was written."""
        if self.latest is None:
            return 0
        return int(read_json(self.latest / "trainer.json", JobError)["progress"].get("returns", 0))

    def is_due(self, course: Course) -> bool:
        """Whether a checkpoint is to be written after the step that was just taken."""
        if course.config.result == "best" and course.progress.held_out.best_step == course.progress.step:
            return True
        if course.config.save_every is not None:
            return course.due(course.config.save_every)
        return time.monotonic() - self._saved_at >= 60 * course.config.save_minutes

    def save(self, course: Course) -> Path:
        """The newest checkpoint, of the step where the run stands; it is written if it is not there."""
        if self.latest is None or self.latest.name != f"step-{course.progress.step}":
            self.latest = self._written_by_first(course)
            self._saved_at = time.monotonic()
        # also those left by a run that was killed after writing
        course.ranks.by_first(lambda: self._remove_old(course))
        return self.latest

    def _written_by_first(self, course: Course) -> Path:
        if course.setup.sharded is None:
            return course.ranks.by_first(lambda: self._written(course))
        asking = state.asking_for(course.setup.sharded, course.setup.optimizer)
        return asking.by_first(lambda: self._written(course, asking))

    def _written(self, course: Course, asking: "Asking | None" = None) -> Path:
        setup, progress = course.setup, course.progress
        meta = {
            "step": progress.step,
            "config": json.loads(course.config.to_json()),
            "progress": {**dataclasses.asdict(progress), "total_steps": setup.total_steps},
            "identity": course.identity,
            "environment": environment(course.config),
            "kept": setup.high_precision_linears,
        }
        saved = state.capture(setup.forward, setup.optimizer, setup.tensors_of_items(), meta, asking)
        path = checkpoint.write_checkpoint(self.root, saved, setup.carry)
        self._on_event(events.checkpoint(str(path), {**progress.metrics, "step": progress.step}))
        return path

    def _remove_old(self, course: Course) -> None:
        needed = {course.progress.held_out.best_step if course.config.result == "best" else None}
        if course.may_go_back:
            good = checkpoint.last_multiple(self.root, course.save_every, course.progress.step + 1)
            needed |= {good, self._best_at(course, good)}
        checkpoint.keep_last(self.root, course.config.keep_last, needed)

    def _best_at(self, course: Course, step: int) -> int | None:
        """If the result is made of the best checkpoint: its step, as of the time when `step` was written."""
        if course.config.result != "best" or step == 0:
            return None
        saved = read_json(self.root / f"step-{step}" / "trainer.json", JobError)["progress"]["held_out"]["best_step"]
        return None if saved is None else int(saved)

    def removed_since_good(self, course: Course) -> int:
        """Removes the checkpoints after the last good one; returns its step. 0: there is none."""
        good = checkpoint.last_multiple(self.root, course.save_every, course.progress.step)
        checkpoint.remove_after(self.root, good)
        return good


def resume(course: Course, path: Path) -> None:
    """Takes over the state and the progress of a verified checkpoint; `course.progress.returns` stays.

    Raises JobError for a checkpoint of another job, or of more steps than the job asks for.
    """
    saved = checkpoint.read_checkpoint(path)
    check_same_job(course.identity, saved.meta["identity"], path)
    _report_changes(course, saved.meta)
    values = dict(saved.meta["progress"])
    before = recovery.attempt(course.job, values.pop("returns", 0))  # an older version has none
    if before != course.config:  # another attempt, which counts its skipped steps from 0
        saved.scaling = recovery.rescaled(saved.scaling, before, course.config)
        values["skipped_in_a_row"] = 0
    restore(course, saved)
    course.setup = course.setup.recall_items(saved.method)
    held_out = HeldOut(**values.pop("held_out", {}))  # a checkpoint of an older version has none
    values |= {"cursor": Cursor(**values["cursor"]), "held_out": held_out, "returns": course.progress.returns}
    course.progress = Progress(**values)
    step = course.progress.step
    course.on_event(events.message("resumed", f"Resumed from step {step}", step=step))


def restore(course: Course, saved: checkpoint.TrainState) -> None:
    """Weights, moments, scales and random numbers of a checkpoint."""
    state.restore(course.setup.forward, course.setup.optimizer, saved, course.setup.sharded)


def _report_changes(course: Course, meta: dict[str, Any]) -> None:
    then, total = meta["progress"].get("total_steps"), course.setup.total_steps
    if total < meta["step"]:
        raise JobError(
            f"The run in {course.out} is at step {meta['step']} already, this job says {total}; ask for more."
        )
    if then is not None and total != then:
        text = f"The run was to end at step {then}, now at {total}: its learning rate follows that from here on"
        course.on_event(events.message("length_changed", text, level="warn", total_steps=total))
    if (here := environment(course.config)) != meta["environment"]:
        changed = [k for k in here if here[k] != meta["environment"].get(k)]
        text = f"{', '.join(changed)} changed since the checkpoint was written: the result may differ in its last bits"
        course.on_event(events.message("machine_changed", text, level="warn"))


def environment(config: TrainConfig) -> dict[str, Any]:
    """What decides the bits besides configuration and data. A run that resumes in another environment reports it."""
    return {
        "torch": torch.__version__,
        "fp8serve": __version__,
        "threads": torch.get_num_threads(),
        "device": config.device,
        "kernels": backends(torch.device(config.device).type),
    }
