"""Reports the hardware and software of this machine and how fp8serve uses them. `fp8serve doctor` prints the report.

A recipe runs "natively" if compiled kernels of fp8serve compute all its operations on the CPU. Otherwise the PyTorch
reference computes them with the same numbers, but slower. Values that cannot be determined are null.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8serve import __version__
from fp8serve.errors import ModelError
from fp8serve.model.storage.memory import free_memory

_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512vbmi", "amx_bf16", "asimd", "bf16")
_MIN_FREE_DISK_BYTES = 1 << 30  # for checkpoints


def examine(
    data_dir: Path | None = None, model: str | None = None, check: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Returns the report of `fp8serve doctor`. Its `problems` are sentences about faults that prevent fp8serve from
    working or from running `model`. Its `notes` are sentences about causes of slowness.

    If `check` is given, all kernels are checked now, and `check` is called with the name of each. Kernels that failed
    this or an earlier check are disabled in this process, as in a server.
    """
    import torch

    from fp8serve.fp8 import ops
    from fp8serve.server.data_directory import data_home

    checks, kernel_problems = kernel_checks(check)
    kernels = ops.backends()
    disk = _disk(data_dir or data_home())
    cpu_name = _proc_value("cpuinfo", "model name") or platform.processor() or platform.machine()
    nvcc = shutil.which("nvcc")
    gpus, library = _gpus(), cuda_library()
    gpu_problems, gpu_notes = about_gpus(gpus, library)
    model_info, serving, model_problems = _model(model)
    return {
        "fp8serve": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": {"version": torch.__version__, "cuda": _cuda_state(), "threads": torch.get_num_threads()},
        "cpu": {"name": cpu_name, "cores": os.cpu_count(), "instruction_sets": instruction_sets()},
        "gpus": gpus,
        "kernels": kernels,
        "numerics_classes": _numerics_classes(kernels, gpus),
        "cuda_kernels": ops.backends("cuda") if torch.cuda.device_count() else {},
        "cuda_library": library,
        "kernel_checks": checks,
        "recipes": _recipes(ops.recipe_ops(), kernels, has_gpu=bool(gpus)) | {"bf16": _BF16},
        "compilers": {"c++": _compiler(), "nvcc": nvcc if nvcc and _first_line(nvcc, "--version") else None},
        "memory": _memory(),
        "disk": disk,
        "model": model_info,
        "serving": serving,
        "problems": _problems(disk) + gpu_problems + model_problems + (kernel_problems if check else []),
        "notes": gpu_notes + ([] if check else kernel_problems),
    }


def _numerics_classes(kernels: dict[str, str], gpus: list[dict[str, Any]]) -> dict[str, list[dict[str, object]]]:
    """Returns the numerics classes of this CPU and of each kind of GPU, by the name of the column in the table."""
    from fp8serve.fp8 import ops
    from fp8serve.fp8.numerics_classes import REFERENCE, chip_column, describe_column

    level = ops.cpu_isa() or REFERENCE
    reference_ops = {op for op, kernel in kernels.items() if kernel.startswith("reference")}
    columns = {level: describe_column(level, reference_ops)}
    columns |= {chip: describe_column(chip, set()) for chip in (chip_column(gpu["architecture"]) for gpu in gpus)}
    return {name: list(rows) for name, rows in columns.items()}


