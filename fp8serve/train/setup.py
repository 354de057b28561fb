"""Everything that a run needs before its first step: rows, model and optimizer, from a base model or a checkpoint.

A checkpoint is itself a model directory, so a resumed job no longer needs the base model. A job that trains an adapter
needs its base model.
"""

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8serve.errors import JobError
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.selfcheck import prepare_device
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import load_trainable, open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.formats.quantization_config import quantization_files
from fp8serve.model.storage.files import read_json
from fp8serve.model.storage.memory import trim
from fp8serve.model.stored import matrices_note
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.ranks import ALONE, Ranks
from fp8serve.train import state
from fp8serve.train.checkpoint import carried_files
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Item, RowCounts, check_length, fingerprint, total_steps
from fp8serve.train.events import OnEvent, message
from fp8serve.train.forward import Forward, Logits
from fp8serve.train.lora import adapted_model, trained
from fp8serve.train.memory import check_layers
from fp8serve.train.methods.interface import Method
from fp8serve.train.methods.table import method_of, reader_of
from fp8serve.train.optimizer import Optimizer
from fp8serve.train.tokenized import TokenizedData

if TYPE_CHECKING:  # importing FSDP2 takes 0.4 s
    from fp8serve.train.sharded.building import Sharded

ITEMS = ("items", "eval_items")


@dataclass(frozen=True)
class Setup:
    """The objects that stay the same during a run.

    items, eval_items: what is learnt, and what is held out; see `methods.interface`. carry: writes the base model's
    small files into a directory. high_precision_linears: those in high precision, as in the base model. sharded: where
    the weights are divided among processes; `forward` is its own.
    """

    method: Method[Any]
    items: list[Any]
    eval_items: list[Any]
    forward: Forward
    optimizer: Optimizer
    total_steps: int
    data_fingerprint: str
    carry: Callable[[Path], None]
    high_precision_linears: tuple[str, ...] = ()
    sharded: "Sharded | None" = None

    @property
    def decoder(self) -> Model:
        """The model that is trained."""
        return self.forward.network.decoder

    def observe(self, loss: Callable[[Logits], Tensor]) -> None:
        """`Forward.observe`. Weights that are gathered in FP8 have no other values, so there a second model, which is
        gathered as it is, lends what it has seen."""
        if self.sharded is None or not self.sharded.in_fp8:
            return self.forward.observe(loss)
        ranks = self.sharded.shards.ranks
        with ranks.together():
            second = self.sharded.in_high_precision()
        state.load_scaling(second, state.scaling_tensors(self.forward))
        second.observe(loss)
        state.load_scaling(self.forward, state.scaling_tensors(second))
        del second  # it is made of cycles
        gc.collect()
        trim()
        return None

    def begun(self, ranks: Ranks) -> "Setup":
        """A copy whose items hold what the method needs to know about the model as it is now."""
        items, eval_items = (self.method.begin(self.forward, result, ranks) for result in (self.items, self.eval_items))
        return replace(self, items=items, eval_items=eval_items)

    def tensors_of_items(self) -> dict[str, Tensor]:
        """What the items hold, for a checkpoint: tensors under `items.` or `eval_items.` and the method's names."""
        results = {name: self.method.keep(getattr(self, name)) for name in ITEMS}
        return {f"{name}.{key}": tensor for name, tensors in results.items() for key, tensor in tensors.items()}

    def recall_items(self, tensors: Mapping[str, Tensor]) -> "Setup":
        """The reverse of `tensors_of_items`. JobError if `tensors` belong to other items."""
        items, eval_items = (self.method.recall(getattr(self, name), _below(name, tensors)) for name in ITEMS)
        return replace(self, items=items, eval_items=eval_items)


