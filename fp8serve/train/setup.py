"""Loads the data, the model and the optimizer of a run, from its base model or from a checkpoint.

A checkpoint is a model directory, so a resumed run does not need the base model, unless it trains an adapter.
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
from fp8serve.fp8.layer_inputs import check_whole_blocks
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.selfcheck import prepare_device
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import load_trainable, open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.formats.quantization_config import quantization_files
from fp8serve.model.parity import use_invariant_mode
from fp8serve.model.storage.files import read_json
from fp8serve.model.storage.memory import trim
from fp8serve.model.stored_checkpoint import matrices_notes
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.ranks import ALONE, Ranks
from fp8serve.train import state
from fp8serve.train.checkpoint import model_file_writer
from fp8serve.train.compiled import CompiledLayers
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Item, RowCounts, check_length, fingerprint, total_steps
from fp8serve.train.events import OnEvent, message
from fp8serve.train.forward import Forward, Logits
from fp8serve.train.lora import adapted_model, adapter_parameters
from fp8serve.train.memory import check_layers
from fp8serve.train.methods.interface import Method, method_of, reader_of
from fp8serve.train.optimizer import Optimizer
from fp8serve.train.token_cache import TokenCache

if TYPE_CHECKING:  # importing FSDP2 takes 0.4 s
    from fp8serve.train.sharded.building import ShardedModel

ITEM_FIELDS = ("items", "eval_items")


@dataclass(frozen=True)
class Setup:
    """The data, the model and the optimizer of a run.

    `items` are trained on, `eval_items` are the validation data. `copy_model_files` writes the base model's
    configuration and tokenizer into a directory. `high_precision_linears` are the linear layers that the base model
    holds in high precision. If the weights are sharded over processes, `forward` belongs to `sharded`. `compiled` are
    the compiled layers of a run with `compile`.
    """

    method: Method[Any]
    items: list[Any]
    eval_items: list[Any]
    forward: Forward
    optimizer: Optimizer
    total_steps: int
    data_fingerprint: str
    copy_model_files: Callable[[Path], None]
    high_precision_linears: tuple[str, ...] = ()
    sharded: "ShardedModel | None" = None
    compiled: CompiledLayers | None = None

    @property
    def decoder(self) -> Model:
        return self.forward.network.decoder

    def observe(self, loss: Callable[[Logits], Tensor]) -> None:
        """Calls `Forward.observe`. If weights are gathered in FP8, a second model that gathers them in high precision
        observes the loss instead, and its amaxes are copied."""
        if self.sharded is None or not self.sharded.in_fp8:
            return self.forward.observe(loss)
        ranks = self.sharded.shards.ranks
        with ranks.shared_errors():
            precise_forward = self.sharded.in_high_precision()
        state.load_scaling(precise_forward, state.scaling_tensors(self.forward))
        precise_forward.observe(loss)
        state.load_scaling(self.forward, state.scaling_tensors(precise_forward))
        del precise_forward
        gc.collect()  # the model has reference cycles
        trim()
        return None

    def with_reference(self, ranks: Ranks) -> "Setup":
        """Returns a copy whose items hold the reference values of the current model."""
        items, eval_items = (
            self.method.compute_reference(self.forward, items, ranks) for items in (self.items, self.eval_items)
        )
        return replace(self, items=items, eval_items=eval_items)

    def reference_tensors(self) -> dict[str, Tensor]:
        """Returns the items' reference values for a checkpoint, named `items.*` and `eval_items.*`."""
        tensors = {field: self.method.reference_tensors(getattr(self, field)) for field in ITEM_FIELDS}
        return {f"{field}.{name}": tensor for field in ITEM_FIELDS for name, tensor in tensors[field].items()}

    def with_loaded_reference(self, tensors: Mapping[str, Tensor]) -> "Setup":
        """Returns a copy with the reference values of a checkpoint. Raises JobError if they belong to other items."""
        items, eval_items = (
            self.method.load_reference(getattr(self, field), _with_prefix(f"{field}.", tensors))
            for field in ITEM_FIELDS
        )
        return replace(self, items=items, eval_items=eval_items)


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def prepare(config: TrainConfig, source: Path, on_event: OnEvent, ranks: Ranks = ALONE) -> Setup:
    """Loads data and model; `source` is the base model or a checkpoint. Raises ModelError, DataError or JobError."""
    source = Path(config.model) if config.lora_rank else source  # a checkpoint of an adapter has no base weights
    model = read_config(source)
    check_length(config.seq_len, model)
    check_layers(config, model)
    recipe = config.fp8_recipe
    check_device(config.device)
    if config.invariant:
        uses_mx = recipe is not None and recipe.specs.linear["input"].is_mx
        on_event(message("invariant", use_invariant_mode(config.device, model, uses_mx)))
    cache = TokenCache(config, source, Tokenizer.from_dir(source, config.today), on_event, writes=ranks.is_first)
    items, counts = cache.load("data")
    report_data(counts, on_event, reader_of(config).requirement)
    eval_items = cache.load("eval_data")[0] if config.eval_data else []
    report_overlap(items, eval_items, on_event)
    unquantized = () if recipe is None or config.lora_rank else high_precision_linears(source)
    if unquantized:
        text = f"{len(unquantized)} linear layers that the model stores in high precision are trained in BF16"
        on_event(message("kept", text, kept=len(unquantized)))
    if last := () if config.lora_rank or is_checkpoint(source) else last_linears(recipe, model.num_layers, source):
        text = f"{len(last)} linear layers at the end of the model are trained in BF16, because the recipe is nvfp4"
        on_event(message("kept", text, kept=len(last)))
        unquantized = tuple(dict.fromkeys((*unquantized, *last)))
    for note in () if config.lora_rank else matrices_notes(open_checkpoint(source), rewritten=True):
        on_event(message("widened", note))
    sharded = _sharded_model(config, source, unquantized, ranks, on_event) if config.fsdp else None
    if sharded is not None:
        forward, parameters = sharded.forward, sharded.shards.masters
    else:
        decoder = adapted_model(config) if config.lora_rank else _trainable_model(source, recipe, unquantized, config)
        forward = Forward(
            decoder,
            None if config.lora_rank else recipe,
            ranks=ranks,
            recompute=config.recompute,
            records_kv=state.records_kv(config, source),
        )
        parameters = adapter_parameters(decoder) if config.lora_rank else dict(decoder.named_parameters())
    if seeded := state.seed_scaling(forward, source):
        on_event(message("seeded", f"{seeded} tensors start with the scales in the model", seeded=seeded))
    elif forward.records_kv:  # in case that the checkpoint, of an older version, has no states of keys and values
        state.seed_scaling(forward, Path(config.model))
    for reason in forward.differences():
        on_event(message("log_probs_differ", f"A server computes other log-probabilities than this run: {reason}"))
    if config.lora_rank:
        count = sum(parameter.numel() for parameter in parameters.values())
        on_event(message("adapter", f"The run trains an adapter of {count} parameters", parameters=count))
        report_rank(parameters, config.lora_rank, on_event)
    compiled = None
    if config.compile:
        forward.prepare_states()
        compiled = CompiledLayers(forward.network.decoder)
    optimizer = Optimizer(parameters, config, None if sharded is None else sharded.norm)
    return Setup(
        method=method_of(config),
        items=items,
        eval_items=eval_items,
        forward=forward,
        optimizer=optimizer,
        total_steps=total_steps([item.tokens for item in items], config),
        data_fingerprint=fingerprint(items),
        copy_model_files=(lambda directory: None) if config.lora_rank else model_file_writer(source),
        high_precision_linears=unquantized,
        sharded=sharded,
        compiled=compiled,
    )


