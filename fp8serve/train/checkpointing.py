"""Writes, retains and removes the checkpoints of a run, resumes a run from its newest one, and recovers a diverged run.

Only rank 0 accesses the disk, and all ranks know the newest checkpoint. A run resumes only with the same job; changes
of the environment are reported.

With on_divergence="return", a run that diverged returns to its last good checkpoint and changes its scaling:

    returns   scaling of the following steps
    0         as configured
    1         a margin larger by 2: a scale leaves four times as much headroom above the largest amax of the history
    2         current scaling: each tensor is scaled by its own amax, so no value saturates

A run keeps a scaling until it diverges again. Checkpoints record the number of returns. With recovery, the trainer
evaluates the run before it writes a checkpoint, so all checkpoints at multiples of `save_every` are good. A run that is
killed between a return and its next checkpoint repeats the divergence and the return, so it ends with the same bytes.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8serve import __version__
from fp8serve.errors import JobError
from fp8serve.fp8.ops import backends
from fp8serve.fp8.recipe import MAX_MARGIN
from fp8serve.model.formats.scales import FILE_NAME, fingerprint
from fp8serve.model.storage.files import COPIED_FILES, MAX_COPIED_FILE_BYTES, read_json
from fp8serve.model.storage.opening import is_regular_file, open_member
from fp8serve.model.stored_checkpoint import Checkpoint
from fp8serve.ranks import Ranks
from fp8serve.train import checkpoint, events, state
from fp8serve.train.config import LENGTH_OPTIONS, TrainConfig
from fp8serve.train.data import Cursor
from fp8serve.train.events import OnEvent
from fp8serve.train.memory import moments_bytes
from fp8serve.train.optimizer import has_blocks
from fp8serve.train.run import Progress, TrainingRun, ValidationLosses

if TYPE_CHECKING:
    from fp8serve.train.sharded.shards import TensorGatherer


def with_template_date(config: TrainConfig, latest: Path | None) -> TrainConfig:
    """Returns the configuration with a template date: its own, else the checkpoint's, else today."""
    if config.template_date is not None:
        return config
    saved = read_json(latest / "trainer.json", JobError)["config"].get("template_date") if latest else None
    return dataclasses.replace(config, template_date=saved or date.today().isoformat())


def identity_of(config: TrainConfig, data: str, latest: Path | None) -> dict[str, Any]:
    """Returns {"config", "data", "model"}, which identify a run. If the base model no longer exists, "model" comes from
    the checkpoint `latest`. `data` is the fingerprint of the data."""
    model = model_digest(Path(config.model))
    if model is None and latest is not None:
        model = read_json(latest / "trainer.json", JobError)["identity"].get("model")
    return {"config": config.identity(), "data": data, "model": model}


