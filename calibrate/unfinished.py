"""Stores the finished results of a calibration in a hidden directory beside its output, so that a killed one can
resume.

    .OUT.calibrating/run.json                  whose results these are: model, recipe, options, samples, versions
                     smooth-00000.safetensors  a layer's smoothed parameters and their factors
                     observed.safetensors      what was seen of every tensor
                     round-00000.safetensors   a layer's rounded weights, and so on

A result is computed, written whole and read back from the mapped file, in an uninterrupted run as in a resumed one: the
bytes are the same, and finished results need no memory. The directory is created with the first result and removed when
OUT is in place; it is locked while the run lives. With several ranks the first one writes and all read.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch import Tensor

from fp8serve.calibration.data import Batches
from fp8serve.calibration.observe import Observer, Seen
from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.result import HISTORY_LENGTH
from fp8serve.errors import Fp8ServeError, MachineError, ModelError, shown
from fp8serve.fp8.recipe import Recipe, to_json
from fp8serve.fp8.scaling import FIELDS, ScalingState
from fp8serve.model.checkpoint import fingerprint
from fp8serve.model.storage.files import fsync, present, read_json, save_tensors, take_lock, write_json
from fp8serve.model.storage.shards import Shards, read_header
from fp8serve.ranks import ALONE, Ranks

RUN = "run.json"
METADATA = {"format": "fp8serve.unfinished"}
Make = Callable[[], Mapping[str, Tensor]]
Once = Callable[[str, Make], Mapping[str, Tensor]]  # (name of a result, function that computes it) -> the result
TOKENS = ".tokens"


def every_time(name: str, make: Make) -> Mapping[str, Tensor]:
    """A `Once` that keeps nothing."""
    return make()


class Unfinished:
    """The results of the run of this `description`, which becomes `out`. `once` is a `Once`.

    ModelError: there are results already and `resume` is not set, or they are another run's, or another process's.
    """

    def __init__(self, out: Path, arguments: Mapping[str, Any], resume: bool, ranks: Ranks = ALONE) -> None:
        out = Path(os.path.abspath(out))
        self.folder, self._out, self._description = out.parent / f".{out.name}.calibrating", out, arguments
        self._lock: IO[str] | None = None
        self._ranks = ranks
        with ranks.together():
            if ranks.first and present(self.folder / RUN):
                self._go_on(resume)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Keep the results only if the run was interrupted: after an error of its input a new run would fail, too."""
        over = kind is None or (issubclass(kind, Fp8ServeError) and not issubclass(kind, MachineError))
        if over and self._ranks.first:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _go_on(self, resume: bool) -> None:
        remove = f"or remove {self.folder} to begin anew"
        if not resume:
            raise ModelError(f"A calibration of {self._out} was interrupted; go on with --resume, {remove}.")
        before = read_json(self.folder / RUN)
        for name in sorted({*before, *self._description}):
            old, new = before.get(name), self._description.get(name)
            if old != new:
                raise ModelError(
                    f"The interrupted calibration of {self._out} began with {name}={shown(old)}, not {shown(new)}; "
                    f"use the same value, {remove}."
                )
        self._take()

    def _take(self) -> None:
        self._lock = take_lock(self.folder / "lock", f"Another process is calibrating {self._out}.", ModelError)

    def once(self, name: str, make: Make) -> Mapping[str, Tensor]:
        """The result of this name, mapped from its file; `make` computes it if there is none."""
        path = self.folder / f"{name}.safetensors"
        if not any(self._ranks.gather(path.exists())):
            created = make()
            with self._ranks.together():
                if self._ranks.first:
                    self._keep(path, created)
        return Shards(*read_header(path))

    def _keep(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        try:
            if self._lock is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._take()
                write_json(self.folder / "run.tmp", self._description)
                fsync(self.folder / "run.tmp")
                (self.folder / "run.tmp").rename(self.folder / RUN)
            temporary = path.with_suffix(".tmp")
            save_tensors(temporary, {n: t.detach().cpu().contiguous() for n, t in tensors.items()}, METADATA)
            fsync(temporary)
            temporary.rename(path)
            fsync(self.folder)
        except OSError as e:
            raise MachineError(f"{path} could not be written: {e.strerror or e}; go on later with --resume.") from e


def description(
    source: Path, recipe: Recipe, settings: CalibrationOptions, batches: Batches, versions: Mapping[str, str]
) -> dict[str, Any]:
    """Everything that decides a calibration's results, by its option names: a run resumes only if all are equal."""
    options = {name: value for name, value in asdict(settings).items() if name not in ("resume", "data", "holdout")}
    digest = sha256()
    for batch in (*batches.calibration, *batches.held_out):
        digest.update(json.dumps([batch.ids.tolist(), batch.targets.tolist(), batch.lengths]).encode())
    arguments = {"model": fingerprint(source), "recipe": to_json(recipe), "samples read": digest.hexdigest()[:32]}
    results: dict[str, Any] = json.loads(json.dumps(arguments | options | dict(versions)))
    return results


def record_observer(observer: Observer) -> dict[str, Tensor]:
    """By the tensor's name and a field: the fields of its state, and `seen`, FP64 [running amax, newest amaxes]. By a
    mixture's name and `tokens`: the counts of its experts."""
    results = {f"{name}{TOKENS}": counts for name, counts in observer.tokens.items()}
    for name, state in observer.states().items():
        results |= {f"{name}.{field}": getattr(state, field) for field in FIELDS}
        seen = observer.seen[name]
        results[f"{name}.seen"] = torch.tensor([seen.amax, *seen.newest], dtype=torch.float64)
    return results


def restore_observer(observer: Observer, tensors: Mapping[str, Tensor]) -> None:
    """Restore the recorded observations into an `observer` of the same tensors."""
    observer.tokens = {name.removesuffix(TOKENS): tensors[name].clone() for name in tensors if name.endswith(TOKENS)}
    for name, state in observer.states().items():
        _set(state, {field: tensors[f"{name}.{field}"] for field in FIELDS})
        amax, *newest = tensors[f"{name}.seen"].tolist()
        steps, nonfinite = int(state.steps), int(state.nonfinite)
        observer.seen[name] = Seen(amax, steps, nonfinite, deque(newest, maxlen=HISTORY_LENGTH))


def _set(state: ScalingState, fields: Mapping[str, Tensor]) -> None:
    for field, value in fields.items():
        setattr(state, field, value.clone().to(state.scale.device))
