"""Does everything that needs a GPU in one command: builds, tests, measures, checks memory, and writes
benchmarks/<gpu>-<date>.json with its page, .md.

    make gpu        or        python benchmarks/gpu.py [--library DIR] [--cutlass PATH] [--skip build,test,...]
    make gpu GPU_ARGS=--dry-run                        the same on a machine without a GPU, as far as that goes

Needs a GPU, a torch with CUDA, nvcc, CMake, ninja and pytest, and no network. CUTLASS comes from the nvidia-cutlass
package, from a wheel of it in the repository or in build/, or from --cutlass: a wheel, or a folder that holds
include/cutlass. --library names a folder with libfp8serve_cuda.so and libfp8serve_cpu.so that were built elsewhere.

Planned for 10 minutes on 16 cores with --library: testing 1.5, measuring kernels 2, training beside torchao and BF16
1.5, the server under load 2, its features and the main job 2, tiles 0.5. Building takes 3 minutes, the sanitizers 4.
The machine may be available for minutes only, and a new kernel may hang. So every file of tests and every group of
measurements has its own process and time limit, and the results are written after each part. If the process of a file
crashes, each of its functions is run in a process of its own: after an illegal access, CUDA answers every call of a
process with that error.

--dry-run rehearses: the build is configured without CUDA and its steps are listed, tests for a GPU are collected, every
measurement runs on the CPU with small sizes, tiles are tuned into a copy of the table, and what compute-sanitizer would
run is collected. It shows that nothing is missing and that no name is wrong. Its figures mean nothing.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/gpu"
LIMITS = {"configure": 60, "build": 240, "test": 100, "measure": 45, "tune": 45, "sanitize": 90}  # seconds a process
# Groups of gpu_measure.py, the safest first.
KERNELS = ("casts", "skinny", "attention", "gemm", "experts", "linear", "decode", "invariant")
TRAINING = (
    "bf16,bf16 compiled,ao tensorwise compiled,ao rowwise compiled,trainer bf16,trainer delayed,trainer rowwise,"
    "trainer bf16 compiled,trainer delayed compiled,trainer rowwise compiled"
)
PROGRAMS = {"training": 150, "load": 150, "features": 120, "job": 120}
"""Measurements of gpu_training.py and gpu_server.py, and their seconds."""
REHEARSAL_SECONDS = 900  # of each program on a CPU
Result = dict[str, Any]


def run(command: list[Any], limit: float, keep: int = 2000, **environment: str) -> Result:
    """Runs a command in the repository; returns its status (124: it took too long), seconds and the last `keep`
    characters of its output. All of it is in build/gpu/log."""
    begin, words = time.monotonic(), [str(part) for part in command]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    print("$", *words, flush=True)
    try:
        process = subprocess.Popen(
            words, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
            start_new_session=True, env={**os.environ, "PYTHONPATH": path, **environment},
        )  # fmt: skip
    except OSError as missing:
        return {"status": 127, "seconds": 0.0, "tail": str(missing)}
    try:
        output, status = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the compilers and test processes that it started
        output, status = process.communicate()[0], 124
    seconds = round(time.monotonic() - begin, 1)
    log(f"$ {' '.join(words)}\n{output}\n= {status} after {seconds} s\n\n")
    print(f"{output[-2000:] if status else ''}\n= {status} after {seconds} s: {' '.join(words)[:100]}", flush=True)
    return {"status": status, "seconds": seconds, "tail": output[-keep:]}


def log(text: str) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "log").open("a") as file:  # one write each: commands run at once
        file.write(text)


def together(parts: dict[str, Result]) -> Result:
    """Combines several results into one, whose status is the first that is not 0."""
    bad = [part["status"] for part in parts.values() if part["status"] != 0]
    return {"status": bad[0] if bad else 0, "seconds": sum(part["seconds"] for part in parts.values()), "parts": parts}


# --- build ----------------------------------------------------------------------------------------------------------


def present_architecture() -> str:
    """ "89", "90a", "100a" or "120a", the target of the GPU in this machine alone; "100f" or "120f" for their
    families."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    if major > 9 and minor > 0:
        return f"{major}0f"
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def cutlass(wheel_path: Path | None) -> Path | None:
    """Returns the folder that holds include/cutlass; None leaves the search to CMake."""
    if wheel_path is None and find_spec("cutlass_library") is None:
        wheels = [*ROOT.glob("nvidia_cutlass-*.whl"), *ROOT.glob("build/nvidia_cutlass-*.whl")]
        wheel_path = wheels[0] if wheels else None
    if wheel_path is None or wheel_path.suffix != ".whl":
        return wheel_path
    with zipfile.ZipFile(wheel_path) as wheel:
        members = [n for n in wheel.namelist() if "source/include/" in n or "source/tools/util/include/" in n]
        wheel.extractall(BUILD / "cutlass", members)
    return BUILD / "cutlass/cutlass_library/source"


