"""The other side of config/decoder.py: one question from stdin, its answer on stdout, both JSON.

It writes the fields without a default and those that differ from their default, from which the reader makes the same
`ModelConfig`.
"""

import contextlib
import json
import sys
from dataclasses import asdict, fields
from typing import Any

from fp8serve.errors import ModelError
from fp8serve.model.transformers_backend import describe


def main() -> None:
    """Answer."""
    with contextlib.redirect_stdout(sys.stderr):  # for what transformers has to say
        answer = _answer(*json.load(sys.stdin))
    json.dump(answer, sys.stdout)


def _answer(raw: dict[str, Any], generation: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        config = describe(raw, generation, where)
    except ModelError as error:
        return {"refused": str(error)}
    plain = asdict(config)
    return {"fields": {f.name: plain[f.name] for f in fields(config) if getattr(config, f.name) != f.default}}


if __name__ == "__main__":
    main()
