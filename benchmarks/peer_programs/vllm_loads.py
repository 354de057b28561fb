"""Whether vLLM's own code loads a directory of FP8 weights, to the bit and without a GPU.

    PYTHON benchmarks/peer_programs/vllm_loads.py DIR

PYTHON: the interpreter of an environment with `vllm`, whose wheel for GPUs is enough. vLLM reads config.json, chooses a
scheme for each layer, builds its class of the model on the CPU, finds the files, and loads them. Every parameter is NaN
before. Then each tensor of the files is compared with its place in vLLM's parameters: rows of q, k, v and of gate, up
are joined there, and experts stacked. vLLM's check that every parameter was loaded is switched on.

Nothing is computed: vLLM's kernels need a GPU, and what it does to the weights for them after loading is left out. If
vLLM finds no kernel for this machine, this script makes one pass as supported and names it in the output. Exit status
1: vLLM refuses, a parameter is not filled, or a tensor is not in its place.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}  # before the imports

import torch
import vllm
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import PlatformEnum, current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

KERNEL = "a kernel of vLLM's that this machine does not have was taken for supported: "
CACHE_SCALE = re.compile(r"\.self_attn\.(?:[kv]_proj\.)?([kv]_scale)$")

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(\w+)")


def configuration(folder: Path) -> VllmConfig:
    strict = {"enable_weights_track": True}
    engine_args = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, load_format="safetensors",
        model_loader_extra_config=strict,
    )  # fmt: skip
    return engine_args.create_engine_config()


def let_every_kernel_be_built() -> set[str]:
    """Makes vLLM choose a kernel that this machine does not support if no other is left. Returns a set, to which the
    names of such kernels are added."""
    choose, kernel_names = kernels.choose_scaled_mm_linear_kernel, set[str]()

    def choose_any(config: object, possible_kernels: dict, **options: object) -> type:
        try:
            return choose(config, possible_kernels, **options)
        except ValueError:
            kernel = (possible_kernels.get(current_platform._enum) or possible_kernels[PlatformEnum.CUDA])[-1]
            kernel.is_supported = kernel.can_implement = classmethod(lambda *_: (True, None))
            kernel_names.add(kernel.__name__)
            return kernel

    kernels.choose_scaled_mm_linear_kernel = choose_any
    return kernel_names


def load(config: VllmConfig) -> tuple[nn.Module, dict[str, Tensor]]:
    """vLLM's model, and the tensors of the files as its iterator gives them."""
    loader = get_model_loader(config.load_config)
    assert isinstance(loader, DefaultModelLoader)
    with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        model = initialize_model(vllm_config=config)
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(255) if parameter.ndim else parameter.data.fill_(float("nan"))
    loader.load_weights(model, config.model_config)
    return model, dict(loader.get_all_weights(config.model_config, model))


def place(model: nn.Module, name: str) -> Tensor | None:
    """Returns the part of vLLM's parameters that holds the file's tensor `name`; None: there is none."""
    parameters = dict(model.named_parameters())
    name = CACHE_SCALE.sub(r".self_attn.attn.\1", name)
    if name in parameters:
        return parameters[name]
    return next((part for part in (*_of_an_expert(parameters, name), *_joined(model, parameters, name))), None)


def _of_an_expert(parameters: dict[str, nn.Parameter], name: str) -> Iterator[Tensor]:
    if match := EXPERT.fullmatch(name):
        around, expert, leaf, kind = match.groups()
        stack = "w2" if leaf in ("down_proj", "w2") else "w13"
        if (key := f"{around}.routed_experts.{stack}_{kind}") in parameters:
            part = parameters[key][int(expert)]
            yield part if stack == "w2" or not part.ndim else part.chunk(2)[leaf in ("up_proj", "w3")]


def _joined(model: nn.Module, parameters: dict[str, nn.Parameter], name: str) -> Iterator[Tensor]:
    owner, _, kind = name.rpartition(".")
    around, _, leaf = owner.rpartition(".")
    for joined, leaves in model.packed_modules_mapping.items():
        key = f"{around}.{joined}"
        if leaf in leaves and f"{key}.{kind}" in parameters:
            parameter, sizes = parameters[f"{key}.{kind}"], model.get_submodule(key).output_sizes
            scales = len(parameter) == len(sizes)  # one for each of the joined
            rows = [1 if scales else len(parameter) * size // sum(sizes) for size in sizes]
            yield parameter.split(rows)[leaves.index(leaf)]


def is_same(original: Tensor, loaded: Tensor) -> bool:
    """Returns whether type and bits are equal. A scalar may be [] or [1], and the scales of rows [N] or [N, 1]."""
    if original.dtype != loaded.dtype or original.numel() != loaded.numel():
        return False
    left, right = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (original, loaded))
    return torch.equal(left, right)


def is_rounded(original: Tensor, loaded: Tensor) -> bool:
    """Returns whether vLLM's parameter has a narrower type, and the value that is nearest in it."""
    return original.dtype == torch.float32 != loaded.dtype and is_same(original.to(loaded.dtype), loaded)


def unfilled(model: nn.Module) -> list[str]:
    """Parameters that still hold NaN. The scales of a cache may: vLLM takes 1 where a file has none."""
    attention = {name for name, module in model.named_modules() if _is_cache(module)}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.float().isnan().any() and name.rpartition(".")[0] not in attention
    ]


def _is_cache(module: nn.Module) -> bool:
    return isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)


def schemes(model: nn.Module) -> Counter[str]:
    """Returns how many layers have which method of vLLM's."""
    counts = Counter[str]()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            scheme = getattr(module, "scheme", None)
            names = [type(module).__name__, type(method).__name__, *([type(scheme).__name__] if scheme else [])]
            counts[" ".join(names)] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    config, kernel_names = configuration(folder), let_every_kernel_be_built()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as meeting:
        init_distributed_environment(1, 0, f"file://{meeting}/point", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model, weights = load(config)
    places = {name: place(model, name) for name in weights}
    other = [name for name, tensor in places.items() if tensor is not None and not is_same(weights[name], tensor)]
    rounded = [name for name in other if is_rounded(weights[name], places[name])]
    report = {
        "vllm": vllm.__version__,
        "class": type(model).__name__,
        "configuration": type(config.quant_config).__name__,
        "layers": dict(schemes(model)),
        "tensors": len(weights),
        "fp8": sum(t.dtype == torch.float8_e4m3fn for t in weights.values()),
        "without a place": [name for name, tensor in places.items() if tensor is None],
        "rounded by vLLM to its parameter's type": rounded,
        "other bits": [name for name in other if name not in rounded],
        "not filled": unfilled(model),
        "notes": [KERNEL + name for name in sorted(kernel_names)],
    }
    print(json.dumps(report, indent=1))
    sys.exit(any(report[wrong] for wrong in ("without a place", "other bits", "not filled")))


if __name__ == "__main__":
    main()