def compiled(settings: list[str]) -> Result:
    """Configures and builds."""
    plain = [f"-DPython_EXECUTABLE={sys.executable}", "-DFP8SERVE_CUDA=ON"]
    configured = run(["cmake", "-S", "csrc", "-B", BUILD, "-G", "Ninja", *plain, *settings], LIMITS["configure"])
    return configured if configured["status"] else run(["ninja", "-C", BUILD], LIMITS["build"])


def rehearsed_build() -> Result:
    """Configures the library for the CPU and lists what would be compiled."""
    folder, plain = BUILD / "rehearsal", [f"-DPython_EXECUTABLE={sys.executable}", "-DFP8SERVE_CUDA=OFF"]
    configured = run(["cmake", "-S", "csrc", "-B", folder, "-G", "Ninja", *plain], LIMITS["configure"])
    return configured if configured["status"] else run(["ninja", "-C", folder, "-n"], LIMITS["build"])


def build(options: argparse.Namespace) -> Result:
    """Builds the libraries for the GPU of this machine; without CUTLASS if they do not compile with it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    if options.dry_run:
        return rehearsed_build()
    if options.library is not None:
        return install(options.library)
    arch = f"-DFP8SERVE_CUDA_ARCHS={present_architecture()}"
    folder = cutlass(options.cutlass)
    parts = {"build": compiled([arch, *([f"-DFP8SERVE_CUTLASS_DIR={folder.resolve()}"] if folder else [])])}
    if parts["build"]["status"] != 0:
        parts["build without CUTLASS"] = compiled([arch, "-DFP8SERVE_CUTLASS_DIR=none"])
    parts["install"] = install(BUILD)
    return together(parts)


def install(folder: Path) -> Result:
    """Copies the libraries of `folder` into the package."""
    libraries = list(folder.glob("libfp8serve_*.so"))
    for library in libraries:
        target = ROOT / "fp8serve" / library.name
        target.unlink(missing_ok=True)
        shutil.copy(library, target)
    names = ", ".join(library.name for library in libraries)
    return {"status": 0 if libraries else 1, "seconds": 0.0, "tail": names or f"{folder} has no libfp8serve_*.so"}


# --- test -----------------------------------------------------------------------------------------------------------

# Without the options of pyproject.toml: its plugins may be missing, and a warning of another version of torch must not
# fail the run.
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "-W",
    "default",
    "-m",
    "gpu",
]


def test_files() -> list[str]:
    """The files in tests/ that have tests for a GPU, relative to the repository."""
    paths = sorted(ROOT.glob("tests/**/test_*.py"))
    marked = [path for path in paths if path.parent.name == "cuda" or "mark.gpu" in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in marked]


def test_functions(collected: str) -> list[str]:
    """The test functions that `pytest --collect-only -q` printed, each once, as file.py::name."""
    return list(dict.fromkeys(re.findall(r"^(tests/\S+?::\w+)", collected, re.MULTILINE)))


def has_crashed(result: Result) -> bool:
    """Whether a process of pytest ended by a signal or a time limit, or a CUDA error may have made later tests fail. A
    status of 1 means failed tests, 5 that no test was collected."""
    return result["status"] not in (0, 1, 5) or "CUDA error" in result["tail"]


def test(options: argparse.Namespace) -> Result:
    """Runs every file of tests in its own process, twelve at a time, and each function of the files whose process
    crashed in a further one."""
    collected = run([*PYTEST, "--collect-only", *test_files()], LIMITS["test"], keep=1 << 24)
    begin, functions = time.monotonic(), test_functions(collected["tail"])
    collected["tail"] = collected["tail"][-2000:]
    if options.dry_run or not functions:
        return collected
    with ThreadPoolExecutor(12) as pool:

        def run_each(names: list[str]) -> dict[str, Result]:
            results = pool.map(lambda name: run([*PYTEST, name], LIMITS["test"]), names)
            return dict(zip(names, results, strict=True))

        parts = run_each(list(dict.fromkeys(name.partition("::")[0] for name in functions)))
        crashed = [name for name, result in parts.items() if has_crashed(result)]
        again = run_each([name for name in functions if name.partition("::")[0] in crashed])
    parts = {name: result for name, result in parts.items() if name not in crashed} | again
    return together({"collect": collected, **parts}) | {"seconds": round(time.monotonic() - begin, 1)}


SANITIZERS = {
    "memcheck": "accesses out of bounds and misaligned ones",
    "racecheck": "threads of a block that read shared memory while others write it",
    "synccheck": "barriers that not all threads reach",
}


def sanitize(options: argparse.Namespace) -> Result:
    """Runs every tool of SANITIZERS on the small inputs of every op."""
    tool, pytest = shutil.which("compute-sanitizer"), [*PYTEST, "tests/cuda", "-k", "test_registered_cases"]
    if options.dry_run:
        return run([*pytest, "--collect-only"], LIMITS["sanitize"])
    if tool is None:
        return {"status": None, "seconds": 0, "tail": "compute-sanitizer was not found"}
    flags = ["--error-exitcode", "9", "--target-processes", "all"]
    limit, uncached = LIMITS["sanitize"], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return together({name: run([tool, "--tool", name, *flags, *pytest], limit, **uncached) for name in SANITIZERS})


# --- measure --------------------------------------------------------------------------------------------------------


def measured(group: str, *flags: str, limit: float) -> Result:
    """Runs a group of gpu_measure.py."""
    return measured_by(["benchmarks.gpu_measure", group, "--out", BUILD / f"{group}.json", *flags], group, limit)


def measured_by(module: list[Any], group: str, limit: float) -> Result:
    """Runs a module that writes build/gpu/GROUP.json, and adds the contents of the file to the result."""
    target = BUILD / f"{group}.json"
    target.unlink(missing_ok=True)
    result = run([sys.executable, "-m", *module], limit)
    if target.exists():  # also when the group did not finish
        result["measured"] = json.loads(target.read_text())
    return result


def measure(options: argparse.Namespace) -> Result:
    """Runs the groups of KERNELS, and PROGRAMS, which measure a fine-tune's layers and the server."""
    BUILD.mkdir(parents=True, exist_ok=True)
    flags, device = (["--dry-run"], "cpu") if options.dry_run else ([], "cuda")
    parts = {group: measured(group, *flags, limit=LIMITS["measure"]) for group in KERNELS}
    for group, limit in PROGRAMS.items():
        if group == "job" and options.dry_run:
            continue  # make demo is its rehearsal
        target = BUILD / f"{group}.json"
        cases = "bf16,trainer delayed" if options.dry_run else TRAINING
        if group == "training":
            command = ["benchmarks.gpu_training", device, target, cases]
        else:
            command = ["benchmarks.gpu_server", group, device, target]
        parts[group] = measured_by(command, group, REHEARSAL_SECONDS if options.dry_run else limit)
    return together(parts)