def _below(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `name.`, by the rest of their names."""
    return {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}


def prepare(config: TrainConfig, source: Path, on_event: OnEvent, ranks: Ranks = ALONE) -> Setup:
    """Load data and model; `source` is the base model or a checkpoint. Raises ModelError, DataError, JobError.

    A checkpoint of an adapter is no model, so the base model is read again.
    """
    source = Path(config.model) if config.lora_rank else source
    check_format(config)
    model = read_config(source)
    check_length(config.seq_len, model)
    check_layers(config, model)
    recipe = config.fp8_recipe
    device_of(config)
    data = TokenizedData(config, source, Tokenizer.from_dir(source, config.today), on_event, keeps=ranks.first)
    items, report = data.load("data")
    report_data(report, on_event, reader_of(config).lacks)
    eval_items = data.load("eval_data")[0] if config.eval_data else []
    report_overlap(items, eval_items, on_event)
    retained = () if recipe is None or config.lora_rank else high_precision_linears(source)
    if retained:
        text = f"{len(retained)} linear layers that are not in FP8 in the model are trained in BF16 and stay so"
        on_event(message("kept", text, kept=len(retained)))
    for note in () if config.lora_rank else matrices_note(open_checkpoint(source), rewritten=True):
        on_event(message("widened", note))
    sharded = _sharded(config, source, retained, ranks, on_event) if config.fsdp else None
    if sharded is not None:
        forward, parameters = sharded.forward, sharded.shards.masters
    else:
        decoder = adapted_model(config) if config.lora_rank else _decoder(source, recipe, retained, config)
        forward = Forward(decoder, None if config.lora_rank else recipe, ranks=ranks, recompute=config.recompute)
        parameters = trained(decoder) if config.lora_rank else dict(decoder.named_parameters())
    if seeded := state.seed_scaling(forward, source):
        on_event(message("seeded", f"{seeded} tensors start with the scales stored in the model", seeded=seeded))
    for reason in forward.differences():
        on_event(message("log_probs_differ", f"A server will return other log-probabilities than this run: {reason}"))
    if config.lora_rank:
        count = sum(parameter.numel() for parameter in parameters.values())
        on_event(message("adapter", f"An adapter of {count} parameters is trained", parameters=count))
        report_rank(parameters, config.lora_rank, on_event)
    optimizer = Optimizer(parameters, config, None if sharded is None else sharded.norm)
    return Setup(
        method=method_of(config),
        items=items,
        eval_items=eval_items,
        forward=forward,
        optimizer=optimizer,
        total_steps=total_steps([item.tokens for item in items], config),
        data_fingerprint=fingerprint(items),
        carry=_nothing if config.lora_rank else carried_files(source),
        high_precision_linears=retained,
        sharded=sharded,
    )


def _sharded(
    config: TrainConfig, source: Path, retained: Collection[str], ranks: Ranks, on_event: OnEvent
) -> "Sharded | None":
    """The model divided among the processes; None if there is one process. JobError: see `check_blocks`."""
    from fp8serve.train.sharded.building import Sharded, described
    from fp8serve.train.sharded.shards import check_blocks

    sharded = Sharded(config, source, retained, ranks) if ranks.in_step else None
    if sharded is not None and config.optimizer_states == "8bit":
        check_blocks(sharded.shards)
    on_event(message("sharded", described(sharded), processes=ranks.size))
    return sharded


def _nothing(directory: Path) -> None:
    """What an adapter's checkpoint takes over from the base model."""


def check_format(config: TrainConfig) -> None:
    """Raises ModelError before any work for a format that cannot express the recipe's weights."""
    recipe = config.fp8_recipe
    if recipe is not None and not recipe.override_linear_precision[0]:
        quantization_files(config.format, recipe, kv_cache=False)


def device_of(config: TrainConfig) -> torch.device:
    try:
        device = torch.device(config.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise JobError(f"The device {config.device!r} cannot be used: {str(error).splitlines()[0]}") from error
    prepare_device(device)
    return device


def report_data(report: RowCounts, on_event: OnEvent, lacks: str) -> None:
    """Say how much of the data carries loss before any time is spent on it."""
    text = (
        f"{report.rows} rows, {report.tokens} tokens an epoch, {report.trainable_fraction:.1%} of them carry loss; "
        f"{report.truncated_rows} rows truncated"
    )
    numbers = {**vars(report), "trainable_fraction": report.trainable_fraction}
    on_event(message("data", text, **numbers))
    if report.dropped_rows:
        text = f"{report.dropped_rows} examples do not have {lacks} within seq_len and were dropped"
        on_event(message("rows_dropped", text, level="warn", dropped_rows=report.dropped_rows))


def report_overlap(items: Sequence[Item], eval_items: Sequence[Item], on_event: OnEvent) -> None:
    """Warn if training rows are also validation rows, because their loss falls by memorisation alone."""
    learnt = {_content(item) for item in items} if eval_items else set()
    if both := sum(_content(item) in learnt for item in eval_items):
        text = f"{both} of {len(eval_items)} validation rows are training rows, too: their loss falls by memory alone"
        on_event(message("overlap", text, level="warn", rows=both))


def _content(item: Item) -> tuple[bytes, ...]:
    return tuple(row.ids.tobytes() + row.loss.tobytes() for row in item.rows)


def report_rank(parameters: Mapping[str, nn.Parameter], rank: int, on_event: OnEvent) -> None:
    """Warn if the rank of an adapter is larger than the smaller side of a matrix, which bounds the rank of its
    change."""
    shapes = {name.rpartition(".")[0]: [0, 0] for name in parameters}
    for name, parameter in parameters.items():
        layer, _, part = name.rpartition(".")
        if part in ("lora_A", "lora_B"):
            shapes[layer][part == "lora_B"] = parameter.numel() // rank
    sides = [min(shape) for shape in shapes.values()]
    if more := sum(side < rank for side in sides):
        text = (
            f"Rank {rank} is more than the smaller side of {more} of {len(sides)} matrices (the smallest: "
            f"{min(sides)}), which can learn no more by it than by a rank of that side"
        )
        on_event(message("rank_too_large", text, level="warn", layers=more))


def high_precision_linears(source: Path) -> tuple[str, ...]:
    """The linears that an FP8 directory holds in high precision; a checkpoint records those of its base model.

    A directory without FP8 weights keeps none, because no layers were chosen for it.
    """
    if (source / "trainer.json").exists():
        return tuple(read_json(source / "trainer.json", JobError).get("kept", ()))
    return tuple(open_checkpoint(source).high_precision_linears)


def _decoder(source: Path, recipe: Recipe | None, retained: tuple[str, ...], config: TrainConfig) -> Model:
    decoder = load_trainable(source, dtype=torch.float32, device=config.device)
    if recipe is not None:
        convert(decoder, skip=(decoder.head_name, *retained))
    return decoder
