"""One-time experiments behind docs/studies.md, each with a command: `python -m benchmarks.studies NAME --help`."""

import sys
from collections.abc import Sequence

import typer

from benchmarks.studies import accumulation, jumps, numerics, parity, parts, quality, seeds, training
from fp8serve.cli import prepare_environment, run

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)
for module in (numerics, training, seeds, quality, accumulation, parts, jumps, parity):
    app.command(module.__name__.rpartition(".")[2])(module.command)


def main(args: Sequence[str]) -> int:
    """Runs one study and returns its exit status."""
    return run(app, args, "python -m benchmarks.studies", obj=list(args))


if __name__ == "__main__":
    prepare_environment(["finetune"])  # as what trains
    sys.exit(main(sys.argv[1:]))