def tune(options: argparse.Namespace) -> Result:
    """Measures the table of tiles, for the results and for csrc/cuda/gemm_tiles.h, which the next build uses."""
    BUILD.mkdir(parents=True, exist_ok=True)
    if not options.dry_run:
        return measured("tiles", "--tune", limit=LIMITS["tune"])
    copy = BUILD / "gemm_tiles.h"
    shutil.copy(ROOT / "csrc/cuda/gemm_tiles.h", copy)
    return measured("tiles", "--tune", "--dry-run", "--header", str(copy), limit=LIMITS["tune"])


def measured_rows(results: dict[str, Result]) -> list[Result]:
    parts = results.get("measure", {}).get("parts", {}).values()
    return [row for part in parts for row in part.get("measured", {}).get("rows", [])]


# --- report ---------------------------------------------------------------------------------------------------------


def machine(dry_run: bool = False) -> dict[str, Any]:
    """Describes this machine and the state of the repository. A rehearsal names no GPU."""
    import torch

    def stdout_of(*command: str) -> str:
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    return {
        "gpu": "dry run" if dry_run else torch.cuda.get_device_name(),
        "capability": None if dry_run else torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "driver": stdout_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": stdout_of("nvcc", "--version").splitlines()[-1:],
        "commit": stdout_of("git", "rev-parse", "HEAD"),
        "changed": bool(stdout_of("git", "status", "--porcelain")),
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


def goals_table(rows: list[Result]) -> str:
    """Returns the rows that have a goal, as Markdown for the documentation."""
    lines = ["| work | goal | predicted | measured | |", "|---|---|---|---|---|"]
    for row in rows:
        if "goal" in row:
            state = "reached" if row["measured"] >= row["goal"] else "short"
            cells = (row["what"], row["goal"], row["predicted"], row["measured"], state)
            lines.append("| " + " | ".join(cell(c) for c in cells) + " |")
    return "\n".join(lines)


def outcome(result: Result) -> str:
    """Returns a status in words."""
    words = {0: "passed", None: "not run", 124: "took too long", 127: "a program is missing"}
    return words.get(result["status"], f"failed with status {result['status']}")


def measured_tables(results: dict[str, Result]) -> list[str]:
    """Returns a table for each group, with a column for each kind of figure that it has."""
    tables = []
    for group, part in results.get("measure", {}).get("parts", {}).items():
        rows = [row for row in part.get("measured", {}).get("rows", []) if "goal" not in row]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(cell(row.get(name, "")) for name in columns) + " |" for row in rows]
        tables.append("\n".join([f"## {group}", "", *(lines if rows else ["Nothing was measured."])]))
    return tables


