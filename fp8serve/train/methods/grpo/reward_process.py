"""`python -m fp8serve.train.methods.grpo.reward_process FILE`: runs a user's `reward` where it cannot harm the run.

Lines of JSON: out {"ready": true} or {"error"}; then for each line in, {"prompt", "completion", "row"}, one out,
{"reward"} or {"error"}. What the user's code prints goes to standard error. The process ends when its standard input
does, even in the middle of a call. The file finds modules that lie beside it, as a script would (docs/training.md).
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
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    sys.path.insert(0, str(file.resolve().parent))  # its neighbours, and nothing of the current directory
    try:
        reward = runpy.run_path(str(file), run_name="reward").get("reward")
        if not callable(reward):
            raise TypeError("it has no function `reward(prompt, completion, row)`")
    except BaseException as problem:
        _say(answers, error=_sentence(problem))
        return
    _say(answers, ready=True)
    while True:
        _say(answers, **_grade(reward, json.loads(inbox.get())))


def _read(inbox: "SimpleQueue[bytes]") -> None:
    for line in sys.stdin.buffer:
        inbox.put(line)
    os._exit(0)


def _grade(reward: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        result = reward(request["prompt"], request["completion"], request["row"])
        return {"reward": float(result)}
    except BaseException as problem:
        return {"error": _sentence(problem)}


def _sentence(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


def _say(answers: IO[str], **fields: Any) -> None:
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
