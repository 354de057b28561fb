"""Exports a checkpoint as a servable model directory, with the scales of the training.

There is no calibration pass. Under delayed scaling, the served scales are the input and weight scales of the next
training step, and weights are quantized from the same high-precision values by the same op. The served model therefore
computes bit for bit what the trainer's evaluation computed. Recipes with current scaling store no scales. A run whose
forward pass was not in FP8 is exported in BF16, and a run that trained an adapter as the files of the adapter. Weights
are read lazily, with one tensor in memory at a time.

    python -m fp8serve.train.export CHECKPOINT OUT    for callers that must not import torch
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve import __version__
from fp8serve.errors import Fp8ServeError, JobError
from fp8serve.fp8.recipe import Recipe, as_delayed
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, open_checkpoint
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.model.storage.files import atomic_directory, read_json
from fp8serve.model.storage.shards import SAFE_WEIGHTS, LazyTensors, load_tensors
from fp8serve.train.checkpoint import require_complete
from fp8serve.train.config import TrainConfig
from fp8serve.train.lora import write_adapter_files


def export(checkpoint_dir: Path | str, out: Path | str) -> Path:
    """Writes the servable directory `out` from a checkpoint `step-N/` atomically, and returns it.

    Raises JobError for a damaged checkpoint, ModelError if `out` exists, and ScalesError if a layer never ran.
    """
    source, out = Path(checkpoint_dir), Path(out)
    require_complete(source)
    meta = read_json(source / "trainer.json", JobError)
    config = TrainConfig.from_dict(meta["config"])
    if config.lora_rank:
        return _export_adapter(source, out, config, meta)
    extra = {"training.json": training_record(meta)}
    weights = _forward_weights(source, config)
    recipe = config.fp8_recipe
    if recipe is not None and not recipe.override_linear_precision[0]:  # the forward pass ran in FP8
        scales = serving_scales(source, recipe, meta)
        unquantized = meta.get("kept", ())
        write_calibrated(
            out, source, scales, weights=weights, high_precision=unquantized, format=config.format, extra_files=extra
        )
    else:
        base = read_json(source / "config.json", JobError)
        write_hf_directory(out, base, weights, copy_files_from=source, extra_files=extra)
    return out


def _export_adapter(source: Path, out: Path, config: TrainConfig, meta: Mapping[str, Any]) -> Path:
    with atomic_directory(out) as folder:
        write_adapter_files(folder, config, load_tensors(source / SAFE_WEIGHTS))
        (folder / "training.json").write_text(training_record(meta), encoding="utf-8")
    return out


_SCALING_OPTIONS = ("recipe", "recipe_options", "amax_history_len")


def training_record(meta: Mapping[str, Any]) -> str:
    """Returns the text of `training.json`, which describes the run. It has no times: equal runs give equal text."""
    progress = meta["progress"]
    record = {k: progress[k] for k in ("step", "trained_tokens", "skipped", "metrics")}
    if progress.get("returns"):  # recovery has changed the scaling
        record |= {"returns": progress["returns"], "trained_with": {k: meta["config"][k] for k in _SCALING_OPTIONS}}
    return (
        json.dumps({**record, "config": meta["identity"]["config"], "data": meta["identity"]["data"]}, indent=2) + "\n"
    )


def serving_scales(source: Path, recipe: Recipe | None, meta: Mapping[str, Any]) -> ScalingCheckpoint:
    """Returns the scales and amax histories in a checkpoint's scaling state, for all tensors that have had an update.

    If attention was trained in FP8, or the base model had scales of keys and values, the result includes keys and
    values. Their scales are those of an FP8 KV cache.
    """
    scaling_tensors = load_tensors(source / "scaling.safetensors") if as_delayed(recipe) is not None else {}
    names = sorted(n.removesuffix(".scale") for n in scaling_tensors if n.endswith(".scale"))
    served = [n for n in names if n.endswith((".k", ".v")) or f"{n.rpartition('.')[0]}.weight.scale" in scaling_tensors]
    steps = {n: int(scaling_tensors[f"{n}.steps"]) for n in served if scaling_tensors[f"{n}.steps"] > 0}
    # a history of length 1 has only the staging slot, which is empty between steps
    histories = {name: history for name in steps if bool((history := scaling_tensors[f"{name}.amax_history"]).any())}
    return ScalingCheckpoint(
        recipe=recipe,
        tensors={name: TensorScale(scaling_tensors[f"{name}.scale"], histories.get(name)) for name in steps},
        observations={"batches": meta["step"], "tokens": meta["progress"]["trained_tokens"], "tensors": steps},
        created_by=f"fp8serve {__version__} train",
    )


def _forward_weights(source: Path, config: TrainConfig) -> Mapping[str, Tensor]:
    """Returns the weights of the forward pass: FP32 if the model holds the masters, else BF16."""
    masters = open_checkpoint(source)
    if config.master_weights == "model":
        return masters
    return LazyTensors(masters, lambda name: masters[name].to(torch.bfloat16))


def main(arguments: list[str]) -> int:
    """Exports a checkpoint, prints an error if there is one, and returns the exit status."""
    try:
        export(*arguments)
    except Fp8ServeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