def kernel_checks(progress: Callable[[str], None] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the results of the kernel checks, one for each device, and sentences about disabled kernels.

    If `progress` is given, the kernels are checked now. Otherwise the results are those of the last check; `date` is
    null if there was none.
    """
    import torch

    from fp8serve.fp8 import selfcheck

    results, problems = [], []
    for device in [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]:
        machine = selfcheck.machine_of(device)
        if machine is None:
            continue
        verdict = (
            selfcheck.stored_verdict(machine)
            if progress is None
            else selfcheck.check_and_store(device, machine, progress)
        )
        if verdict is not None and verdict.bad:
            selfcheck.switch_off(device, verdict.bad)
            problems.append(selfcheck.warning_text(verdict))
        if verdict is not None and verdict.unfinished:
            problems.append(f"The check of the kernels on {machine.name} did not finish: {verdict.unfinished}.")
        kernels = {} if verdict is None else {name: finding.text() for name, finding in verdict.kernels.items()}
        date = None if verdict is None else verdict.date
        results.append({"device": str(device), "name": machine.name, "date": date, "kernels": kernels})
    return results, problems


_BF16 = {"runs": "torch", "why": "no FP8: torch's own high-precision kernels"}


def _model(name: str | None) -> tuple[dict[str, str] | None, dict[str, Any] | None, list[str]]:
    """Returns a description of the model, how it is served, and its problems. Reads no weights."""
    from fp8serve.hub import find_model
    from fp8serve.model.config.decoder import read_any_config
    from fp8serve.model.config.model_config import computed_by

    if name is None:
        return None, None, []
    try:
        path = find_model(name)
        config, serving = read_any_config(path), _serving(path)
    except ModelError as error:
        return None, None, [str(error)]
    info = {"path": str(path), "architecture": config.architecture, "computed_by": computed_by(config)}
    return info, serving, []


def _serving(model_dir: Path) -> dict[str, Any]:
    """Returns the device on which a server would run the model, and the options that its engine would have there by
    default (engine/defaults.py). An option that the engine measures when it loads the model is null. Reads no
    weights."""
    import torch

    from fp8serve.engine.defaults import estimated_options, graph_sizes
    from fp8serve.engine.loading import derive_kv_cache_dtype
    from fp8serve.engine.memory import cache_bytes
    from fp8serve.engine.options import EngineOptions
    from fp8serve.fp8.cuda_support import visible_gpus
    from fp8serve.model.config.decoder import read_any_config
    from fp8serve.model.config.model_config import ModelConfig
    from fp8serve.model.device import estimate_weight_memory, find_device
    from fp8serve.model.parity import describe_invariant_mode, unsupported_in_invariant_mode

    choice, config = find_device(model_dir, "stored"), read_any_config(model_dir)
    options, is_on_gpu = EngineOptions(device=choice.device), choice.device != "cpu"
    cache_dtype = derive_kv_cache_dtype(model_dir, options, has_stored_weights=True)
    invariant = None  # for a model that does not generate
    if isinstance(config, ModelConfig):
        unsupported = unsupported_in_invariant_mode(choice.device, config, uses_mx=False)
        invariant = f"not supported: {unsupported}" if unsupported else describe_invariant_mode(choice.device)
    if is_on_gpu and isinstance(config, ModelConfig):
        weights = estimate_weight_memory(model_dir, "stored").served
        token_bytes = cache_bytes(config, 1, torch.float8_e4m3fn if cache_dtype == "fp8" else torch.bfloat16)
        options = estimated_options(options, visible_gpus()[0].memory, weights, token_bytes, config.max_length)
    return {
        "device": choice.device,
        "reason": choice.reason,
        "max_num_seqs": options.num_seqs,
        "max_batch_tokens": options.step_tokens,
        "max_prefill_tokens": None if is_on_gpu else options.prefill_tokens,
        "kv_cache_dtype": cache_dtype,
        "gpu_memory": options.gpu_memory,
        "threads": options.threads or torch.get_num_threads(),
        "cuda_graphs": graph_sizes(options.num_seqs) if is_on_gpu else [],
        "invariant": invariant,
    }


# How recipes run where a GPU has no kernels for them.
_ON_GPU = {
    "mxfp8": "on a GPU torch widens both operands to BF16, and mm multiplies them",
    "nvfp4": "on a GPU torch casts to values in BF16, and mm multiplies them",
}


def _recipes(needed: dict[str, tuple[str, ...]], kernels: dict[str, str], has_gpu: bool) -> dict[str, dict[str, str]]:
    """Returns how each recipe runs, by name. `needed` are the ops of its linear layers."""
    recipes = {}
    for name, ops in needed.items():
        if reference_ops := [op for op in ops if "reference" in kernels[op]]:
            recipes[name] = {"runs": "on the reference", "why": f"no compiled kernel for {', '.join(reference_ops)}"}
        else:
            recipes[name] = {"runs": "natively", "why": f"compiled kernels serve {', '.join(ops)}"}
    for name, how in _ON_GPU.items() if has_gpu else ():
        recipes[name]["why"] += f"; {how}"
    return recipes


def _cuda_state() -> str:
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else f"CUDA {torch.version.cuda}, no usable device"


def _gpus() -> list[dict[str, Any]]:
    import torch

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": p.name, "architecture": f"sm_{p.major}{p.minor}", "memory": p.total_memory} for p in properties]


def cuda_library() -> dict[str, Any]:
    """Returns the path and the architectures of the library of CUDA kernels. `state` says whether the library is loaded
    and why not."""
    import torch

    from fp8serve.fp8.cuda_support import library_path, read_build

    path = library_path("fp8serve_cuda")
    if path is None:
        return {"path": None, "architectures": [], "runtime": None, "state": f"not built: {_why_not_built()}"}
    build = read_build(path)
    info = {"path": str(path), "architectures": list(build.architectures), "runtime": build.runtime}
    if torch.version.cuda is None:
        return info | {"state": "built, but this torch is built without CUDA and cannot load it"}
    return info | {"state": "loaded"}


MIN_NVCC_VERSION = (12, 8)  # the first version that supports sm_100a and sm_120a


def _why_not_built() -> str:
    import torch

    path = shutil.which("nvcc")
    if path is None:
        return "nvcc is not on the PATH; install CUDA 12.8 or newer and build fp8serve again"
    version = nvcc_version(path)
    if version is None:
        return f"{path} does not say its version"
    if version < MIN_NVCC_VERSION:
        return f"{path} is CUDA {version[0]}.{version[1]}, and 12.8 or newer is needed"
    if torch.version.cuda is None:
        return "this torch is built without CUDA; `make wheel FP8SERVE_CUDA=ON` builds it for another machine"
    return "fp8serve was installed without it; build it again where nvcc is"


def nvcc_version(path: str) -> tuple[int, int] | None:
    """Returns the version of an nvcc, such as (13, 0), or None if it cannot be determined."""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _proc_value(file: str, key: str) -> str:
    """Returns the first value of a key in a file of /proc, or "" if the file or the key does not exist."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")


