"""The child process of the kernel check. It runs one kernel at a time and names the kernel before it runs it, so that
the parent process (check_runner.py) knows which kernel has hung.

    python -m fp8serve.fp8.selfcheck.child < '{"device": "cuda:0", "known": [], "off": []}'

It writes lines of JSON: {"trying": name}, then {"name": name, "state": ..., "why": ...}, or {"name": name} if the
kernel supports no case on this machine, and {"done": true} at the end. After an exception on a GPU it ends without
{"done": true}, because later kernels in the same process would fail, too.
"""

import json
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import one_line
from fp8serve.fp8.ops.registry import Case, reference
from fp8serve.fp8.selfcheck.agreement import describe_difference, outputs_of
from fp8serve.fp8.selfcheck.candidates import MAX_CASES, UNSUPPORTED_CASE, Candidate, candidates
from fp8serve.fp8.selfcheck.switches import SEPARATE, switch_off
from fp8serve.fp8.selfcheck.verdict import KernelResult


def send(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def move_to(value: Any, device: str) -> Any:
    """Returns the arguments of an op with all tensors on a device."""
    if isinstance(value, list | tuple):
        return type(value)(move_to(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


@cache
def reference_outputs(op: str, case: Case) -> list[Tensor]:
    """Returns the outputs of the reference on the CPU. They are cached, because kernels of an op share cases."""
    arguments = case.make()
    return list(outputs_of(getattr(reference, op)(*arguments), arguments, _is_mutable(op)))


def _is_mutable(op: str) -> bool:
    return bool(getattr(torch.ops.fp8serve, op).default._schema.is_mutable)


def compare_with_reference(candidate: Candidate, case: Case, device: str) -> str | None:
    """Returns a description of the difference between a kernel and the reference, or None if they agree.

    Raises RuntimeError with UNSUPPORTED_CASE in its message if the kernel does not support the case.
    """
    arguments = move_to(case.make(), device)
    outputs = list(outputs_of(candidate.run(*arguments), arguments, _is_mutable(candidate.op)))
    return describe_difference(candidate.op, case.make(), outputs, reference_outputs(candidate.op, case))


def check_kernel(candidate: Candidate, device: str) -> KernelResult | None:
    """Checks a kernel on at most MAX_CASES cases. Returns None if it supports no case."""
    num_compared = 0
    for case in candidate.cases:
        try:
            difference = compare_with_reference(candidate, case, device)
        except Exception as error:
            if UNSUPPORTED_CASE in str(error):
                continue
            return KernelResult("throws", f"{case.name}: {type(error).__name__}: {one_line(error)}")
        if difference is not None:
            return KernelResult("disagrees", f"{case.name}: {difference}")
        num_compared += 1
        if num_compared == MAX_CASES:
            break
    return KernelResult("agrees") if num_compared else None


def main() -> None:
    task = json.load(sys.stdin)
    device, checked_names, off = task["device"], set(task["known"]), set(task["off"])
    is_gpu = device != "cpu"
    if is_gpu:
        switch_off(torch.device(device), {*off, *SEPARATE})
    for candidate in candidates(device):
        if candidate.name in checked_names:
            continue
        send(trying=candidate.name)
        result = check_kernel(candidate, device)
        send(name=candidate.name, **({} if result is None else {"state": result.state, "why": result.why}))
        if is_gpu and result is not None and result.state != "agrees":
            if result.state == "throws":
                return
            off.add(candidate.name)
            switch_off(torch.device(device), off)
    send(done=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
