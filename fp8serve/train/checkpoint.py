"""Step checkpoints: directories `checkpoints/step-N/`, which are written atomically.

    model.safetensors       FP32 master weights under their Hugging Face names; for an adapter only its masters,
                            `{linear}.lora_A` and so on
    model.safetensors.index.json
                            the index of model.safetensors
    config.json, tokenizer  those of the base model, without its quantization; with the weights they make a model
                            directory
    optimizer.safetensors   `{parameter}.{exp_avg|exp_avg_sq|step}`; 8-bit moments as in `train.optimizer`
    scaling.safetensors     `{linear}.{input|weight|grad_output}.{scale|amax_history|nonfinite|steps}`; the same four
                            tensors for `{attention}.{k|v}`, or for all operands of an attention that is trained in FP8
    random.safetensors      the state of torch's random generator
    method.safetensors      the reference values of the method (`methods.interface`), if it has any
    trainer.json            step, cursor, token counts, the configuration and the environment of the run
    manifest.json           size and SHA-256 of every other file, written last

A checkpoint is written into a hidden directory beside the final one. Its files and the directory are fsynced, the
directory is renamed, and its parent is fsynced (`model.storage.files`). A kill at any instant leaves at most the hidden
directory, which the next start removes. Before a run resumes, it verifies the manifest, so that lost or changed bytes
are detected; it resumes from the newest checkpoint that is complete. There is no pickle. A checkpoint takes 12 bytes a
parameter, or 6 with 8-bit moments; each byte is written once and hashed once. The files are not sharded, because only
this program reads them; `export` writes sharded or quantized files.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.storage.files import atomic_directory, copied_files, fsync, read_json, write_json
from fp8serve.model.storage.opening import open_member
from fp8serve.model.storage.shards import Shards, load_tensors, read_header, save_tensors, write_index

VERSION = 1
_STEP = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"\.(step-\d+|model|model-step-\d+)\.tmp-")
# Each kind of tensors has its own file. `read_checkpoint` maps the first two, and loads the others.
_MAPPED_KINDS, _LOADED_KINDS = ("model", "optimizer"), ("scaling", "random", "method")


@dataclass
class TrainState:
    """The complete state of a run between two steps. `meta` is JSON; tensors have the same names as in the files.

    A tensor to be written may be `TensorParts`. In a state that was read, model and optimizer are views of their files.
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


def write_checkpoint(root: Path, state: TrainState, copy_model_files: Callable[[Path], None]) -> Path:
    """Writes `root/step-N` and returns its path. `copy_model_files(directory)` adds the base model's small files.

    Raises JobError if that step exists, and MachineError if the disk is full or not writable.
    """
    final = root / f"step-{state.step}"
    with atomic_directory(final, JobError) as directory:
        copy_model_files(directory)
        for kind in _MAPPED_KINDS + _LOADED_KINDS:
            if kind != "method" or state.method:
                save_tensors(directory / f"{kind}.safetensors", getattr(state, kind), {"format": "pt"})
        write_index(directory)
        write_json(directory / "trainer.json", {"version": VERSION, **state.meta})
        write_json(directory / "manifest.json", manifest_of(directory))
    return final


def manifest_of(directory: Path) -> dict[str, Any]:
    """Returns {"version": 1, "files": {name: {"bytes", "sha256"}}} of all files in `directory` except the manifest."""
    names = sorted(p.name for p in directory.iterdir() if p.name != "manifest.json")
    return {"version": VERSION, "files": {n: _describe(directory / n) for n in names}}


