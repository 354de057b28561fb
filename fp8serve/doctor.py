"""What this machine has and how fp8serve uses it, as plain data: `examine()`; the command prints it.

"Natively" means that compiled kernels of ours serve every operation of a recipe on the CPU; otherwise the PyTorch
reference does, with the same numbers and slower. Nothing here changes the machine, and nothing is guessed: values that
cannot be read are null.
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

_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512vbmi", "amx_bf16", "asimd", "bf16")
_LEAST_DISK = 1 << 30


def examine(
    data_dir: Path | None = None, model: str | None = None, check: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Everything `fp8serve doctor` shows; `problems` lists sentences about what keeps fp8serve from working, or from
    computing `model`, and `notes` those about what makes it slow.

    With `check` every kernel is tried now, and it is told what is being tried. Kernels that this or an earlier check
    has found wrong are switched off in this process, as in one that serves.
    """
    import torch

    from fp8serve.fp8 import ops

    checks, wrong = kernel_checks(check)
    kernels = ops.backends()
    disk = _disk(data_dir or _data_home())
    gpus, library = _gpus(), cuda_library()
    refused, slow = about_gpus(gpus, library)
    computed, unknown = _model(model)
    return {
        "fp8serve": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": {"version": torch.__version__, "cuda": _cuda_state(), "threads": torch.get_num_threads()},
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count(), "instruction_sets": instruction_sets()},
        "gpus": gpus,
        "kernels": kernels,
        "numerics": {op: kernel["numerics"] for op, kernel in ops.cpu_kernels().items()},
        "cuda_kernels": ops.backends("cuda") if torch.cuda.device_count() else {},
        "cuda_library": library,
        "kernel_checks": checks,
        "recipes": {name: _recipe(needed, kernels) for name, needed in ops.recipe_ops().items()} | {"bf16": _BF16},
        "compilers": {"c++": _compiler(), "nvcc": _nvcc()},
        "memory": _memory(),
        "disk": disk,
        "model": computed,
        "problems": _problems(disk) + refused + unknown + (wrong if check else []),
        "notes": slow + ([] if check else wrong),
    }