def _sharded_model(
    config: TrainConfig, source: Path, unquantized: Collection[str], ranks: Ranks, on_event: OnEvent
) -> "ShardedModel | None":
    """Returns the model sharded over the processes, or None if there is one process. Raises JobError if 8-bit moments
    cannot be divided."""
    from fp8serve.train.sharded.building import ShardedModel, describe
    from fp8serve.train.sharded.shards import check_blocks

    sharded = ShardedModel(config, source, unquantized, ranks) if ranks.is_sharded else None
    if sharded is not None and config.optimizer_states == "8bit":
        check_blocks(sharded.shards)
    on_event(message("sharded", describe(sharded), processes=ranks.size))
    return sharded


def check_format(config: TrainConfig) -> None:
    """Raises ModelError if the job's file format cannot store weights of the job's recipe, or RecipeError if the recipe
    cannot quantize a layer. A run that resumes without its base model does not check the layers."""
    recipe = config.fp8_recipe
    if recipe is None or recipe.override_linear_precision[0]:
        return
    quantization_files(config.format, recipe, kv_cache=False)
    weight = recipe.specs.linear["weight"]
    if (weight.is_mx or weight.is_4bit) and Path(config.model).exists():
        base = open_checkpoint(config.model)
        unquantized = frozenset(() if config.lora_rank else base.high_precision_linears)
        for name in base.linears:
            if name not in unquantized:
                check_whole_blocks(recipe, base.shapes[f"{name}.weight"][1], name)


