"""Fine-tune MODEL in FP8 on your own data.

The result carries the scales that training kept: no calibration is needed before serving it. Interrupted
(ctrl-C, SIGTERM), it writes a checkpoint first; the same command again goes on from there, with more --max-steps
or --epochs beyond its end. Killed, it loses what came after its last checkpoint. --dry-run trains nothing: it reads
all data, and prints every row that is wrong, the steps, the memory that they take, and what is learnt of the first row.

\b
Examples:
  fp8serve finetune ./llama --data chats.jsonl --out ./run --dry-run
  fp8serve finetune ./llama --data chats.jsonl --out ./run
  fp8serve finetune ./llama-fp8 --data chats.jsonl --out ./run --epochs 3 --lr 1e-5
  fp8serve finetune ./llama --data chats.jsonl --out ./run --recipe-option fp8_dpa=true --recipe-option margin=1
  fp8serve serve ./run/model
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.terminal import Advance, AsJson, Model, print_json, printable, progress, remark
from fp8serve.train.config import TrainConfig

if TYPE_CHECKING:
    from fp8serve.train.validate import ValidationReport

LEARNT = ("»", "«")


@with_options()
def command(
    model: Model,
    options: Chosen[TrainConfig],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only look at the data, and say what the run takes.")
    ] = False,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model

    config = options(model=str(find_model(model)))
    _dry_run(config, json) if dry_run else _run(config, json)


def _run(config: TrainConfig, json: bool) -> None:
    from fp8serve.train.trainer import Trainer

    with progress("Training") as advance, _stop_on_signal() as stopped:
        result = Trainer(config).run(on_event=lambda event: _show(event, advance), stop=stopped)
    print_json(vars(result)) if json else _summary(result)
    if result.status == "stopped":
        raise typer.Exit(130)


def _dry_run(config: TrainConfig, json: bool) -> None:
    from fp8serve.train.validate import validate

    report = validate(config)
    print_json(vars(report) | {"data": vars(report.data)}) if json else _print_report(report)
    if not report.ok:
        raise typer.Exit(1)


def _print_report(report: "ValidationReport") -> None:
    for bad in report.bad_lines:
        print(bad["message"])
    if more := report.bad_line_count - len(report.bad_lines):
        print(f"... and {more} more rows that are wrong")
    data, memory = report.data, report.memory_bytes["total"]
    print(
        f"{data.rows} rows, {data.tokens} tokens, {report.trainable_fraction:.0%} of them learnt; "
        f"{report.steps} steps; about {memory / 2**30:.1f} GiB of memory"
    )
    if report.sample:
        print(f"The first row, with what is learnt between {LEARNT[0]} and {LEARNT[1]}:")
        print(printable("".join(f"{LEARNT[0]}{text}{LEARNT[1]}" if learnt else text for text, learnt in report.sample)))


def _show(event: dict[str, Any], advance: Advance) -> None:
    remark(event["message"])
    if event["type"] == "metrics":
        advance(event["step"], event["total_steps"])


def _summary(result: Any) -> None:
    if result.status == "stopped":
        print(
            f"Stopped after step {result.step} of {result.total_steps}; "
            f"the same command again goes on from {result.checkpoint}."
        )
    else:
        loss = result.metrics.get("train_loss")
        print(
            f"{result.step} steps, {result.trained_tokens} tokens in {result.seconds:.1f} s; "
            f"last loss {'not finite' if loss is None else f'{loss:.4f}'}; model in {result.model}"
        )


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """The first SIGINT or SIGTERM asks to stop after the step that runs; a second one has its usual effect."""
    seen: list[int] = []
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: object) -> None:
        seen.append(number)
        signal.signal(number, usual[signal.Signals(number)])

    for number in usual:
        signal.signal(number, ask)
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