def model_digest(directory: Path) -> str | None:
    """Returns a digest (32 hex digits) of the files that a run reads from its base model: weights, scales, tokenizer.
    Returns None if the directory has no model."""
    if not (directory / "config.json").exists():
        return None
    digest = hashlib.sha256(fingerprint(directory).encode())
    for name in sorted({*COPIED_FILES, FILE_NAME}):
        if is_regular_file(directory / name):
            limit = None if name == FILE_NAME else MAX_COPIED_FILE_BYTES
            with open_member(directory / name, limit) as file:
                digest.update(f"{name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def required_disk_bytes(base: Checkpoint, config: TrainConfig) -> int:
    """Returns the bytes on the disk that a run of all weights of `base` needs at least: those of its checkpoints and of
    its result, and with grpo of the reference model. Scales and small files are not counted.

    The configuration says how many checkpoints exist at once only if it has both `save_every` and `max_steps`.
    """
    moments = 0
    for shape in base.shapes.values():
        elements = math.prod(shape)
        is_8bit = config.optimizer_states == "8bit" and len(shape) >= 2 and has_blocks(elements)
        moments += moments_bytes(elements, is_8bit)
    checkpoint_bytes = torch.float32.itemsize * base.num_weights + moments
    recipe, fp8_weights = config.fp8_recipe, 0
    if recipe is not None and not recipe.override_linear_precision[0]:
        fp8_linears = set(base.linears).difference(base.high_precision_linears)
        fp8_weights = sum(math.prod(base.shapes[f"{linear}.weight"]) for linear in fp8_linears)
    result_bytes = torch.bfloat16.itemsize * (base.num_weights - fp8_weights) + fp8_weights
    reference_bytes = result_bytes if config.method == "grpo" and config.effective_beta else 0
    steps = _min_steps(config)
    written = -(-steps // config.save_every) if steps and config.save_every else 1
    if written > config.keep_last:  # an old checkpoint is removed after the new one is complete
        return (config.keep_last + 1) * checkpoint_bytes + reference_bytes
    return written * checkpoint_bytes + result_bytes + reference_bytes


def _min_steps(config: TrainConfig) -> int | None:
    """Returns the least number of steps of a run, if the configuration determines it. With `patience` a run may end
    that many validations after the first one. Without `max_steps` it may end sooner, with its data."""
    if config.max_steps is None or config.patience is None or config.eval_every is None:
        return config.max_steps
    return min(config.max_steps, (1 + config.patience) * config.eval_every)


def check_same_job(identity: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> None:
    """Raises JobError that names the first difference between a run's identity and the one in the checkpoint `path`.

    Options that an older version did not record are not compared.
    """
    for key, value in identity["config"].items():
        if key not in LENGTH_OPTIONS and key in saved["config"] and saved["config"][key] != value:
            raise JobError(
                f"{path} was written with {key}={saved['config'][key]!r}, and this job has {value!r}; "
                "use the same value or another output directory."
            )
    if identity["model"] != saved.get("model", identity["model"]):
        raise JobError(f"{path} was trained from another model than this job's; use another output directory.")
    if identity["data"] != saved["data"]:
        raise JobError(f"The training data differ from those of {path}; use another output directory.")


class Checkpointer:
    """Writes and removes the checkpoints in `out/checkpoints`. `latest` is the newest one, or None.

    The constructor removes unfinished directories and renames damaged checkpoints.
    """

    def __init__(self, out: Path, ranks: Ranks, on_event: OnEvent) -> None:
        self.root = out / "checkpoints"
        self._saved_at = time.monotonic()
        self._on_event = on_event
        self.latest = ranks.run_on_first(self._clean_up)

    def _clean_up(self) -> Path | None:
        self.root.mkdir(parents=True, exist_ok=True)
        for root in (self.root, self.root.parent):
            if removed := checkpoint.remove_unfinished(root):
                text = f"Removed {len(removed)} unfinished directories"
                self._on_event(events.message("sweep", text, names=removed))
        return checkpoint.newest_complete(self.root, self._report_damaged)

    def _report_damaged(self, path: Path, reason: str) -> None:
        text = f"{path.name} is damaged ({reason}) and was renamed; the run continues from the checkpoint before it"
        self._on_event(events.message("checkpoint_broken", text, level="warn"))

    def saved_returns(self) -> int:
        """Returns the number of returns (see the module) that the newest checkpoint records, or 0 without one."""
        if self.latest is None:
            return 0
        return int(read_json(self.latest / "trainer.json", JobError)["progress"].get("returns", 0))

    def is_due(self, run: TrainingRun) -> bool:
        """Whether a checkpoint is due after the current step."""
        if run.config.result == "best" and run.progress.held_out.best_step == run.progress.step:
            return True
        if run.config.save_every is not None:
            return run.is_due(run.config.save_every)
        return time.monotonic() - self._saved_at >= 60 * run.config.save_minutes

    def save(self, run: TrainingRun) -> Path:
        """Writes the checkpoint of the current step, unless it exists, and returns it. Removes old checkpoints."""
        if self.latest is None or self.latest.name != f"step-{run.progress.step}":
            if run.setup.sharded is None:
                self.latest = run.ranks.run_on_first(lambda: self._write(run))
            else:
                gatherer = state.tensor_gatherer(run.setup.sharded, run.setup.optimizer)
                self.latest = gatherer.run_on_first(lambda: self._write(run, gatherer))
            self._saved_at = time.monotonic()
        run.ranks.run_on_first(lambda: self._remove_old(run))
        return self.latest

    def _write(self, run: TrainingRun, gatherer: "TensorGatherer | None" = None) -> Path:
        setup, progress = run.setup, run.progress
        meta = {
            "step": progress.step,
            "config": json.loads(run.config.to_json()),
            "progress": {**dataclasses.asdict(progress), "total_steps": setup.total_steps},
            "identity": run.identity,
            "environment": environment(run.config),
            "kept": setup.high_precision_linears,
        }
        saved = state.capture(setup.forward, setup.optimizer, setup.reference_tensors(), meta, gatherer)
        path = checkpoint.write_checkpoint(self.root, saved, setup.copy_model_files)
        self._on_event(events.checkpoint(str(path), {**progress.metrics, "step": progress.step}))
        return path

    def _remove_old(self, run: TrainingRun) -> None:
        needed = {run.progress.held_out.best_step if run.config.result == "best" else None}
        if run.may_recover:
            good = checkpoint.last_multiple(self.root, run.save_every, run.progress.step + 1)
            needed |= {good, self._best_step_at(run, good)}
        checkpoint.keep_last(self.root, run.config.keep_last, needed)

    def _best_step_at(self, run: TrainingRun, step: int) -> int | None:
        """Returns the best step that the checkpoint of `step` recorded, or None unless the option result is "best"."""
        if run.config.result != "best" or step == 0:
            return None
        saved = read_json(self.root / f"step-{step}" / "trainer.json", JobError)["progress"]["held_out"]["best_step"]
        return None if saved is None else int(saved)

    def remove_after_good(self, run: TrainingRun) -> int:
        """Removes the checkpoints after the last good one. Returns the step of that one, or 0 if there is none."""
        good = checkpoint.last_multiple(self.root, run.save_every, run.progress.step)
        checkpoint.remove_after(self.root, good)
        return good


def resume(run: TrainingRun, path: Path) -> None:
    """Loads the state and the progress of a verified checkpoint into `run`, except `run.progress.returns`.

    Raises JobError if the checkpoint belongs to another job, or has more steps than the job.
    """
    saved = checkpoint.read_checkpoint(path)
    check_same_job(run.identity, saved.meta["identity"], path)
    _report_changes(run, saved.meta)
    values = dict(saved.meta["progress"])
    # Checkpoints of older versions have neither "returns" nor "held_out".
    saved_config = config_after(run.job_config, values.pop("returns", 0))
    if saved_config != run.config:  # the run has returned (see the module) since it wrote this checkpoint
        saved.scaling = convert_scaling(saved.scaling, saved_config, run.config)
        values["skipped_in_a_row"] = 0
    load_state(run, saved)
    run.setup = run.setup.with_loaded_reference(saved.method)
    held_out = ValidationLosses(**values.pop("held_out", {}))
    values |= {"cursor": Cursor(**values["cursor"]), "held_out": held_out, "returns": run.progress.returns}
    run.progress = Progress(**values)
    step = run.progress.step
    run.on_event(events.message("resumed", f"Resumed from step {step}", step=step))


def load_state(run: TrainingRun, saved: checkpoint.TrainState) -> None:
    """Loads the weights, moments, scales and random state of a checkpoint."""
    state.restore(run.setup.forward, run.setup.optimizer, saved, run.setup.sharded)


def _report_changes(run: TrainingRun, meta: dict[str, Any]) -> None:
    saved_total, total = meta["progress"].get("total_steps"), run.setup.total_steps
    if total < meta["step"]:
        raise JobError(
            f"The run in {run.out} is already at step {meta['step']}, and this job ends at step {total}; "
            "raise max_steps or epochs."
        )
    if saved_total is not None and total != saved_total:
        text = f"The run now ends at step {total} instead of {saved_total}; its learning rate follows the new length"
        run.on_event(events.message("length_changed", text, level="warn", total_steps=total))
    current, saved = environment(run.config), {"compile": False, **meta["environment"]}  # new in 0.1.0
    if changed := [name for name in current if current[name] != saved.get(name)]:
        text = f"{', '.join(changed)} changed since the checkpoint was written: the result may differ in its last bits"
        run.on_event(events.message("machine_changed", text, level="warn"))


def environment(config: TrainConfig) -> dict[str, Any]:
    """Returns the software and hardware on which a result's bits depend. A resumed run reports changes of it."""
    return {
        "torch": torch.__version__,
        "fp8serve": __version__,
        "threads": torch.get_num_threads(),
        "device": config.device,
        "compile": config.compile,
        "kernels": backends(torch.device(config.device).type),
    }


MARGIN_INCREASE = 2
_SHARED = ("fp8_format", "override_linear_precision", "fp8_dpa", "fp8_mha")  # parameters of both recipes


def recovery_configs(config: TrainConfig) -> list[TrainConfig]:
    """Returns the job's configuration after 0, 1, ... returns. Recipes other than delayed have only the first."""
    if config.recipe != "delayed" or config.lora_rank is not None:
        return [config]
    margin = _margin(config)
    options = dict(config.recipe_options)
    larger = {**options, "margin": min(margin + MARGIN_INCREASE, MAX_MARGIN)}
    shared = {name: value for name, value in options.items() if name in _SHARED}
    configs = [config]
    if margin < MAX_MARGIN:
        configs.append(dataclasses.replace(config, recipe_options=larger, on_divergence="fail"))
    current = dataclasses.replace(
        config, recipe="current", recipe_options=shared, amax_history_len=None, on_divergence="fail"
    )
    return [*configs, current]


def config_after(config: TrainConfig, returns: int) -> TrainConfig:
    """Returns the job's configuration after this number of returns."""
    configs = recovery_configs(config)
    return configs[min(returns, len(configs) - 1)]


def describe_scaling(config: TrainConfig) -> str:
    return f"margin {_margin(config)}" if config.recipe == "delayed" else f"{config.recipe} scaling"


def convert_scaling(scaling: Mapping[str, Tensor], source: TrainConfig, target: TrainConfig) -> dict[str, Tensor]:
    """Returns the scaling state of a checkpoint with the configuration `source` for a run with `target`."""
    if target.recipe != "delayed":
        return {}
    factor = 2.0 ** (_margin(source) - _margin(target))  # a power of two, so the product is exact
    return {name: tensor * factor if name.endswith(".scale") else tensor for name, tensor in scaling.items()}


def _margin(config: TrainConfig) -> int:
    return int(config.recipe_options.get("margin", 0))


def return_to_good_checkpoint(run: TrainingRun, checkpointer: Checkpointer, reason: str, *, is_repeated: bool) -> int:
    """Removes the checkpoints after the last good one, and returns the new number of returns.

    Raises JobError if all scalings have been tried. `is_repeated` means that the weights of the previous return's
    checkpoint had already diverged. The run then returns to an earlier checkpoint, and this return is not counted.
    """
    configs, progress = recovery_configs(run.job_config), run.progress
    returns = progress.returns + (not is_repeated)
    if returns == len(configs):
        names = " nor ".join(describe_scaling(config) for config in configs[1:])
        raise JobError(f"{reason}, and neither {names} helped; lower lr ({run.config.lr}), or check the data.")
    step = run.ranks.run_on_first(lambda: checkpointer.remove_after_good(run))
    scaling = describe_scaling(configs[returns])
    text = f"{reason}. The run returns from step {progress.step} to step {step} and continues with {scaling}"
    details = {"step": step, "from_step": progress.step, "returns": returns, "tried": scaling}
    run.on_event(events.message("returned", text, level="warn", **details))
    return returns
