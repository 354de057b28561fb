"""Estimates the memory of a model's weights, and chooses the device for `device="auto"`: a GPU if fp8serve can use it
and the weights fit, else the CPU.

The choice needs no torch and reads only the headers of weight files. It considers the total memory of a GPU, not the
free memory. If another process has filled the GPU, loading fails with an error that names the memory; moving the model
to the CPU without notice would make it a hundred times slower. The choice does not consider the memory of activations
in training.

The estimate follows from file headers and config.json. An FP8 recipe stores an element of a linear layer's weight in
one byte and has an FP32 scale for each row; a recipe of 4 bits needs half a byte, and one byte for 16 or 32 elements.
Embeddings, norms, routers and the `kv_b_proj` of latent attention are served in BF16, whatever dtype the file has.
Linear layers are recognised by names and shapes, because building the network would need torch. Tensors that do not
belong to the language model are not loaded and not counted.
"""

import logging
import math
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fp8serve.errors import ModelError
from fp8serve.fp8.cuda_support import Gpu, driver_version, incompatibility, library_path, read_build, visible_gpus
from fp8serve.fp8.recipe import HeadDtype, from_json, from_name
from fp8serve.model.config.decoder import read_any_config
from fp8serve.model.config.model_config import AnyConfig, ModelConfig
from fp8serve.model.config.wrappers import is_wrapper, text_tensor_name
from fp8serve.model.storage.files import present, read_json
from fp8serve.model.storage.headers import header_json, tensor_shape
from fp8serve.model.storage.memory import RETAINED_BYTES
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


HEAD = "lm_head.weight"
SCALES = "scales.safetensors"
BF16_BYTES, FP32_BYTES = 2, 4
_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HIGH_PRECISION = re.compile(r"embed|wpe|wte|router|\.gate\.|shared_expert_gate|kv_b_proj|bias|norm")
_SCALE = re.compile(r"scale")


@dataclass(frozen=True)
class WeightMemory:
    """Bytes of a model's weights: `served` while it is served, `peak` while it is loaded. On a CPU, `copied` of the
    served ones are converted or rearranged when they are loaded; the others are parts of the mapped files."""

    served: int
    peak: int
    copied: int


