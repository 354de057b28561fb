"""Fine-tune MODEL in FP8 on your own data.

The result has the scales of the training, so it needs no calibration before it is served. An interrupted run (ctrl-C,
SIGTERM) first writes a checkpoint, and the same command continues from there. With more --max-steps or --epochs it also
continues a finished run. A killed run loses the steps after its last checkpoint. --dry-run trains nothing: it reads all
data, and prints the invalid rows, the number of steps, their memory, and the first row with its loss mask.
`fp8serve jobs metrics` and `jobs plot` show the metrics of the run in a directory.

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

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8serve.commands import jobs
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.errors import Fp8ServeError, GroupError, JobError
from fp8serve.options import AUTO
from fp8serve.terminal import Advance, AsJson, Model, on_device, print_json, progress, remark
from fp8serve.train.config import TrainConfig
from fp8serve.train.events import EVENTS, Event, EventLog, series_of_run

if TYPE_CHECKING:
    from fp8serve.ranks import Ranks

EXIT_STOPPED = 130  # as a shell reports ctrl-C


@with_options(device=AUTO)
def command(
    model: Model,
    options: OptionValues[TrainConfig],
    procs: Annotated[
        int, typer.Option(min=1, help="Number of processes on this machine that share the microbatches of a step.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the data, and print the steps and the memory of the run.")
    ] = False,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model
    from fp8serve.ranks import torchrun

    directory = find_model(model)
    processes = max(procs, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # those of torchrun on this machine
    resolved = {"model": str(directory)} | on_device({"device": options.values["device"]}, directory, processes)
    if dry_run:
        return _dry_run(options(**resolved), procs, json)
    with torchrun(resolved["device"]) as ranks:
        config = options(**resolved)
        if procs > 1:
            return _run_group(config, json, procs)
        status = _run(config, json, ranks)
    if status and ranks.size == 1:  # torchrun would treat this status as a crash
        raise typer.Exit(status)
    return None


def _run(config: TrainConfig, json: bool, ranks: "Ranks") -> int:
    """Runs the job in this process or as one of `ranks`, of which rank 0 prints. Returns the exit status."""
    from fp8serve.train.trainer import Trainer

    out = Path(config.out)
    with (
        progress("Training", ranks.is_first) as advance,
        closing(EventLog(out / EVENTS)) as log,
        _stop_on_signal() as stop_requested,
    ):

        def print_event(event: Event) -> None:
            log(event)
            _show(event, advance)

        result = Trainer(config, ranks).run(on_event=print_event, stop=stop_requested)
    if ranks.is_first:
        print_json(vars(result)) if json else _summary(result, out)
    return EXIT_STOPPED if result.status == "stopped" else 0


def _run_group(config: TrainConfig, json: bool, procs: int) -> None:
    from fp8serve.ranks import is_rank
    from fp8serve.train.group import run_group
    from fp8serve.train.trainer import check_processes

    if is_rank():
        raise JobError("torchrun has already started the processes; leave --procs out.")
    check_processes(config, procs)
    status = run_group(procs, "fp8serve.commands.finetune:run_rank", [config.to_json(), str(json)])
    raise typer.Exit(EXIT_STOPPED if status is None else status)


def run_rank(arguments: list[str]) -> int:
    """Trains as a rank of `_run_group`. The arguments are the configuration as JSON, and the value of --json."""
    from fp8serve.ranks import torchrun

    config = TrainConfig.from_json(arguments[0])
    try:
        with torchrun(config.device) as ranks:
            return _run(config, arguments[1] == "True", ranks)
    except GroupError:  # `run_group` restarts the group
        raise
    except Fp8ServeError as error:
        remark(f"fp8serve: {error}")
        return 1


def _dry_run(config: TrainConfig, procs: int, json: bool) -> None:
    from fp8serve.train.validate import validate

    report = validate(config, procs)
    fields = vars(report) | {"data": vars(report.data)}
    print_json(fields) if json else jobs.show_dry_run(fields)
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
            f"run the same command again to resume from {result.checkpoint}."
        )
    else:
        loss = result.metrics.get("train_loss")
        print(
            f"{result.step} steps, {result.trained_tokens} tokens in {result.seconds:.1f} s; "
            f"last loss {'not finite' if loss is None else f'{loss:.4f}'}; model in {result.model}"
        )
    jobs.print_loss_chart(series_of_run(out))


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether SIGINT or SIGTERM has arrived. A second signal ends the process."""
    received: list[int] = []
    previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, previous_handlers[signal.Signals(number)])

    for number in previous_handlers:
        signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
