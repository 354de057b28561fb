"""Stores the results of a calibration's finished stages in a hidden directory, so that --resume can continue.

    .OUT.calibrating/run.json                  the run: its model, recipe, options, samples and versions
                     smooth-00000.safetensors  the smoothed parameters of a layer and their factors
                     observed.safetensors      the observations of every tensor
                     round-00000.safetensors   the rounded weights of a layer, and so on

Every result is written atomically and then read from the mapped file, also in a run that is not interrupted. So both
kinds of runs use the same bytes, and finished results need no memory. The directory is beside the output, is created
with the first result, and is removed when OUT is complete. It is locked while the run lives. With several ranks, rank 0
writes and all ranks read.
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
from fp8serve.calibration.observe import Observer, TensorRecord
from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.result import HISTORY_LENGTH
from fp8serve.errors import Fp8ServeError, MachineError, ModelError, shown
from fp8serve.fp8.recipe import Recipe, to_json
from fp8serve.fp8.scaling import FIELDS
from fp8serve.model.checkpoint import fingerprint
from fp8serve.model.storage.files import acquire_lock, atomic_file, present, read_json, write_json
from fp8serve.model.storage.shards import Shards, read_header, save_tensors
from fp8serve.ranks import ALONE, Ranks

RUN_FILE = "run.json"
METADATA = {"format": "fp8serve.unfinished"}
REMOVED_OPTIONS = {"input_scales": "history"}  # of earlier versions, with their defaults
Compute = Callable[[], Mapping[str, Tensor]]
LoadOrCompute = Callable[[str, Compute], Mapping[str, Tensor]]  # (name of a result, its function) -> the result
TOKENS = ".tokens"  # suffix of the names of token counts


def always_compute(name: str, compute: Compute) -> Mapping[str, Tensor]:
    """A `LoadOrCompute` that stores nothing."""
    return compute()


class StageResults:
    """The results of the run with this `description`, which will write `out`.

    Raises ModelError if there are results already and `resume` is not set, or if they belong to another run or are in
    use by another process.
    """

    def __init__(self, out: Path, description: Mapping[str, Any], resume: bool, ranks: Ranks = ALONE) -> None:
        out = Path(os.path.abspath(out))
        self.folder, self._out, self._description = out.parent / f".{out.name}.calibrating", out, description
        self._lock: IO[str] | None = None
        self._ranks = ranks
        with ranks.shared_errors():
            if ranks.is_first and present(self.folder / RUN_FILE):
                self._check_resumable(resume)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Removes the results unless the run was interrupted. After an error of the input they would be of no use."""
        is_over = kind is None or (issubclass(kind, Fp8ServeError) and not issubclass(kind, MachineError))
        if is_over and self._ranks.is_first:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _check_resumable(self, resume: bool) -> None:
        remove = f"or remove {self.folder} to start over"
        if not resume:
            raise ModelError(f"A calibration of {self._out} was interrupted; continue it with --resume, {remove}.")
        interrupted = read_json(self.folder / RUN_FILE)
        for name in sorted({*interrupted, *self._description}):
            old, new = interrupted.get(name), self._description.get(name, REMOVED_OPTIONS.get(name))
            if old != new:
                raise ModelError(
                    f"The interrupted calibration of {self._out} began with {name}={shown(old)}, not {shown(new)}; "
                    f"use the same value, {remove}."
                )
        self._acquire_lock()

    def _acquire_lock(self) -> None:
        self._lock = acquire_lock(self.folder / "lock", f"Another process is calibrating {self._out}.", ModelError)

    def load_or_compute(self, name: str, compute: Compute) -> Mapping[str, Tensor]:
        """Returns the result of this name, mapped from its file; calls `compute` and stores the result if needed."""
        path = self.folder / f"{name}.safetensors"
        if not any(self._ranks.gather(path.exists())):
            tensors = compute()
            with self._ranks.shared_errors():
                if self._ranks.is_first:
                    self._store(path, tensors)
        return Shards(*read_header(path))

    def _store(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        try:
            if self._lock is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._acquire_lock()
                with atomic_file(self.folder / RUN_FILE) as temporary:
                    write_json(temporary, self._description)
            with atomic_file(path) as temporary:
                save_tensors(temporary, tensors, METADATA)
        except OSError as e:
            raise MachineError(f"{path} could not be written: {e.strerror or e}; continue later with --resume.") from e


def run_description(
    source: Path, recipe: Recipe, settings: CalibrationOptions, batches: Batches, versions: Mapping[str, str]
) -> dict[str, Any]:
    """Returns everything that determines the results, by option name; only a run with an equal description resumes."""
    options = {name: value for name, value in asdict(settings).items() if name not in ("resume", "data", "holdout")}
    digest = sha256()
    for batch in (*batches.calibration, *batches.held_out):
        digest.update(json.dumps([batch.ids.tolist(), batch.targets.tolist(), batch.lengths]).encode())
    inputs = {"model": fingerprint(source), "recipe": to_json(recipe), "samples read": digest.hexdigest()[:32]}
    result: dict[str, Any] = json.loads(json.dumps(inputs | options | dict(versions)))
    return result


def observer_tensors(observer: Observer) -> dict[str, Tensor]:
    """Returns the observations as named tensors, which `load_observer` reads.

    `<tensor>.<field>` are the fields of the tensor's state, `<tensor>.seen` is FP64 [amax, recent amaxes], and
    `<mixture>.tokens` are the token counts of its experts.
    """
    results = {f"{name}{TOKENS}": counts for name, counts in observer.tokens.items()}
    for name, state in observer.states().items():
        results |= {f"{name}.{field}": getattr(state, field) for field in FIELDS}
        record = observer.records[name]
        results[f"{name}.seen"] = torch.tensor([record.amax, *record.recent_amaxes], dtype=torch.float64)
    return results


def load_observer(observer: Observer, tensors: Mapping[str, Tensor]) -> None:
    """Loads the result of `observer_tensors` into an observer of the same tensors."""
    observer.tokens = {name.removesuffix(TOKENS): tensors[name].clone() for name in tensors if name.endswith(TOKENS)}
    for name, state in observer.states().items():
        for field in FIELDS:
            setattr(state, field, tensors[f"{name}.{field}"].clone().to(state.scale.device))
        amax, *recent = tensors[f"{name}.seen"].tolist()
        steps, nonfinite = int(state.steps), int(state.nonfinite)
        observer.records[name] = TensorRecord(amax, steps, nonfinite, deque(recent, maxlen=HISTORY_LENGTH))
