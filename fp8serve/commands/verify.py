"""Find errors in a checkpoint before it is served: scales that are missing, zero, NaN, reciprocal or stale.

Reads headers, scales and the codes of quantized weights of a model directory, one of its shards, or a single
.safetensors file, in every format of docs/formats.md and of any architecture. The exit status is 1 if an error would
make outputs wrong, and 0 if there are only warnings.

\b
Examples:
  fp8serve verify ./llama-fp8
  fp8serve verify ./llama-fp8/model-00001-of-00002.safetensors --json
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8serve.errors import ScalesError
from fp8serve.terminal import AsJson, print_json, progress

if TYPE_CHECKING:
    from fp8serve.model.verify import Finding

MAX_LISTED = 5  # findings of a kind; --json lists all


def command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Model directory, or a .safetensors file.")],
    json: AsJson = False,
) -> None:
    from dataclasses import asdict

    from fp8serve.hub import find_checkpoint
    from fp8serve.model.verify import verify

    checkpoint = find_checkpoint(path)
    with progress("Verifying") as advance:
        findings = verify(checkpoint, advance)
    errors = sum(finding.severity == "error" for finding in findings)
    if json:
        print_json({"path": str(checkpoint), "good": not errors, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(checkpoint, findings)
    if any(finding.check == "format" for finding in findings):
        raise ScalesError(f"{path} cannot be verified.")
    if errors:
        raise ScalesError(f"{path} has {errors} {'error' if errors == 1 else 'errors'} that would make outputs wrong.")


def _print(path: Path, findings: "list[Finding]") -> None:
    if not findings:
        servable = "`fp8serve inspect` shows whether it can be served."
        print(f"{path}: no error in its scales and quantized weights. {servable}")
    kinds = dict.fromkeys((finding.severity, finding.check) for finding in findings)
    for severity, check in kinds:
        same_kind = [finding for finding in findings if (finding.severity, finding.check) == (severity, check)]
        for finding in same_kind[:MAX_LISTED]:
            print(f"{severity}, {check}: {finding.sentence}")
        if len(same_kind) > MAX_LISTED:
            print(f"{severity}, {check}: ... and {len(same_kind) - MAX_LISTED} more; --json lists all.")
