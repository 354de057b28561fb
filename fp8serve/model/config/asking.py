"""How transformers' class reads a config.json, for a process without torch, which asks another process.

The answer needs torch and transformers, which the server's front never loads. The other process is this package's
transformers_backend/__main__.py; it is started once for each model, takes seconds, and ends.
"""

import json
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.processes import module_command

_COMMAND = module_command("fp8serve.model.transformers_backend")
_SECONDS = 300.0


def ask(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of the model's `ModelConfig` that have no default or another value. ModelError: as `describe`."""
    text = _asked(json.dumps([raw, generation, where], sort_keys=True))
    try:
        answer = json.loads(text, object_hook=_with_tuples)
    except ValueError:
        raise ModelError(f"The process that builds transformers' class gave no answer: {shown(text[:80])}.") from None
    if "refused" in answer:
        raise ModelError(answer["refused"])
    return dict(answer["fields"])


@cache
def _asked(question: str) -> bytes:
    try:
        done = subprocess.run(_COMMAND, input=question.encode(), capture_output=True, timeout=_SECONDS, check=True)
    except subprocess.TimeoutExpired as problem:  # its output ends with a warning that explains nothing
        raise ModelError(f"transformers' class was not built within {_SECONDS:g} seconds.") from problem
    except (OSError, subprocess.SubprocessError) as problem:
        why = (getattr(problem, "stderr", None) or b"").decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"The process that builds transformers' class failed: {why[:300] or problem}.") from problem
    return done.stdout


def _with_tuples(found: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
