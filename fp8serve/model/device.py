"""Chooses the device for `device="auto"`: a GPU if fp8serve can use it and the weights fit, else the CPU.

The choice needs no torch and reads only the headers of weight files. It considers the total memory of a GPU, not the
free memory. If another process has filled the GPU, loading fails with an error that names the memory; moving the model
to the CPU without notice would make it a hundred times slower. The choice does not consider the memory of activations
in training.
"""

import logging
import runpy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fp8serve.fp8.cuda_support import Gpu, driver_version, incompatibility, library_path, read_build, visible_gpus
from fp8serve.fp8.recipe import HeadDtype
from fp8serve.model.weight_memory import estimate_weight_memory
from fp8serve.options import AUTO

log = logging.getLogger("fp8serve.device")
GIB = 1 << 30
WEIGHT_FACTOR = 1.2  # a model in use needs about WEIGHT_FACTOR * its weights' bytes + EXTRA_BYTES
EXTRA_BYTES = GIB


@dataclass(frozen=True)
class DeviceChoice:
    """A device, "cuda" or "cpu", and the reason for the choice as a clause. `has_gpu` is whether a GPU was found."""

    device: str
    reason: str
    has_gpu: bool = True

    @property
    def text(self) -> str:
        return f"device auto: {self.device}, because {self.reason}"


def choose_device(gpus: list[Gpu], obstacle: str | None, weight_bytes: int, processes: int = 1) -> DeviceChoice:
    """Chooses a device for weights of `weight_bytes` bytes and for `processes` processes, each of which needs a GPU.

    `obstacle` is a clause that says why fp8serve cannot use the first GPU, or None if it can.
    """
    if not gpus:
        return DeviceChoice("cpu", "the CUDA driver finds no GPU", has_gpu=False)
    if obstacle is not None:
        return DeviceChoice("cpu", obstacle)
    if len(gpus) < processes:
        return DeviceChoice("cpu", f"{processes} processes need a GPU each, and there are {len(gpus)}")
    gpu, needed = min(gpus[:processes], key=lambda gpu: gpu.memory), WEIGHT_FACTOR * weight_bytes + EXTRA_BYTES
    reason = f"{gpu.name} has {gpu.memory / GIB:.1f} GiB and the model needs about {needed / GIB:.1f} GiB"
    return DeviceChoice("cuda" if needed <= gpu.memory else "cpu", reason)


def resolve_device(
    device: str, model_dir: Path, recipe: str = "bf16", head: HeadDtype = "bf16", scales: str | None = None
) -> str:
    """Returns `device`, or the device that "auto" stands for, which is logged with the reason. The other arguments are
    the model and how it is loaded. Raises ModelError if a weight file is damaged."""
    if device != AUTO:
        return device
    choice = find_device(model_dir, recipe, head, scales)
    log.info("%s", choice.text)
    return choice.device


def find_device(
    model_dir: Path, recipe: str = "bf16", head: HeadDtype = "bf16", scales: str | None = None, processes: int = 1
) -> DeviceChoice:
    """Chooses a device of this machine. The arguments are those of `resolve_device`."""
    gpus = visible_gpus()
    obstacle = gpu_obstacle(gpus[0]) if gpus else None
    if not gpus or obstacle is not None:
        return choose_device(gpus, obstacle, 0, processes)
    return choose_device(gpus, None, estimate_weight_memory(model_dir, recipe, head, scales).served, processes)


def gpu_obstacle(gpu: Gpu) -> str | None:
    """Returns a clause that says why fp8serve cannot use `gpu`, or None if it can."""
    if torch_cuda_version() is None:
        return "this PyTorch is built without CUDA"
    path = library_path("fp8serve_cuda")
    if path is None:
        return "fp8serve is built without CUDA kernels (fp8serve doctor says why)"
    sentence = incompatibility(read_build(path), gpu.name, gpu.capability, driver_version())
    return None if sentence is None else sentence.partition(";")[0]


def torch_cuda_version() -> str | None:
    """Returns the CUDA version of the installed PyTorch, or None if it is built without CUDA. torch/version.py has it,
    and reading this file does not import torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    version: str | None = runpy.run_path(str(path)).get("cuda") if path.is_file() else None
    return version