def _describe(path: Path) -> dict[str, Any]:
    with open_member(path, error=JobError) as stream:
        size = os.fstat(stream.fileno()).st_size
        return {"bytes": size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def find_damage(directory: Path) -> str | None:
    """Returns the reason why `directory` is not a complete checkpoint, or None if it is complete."""
    try:
        manifest = read_json(directory / "manifest.json", JobError)
        if manifest.get("version") != VERSION:
            return f"its manifest has version {manifest.get('version')!r}, this program reads version {VERSION}"
        return None if manifest == manifest_of(directory) else "its files differ from its manifest"
    except (JobError, OSError) as error:
        return str(error)


def list_checkpoints(root: Path) -> list[Path]:
    """Returns the `step-N` directories in `root`, oldest first."""
    steps = [(int(m[1]), p) for p in (root.iterdir() if root.is_dir() else []) if (m := _STEP.fullmatch(p.name))]
    return [path for _, path in sorted(steps)]


def newest_complete(root: Path, on_damaged: Callable[[Path, str], None]) -> Path | None:
    """Returns the newest complete checkpoint. Renames newer, damaged ones to `step-N.broken`, and reports them."""
    for path in reversed(list_checkpoints(root)):
        reason = find_damage(path)
        if reason is None:
            return path
        on_damaged(path, reason)
        damaged = path.with_name(f"{path.name}.broken")
        shutil.rmtree(damaged, ignore_errors=True)
        path.rename(damaged)
        fsync(path.parent)
    return None


def require_complete(directory: Path) -> None:
    """Raises JobError if `directory` is not a complete checkpoint."""
    if (reason := find_damage(directory)) is not None:
        raise JobError(f"{directory} is not a usable training checkpoint: {reason}.")


def read_checkpoint(directory: Path) -> TrainState:
    """Returns the state in a checkpoint, which the caller has verified."""
    paths = {kind: directory / f"{kind}.safetensors" for kind in _MAPPED_KINDS + _LOADED_KINDS}
    tensors: dict[str, Mapping[str, Tensor]] = {k: Shards(read_header(paths[k])[0]) for k in _MAPPED_KINDS}
    tensors |= {kind: load_tensors(paths[kind]) for kind in _LOADED_KINDS if paths[kind].exists()}
    return TrainState(**tensors, meta=read_json(directory / "trainer.json", JobError))


def remove_unfinished(root: Path) -> list[str]:
    """Removes the directories that interrupted writes left in `root`. Returns their names."""
    unfinished = [p for p in (root.iterdir() if root.is_dir() else []) if _UNFINISHED.match(p.name)]
    for path in unfinished:
        shutil.rmtree(path, ignore_errors=True)
    return [p.name for p in unfinished]


def keep_last(root: Path, count: int, needed_steps: Collection[int | None] = ()) -> None:
    """Removes all but the newest `count` checkpoints and those of `needed_steps`."""
    for path in list_checkpoints(root)[:-count]:
        if _step_of(path) not in needed_steps:
            _remove(path)


def remove_after(root: Path, step: int) -> None:
    """Removes the checkpoints after `step`, newest first, so that a kill leaves no gap."""
    for path in reversed(list_checkpoints(root)):
        if _step_of(path) > step:
            _remove(path)


def last_multiple(root: Path, every: int, below: int) -> int:
    """Returns the newest step before `below` that has a checkpoint and is a multiple of `every`, or 0."""
    steps = (_step_of(path) for path in list_checkpoints(root))
    return max((step for step in steps if step < below and step % every == 0), default=0)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _remove(path: Path) -> None:
    """Renames a checkpoint before it deletes the files, so that a listed checkpoint is always complete."""
    renamed = path.with_name(f".{path.name}.tmp-removed")
    shutil.rmtree(renamed, ignore_errors=True)
    path.rename(renamed)
    fsync(path.parent)
    shutil.rmtree(renamed, ignore_errors=True)


def model_file_writer(source: Path) -> Callable[[Path], None]:
    """Returns a function that writes the tokenizer and the configuration (`training_config`) of `source` into a
    directory."""
    contents, config = dict(copied_files(source)), training_config(read_text_config(source))

    def write(directory: Path) -> None:
        write_json(directory / "config.json", config)
        for name, content in contents.items():
            (directory / name).write_bytes(content)

    return write


def training_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the model in training: without quantization, and in BF16, the activations' dtype."""
    dtype_key = "torch_dtype" if "torch_dtype" in config else "dtype"
    others = {k: v for k, v in config.items() if k not in ("quantization_config", "dtype", "torch_dtype")}
    return {**others, dtype_key: "bfloat16"}
