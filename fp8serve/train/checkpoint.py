"""Step checkpoints: directories `checkpoints/step-N/` that are there whole or not at all.

    model.safetensors       FP32 master weights under their Hugging Face names; for an adapter only its masters,
                            `{linear}.lora_A` and so on
    model.safetensors.index.json, config.json, tokenizer
                            carried over, with the quantization removed: they make the directory a model directory
    optimizer.safetensors   `{parameter}.{exp_avg|exp_avg_sq|step}`; moments of 8 bits as `train.optimizer` says
    scaling.safetensors     `{linear}.{input|weight|grad_output}.{scale|amax_history|nonfinite|steps}`
    random.safetensors      torch's generator state
    method.safetensors      what the method computed before the first step (`methods.interface`), if anything
    trainer.json            step, cursor, token counts, the configuration and the environment of the run
    manifest.json           size and SHA-256 of every other file, written last

A checkpoint is written into a hidden sibling; each file and the directory are fsynced, the directory is renamed, and
its parent is fsynced (`model.storage.files`). A kill at any instant leaves at most the sibling, which the next start
removes. Reading verifies the manifest, so a disk that lost or changed bytes is found before a step is taken; the newest
checkpoint that verifies is the one resumed from. There is no pickle. A checkpoint costs 12 bytes per parameter, written
and hashed once. Each kind has one file instead of shards, because only this program reads a checkpoint, and `export`
makes the sharded or quantized forms.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.storage.files import (
    CARRIED,
    MAX_CARRIED_BYTES,
    fsync,
    read_file,
    read_json,
    save_tensors,
    whole_directory,
    write_json,
)
from fp8serve.model.storage.opening import open_member, regular_file
from fp8serve.model.storage.shards import Parts, Shards, load_tensors, read_header, stream_tensors, write_index

VERSION = 1
_STEP = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"\.(step-\d+|model|model-step-\d+)\.tmp-")
_KINDS = ("model", "optimizer", "scaling", "random")
_IF_ANY = "method"
_MAPPED = ("model", "optimizer")


@dataclass
class TrainState:
    """The whole state of a run between two steps. `meta` is JSON; tensors are by name, as in the files above.

    To be written, a tensor may arrive in parts; of one that was read, model and optimizer are views of their files.
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    scaling: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    method: Mapping[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.meta["step"])


def write_checkpoint(root: Path, state: TrainState, carry: Callable[[Path], None]) -> Path:
    """Write `root/step-N`; `carry(directory)` adds the base model's small files. Returns its path.

    Raises JobError when that step exists already, MachineError when the disk is full or not writable.
    """
    final = root / f"step-{state.step}"
    with whole_directory(final, JobError) as directory:
        carry(directory)
        for kind in (*_KINDS, *([_IF_ANY] if state.method else [])):
            _save(directory / f"{kind}.safetensors", getattr(state, kind))
        write_index(directory)
        write_json(directory / "trainer.json", {"version": VERSION, **state.meta})
        write_json(directory / "manifest.json", manifest_of(directory))
    return final


def _save(path: Path, tensors: Mapping[str, Any]) -> None:
    """Tied parameters share storage, which safetensors refuses: `tensors` names each storage once."""
    if any(isinstance(tensor, Parts) for tensor in tensors.values()):
        stream_tensors(path, tensors, {"format": "pt"})
        return
    try:
        save_tensors(path, {k: v.detach().to("cpu").contiguous() for k, v in tensors.items()}, {"format": "pt"})
    except SafetensorError as error:  # what safetensors raises when the disk is full
        raise OSError(str(error)) from error


def manifest_of(directory: Path) -> dict[str, Any]:
    """{"version": 1, "files": {name: {"bytes", "sha256"}}} of every file in `directory` except the manifest."""
    names = sorted(p.name for p in directory.iterdir() if p.name != "manifest.json")
    return {"version": VERSION, "files": {n: _describe(directory / n) for n in names}}


