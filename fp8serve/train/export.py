"""Turns a step checkpoint into a model directory to serve, with the scales that training kept.

There is no calibration pass. Under delayed scaling, the serving scales are the input and weight scales that the next
training step would have used, and weights are quantized from the same high-precision values by the same op. So the
served model computes what the trainer's own evaluation computed, bit for bit. Recipes that take scales from the tensors
need none stored. A run whose forward pass was not in FP8 gives a BF16 directory; a run that trained an adapter gives
the files of that adapter. Weights are read lazily, one tensor in memory at a time.

    python -m fp8serve.train.export CHECKPOINT OUT    for a process that loads no torch; an error is one sentence
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve import __version__
from fp8serve.errors import Fp8ServeError, JobError
from fp8serve.fp8.recipe import Recipe, delayed
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, open_checkpoint
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.model.storage.files import read_json, whole_directory
from fp8serve.model.storage.shards import SINGLE, load_tensors
from fp8serve.train.checkpoint import require_whole
from fp8serve.train.config import TrainConfig
from fp8serve.train.lora import write_result


def export(checkpoint_dir: Path | str, out: Path | str) -> Path:
    """Write the servable directory `out` from a checkpoint `step-N/`, whole or not at all, and return it.

    Raises JobError for a damaged checkpoint, ModelError when `out` is taken, ScalesError when a layer was never run.
    """
    source, out = Path(checkpoint_dir), Path(out)
    require_whole(source)
    meta = read_json(source / "trainer.json", JobError)
    config = TrainConfig.from_dict(meta["config"])
    if config.lora_rank:
        return _adapter(source, out, config, meta)
    extra = {"training.json": training_record(meta)}
    weights = _as_computed(source, config)
    recipe = config.fp8_recipe
    if recipe is not None and not recipe.override_linear_precision[0]:  # what the forward pass ran in
        scales = serving_scales(source, recipe, meta)
        retained = meta.get("kept", ())
        write_calibrated(
            out, source, scales, weights=weights, high_precision=retained, format=config.format, extra_files=extra
        )
    else:
        base = read_json(source / "config.json", JobError)
        write_hf_directory(out, base, weights, carry_from=source, extra_files=extra)
    return out


def _adapter(source: Path, out: Path, config: TrainConfig, meta: Mapping[str, Any]) -> Path:
    with whole_directory(out) as folder:
        write_result(folder, config, load_tensors(source / SINGLE))
        (folder / "training.json").write_text(training_record(meta), encoding="utf-8")
    return out


_SCALING = ("recipe", "recipe_options", "amax_history_len")


def training_record(meta: Mapping[str, Any]) -> str:
    """`training.json`: how the model came to be; no times, so that equal runs write equal directories."""
    progress = meta["progress"]
    retained = {k: progress[k] for k in ("step", "trained_tokens", "skipped", "metrics")}
    if progress.get("returns"):  # then the scales are not those that the job asked for
        retained |= {"returns": progress["returns"], "trained_with": {k: meta["config"][k] for k in _SCALING}}
    return (
        json.dumps({**retained, "config": meta["identity"]["config"], "data": meta["identity"]["data"]}, indent=2)
        + "\n"
    )


def serving_scales(source: Path, recipe: Recipe | None, meta: Mapping[str, Any]) -> ScalingCheckpoint:
    """The scaling state of a checkpoint as a scaling file: scales and histories of every tensor that ever ran.

    Of attention that was trained in FP8, it keeps the keys' and values', which are the scales of an FP8 KV cache.
    """
    stored = load_tensors(source / "scaling.safetensors") if delayed(recipe) is not None else {}
    names = sorted(n.removesuffix(".scale") for n in stored if n.endswith(".scale"))
    served = [n for n in names if n.endswith((".k", ".v")) or f"{n.rpartition('.')[0]}.weight.scale" in stored]
    ran = {n: int(stored[f"{n}.steps"]) for n in served if stored[f"{n}.steps"] > 0}
    return ScalingCheckpoint(
        recipe=recipe,
        tensors={n: TensorScale(stored[f"{n}.scale"], _history(stored[f"{n}.amax_history"])) for n in ran},
        observations={"batches": meta["step"], "tokens": meta["progress"]["trained_tokens"], "tensors": ran},
        created_by=f"fp8serve {__version__} train",
    )


def _history(history: Tensor) -> Tensor | None:
    """A history of length 1 is only the staging slot, which is empty between steps: nothing to store."""
    return history if bool(history.any()) else None


class _Rounded(Mapping[str, Tensor]):
    """The FP32 masters as the BF16 model that the trainer computed with."""

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        self._masters = masters

    def __getitem__(self, name: str) -> Tensor:
        return self._masters[name].to(torch.bfloat16)

    def __iter__(self) -> Iterator[str]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)


def _as_computed(source: Path, config: TrainConfig) -> Mapping[str, Tensor]:
    """The weights as the quantizer saw them: FP32 where the model holds the masters, else BF16."""
    masters = open_checkpoint(source)
    return masters if config.master_weights == "model" else _Rounded(masters)


def main(arguments: list[str]) -> int:
    """The exit status."""
    try:
        export(*arguments)
    except Fp8ServeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
