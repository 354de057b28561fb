"""The process that tries kernels: one at a time, saying before each which it is, so that its parent knows who hung.

    python -m fp8serve.fp8.selfcheck.child < '{"device": "cuda:0", "known": [], "off": []}'

It writes lines of JSON: {"trying": name}, then {"name": name, "state": ..., "why": ...}, or {"name": name} when the
kernel takes nothing here; {"done": true} at the end. After an exception on a GPU it ends without: what follows in that
process would fail, too.
"""

import json
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import one_line
from fp8serve.fp8.ops.registry import Case, reference
from fp8serve.fp8.selfcheck.agreement import difference, written
from fp8serve.fp8.selfcheck.candidates import MOST, NOT_FOR_IT, OVERLAP, Candidate, candidates, switch_off
from fp8serve.fp8.selfcheck.verdict import Finding


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def moved(value: Any, device: str) -> Any:
    """Arguments of an op on a device."""
    if isinstance(value, list | tuple):
        return type(value)(moved(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


@cache
def expected(op: str, case: Case) -> list[Tensor]:
    """The reference's results, on the CPU; several kernels of an op have the same cases."""
    arguments = case.make()
    return list(written(getattr(reference, op)(*arguments), arguments, _is_mutable(op)))


def _is_mutable(op: str) -> bool:
    return bool(getattr(torch.ops.fp8serve, op).default._schema.is_mutable)


def judged(candidate: Candidate, case: Case, device: str) -> str | None:
    """What is wrong with a kernel's answer. RuntimeError with NOT_FOR_IT when it is none of the kernel's."""
    arguments = moved(case.make(), device)
    results = list(written(candidate.run(*arguments), arguments, _is_mutable(candidate.op)))
    return difference(candidate.op, case.make(), results, expected(candidate.op, case))


def tried(candidate: Candidate, device: str) -> Finding | None:
    """What a kernel does with at most MOST cases that it takes; None when it takes none."""
    compared = 0
    for case in candidate.cases:
        try:
            wrong = judged(candidate, case, device)
        except Exception as thrown:
            if NOT_FOR_IT in str(thrown):
                continue
            return Finding("throws", f"{case.name}: {type(thrown).__name__}: {one_line(thrown)}")
        if wrong is not None:
            return Finding("disagrees", f"{case.name}: {wrong}")
        compared += 1
        if compared == MOST:
            break
    return Finding("agrees") if compared else None


def main() -> None:
    task = json.load(sys.stdin)
    device, known, off = task["device"], set(task["known"]), set(task["off"])
    on_gpu = device != "cpu"
    if on_gpu:
        switch_off(torch.device(device), {*off, *OVERLAP})  # what overlaps is tried by itself
    for candidate in candidates(device):
        if candidate.name in known:
            continue
        say(trying=candidate.name)
        finding = tried(candidate, device)
        say(name=candidate.name, **({} if finding is None else {"state": finding.state, "why": finding.why}))
        if on_gpu and finding is not None and finding.state != "agrees":
            if finding.state == "throws":
                return
            off.add(candidate.name)
            switch_off(torch.device(device), off)
    say(done=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
