"""Show what this machine has and how fp8serve runs on it.

Shows the device, the instruction set, which kernel serves each operation, and which recipes run natively; with MODEL
also whether fp8serve's own layers or transformers' class compute it. The exit status is 1 if something keeps fp8serve
from working.

With --check every kernel computes some thirty small cases, on every GPU and, for each of its instruction sets, on the
CPU, in a process with time limits, and is compared with the PyTorch reference. One that is wrong is switched off from
then on, until a check finds it right.

\b
Examples:
  fp8serve doctor
  fp8serve doctor --check
  fp8serve doctor ./llama
  fp8serve doctor --json
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.terminal import AsJson, print_json, print_table, size


def command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Model as the other commands take it.")] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="The server's data directory, to check its disk.", show_default="a user directory"),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare every kernel with the reference now.")] = False,
    json: AsJson = False,
) -> None:
    from fp8serve.doctor import examine

    report = examine(data_dir, model, _show if check else None)
    _show("")
    print_json(report) if json else _print(report)
    if report["problems"]:
        raise typer.Exit(1)


def _show(kernel: str) -> None:
    """Shows on a terminal what is being checked."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{kernel}", end="", file=sys.stderr, flush=True)


def _print(report: dict[str, Any]) -> None:
    from fp8serve.model.config.model_config import COMPUTED_BY

    cpu, memory, disk, tools = report["cpu"], report["memory"], report["disk"], report["compilers"]
    print(
        f"fp8serve {report['fp8serve']}, Python {report['python']}, torch {report['torch']['version']}, "
        f"{report['platform']}"
    )
    print(
        f"CPU      {cpu['name']}, {cpu['cores']} cores; "
        f"{' '.join(cpu['instruction_sets']) or 'no vector extension that is used'}"
    )
    for gpu in report["gpus"]:
        print(f"GPU      {gpu['name']}, {gpu['architecture']}, {size(gpu['memory'])}")
    if not report["gpus"]:
        print(f"GPU      none ({report['torch']['cuda']})")
    print(f"memory   {size(memory['available'])} free of {size(memory['total'])}")
    print(f"disk     {size(disk['free'])} free at {disk['path']}")
    print(f"C++      {tools['c++'] or 'none: csrc/ cannot be compiled here'}")
    print(f"nvcc     {tools['nvcc'] or 'none: CUDA kernels cannot be compiled here'}")
    library = report["cuda_library"]
    print(f"CUDA     kernels {library['state']}{_for(library['architectures'])}")
    for check in report["kernel_checks"]:
        print(f"check    {check['device']}: {_outcome(check)}")
    if (model := report["model"]) is not None:
        print(f"model    {model['path']}, {model['architecture']}, {COMPUTED_BY[model['computed_by']]}")
    print()
    numerics = report["numerics"]
    rows = [(op, kernel, numerics.get(op, "")) for op, kernel in sorted(report["kernels"].items())]
    print_table(("operation", "served by", "numerics class"), rows)
    if report["cuda_kernels"]:
        print()
        print_table(("operation on a GPU", "served by"), sorted(report["cuda_kernels"].items()))
    print()
    print_table(("recipe", "runs", "why"), [(name, r["runs"], r["why"]) for name, r in report["recipes"].items()])
    bad = [
        (check["device"], name, state)
        for check in report["kernel_checks"]
        for name, state in check["kernels"].items()
        if state != "agrees"
    ]
    if bad:
        print()
        print_table(("device", "kernel switched off", "why"), bad)
    for note in report["notes"]:
        print(f"\nnote: {note}")
    for problem in report["problems"]:
        print(f"\nproblem: {problem}")


def _outcome(check: dict[str, Any]) -> str:
    if check["date"] is None:
        return "kernels not checked here yet (--check does it)"
    agree = sum(state == "agrees" for state in check["kernels"].values())
    return f"{agree} of {len(check['kernels'])} kernels agree with the reference, {check['date'][:10]}"


def _for(architectures: list[str]) -> str:
    return f", for {' '.join(architectures)}" if architectures else ""
