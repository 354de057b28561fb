"""`python -m fp8serve.train.methods.grpo.reward_process FILE` runs a user's `reward` function in a process of its
own, so that its faults cannot harm the trainer.

The protocol is one JSON object a line. After the import, the process writes {"ready": true} or {"error"} to standard
output. It then reads {"prompt", "completion", "row"} from standard input and answers each line with {"reward"} or
{"error"}. Output that the user's code prints goes to standard error. The process ends as soon as its standard input is
closed, even during a call. The user's file can import modules of its own directory, like a script (docs/training.md).
"""

import json
import os
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any


def main(file: Path) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    sys.path.insert(0, str(file.resolve().parent))
    try:
        reward = runpy.run_path(str(file), run_name="reward").get("reward")
        if not callable(reward):
            raise TypeError("it has no function `reward(prompt, completion, row)`")
    except BaseException as problem:
        _write_reply(replies, error=_error_text(problem))
        return
    _write_reply(replies, ready=True)
    while True:
        _write_reply(replies, **_grade(reward, json.loads(requests.get())))


def _read_requests(requests: "SimpleQueue[bytes]") -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def _grade(reward: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        result = reward(request["prompt"], request["completion"], request["row"])
        return {"reward": float(result)}
    except BaseException as problem:
        return {"error": _error_text(problem)}


def _error_text(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


def _write_reply(replies: IO[str], **fields: Any) -> None:
    replies.write(json.dumps(fields) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