def check_device(name: str) -> None:
    """Raises JobError if torch cannot use the device. Runs the self-check of its kernels otherwise."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise JobError(f"The device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    prepare_device(device)


def report_data(counts: RowCounts, on_event: OnEvent, requirement: str) -> None:
    """Reports the size of the data, and warns of dropped examples, which lack `requirement`."""
    text = (
        f"{counts.rows} rows, {counts.tokens} tokens an epoch, {counts.trainable_fraction:.1%} of them carry loss; "
        f"{counts.truncated_rows} rows truncated"
    )
    on_event(message("data", text, **vars(counts), trainable_fraction=counts.trainable_fraction))
    if counts.dropped_rows:
        text = f"{counts.dropped_rows} examples do not have {requirement} within seq_len and were dropped"
        on_event(message("rows_dropped", text, level="warn", dropped_rows=counts.dropped_rows))


def report_overlap(items: Sequence[Item], eval_items: Sequence[Item], on_event: OnEvent) -> None:
    """Warns if validation rows are also training rows, because their loss falls by memorization alone."""
    training_contents = {_content(item) for item in items} if eval_items else set()
    if overlap := sum(_content(item) in training_contents for item in eval_items):
        text = (
            f"{overlap} of {len(eval_items)} validation rows are also training rows: their loss falls by memorization "
            "alone"
        )
        on_event(message("overlap", text, level="warn", rows=overlap))


def _content(item: Item) -> tuple[bytes, ...]:
    return tuple(row.ids.tobytes() + row.loss.tobytes() for row in item.rows)


def report_rank(parameters: Mapping[str, nn.Parameter], rank: int, on_event: OnEvent) -> None:
    """Warns if an adapter's rank is larger than the smaller side of a matrix, the highest rank that it can use."""
    shapes = {name.rpartition(".")[0]: [0, 0] for name in parameters}
    for name, parameter in parameters.items():
        layer, _, part = name.rpartition(".")
        if part in ("lora_A", "lora_B"):
            shapes[layer][part == "lora_B"] = parameter.numel() // rank
    sides = [min(shape) for shape in shapes.values()]
    if count := sum(side < rank for side in sides):
        text = (
            f"Rank {rank} is more than the smaller side of {count} of {len(sides)} matrices (the smallest has "
            f"{min(sides)}), and a rank above the smaller side adds no capacity"
        )
        on_event(message("rank_too_large", text, level="warn", layers=count))


def is_checkpoint(source: Path) -> bool:
    """Returns whether the directory is a checkpoint of a run, and no base model."""
    return (source / "trainer.json").exists()


def last_linears(recipe: Recipe | None, num_layers: int, source: Path) -> tuple[str, ...]:
    """Returns the linear layers that a run in NVFP4 trains in BF16: those of the last 15 % of the model's layers.

    NVIDIA's recipe for NVFP4 leaves about so many in BF16, most of them at the end, where rounding harms most. A model
    of up to six layers has none.
    """
    if recipe is None or not recipe.specs.linear["grad_output"].is_4bit:
        return ()
    first = num_layers - num_layers * 15 // 100
    prefixes = tuple(f"model.layers.{index}." for index in range(first, num_layers))
    return tuple(name for name in open_checkpoint(source).linears if name.startswith(prefixes))


def high_precision_linears(source: Path) -> tuple[str, ...]:
    """Returns the linear layers that an FP8 directory, or the base model of a checkpoint, holds in high precision.

    Returns () for a directory without FP8 weights: then all linear layers are trained in FP8.
    """
    if is_checkpoint(source):
        return tuple(read_json(source / "trainer.json", JobError).get("kept", ()))
    return tuple(open_checkpoint(source).high_precision_linears)


def _trainable_model(source: Path, recipe: Recipe | None, unquantized: tuple[str, ...], config: TrainConfig) -> Model:
    decoder = load_trainable(source, dtype=torch.float32, device=config.device)
    if recipe is not None:
        convert(decoder, skip=(decoder.head_name, *unquantized))
    return decoder
