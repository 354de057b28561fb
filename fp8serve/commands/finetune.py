"""Fine-tune MODEL in FP8 on your own data.

The result has the scales from training, so no calibration is needed before serving it. An interrupted run (ctrl-C,
SIGTERM) first writes a checkpoint; the same command continues from there, and with more --max-steps or --epochs also
beyond the end of a finished run. A killed run loses everything after its last checkpoint. --dry-run trains nothing: it
reads all data and prints every invalid row, the number of steps, the memory that they take, and the learnt part of the
first row. `fp8serve jobs metrics` and `jobs plot` show what the run in a directory has reported.

\b
Examples:
  fp8serve finetune ./llama --data chats.jsonl --out ./run --dry-run
  fp8serve finetune ./llama --data chats.jsonl --out ./run
  fp8serve finetune ./llama-fp8 --data chats.jsonl --out ./run --epochs 3 --lr 1e-5
  fp8serve finetune ./llama --method dpo --data pairs.jsonl --out ./run --lr 1e-6
  fp8serve finetune ./llama --method grpo --data prompts.jsonl --reward reward.py --out ./run --lr 1e-6
  fp8serve finetune ./llama --data chats.jsonl --out ./run --recipe-option fp8_dpa=true --recipe-option margin=1
  fp8serve finetune ./llama --data chats.jsonl --out ./run --procs 2 --accumulate 4
  fp8serve finetune ./llama --data chats.jsonl --out ./run --procs 2 --accumulate 4 --fsdp
  torchrun --nnodes 2 --nproc-per-node 8 ... -m fp8serve finetune ./llama --data chats.jsonl --out ./run --accumulate 16
  fp8serve serve ./run/model
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8serve.commands import jobs
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.errors import Fp8ServeError, GroupError, JobError
from fp8serve.terminal import Advance, AsJson, Model, print_json, progress, remark
from fp8serve.train.config import TrainConfig
from fp8serve.train.events import EVENTS, Event, logged, series_of_run

if TYPE_CHECKING:
    from fp8serve.ranks import Ranks

STOPPED = 130  # exit status


@with_options()
def command(
    model: Model,
    options: Chosen[TrainConfig],
    procs: Annotated[
        int, typer.Option(min=1, help="Processes of this machine that divide the microbatches of a step among them.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the data, and print what the run takes.")
    ] = False,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model
    from fp8serve.ranks import torchrun

    if dry_run:
        return _dry_run(options(model=str(find_model(model))), procs, json)
    with torchrun(str(options.values.get("device", "cpu"))) as ranks:
        config = options(model=str(find_model(model)))
        if procs > 1:
            return _run_group(config, json, procs)
        status = _run(config, json, ranks)
    if status and ranks.size == 1:  # torchrun would take it for a crash
        raise typer.Exit(status)
    return None


def _run(config: TrainConfig, json: bool, ranks: "Ranks") -> int:
    """The exit status of a run by this process, or by all ranks, of which rank 0 speaks."""
    from fp8serve.train.trainer import Trainer

    out = Path(config.out)
    with progress("Training", ranks.first) as advance, logged(out / EVENTS) as log, _stop_on_signal() as stopped:

        def print_event(event: Event) -> None:
            log(event)
            _show(event, advance)

        result = Trainer(config, ranks).run(on_event=print_event, stop=stopped)
    if ranks.first:
        print_json(vars(result)) if json else _summary(result, out)
    return STOPPED if result.status == "stopped" else 0


def _run_group(config: TrainConfig, json: bool, procs: int) -> None:
    from fp8serve.ranks import is_rank
    from fp8serve.train.group import run_group
    from fp8serve.train.trainer import check_processes

    if is_rank():
        raise JobError("torchrun has started the processes already; leave --procs out.")
    check_processes(config, procs)
    status = run_group(procs, "fp8serve.commands.finetune:as_rank", [config.to_json(), str(json)])
    raise typer.Exit(STOPPED if status is None else status)


def as_rank(arguments: list[str]) -> int:
    """CONFIG JSON: train as one of the processes that `_run_group` has started."""
    from fp8serve.ranks import torchrun

    config = TrainConfig.from_json(arguments[0])
    try:
        with torchrun(config.device) as ranks:
            return _run(config, arguments[1] == "True", ranks)
    except GroupError:  # the group starts again
        raise
    except Fp8ServeError as error:
        remark(f"fp8serve: {error}")
        return 1


def _dry_run(config: TrainConfig, procs: int, json: bool) -> None:
    from fp8serve.train.validate import validate

    report = validate(config, procs)
    result = vars(report) | {"data": vars(report.data)}
    print_json(result) if json else jobs.show_dry_run(result)
    if not report.ok:
        raise typer.Exit(1)


def _show(event: dict[str, Any], advance: Advance) -> None:
    remark(event["message"])
    if event["type"] == "metrics":
        advance(event["step"], event["total_steps"])


def _summary(result: Any, out: Path) -> None:
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
    jobs.show_chart(series_of_run(out))


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
