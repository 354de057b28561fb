"""The checkpoints of a run on the disk: the newest one, when to write the next, and which ones to keep.

Only rank 0 touches the disk; all ranks know the newest checkpoint.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fp8serve.errors import JobError
from fp8serve.model.storage.files import read_json
from fp8serve.ranks import Ranks
from fp8serve.train import checkpoint, events, state
from fp8serve.train.events import OnEvent
from fp8serve.train.progress import Course
from fp8serve.train.setup import environment

if TYPE_CHECKING:  # importing FSDP2 takes 0.4 s
    from fp8serve.train.sharded.asking import Asking


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
            "kept": setup.kept_linears,
        }
        saved = state.capture(setup.forward, setup.optimizer, setup.kept(), meta, asking)
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
