"""The command line. Each command is a module of `commands/`, whose docstring is its help text.

The exit status is 0 for success, 1 for an error, 2 for wrong usage and 130 for an interrupt. An error is one sentence
on standard error, with a traceback only with --debug. Results go to standard output, as JSON with --json; everything
else goes to standard error. Commands import torch and the web framework inside their functions, so that
`fp8serve --help` is fast.
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
    state,
    verify,
)
from fp8serve.errors import Fp8ServeError
from fp8serve.processes import end_first_process_at_sigterm

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
    # vLLM accepts several values after one option; serve gets them as extra arguments and says what to write instead
    settings = {"allow_extra_args": True} if module is serve else None
    app.command(name, help=module.__doc__, context_settings=settings)(module.command)
GROUPS = {"models": models.app, "jobs": jobs.app, "key": key.app, "state": state.app, "bench": bench.app}
for group, group_app in GROUPS.items():
    app.add_typer(group_app, name=group)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"fp8serve {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may also follow the command.")
    ] = False,
) -> None:
    """Calibrate a language model to FP8, serve it, fine-tune it in FP8, and serve the result with the same scales.

    \b
    Examples:
      fp8serve demo                                   # all steps with a small model, offline
      fp8serve calibrate MODEL --out MODEL-fp8
      fp8serve serve MODEL-fp8
      fp8serve generate MODEL-fp8 "Once upon a time"
    """


TRAINING_COMMANDS = {"finetune", "serve", "demo", "bench step", "bench monitor"}
"""Commands that train, or that start child processes that train."""


def prepare_environment(args: Sequence[str]) -> None:
    """Sets environment variables that torch and its libraries read when they are loaded, unless they are set already.

    By default, idle threads of torch spin for milliseconds. This slows other threads on the same cores, such as an
    engine's, a trainer's or those of fp8serve's kernels (csrc/cpu/threads.h), up to tenfold. With
    OMP_WAIT_POLICY=PASSIVE, idle threads sleep at once. In a process that only trains, they first spin for some
    microseconds, which saves a twentieth of a step.
    """
    words = [arg for arg in args if not arg.startswith("-")]
    training_commands = {" ".join(words[:1]), " ".join(words[:2])} & TRAINING_COMMANDS
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if training_commands - {"serve", "demo"}:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if training_commands:
        # Huge pages for large tensors, also in child processes: a training step has a tenth of the page faults.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    prepare_environment(args)
    end_first_process_at_sigterm()
    debug = "--debug" in args
    return run(app, ["--debug"] * debug + [a for a in args if a != "--debug"], "fp8serve", debug, args)


def run(app: typer.Typer, args: Sequence[str], name: str, debug: bool = False, obj: object = None) -> int:
    """Runs `app` with the arguments `args` and returns the exit status. Prints an error as one sentence or, with
    `debug`, as a traceback. `name` is the program's name in help texts."""
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
            _print_error(_error_message(error))
        return 1
    return 0


def _print_error(message: str) -> None:
    if logs.writes_json():  # then each line on standard error must be JSON
        logging.getLogger("fp8serve").critical("%s", message)
    else:
        print(f"fp8serve: {message}", file=sys.stderr)


def _error_message(error: Exception) -> str:
    """Returns the message for the user. Errors of other classes than fp8serve's and OSError are internal errors."""
    if isinstance(error, Fp8ServeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"internal error, {type(error).__name__}: {error}; run the command again with --debug for the traceback."


if __name__ == "__main__":
    sys.exit(main())
