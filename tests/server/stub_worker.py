"""A trainer without a model that keeps the contract of `fp8serve.train.job_process`, in milliseconds, and can be told
to misbehave.

The job's text says how: "slow" waits between steps, "held" waits after step 1 for a file named go, "stubborn" too and
ignores SIGTERM, "fail" gives up with a sentence, "die" is killed at step 3 for ever, "die-once" on the first try only,
"full-disk" finds no space at step 3 until there is a file named room. Steps are resumed from `step.txt`.
"""

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

STEPS = 6
ORPHANED = 600.0  # seconds; no test keeps a job this long


def main(directory: Path) -> int:
    job = json.loads((directory / "job.json").read_text())
    mood = Path(job["data"][0]).read_text(errors="replace")
    lock = (directory / "worker.lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("Another worker is running the job.", file=sys.stderr)
        return 5
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    if (directory / "result.json").exists():
        return 0
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, (lambda *_: None) if "stubborn" in mood else (lambda *_: stopped.append(1)))
    return work(directory, mood, stopped)


def work(directory: Path, mood: str, stopped: list[int]) -> int:
    marks = directory / "step.txt"
    tries = directory / "tries.txt"
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    start = int(marks.read_text()) if marks.exists() else 0
    emit(directory, {"type": "message", "level": "info", "code": "data", "message": "rows are in " + str(directory)})
    if "fail" in mood:
        emit(directory, {"type": "message", "level": "error", "code": "error", "message": "The loss is not finite."})
        return 1
    for step in range(start + 1, STEPS + 1):
        if "slow" in mood:
            time.sleep(0.15)
        if step > 1 and ("held" in mood or "stubborn" in mood):
            hold(directory / "go", stopped)
        if step == 3 and ("die-once" not in mood or len(tries.read_text()) == 1) and "die" in mood:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and "full-disk" in mood and not (directory / "room").exists():
            text = "out could not be written: No space left on device."
            emit(directory, {"type": "message", "level": "error", "code": "error", "message": text})
            return 1
        values = {"step": step, "total_steps": STEPS, "train_loss": 1.0 / step, "trained_tokens": step * 10}
        emit(directory, {"type": "metrics", "level": "info", "message": f"Step {step}", **values})
        (directory / "out" / "checkpoints" / f"step-{step}").mkdir(parents=True, exist_ok=True)
        marks.write_text(str(step))
        emit(directory, {"type": "checkpoint", "level": "info", "message": "Checkpoint", "path": "/secret", **values})
        if stopped:
            return 3
    model = directory / "out" / "model"
    model.mkdir(parents=True, exist_ok=True)
    base = Path(json.loads((directory / "job.json").read_text())["model"])
    config = json.loads((base / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_version": directory.name}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (base / name).exists():
            shutil.copy(base / name, model)
    (directory / "result.json").write_text("{}")
    return 0


def hold(go: Path, stopped: list[int]) -> None:
    """Waits until `go` exists, or this worker is asked to stop."""
    end = time.monotonic() + ORPHANED
    while not (go.exists() or stopped or time.monotonic() > end):
        time.sleep(0.01)


def emit(directory: Path, event: dict[str, object]) -> None:
    path = directory / "events.jsonl"
    past = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if any(old["type"] == event["type"] != "message" and old["step"] == event["step"] for old in past):
        return
    with path.open("a") as file:
        file.write(json.dumps({"id": len(past) + 1, "created_at": int(time.time()), **event}) + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