@dataclass(frozen=True)
class _Tensor:
    """The header entry of a tensor; `elements` is its number of elements after unpacking."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def owner(self) -> str:
        """The name of the layer, or of the experts in gpt-oss' files."""
        return self.name.rpartition(".")[0]

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * (8 if self.is_int4 else 2 if self.is_packed else 1)

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor holds elements of a weight in FP8 or in 4 bits."""
        return self.is_packed or (self.dtype in _FP8_DTYPES and _SCALE.search(self.name) is None)

    @property
    def is_packed(self) -> bool:
        """Whether a byte has two elements (formats/microscaling.py)."""
        return self.dtype == "U8" and _SCALE.search(self.name) is None

    @property
    def is_int4(self) -> bool:
        """Whether a number has eight elements, which are widened when they are read (formats/int4.py)."""
        return self.dtype == "I32" and self.name.endswith(".weight_packed")


def estimate_weight_memory(
    model_dir: Path, recipe: str, head: HeadDtype = "bf16", scales: str | None = None
) -> WeightMemory:
    """Estimates the memory of the weights under these `EngineOptions`. Raises ModelError if a file is damaged."""
    config = read_any_config(model_dir)
    tensors = list(_tensors(model_dir, config))
    serves_4_bits = _serves_4_bits(model_dir)
    # MXFP4 weights that config.json does not name as such, and all in INT4, are dequantized to BF16
    widened = {t.owner for t in tensors if t.is_int4 or (t.is_packed and not serves_4_bits)}
    quantized = [t for t in tensors if t.is_quantized and t.owner not in widened]
    owners = {t.owner for t in quantized}
    has_quantized_linears = any(_is_linear(t, config) for t in quantized)
    casts_linears = _casts_linears(model_dir, recipe, scales, has_quantized_linears)
    bits = _bits_of(recipe)
    served_bytes = cast_bytes = copied_bytes = 0
    for tensor in tensors:
        if head == "fp8" and tensor.name == HEAD:  # freed after it was cast
            continue
        as_stored = recipe == "stored" and tensor.owner in owners
        if _SCALE.search(tensor.name):
            is_byte = tensor.dtype in ("U8", "F8_E8M0", "F8_E4M3")
            size = (1 if is_byte else FP32_BYTES) * tensor.elements if as_stored else 0
            served_bytes += size
            copied_bytes += size if _is_rearranged(tensor, config) else 0
        elif _is_linear(tensor, config) and casts_linears:
            rows = math.prod(tensor.shape[:2] if len(tensor.shape) == 4 else tensor.shape[:-1])  # 4: gpt-oss' blocks
            row_scales = FP32_BYTES * rows if bits == 8 else 0
            cast_bytes += int(tensor.elements * bits / 8) + row_scales
        else:
            is_byte = as_stored and tensor.is_quantized
            size = math.prod(tensor.shape) if is_byte else tensor.elements * BF16_BYTES
            served_bytes += size
            is_mapped = (is_byte or tensor.dtype == "BF16") and not _is_rearranged(tensor, config)
            copied_bytes += 0 if is_mapped else size
    if head == "fp8" and isinstance(config, ModelConfig):  # FP8 elements, and an FP32 scale for each row
        head_bytes = config.vocab_size * (config.hidden_size + FP32_BYTES)
        served_bytes, copied_bytes = served_bytes + head_bytes, copied_bytes + head_bytes
    served_bytes, copied_bytes = served_bytes + cast_bytes, copied_bytes + cast_bytes
    # malloc retains some memory of the cast weights after they were packed
    return WeightMemory(served_bytes, served_bytes + min(cast_bytes, RETAINED_BYTES), copied_bytes)


def _casts_linears(model_dir: Path, recipe: str, scales: str | None, has_quantized_linears: bool) -> bool:
    """Whether loading casts every linear layer to FP8, with current or calibrated scales."""
    if recipe.lstrip().startswith("{"):
        parsed = from_json(recipe)
        return parsed is not None and not parsed.override_linear_precision[0]
    if recipe == "stored":
        return not has_quantized_linears and (scales is not None or present(model_dir / SCALES))
    return recipe != "bf16"


def _bits_of(recipe: str) -> float:
    """Returns the number of bits of an element of a weight that the recipe casts, with its share of block scales."""
    text = recipe.lstrip()
    parsed = from_json(text) if text.startswith("{") else from_name(recipe) if recipe != "stored" else None
    weight = None if parsed is None else parsed.specs.linear["weight"]
    return 8 if weight is None or not weight.is_4bit else 4 + 8 / (weight.block[1] or 1)


def _serves_4_bits(model_dir: Path) -> bool:
    """Whether config.json names a group of layers whose weights have 4 bits."""
    config = read_json(model_dir / "config.json", ModelError).get("quantization_config")
    side_car = model_dir / "hf_quant_config.json"
    if config is None and present(side_car):
        config = read_json(side_car, ModelError).get("quantization")
    if not isinstance(config, dict):
        return False
    groups = config.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    weights = [group.get("weights") for group in groups]
    has_4bit_group = any(isinstance(args, dict) and args.get("num_bits") == 4 for args in weights)
    layers = config.get("quantized_layers")
    described = [config, *(layers.values() if isinstance(layers, dict) else ())]
    algorithms = [str(layer.get("quant_algo")).upper() for layer in described if isinstance(layer, dict)]
    is_4bit = any(algorithm.endswith(("NVFP4", "MXFP4", "NVFP4_AWQ")) for algorithm in algorithms)
    return has_4bit_group or is_4bit or config.get("quant_method") == "mxfp4"


def _tensors(model_dir: Path, config: AnyConfig) -> Iterator[_Tensor]:
    """Yields the header entries of the tensors that are loaded."""
    wrapped = is_wrapper(read_json(model_dir / "config.json", ModelError))
    for path in _files(model_dir):
        for key, entry in header_json(path).tensors.items():
            name = text_tensor_name(key) if wrapped else key
            if name is not None and key != "__metadata__" and not _is_omitted(name, config):
                yield _Tensor(name, tensor_shape(path, key, entry), str(entry.get("dtype")))


def _files(model_dir: Path) -> list[Path]:
    """Returns the existing weight files. Errors in the index are reported when the model is loaded, not here."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if present(single) or not present(index):
        return [single] if single.is_file() else []
    weight_map = read_json(index, ModelError).get("weight_map")
    names = {Path(str(name)).name for name in weight_map.values()} if isinstance(weight_map, dict) else set()
    return [path for name in sorted(names) if (path := model_dir / name).is_file()]


def _is_omitted(name: str, config: AnyConfig) -> bool:
    """Whether the tensor is not loaded: it belongs to multi-token prediction, or is a head tied to the embedding."""
    if not isinstance(config, ModelConfig):
        return False
    layer = _LAYER.match(name)
    is_extra_layer = layer is not None and int(layer[1]) >= config.num_layers
    return is_extra_layer or (config.tie_word_embeddings and name == HEAD)


def _is_linear(tensor: _Tensor, config: AnyConfig) -> bool:
    """Whether an FP8 recipe casts the tensor."""
    is_matrix = len(tensor.shape) > 1 and min(tensor.shape) > 1
    return is_matrix and config.vocab_size not in tensor.shape and _HIGH_PRECISION.search(tensor.name) is None


def _is_rearranged(tensor: _Tensor, config: AnyConfig) -> bool:
    """Whether the tensor is copied even if its type stays: in gpt-oss' files, gate and up rows alternate, and experts
    in BF16 are transposed."""
    if not isinstance(config, ModelConfig) or config.experts is None or not config.experts.interleaved:
        return False
    is_down = tensor.dtype == "BF16" and tensor.name.endswith(".experts.down_proj")
    return is_down or ".experts.gate_up_proj" in tensor.name