def page(about: dict[str, Any], results: dict[str, Result]) -> str:
    """Returns the results for a person to read."""
    name = about["gpu"]
    of_machine = [f"* {key}: {value}" for key, value in about.items() if key != "gpu"]
    parts = ["| part | outcome | seconds |", "|---|---|---|"]
    for part, result in results.items():
        parts.append(f"| {part} | {outcome(result)} | {result['seconds']} |")
        failed = {n: r for n, r in result.get("parts", {}).items() if r["status"] != 0}
        parts += [f"| {part}: {n} | {outcome(r)} | {r['seconds']} |" for n, r in failed.items()]
    sections = [f"# {name}, {about['date'][:10]}", "\n".join(of_machine), "\n".join(parts)]
    sections += ["## Goals", goals_table(measured_rows(results)), *measured_tables(results)]
    return "\n\n".join(sections) + "\n"


def report(about: dict[str, Any], results: dict[str, Result], folder: Path) -> Path:
    """Writes the JSON and, beside it, the page; returns the path of the JSON."""
    name = about["gpu"].lower().replace("nvidia ", "").replace(" ", "-")
    target = folder / f"{name}-{about['date'][:10]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": about, **results}, indent=1) + "\n")
    target.with_suffix(".md").write_text(page(about, results))
    return target


PARTS: tuple[Callable[[argparse.Namespace], Result], ...] = (build, test, measure, tune, sanitize)


def attempted(part: Callable[[argparse.Namespace], Result], options: argparse.Namespace) -> Result:
    """Runs a part and returns its result; for an exception, a result with status 1 and the error as its tail."""
    try:
        return part(options)
    except Exception as failed:  # any error: the other parts still count
        return {"status": 1, "seconds": 0, "tail": f"{type(failed).__name__}: {failed}"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="a folder with the compiled libraries; nothing is built")
    parser.add_argument("--cutlass", type=Path, help="the nvidia-cutlass wheel, or a folder with include/cutlass")
    parser.add_argument("--skip", default="", help="parts to leave out, separated by commas")
    parser.add_argument("--out", type=Path, help="where JSON and page go: benchmarks, or build/gpu with --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="rehearse it on the CPU")
    options = parser.parse_args()
    options.out = options.out or (BUILD if options.dry_run else ROOT / "benchmarks")
    names = {part.__name__ for part in PARTS}
    if unknown := set(filter(None, options.skip.split(","))) - names:
        parser.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(sorted(names))}")
    return options


def main() -> int:
    options = arguments()
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("There is no CUDA device here (torch.cuda.is_available() is false); run this on a machine with a GPU,")
        print("or rehearse it here with --dry-run.")
        return 1
    about, results = machine(options.dry_run), dict[str, Result]()
    write = partial(report, about, results, options.out)
    for part in PARTS:
        if part.__name__ not in options.skip.split(","):
            results[part.__name__] = attempted(part, options)
            write()
    rows = measured_rows(results)
    print(table(rows), goals_table(rows), sep="\n\n")
    for name, result in results.items():
        print(f"{name:10} status {result['status']}  {result['seconds']} s")
    print(f"written: {write()}")
    return int(any(result["status"] not in (0, None) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