def _describe(path: Path) -> dict[str, Any]:
    with open_member(path, error=JobError) as stream:
        size = os.fstat(stream.fileno()).st_size
        return {"bytes": size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def verify(directory: Path) -> str | None:
    """Why `directory` is not a whole checkpoint, in words; None when it is."""
    try:
        listed = read_json(directory / "manifest.json", JobError)
        if listed.get("version") != VERSION:
            return f"its manifest has version {listed.get('version')!r}, this program reads version {VERSION}"
        return None if listed == manifest_of(directory) else "its files are not those its manifest lists"
    except (JobError, OSError) as error:
        return str(error)


def list_checkpoints(root: Path) -> list[Path]:
    """The `step-N` directories under `root`, oldest first."""
    steps = [(int(m[1]), p) for p in (root.iterdir() if root.is_dir() else []) if (m := _STEP.fullmatch(p.name))]
    return [path for _, path in sorted(steps)]


def newest_whole(root: Path, on_broken: Callable[[Path, str], None]) -> Path | None:
    """The newest checkpoint that verifies. A newer one that does not is set aside as `step-N.broken` and reported."""
    for path in reversed(list_checkpoints(root)):
        why = verify(path)
        if why is None:
            return path
        on_broken(path, why)
        _set_aside(path)
    return None


def require_whole(directory: Path) -> None:
    """Raises JobError when `directory` is not a whole checkpoint."""
    if (why := verify(directory)) is not None:
        raise JobError(f"{directory} is not a usable training checkpoint: {why}.")


def read_checkpoint(directory: Path) -> TrainState:
    """A checkpoint that was verified."""
    small = [kind for kind in (*_KINDS, _IF_ANY) if kind not in _MAPPED]
    paths = {kind: directory / f"{kind}.safetensors" for kind in (*_MAPPED, *small)}
    mapped: dict[str, Mapping[str, Tensor]] = {kind: Shards(read_header(paths[kind])[0]) for kind in _MAPPED}
    loaded = {kind: load_tensors(paths[kind]) for kind in small if kind != _IF_ANY or paths[kind].exists()}
    return TrainState(**mapped, **loaded, meta=read_json(directory / "trainer.json", JobError))


def sweep(root: Path) -> list[str]:
    """Remove what an interrupted write left behind; returns the names removed."""
    left = [p for p in (root.iterdir() if root.is_dir() else []) if _UNFINISHED.match(p.name)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [p.name for p in left]


def keep_last(root: Path, count: int, also: Collection[int | None] = ()) -> None:
    """Remove all but the newest `count` checkpoints and those of the steps `also`.

    The rename comes first: a listed checkpoint is never half gone.
    """
    for path in list_checkpoints(root)[:-count]:
        if _step_of(path) not in also:
            _remove(path)


def remove_after(root: Path, step: int) -> None:
    """Remove the checkpoints of later steps, the newest first, so that the newest one left is whole at any instant."""
    for path in reversed(list_checkpoints(root)):
        if _step_of(path) > step:
            _remove(path)


def last_multiple(root: Path, every: int, below: int) -> int:
    """The newest step before `below` that has a checkpoint and is a multiple of `every`; 0 for none."""
    steps = (_step_of(path) for path in list_checkpoints(root))
    return max((step for step in steps if step < below and step % every == 0), default=0)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _set_aside(path: Path) -> None:
    """Keep a checkpoint that cannot be read under another name; only an older broken one of the same step is
    deleted."""
    wreck = path.with_name(f"{path.name}.broken")
    shutil.rmtree(wreck, ignore_errors=True)
    path.rename(wreck)
    fsync(path.parent)


def _remove(path: Path) -> None:
    doomed = path.with_name(f".{path.name}.tmp-removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    fsync(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def carried_files(source: Path) -> Callable[[Path], None]:
    """A function that writes the files of `source` into a directory; config.json as `training_config` makes it."""
    contents = {n: read_file(source / n, MAX_CARRIED_BYTES) for n in CARRIED if regular_file(source / n)}
    config = training_config(read_text_config(source))

    def write(directory: Path) -> None:
        write_json(directory / "config.json", config)
        for name, content in contents.items():
            (directory / name).write_bytes(content)

    return write


def training_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model in training: not quantized, and BF16, which is what activations are computed in."""
    named = "torch_dtype" if "torch_dtype" in config else "dtype"
    retained = {k: v for k, v in config.items() if k not in ("quantization_config", "dtype", "torch_dtype")}
    return {**retained, named: "bfloat16"}
