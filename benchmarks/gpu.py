"""Everything that needs a GPU, in one command: build, test, check memory, measure, write benchmarks/<gpu>-<date>.json.

    make gpu        or        python benchmarks/gpu.py [--cutlass PATH] [--skip build,test,sanitize,measure]

Needs a GPU, a torch with CUDA, nvcc, CMake, ninja and pytest, and no network. CUTLASS comes from the nvidia-cutlass
package, or from --cutlass: its wheel, or a folder that holds include/cutlass. Each part runs in a process of its own
under a time limit, and what was measured is written even when a part failed, so that a borrowed GPU is never wasted.
Planned for 16 cores: build 3 minutes, tests 1.5, sanitizer 1, measuring 0.5.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/gpu"
LIMITS = {"build": 420, "test": 180, "sanitize": 120, "measure": 120}  # seconds


def run(command: list[Any], limit: float, **environment: str) -> dict[str, Any]:
    """Runs a command under the repository; its status, seconds and the end of its output."""
    print("$", *command, flush=True)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=ROOT, timeout=limit, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )  # fmt: skip
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, output = 124, (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else late.stdout or ""
    print(output[-3000:], flush=True)
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "tail": output[-1500:]}


# --- build ----------------------------------------------------------------------------------------------------------


def present_architecture() -> str:
    """ "89", "90a", "100a" or "120a": the architecture-specific target of the GPU in this machine."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def cutlass_folder(given: Path | None) -> list[str]:
    if given is None:
        return []
    if given.suffix == ".whl":
        unpacked = BUILD / "cutlass"
        with zipfile.ZipFile(given) as wheel:
            wheel.extractall(unpacked, [n for n in wheel.namelist() if "source/include/" in n or "util/include/" in n])
        given = unpacked / "cutlass_library/source"
    return [f"-DFP8SERVE_CUTLASS_DIR={given.resolve()}"]


def build(options: argparse.Namespace) -> dict[str, Any]:
    BUILD.mkdir(parents=True, exist_ok=True)
    settings = [f"-DPython_EXECUTABLE={sys.executable}", "-DFP8SERVE_CUDA=ON"]
    settings += [f"-DFP8SERVE_CUDA_ARCHS={present_architecture()}", *cutlass_folder(options.cutlass)]
    configured = run(["cmake", "-S", "csrc", "-B", BUILD, "-G", "Ninja", *settings], 60)
    if configured["status"] != 0:
        return configured
    built = run(["ninja", "-C", BUILD], LIMITS["build"])
    for library in BUILD.glob("libfp8serve_*.so"):
        shutil.copy(library, ROOT / "fp8serve" / library.name)
    return built


# --- test -----------------------------------------------------------------------------------------------------------


# A warning of a torch that is not the one of development must not cost the run.
PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/cuda", "-q", "-p", "no:cacheprovider", "-W", "default"]


def test(options: argparse.Namespace) -> dict[str, Any]:
    return run(PYTEST, LIMITS["test"])


def sanitize(options: argparse.Namespace) -> dict[str, Any]:
    """Out-of-bounds and misaligned accesses, over the small inputs of every op."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"status": None, "seconds": 0, "tail": "compute-sanitizer was not found"}
    flags = ["--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    return run([tool, *flags, *PYTEST, "-k", "test_cases"], LIMITS["sanitize"], PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    target = BUILD / "measured.json"
    result = run([sys.executable, ROOT / "benchmarks/gpu_measure.py", target], LIMITS["measure"])
    if target.exists():
        result["measured"] = json.loads(target.read_text())
    return result


# --- report ---------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    import torch

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        except OSError:
            return ""

    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": said("nvcc", "--version").splitlines()[-1:],
        "commit": said("git", "rev-parse", "HEAD"),
        "changed": bool(said("git", "status", "--porcelain")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
    }


def cell(value: Any) -> str:
    return (f"{value:.3g}" if value < 1000 else f"{value:.0f}") if isinstance(value, float) else str(value)


def table(rows: list[dict[str, Any]]) -> str:
    lines = (
        [f"{row['what']:44}", *(f"{name} {cell(value)}" for name, value in row.items() if name != "what")]
        for row in rows
    )
    return "\n".join("  ".join(line) for line in lines)


def report(results: dict[str, Any], folder: Path) -> Path:
    about = machine()
    name = about["gpu"].lower().replace("nvidia ", "").replace(" ", "-")
    target = folder / f"{name}-{about['date'][:10]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": about, **results}, indent=1) + "\n")
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cutlass", type=Path, help="the nvidia-cutlass wheel, or a folder with include/cutlass")
    parser.add_argument("--skip", default="", help="parts to leave out, separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="where the JSON goes")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("There is no CUDA device here (torch.cuda.is_available() is false); run this on a machine with a GPU.")
        return 1
    results: dict[str, Any] = {}
    for part in (build, test, sanitize, measure):
        if part.__name__ not in options.skip.split(","):
            results[part.__name__] = part(options)
            target = report(results, options.out)
    print(table(results.get("measure", {}).get("measured", {}).get("rows", [])))
    for name, result in results.items():
        print(f"{name:10} status {result['status']}  {result['seconds']} s")
    print(f"written: {target}")
    return int(any(result["status"] not in (0, None) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
