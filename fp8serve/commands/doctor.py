"""Show what this machine has and how fp8serve runs on it.

Shows the device, the instruction set, the kernel of each operation, the processors that give the same bits, and the
recipes that run natively. With MODEL it also shows whether fp8serve's own layers or transformers' class compute the
model, on which device it would be served, and how many sequences and tokens an engine would put in a step there. The
exit status is 1 if fp8serve cannot work on this machine.

--check compares every kernel with the PyTorch reference in about thirty small cases, on every GPU and on the CPU with
each of its instruction sets. The kernels run in a child process with time limits. A kernel with a wrong result is
switched off until a later check passes.

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

from fp8serve.fp8.numerics_classes import CHIPS, LEVELS
from fp8serve.terminal import AsJson, format_bytes, print_json, print_table


def command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Model directory or name.")] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="The server's data directory, to check its disk.", show_default="a user directory"),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare every kernel with the reference.")] = False,
    json: AsJson = False,
) -> None:
    from fp8serve.doctor import examine

    report = examine(data_dir, model, _show_progress if check else None)
    _show_progress("")
    print_json(report) if json else _print(report)
    if report["problems"]:
        raise typer.Exit(1)


def _show_progress(kernel: str) -> None:
    """Overwrites the line of the terminal with the kernel that is being checked."""
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
        f"{' '.join(cpu['instruction_sets']) or 'no supported vector extension'}"
    )
    for gpu in report["gpus"]:
        print(f"GPU      {gpu['name']}, {gpu['architecture']}, {format_bytes(gpu['memory'])}")
    if not report["gpus"]:
        print(f"GPU      none ({report['torch']['cuda']})")
    print(f"memory   {format_bytes(memory['available'])} free of {format_bytes(memory['total'])}")
    print(f"disk     {format_bytes(disk['free'])} free at {disk['path']}")
    print(f"C++      {tools['c++'] or 'none: csrc/ cannot be compiled here'}")
    print(f"nvcc     {tools['nvcc'] or 'none: CUDA kernels cannot be compiled here'}")
    library = report["cuda_library"]
    architectures = f", for {' '.join(library['architectures'])}" if library["architectures"] else ""
    print(f"CUDA     kernels {library['state']}{architectures}")
    for check in report["kernel_checks"]:
        print(f"check    {check['device']}: {_check_result(check)}")
    if (model := report["model"]) is not None:
        print(f"model    {model['path']}, {model['architecture']}, {COMPUTED_BY[model['computed_by']]}")
    if (serving := report["serving"]) is not None:
        print(f"serving  device auto: {serving['device']}, because {serving['reason']}")
        print(f"         {_limits(serving)}")
        if serving["invariant"] is not None:
            print(f"         with --invariant: {serving['invariant']}")
    print()
    print_table(("operation", "kernel"), sorted(report["kernels"].items()))
    if report["cuda_kernels"]:
        print()
        print_table(("operation on a GPU", "kernel"), sorted(report["cuda_kernels"].items()))
    for processor, classes in report["numerics_classes"].items():
        print()
        rows = [(c["operation"], c["format"], c["class"], _same_bits(c)) for c in classes]
        print_table(("operation", "format", f"numerics class ({processor})", "same bits on"), rows)
    print()
    print_table(("recipe", "runs", "reason"), [(name, r["runs"], r["why"]) for name, r in report["recipes"].items()])
    switched_off = [
        (check["device"], name, state)
        for check in report["kernel_checks"]
        for name, state in check["kernels"].items()
        if state != "agrees"
    ]
    if switched_off:
        print()
        print_table(("device", "kernel switched off", "reason"), switched_off)
    for note in report["notes"]:
        print(f"\nnote: {note}")
    for problem in report["problems"]:
        print(f"\nproblem: {problem}")


def _same_bits(row: dict[str, Any]) -> str:
    """Returns the columns of the table of numerics classes that have the bits of a row, in few words."""
    columns = row["same_bits_without_subnormals"]
    if set(columns) >= {*LEVELS, *CHIPS}:
        names = "every processor"
    else:
        names = "every CPU" if set(columns) >= set(LEVELS) else " ".join(columns)
    return names if columns == row["same_bits"] else f"{names}, subnormals apart"


def _limits(serving: dict[str, Any]) -> str:
    prefill, share = serving["max_prefill_tokens"], serving["gpu_memory"]
    return (
        f"up to {serving['max_num_seqs']} sequences and {serving['max_batch_tokens']} tokens a step, "
        f"{'as many prompt tokens as take 25 ms' if prefill is None else f'{prefill} prompt tokens'} while others "
        f"decode, a KV cache in {serving['kv_cache_dtype']}{'' if share is None else f', {share:.0%} of the memory'}"
    )


def _check_result(check: dict[str, Any]) -> str:
    if check["date"] is None:
        return "the kernels have not been checked on this machine; run doctor --check"
    agree = sum(state == "agrees" for state in check["kernels"].values())
    return f"{agree} of {len(check['kernels'])} kernels agree with the reference, {check['date'][:10]}"