def instruction_sets() -> list[str]:
    """Returns the vector extensions of this processor that the kernels of fp8serve or torch use."""
    flags = f"{_proc_value('cpuinfo', 'flags')} {_proc_value('cpuinfo', 'Features')}".split()
    return [name for name in _INSTRUCTION_SETS if name in flags]


def _first_line(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next((line.strip() for line in result.stdout.splitlines() if line.strip()), None)


def _compiler() -> str | None:
    """Returns the C++ compiler that a build would use: $CXX, as in CMake, or one with a usual name."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((line for name in names if shutil.which(name) and (line := _first_line(name, "--version"))), None)


def _memory() -> dict[str, int]:
    """Returns the total and the available memory in bytes, within the limit of a container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = min(total, _read_number("/sys/fs/cgroup/memory.max") or total)
    return {"total": total, "available": min(total, free_memory())}


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _disk(path: Path) -> dict[str, Any]:
    existing = next(p for p in (path, *path.parents) if p.exists())
    return {"path": str(path), "free": shutil.disk_usage(existing).free, "writable": os.access(existing, os.W_OK)}


def about_gpus(gpus: list[dict[str, Any]], library: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns sentences about GPUs on which the library cannot run, and about GPUs on which it is slow."""
    from fp8serve.fp8.cuda_support import CudaBuild, driver_version, incompatibility, slowdown

    build, driver = CudaBuild(tuple(library["architectures"]), library.get("runtime")), driver_version()
    chips = [(gpu["name"], int(gpu["architecture"].removeprefix("sm_"))) for gpu in gpus]
    refusals = [incompatibility(build, name, chip, driver) for name, chip in chips]
    notes = [slowdown(build, name, chip) for name, chip in chips]
    return [text for text in refusals if text], [text for text in notes if text]


def _problems(disk: dict[str, Any]) -> list[str]:
    problems = []
    if sys.byteorder != "little":
        problems.append("this machine is big-endian; safetensors files and fp8serve's kernels are little-endian.")
    if not disk["writable"]:
        problems.append(f"the data directory {disk['path']} cannot be written; choose another with --data-dir.")
    if disk["free"] < _MIN_FREE_DISK_BYTES:
        problems.append(f"only {disk['free'] >> 20} MiB are free at {disk['path']}; checkpoints will not fit.")
    return problems
