"""Calibrate a model larger than the memory that the process may have: time and peak against its file.

    python benchmarks/calibrate_memory.py [--gib 1.25] [--hidden 2048] [--limit-gib 1.0] [--rounding gptq]

Writes a random Llama of `--gib` in BF16 into a temporary directory and calibrates it in a process of its own. As root
on a machine with memory control groups (version 1 or 2) that process, and the pages of files that it reads, are held to
`--limit-gib`; the kernel kills what needs more. Elsewhere there is no limit; only the peaks are measured.

Prints as JSON the bytes of the file, seconds, the peaks of resident memory (VmHWM, with mapped pages) and of memory
that no file backs (RssAnon, sampled), what the control group charged, and the seconds of each stage.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GIB = 2**30
TEXTS = ["A layer is read once, runs over all batches, and is released before the next one is touched."]
CALIBRATE = "import sys; from fp8serve.cli import main; sys.exit(main())"
GROUPS = Path("/sys/fs/cgroup")


def write_model(folder: Path, gib: float, hidden: int) -> int:
    """Writes the weights and returns the size of their file in bytes. Drops the file's pages from the page cache,
    because a page is charged to the group that reads it first."""
    from fp8serve.train.scratch import write_random_model

    wide = hidden * 11 // 4
    layers = max(2, round(gib * GIB / (2 * hidden * (2 * hidden + hidden // 2 + 3 * wide))))
    write_random_model(
        folder, TEXTS, hidden_size=hidden, layers=layers, heads=16, kv_heads=4, intermediate_size=wide, context=512
    )
    with (folder / "model.safetensors").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return os.fstat(file.fileno()).st_size


@contextmanager
def limited(num_bytes: int) -> Iterator[Path | None]:
    """A control group with this limit, or None if none can be made."""
    parent, limit = _controller()
    group = parent / f"calibrate-memory-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(num_bytes))
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def _controller() -> tuple[Path, str]:
    """Returns the directory of memory groups, and the name of the file for the limit."""
    if (GROUPS / "cgroup.controllers").exists():
        return GROUPS, "memory.max"
    return GROUPS / "memory", "memory.limit_in_bytes"


def charged(group: Path | None) -> int | None:
    """Returns the largest amount charged to the group."""
    if group is None:
        return None
    for name in ("memory.peak", "memory.max_usage_in_bytes"):
        if (group / name).exists():
            return int((group / name).read_text())
    return None


def watched(command: list[str], group: Path | None) -> tuple[float, int, int]:
    """Returns (seconds, peak of resident bytes, peak of anonymous bytes) of a command run in the group."""
    join = [] if group is None else [(str(group / "cgroup.procs"))]
    shell = ["sh", "-c", 'if [ -n "$0" ]; then echo $$ > "$0"; fi; exec "$@"', *(join or [""]), *command]
    started, peak, anonymous = time.perf_counter(), 0, 0
    process = subprocess.Popen(shell, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        status = _status(process.pid)
        peak, anonymous = max(peak, status.get("VmHWM", 0)), max(anonymous, status.get("RssAnon", 0))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"The calibration ended with status {process.returncode}.")
    return time.perf_counter() - started, peak, anonymous


def _status(pid: int) -> dict[str, int]:
    """Returns the sizes in /proc/PID/status, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith(" kB")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.25)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--limit-gib", type=float, default=1.0)
    parser.add_argument("--rounding", choices=("nearest", "gptq"), default="nearest")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--folder", type=Path, help="where the model and the result are written")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        model, out = Path(name) / "model", Path(name) / "out"
        size = write_model(model, args.gib, args.hidden)
        options = ["--samples", args.samples, "--seq-len", args.seq_len, "--rounding", args.rounding]
        options += ["--generated-samples", 0]  # every generated token would read the whole file again
        command = [sys.executable, "-c", CALIBRATE, "calibrate", model, "--out", out, *options]
        with limited(int(args.limit_gib * GIB)) as group:
            seconds, peak, anonymous = watched([str(part) for part in command], group)
            peaks = charged(group)
        stages = json.loads((out / "calibration.json").read_text())["seconds"]
    print(
        json.dumps(
            {
                "file_bytes": size,
                "limit_bytes": None if group is None else int(args.limit_gib * GIB),
                "charged_bytes": peaks,
                "peak_resident_bytes": peak,
                "peak_anonymous_bytes": anonymous,
                "seconds": round(seconds, 1),
                "stages": stages,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
