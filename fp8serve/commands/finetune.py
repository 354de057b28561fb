"""`fp8serve finetune`: the trainer of the endpoint, in the foreground."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fp8serve.errors import RecipeError
from fp8serve.fp8.recipe import RecipeName
from fp8serve.terminal import Advance, AsJson, print_json, progress, remark


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face-format directory, or a name on the hub.")],
    data: Annotated[list[Path], typer.Option(help="Text or JSON-lines file; repeat for several.")],
    out: Annotated[Path, typer.Option(help="Directory for checkpoints/ and, at the end, model/.")],
    recipe: Annotated[RecipeName, typer.Option(help="How tensors are scaled.")] = "delayed",
    recipe_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A parameter of the recipe, its value in JSON; repeat for several."),
    ] = None,
    history_len: Annotated[
        int | None, typer.Option(min=1, help="Length of the amax history (delayed).", show_default="1024")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 1,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, instead of epochs.")] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-5,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of linear rise.", show_default="3 % of all")
    ] = None,
    min_lr_ratio: Annotated[float, typer.Option(min=0, max=1, help="Where it ends, as a part of the peak.")] = 0.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a microbatch.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Microbatches in an optimizer step.")] = 1,
    seq_len: Annotated[int, typer.Option(min=2, help="Longest row, in tokens.")] = 256,
    packing: Annotated[
        Literal["rows", "tokens"], typer.Option(help="Fill a microbatch by rows, or to batch-size x seq-len tokens.")
    ] = "rows",
    master_weights: Annotated[
        Literal["model", "optimizer"],
        typer.Option(help="FP32 weights in the model, or in the optimizer beside a BF16 model."),
    ] = "model",
    weight_decay: Annotated[float, typer.Option(min=0, help="AdamW's weight decay.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Largest gradient norm.")] = 1.0,
    eval_data: Annotated[list[Path] | None, typer.Option(help="File to validate on; repeat for several.")] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between validations.", show_default="at the end")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints.", show_default="by --save-minutes")
    ] = None,
    save_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints, without --save-every.")] = 10.0,
    keep_last: Annotated[int, typer.Option(min=1, help="Newest checkpoints to keep.")] = 2,
    format: Annotated[
        Literal["compressed-tensors", "fp8", "modelopt"], typer.Option(help="Spelling of the result's FP8 weights.")
    ] = "compressed-tensors",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data order.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    template_date: Annotated[
        str | None, typer.Option(metavar="DATE", help="Date that chat templates are told.", show_default="first day")
    ] = None,
    on_divergence: Annotated[
        Literal["fail", "keep"], typer.Option(help="Whether a run that made the model worse gives a model.")
    ] = "fail",
    json: AsJson = False,
) -> None:
    """Fine-tune MODEL in FP8 on your own data.

    The result carries the scales that training kept: no calibration is needed before serving it. Interrupted
    (ctrl-C, SIGTERM), it writes a checkpoint first; the same command again goes on from there, with more --max-steps
    or --epochs beyond its end. Killed, it loses what came after its last checkpoint.

    \b
    Examples:
      fp8serve finetune ./llama --data chats.jsonl --out ./run
      fp8serve finetune ./llama-fp8 --data chats.jsonl --out ./run --epochs 3 --lr 1e-5
      fp8serve finetune ./llama --data chats.jsonl --out ./run --recipe-option fp8_dpa=true --recipe-option margin=1
      fp8serve serve ./run/model
    """
    from fp8serve.hub import find_model

    directory = find_model(model)
    from fp8serve.train.config import TrainConfig
    from fp8serve.train.trainer import Trainer

    config = TrainConfig(
        model=str(directory),
        data=tuple(map(str, data)),
        out=str(out),
        recipe=recipe,
        recipe_options=recipe_options(recipe_option or []),
        amax_history_len=history_len,
        epochs=epochs,
        max_steps=max_steps,
        lr=lr,
        warmup_steps=warmup_steps,
        min_lr_ratio=min_lr_ratio,
        batch_size=batch_size,
        accumulate=accumulate,
        seq_len=seq_len,
        packing=packing,
        master_weights=master_weights,
        weight_decay=weight_decay,
        clip=clip,
        eval_data=tuple(map(str, eval_data or ())),
        eval_every=eval_every,
        save_every=save_every,
        save_minutes=save_minutes,
        keep_last=keep_last,
        format=format,
        seed=seed,
        device=device,
        template_date=template_date,
        on_divergence=on_divergence,
    )
    with progress("Training") as advance, _stop_on_signal() as stopped:
        result = Trainer(config).run(on_event=lambda event: _show(event, advance), stop=stopped)
    print_json(vars(result)) if json else _summary(result)
    if result.status == "stopped":
        raise typer.Exit(130)


def recipe_options(given: list[str]) -> dict[str, Any]:
    """{"margin": 1} of ["margin=1"]; a value that is not JSON is a string. Raises RecipeError for one without "="."""
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(f"--recipe-option wants NAME=VALUE, such as margin=1, found {text!r}.")
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


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