def kernel_checks(progress: Callable[[str], None] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """(for each device with kernels of ours what a check has found, sentences about kernels that are switched off).

    With `progress` the check is made now, else it is one that was kept; `date` is null where there is none.
    """
    import torch

    from fp8serve.fp8 import selfcheck

    result, wrong = [], []
    for device in [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]:
        machine = selfcheck.machine_of(device)
        if machine is None:
            continue
        verdict = (
            selfcheck.stored_verdict(machine) if progress is None else selfcheck.examine(device, machine, progress)
        )
        if verdict is not None and verdict.bad:
            selfcheck.switch_off(device, verdict.bad)
            wrong.append(selfcheck.sentence(verdict))
        if verdict is not None and verdict.unfinished:
            wrong.append(f"The check of the kernels on {machine.name} did not finish: {verdict.unfinished}.")
        kernels = {} if verdict is None else {name: finding.text() for name, finding in verdict.kernels.items()}
        date = None if verdict is None else verdict.date
        result.append({"device": str(device), "name": machine.name, "date": date, "kernels": kernels})
    return result, wrong


_BF16 = {"runs": "torch", "why": "no FP8: torch's own high-precision kernels"}


def _model(name: str | None) -> tuple[dict[str, str] | None, list[str]]:
    """(description of the model and of what computes it, problems); needs no weights."""
    from fp8serve.hub import find_model
    from fp8serve.model.config.decoder import read_any_config
    from fp8serve.model.config.model_config import computed_by

    if name is None:
        return None, []
    try:
        path = find_model(name)
        config = read_any_config(path)
    except ModelError as error:
        return None, [str(error)]
    return {"path": str(path), "architecture": config.architecture, "computed_by": computed_by(config)}, []


def _recipe(needed: tuple[str, ...], kernels: dict[str, str]) -> dict[str, str]:
    """How a recipe runs whose linear layers need these ops."""
    on_reference = [op for op in needed if "reference" in kernels[op]]
    if on_reference:
        return {"runs": "on the reference", "why": f"no compiled kernel for {', '.join(on_reference)}"}
    return {"runs": "natively", "why": f"compiled kernels serve {', '.join(needed)}"}


def _data_home() -> Path:
    from fp8serve.server.data_directory import data_home

    return data_home()


def _cuda_state() -> str:
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else f"CUDA {torch.version.cuda}, no usable device"


def _gpus() -> list[dict[str, Any]]:
    import torch

    results = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": p.name, "architecture": f"sm_{p.major}{p.minor}", "memory": p.total_memory} for p in results]


def cuda_library() -> dict[str, Any]:
    """The library of CUDA kernels: its path and architectures, or why there is none; "state" is a sentence."""
    import torch

    from fp8serve.fp8 import ops
    from fp8serve.fp8.cuda_library import built_for

    path = ops.library_path("fp8serve_cuda")
    if path is None:
        return {"path": None, "architectures": [], "runtime": None, "state": f"not built: {_why_not_built()}"}
    built = built_for(path)
    results = {"path": str(path), "architectures": list(built.architectures), "runtime": built.runtime}
    if torch.version.cuda is None:
        return results | {"state": "built, but this torch is built without CUDA and cannot load it"}
    return results | {"state": "loaded"}


OLDEST_NVCC = (12, 8)  # the first version that supports sm_100a and sm_120a


def _why_not_built() -> str:
    import torch

    path = shutil.which("nvcc")
    if path is None:
        return "nvcc is not on the PATH; install CUDA 12.8 or newer and build fp8serve again"
    version = nvcc_version(path)
    if version is None:
        return f"{path} does not say its version"
    if version < OLDEST_NVCC:
        return f"{path} is CUDA {version[0]}.{version[1]}, and 12.8 or newer is needed"
    if torch.version.cuda is None:
        return "this torch is built without CUDA; `make wheel FP8SERVE_CUDA=ON` builds it for another machine"
    return "fp8serve was installed without it; build it again where nvcc is"


def nvcc_version(path: str) -> tuple[int, int] | None:
    """(13, 0) of a compiler that calls itself "release 13.0"."""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _cpuinfo(key: str) -> str:
    """The first value of a key in /proc/cpuinfo; empty where there is no such file or key."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next(
        (value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == key), ""
    )


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """The vector extensions of this processor that our kernels, or torch's, make use of."""
    flags = f"{_cpuinfo('flags')} {_cpuinfo('Features')}".split()
    return [name for name in _INSTRUCTION_SETS if name in flags]


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next((line.strip() for line in done.stdout.splitlines() if line.strip()), None)


def _compiler() -> str | None:
    """The C++ compiler that a build would use: $CXX as CMake reads it, then the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((line for name in names if shutil.which(name) and (line := _first_line(name, "--version"))), None)


def _nvcc() -> str | None:
    path = shutil.which("nvcc")
    return f"{path}" if path and _first_line(path, "--version") else None


def _memory() -> dict[str, int | None]:
    """Bytes; a container's own limit counts when it is lower than the machine's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _meminfo("MemAvailable")
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is None or limit >= total:
        return {"total": total, "available": available}
    return {"total": limit, "available": min(available or limit, limit - (used or 0))}


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _disk(path: Path) -> dict[str, Any]:
    there = next(p for p in (path, *path.parents) if p.exists())
    return {"path": str(path), "free": shutil.disk_usage(there).free, "writable": os.access(there, os.W_OK)}


def about_gpus(gpus: list[dict[str, Any]], library: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(sentences about GPUs that the library cannot run on, and about those on which it is slow)."""
    from fp8serve.fp8.cuda_library import Built, driver_version, refusal, slowness

    built, driver = Built(tuple(library["architectures"]), library.get("runtime")), driver_version()
    chips = [(gpu["name"], int(gpu["architecture"].removeprefix("sm_"))) for gpu in gpus]
    refused = [refusal(built, name, chip, driver) for name, chip in chips]
    slow = [slowness(built, name, chip) for name, chip in chips]
    return [text for text in refused if text], [text for text in slow if text]


def _problems(disk: dict[str, Any]) -> list[str]:
    results = []
    if sys.byteorder != "little":
        results.append("this machine is big-endian; safetensors files and our kernels are little-endian.")
    if not disk["writable"]:
        results.append(f"the data directory {disk['path']} cannot be written; choose another with --data-dir.")
    if disk["free"] < _LEAST_DISK:
        results.append(f"only {disk['free'] >> 20} MiB are free at {disk['path']}; checkpoints will not fit.")
    return results
