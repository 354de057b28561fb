"""The command line: `commands/` has one module per command, whose docstring is its help; this module has the common
part.

Exit status 0 done, 1 failed, 2 wrong usage, 130 interrupted. A failure is one sentence on standard error; a traceback
appears only with --debug. Results go to standard output (as JSON with --json), everything else to standard error.
Commands import torch and the web framework inside their functions, so that `fp8serve --help` answers at once.
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fp8serve import __version__, logs
from fp8serve.commands import (  # fmt: skip
    bench,
    calibrate,
    chat,
    convert,
    demo,
    doctor,
    evaluate,
    finetune,
    generate,
    inspect,
    jobs,
    key,
    merge,
    models,
    serve,
    verify,
)
from fp8serve.errors import Fp8ServeError

app = typer.Typer(
    name="fp8serve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help is faster, and pipes and pagers show it unchanged
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
COMMANDS: dict[str, Any] = {
    "calibrate": calibrate, "serve": serve, "generate": generate, "chat": chat,
    "finetune": finetune, "merge": merge, "eval": evaluate,
    "convert": convert, "inspect": inspect, "verify": verify, "doctor": doctor, "demo": demo,
}  # fmt: skip
for name, module in COMMANDS.items():
    # serve says itself what to do about the values of an option in a row, as vLLM takes them
    settings = {"allow_extra_args": True} if module is serve else None
    app.command(name, help=module.__doc__, context_settings=settings)(module.command)
for group, inner in {"models": models.app, "jobs": jobs.app, "key": key.app, "bench": bench.app}.items():
    app.add_typer(inner, name=group)


def _print_version(expected: bool) -> None:
    if expected:
        typer.echo(f"fp8serve {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback when something fails; also after the command.")
    ] = False,
) -> None:
    """Calibrate a language model to FP8, serve it, fine-tune it in FP8, and serve the result with the same scales.

    \b
    Examples:
      fp8serve demo                                   # the whole job on a small model, offline
      fp8serve calibrate MODEL --out MODEL-fp8
      fp8serve serve MODEL-fp8
      fp8serve generate MODEL-fp8 "Once upon a time"
    """


# Commands that train, or start what trains.
TRAINING = {"finetune", "serve", "demo", "bench step", "bench monitor"}


def prepare_environment(args: Sequence[str]) -> None:
    """Sets what torch and its libraries read when they are loaded, unless it is set: how threads wait, and pages.

    torch's threads wait for work by spinning for milliseconds. When they share cores with an engine, a trainer or the
    threads of our kernels (csrc/cpu/threads.h), that slows all of them up to tenfold, so here they sleep at once. A
    trainer alone lets them spin for a few microseconds, which saves a twentieth of a step.
    """
    words = [a for a in args if not a.startswith("-")]
    trains = {" ".join(words[:1]), " ".join(words[:2])} & TRAINING
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if trains - {"serve", "demo"}:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if trains:
        # Large temporaries of torch in pages of 2 MB, also in child processes: a training step faults a tenth as often.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    prepare_environment(args)
    debug = "--debug" in args
    return run(app, ["--debug"] * debug + [a for a in args if a != "--debug"], "fp8serve", debug, args)


def run(app: typer.Typer, args: Sequence[str], name: str, debug: bool = False, obj: object = None) -> int:
    """The exit status of the command `args` of `app`, which is called `name`; a failure is one sentence or, with
    `debug`, a traceback."""
    try:
        app(args, prog_name=name, obj=obj)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            _tell(_sentence(error))
        return 1
    return 0


def _tell(sentence: str) -> None:
    if logs.writes_json():  # a server whose every line is JSON
        logging.getLogger("fp8serve").critical("%s", sentence)
    else:
        print(f"fp8serve: {sentence}", file=sys.stderr)


def _sentence(error: Exception) -> str:
    """The message for the user: our own errors and the system's explain themselves, anything else is our fault."""
    if isinstance(error, Fp8ServeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"internal error, {type(error).__name__}: {error}; run the command again with --debug for the traceback."


if __name__ == "__main__":
    sys.exit(main())
