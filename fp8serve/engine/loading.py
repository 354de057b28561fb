"""Loads what an engine runs from a model directory: decoder, tokenizer, cache, and layers that do not mix their rows.

A recipe with one dynamic scale per activation tensor would let the requests of a batch change each other's numbers. In
serving, such a scale is therefore that of one token's row, so that a request gets the numbers that it gets alone.
"""

import logging
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fp8serve.engine.bad_words import Bans
from fp8serve.engine.draft_model import DraftParts, LoadedDraft, draft_config, load_draft
from fp8serve.engine.grammar import Grammars
from fp8serve.engine.memory import CachePlan, check_length, plan, plan_on_gpu, weight_bytes
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.packing import Packer, packer_of
from fp8serve.engine.request import EngineLimits
from fp8serve.engine.runner import Runner
from fp8serve.engine.saved_prefixes import SavedPrefixes, open_prefixes
from fp8serve.engine.step import GraphReport
from fp8serve.engine.task import check_generates
from fp8serve.engine.traffic import Calibrated, Traffic, input_scale
from fp8serve.errors import MachineError, ModelError, ScalesError
from fp8serve.fp8 import ops, recipe
from fp8serve.fp8.batch_invariant_linear import use_batch_invariant_products
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling, Float8CurrentScaling, delayed
from fp8serve.fp8.selfcheck import prepare_device
from fp8serve.fp8.served_attention import KvScale
from fp8serve.model import parity
from fp8serve.model.building import AnyModel, Model
from fp8serve.model.checkpoint import cache_refusal, kv_scales, load_servable, open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.model_config import ModelConfig, computed_by_note
from fp8serve.model.config.wrappers import left_out_notes
from fp8serve.model.formats.microscaling import widened_note
from fp8serve.model.formats.scales import FILE_NAME, load_scales
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.experts import reset_token_counts, rows_of_experts
from fp8serve.model.storage.files import present
from fp8serve.model.storage.opening import real_path
from fp8serve.model.stored import matrices_note
from fp8serve.model.text.tokenizer import Tokenizer

log = logging.getLogger("fp8serve.engine")
CACHE = (
    "Keys and values are rounded to an FP8 cache, which a fine-tune does not do; fp8serve.log_probs does it with "
    'kv_cache_dtype="fp8", and a trainer of your own with Forward(..., cache=scales).'
)
ROLLS = "Scales of inputs follow the traffic (roll_history), and a trainer has those that were stored."
HEAD = "The head is in FP8 (head_dtype), and training computes logits in BF16."
GPU_HEAD_DIM = 512  # csrc/cuda/attention.cu


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run, and facts about it."""

    model_dir: Path
    options: EngineOptions
    config: ModelConfig
    tokenizer: Tokenizer | None
    grammars: Grammars
    bans: Bans
    plan: CachePlan
    runner: Runner
    frozen: dict[str, FrozenLinear]  # FP8 layers but for the head, by their names in the checkpoint
    graphs: GraphReport
    packer: Packer
    traffic: Traffic
    prefixes: SavedPrefixes | None
    draft: DraftParts | None
    differences: list[str]  # why log-probabilities are not those of training; see model/parity.py

    def info(self) -> dict[str, Any]:
        """JSON: the model, its numbers and its limits."""
        config, options = self.config, self.options
        return {
            "model": str(self.model_dir),
            "architecture": config.architecture,
            "computed_by": "fp8serve" if config.computed_by is None else "transformers",
            "recipe": options.recipe,
            "fp8_layers": len(self.frozen),
            "input_scales": ", ".join(sorted({input_scale(layer) for layer in self.frozen.values()})) or None,
            "device": options.device,
            "threads": torch.get_num_threads(),
            "dtype": str(next(self.runner.model.parameters()).dtype).removeprefix("torch."),
            "kv_cache_dtype": options.kv_cache_dtype,
            "head_dtype": options.head_dtype,
            "max_model_len": self.plan.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "max_batch_tokens": options.step_tokens,
            "speculative_tokens": options.drafted_tokens,
            "draft_model": None if self.draft is None else self.draft.info(),
            "block_size": options.block_size,
            "num_blocks": self.plan.num_blocks,
            "kv_cache_bytes": self.plan.cache_bytes,
            "weight_bytes": weight_bytes(self.runner.model),
            "vocab_size": config.vocab_size,
            "eos_token_ids": list(config.eos_token_ids),
            "kernels": ops.backends(torch.device(options.device).type),
            "cuda_graphs": self.graphs.text(),
            "log_probs_as_trained": not self.differences,
            "log_probs_differ_because": self.differences,
        }

    def with_other_weights(self, model_dir: Path | None) -> "Loaded":
        """The record after the weights were replaced, by those of a directory if it is given. Kept prefixes belong to
        the old ones."""
        calibrated = Calibrated(DelayedScaling(), {})
        if model_dir is not None:
            calibrated = _calibrated(model_dir, self.frozen, replace(self.options, scales=None))
        self.traffic.begin_anew(calibrated)
        return replace(self, prefixes=None)

    def limits(self) -> EngineLimits:
        """The limits against which requests are checked."""
        plan, config = self.plan, self.config
        has_tokenizer = self.tokenizer is not None
        size = self.options.block_size
        return EngineLimits(plan.max_model_len, plan.num_blocks, size, config.vocab_size, has_tokenizer)

    def rows(self, tokens: int, sampled: int) -> dict[str, int]:
        """How many rows each FP8 layer has read when `tokens` were computed, `sampled` of them with logits."""
        pruned = set(self.runner.model.pruned_names())
        rows = {name: sampled if name in pruned else tokens for name in self.frozen}
        return rows | rows_of_experts(self.runner.model)


def load(model_dir: Path, options: EngineOptions, network: Model | None = None) -> Loaded:
    """See `Engine` for `network`, a model with its weights, and for what is raised."""
    device = open_device(options)
    config = read_config(model_dir)
    check_generates(model_dir, options.task)
    if device.type == "cuda" and config.head_dim > GPU_HEAD_DIM:
        raise ModelError(
            f"{model_dir} has keys of {config.head_dim} elements, and attention on a GPU takes at most {GPU_HEAD_DIM}; "
            "serve it on a CPU."
        )
    cache_dtype = torch.float8_e4m3fn if options.kv_cache_dtype == "fp8" else torch.bfloat16
    draft_dir = None if options.draft_model is None else Path(options.draft_model)
    draft_model_config = None if draft_dir is None else draft_config(draft_dir, model_dir, config)
    # before the weights: it is the cheaper refusal
    sizes = None if device.type == "cuda" else plan(config, options, cache_dtype, draft=draft_model_config)
    check_length(config, options)
    model = network or load_servable(
        model_dir, parse_recipe(options.recipe), _path(options.scales), options.device, head=options.head_dtype
    )
    loaded_draft = None if draft_dir is None else load_draft(draft_dir, model, options)
    frozen = _frozen(model)
    scales_follow_batch = any(layer.input_spec.depends_on_batch for layer in frozen.values())
    separate_rows(model, options.device)
    cache_scales = _cache_scales(model_dir, options) if options.kv_cache_dtype == "fp8" else None
    scales = _path(options.scales)
    if cache_scales is None and network is None and (reason := cache_refusal(model_dir, scales)) is not None:
        log.warning("The cache is BF16, and cannot be FP8 with these scales: %s", reason)
    sizes = sizes or plan_on_gpu(model, config, options, cache_dtype, draft_model_config)
    model.expect(sizes.max_model_len)
    runner = Runner(model, sizes.num_blocks, options.block_size, cache_dtype, cache_scales, options.max_lora_rank)
    graphs = _captured(runner, frozen, options, sizes)
    draft = None if loaded_draft is None else _draft_parts(loaded_draft, sizes, options)
    tokenizer = Tokenizer.from_dir(model_dir) if present(model_dir / "tokenizer.json") else None
    checkpoint = open_checkpoint(model_dir)
    notes = left_out_notes(model_dir, checkpoint.left_out), widened_note(checkpoint.shards), computed_by_note(config)
    for note in chain(*notes, matrices_note(checkpoint)):
        log.warning(note)
    calibrated = Calibrated(DelayedScaling(), {}) if network else _calibrated(model_dir, frozen, options)
    trained = Float8CurrentScaling() if scales_follow_batch else calibrated.rules
    differences = list(parity.differences(trained, config, options.device, sizes.max_model_len))
    differences += [CACHE] if cache_scales is not None else []
    differences += [ROLLS] if options.roll_history else []
    differences += [HEAD] if options.head_dtype != "bf16" else []
    return Loaded(
        model_dir=model_dir,
        options=options,
        config=config,
        tokenizer=tokenizer,
        grammars=Grammars(model_dir / "tokenizer.json", config.vocab_size, config.eos_token_ids),
        bans=Bans(tokenizer, config.vocab_size, config.eos_token_ids),
        plan=sizes,
        runner=runner,
        frozen=frozen,
        graphs=graphs,
        packer=Packer([]) if device.type == "cuda" else packer_of(model, *([draft.runner.model] if draft else [])),
        traffic=Traffic(frozen, calibrated, options),
        prefixes=open_prefixes(model_dir, config, options, sizes),
        draft=draft,
        differences=differences,
    )


def open_device(options: EngineOptions) -> torch.device:
    """The device of the options, checked, with the threads that they give this process.

    MachineError: this machine does not have the device, or its GPU cannot run the kernels that are there.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return check_device(options.device)


def check_device(name: str) -> torch.device:
    """See `open_device`."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MachineError(f"There is no device {name!r}; use cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MachineError(f"The device {name} was asked for, but PyTorch finds no GPU here; use --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MachineError(f"The device {name} was asked for, but PyTorch finds {torch.cuda.device_count()} GPU here.")
    prepare_device(device)
    return device


def weights_of(model_dir: Path, loaded: Loaded) -> dict[str, Tensor]:
    """The tensors of another directory of the same model, read as that of `loaded` was. ModelError: it holds another
    model."""
    options = loaded.options
    if _network(read_config(model_dir)) != _network(loaded.config):
        raise ModelError(
            f"{model_dir} has another configuration than {loaded.model_dir}; load weights of the same model."
        )
    model = load_servable(model_dir, parse_recipe(options.recipe), None, options.device, head=options.head_dtype)
    for name, layer in _frozen(model).items():
        layer.make_rows_independent()
        if name not in loaded.frozen or layer.input_spec != loaded.frozen[name].input_spec:
            raise ModelError(f"{model_dir} quantizes the input of {name} differently from {loaded.model_dir}.")
    return model.state_dict()


def _network(config: ModelConfig) -> ModelConfig:
    """The part of the configuration that decides how a model computes."""
    return replace(config, dtype="bfloat16", eos_token_ids=())


def _frozen(model: Model) -> dict[str, FrozenLinear]:
    """FP8 layers but for the head."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}
    layers.pop(model.head_name, None)
    return layers


def _draft_parts(loaded: LoadedDraft, sizes: CachePlan, options: EngineOptions) -> DraftParts:
    """The draft model with its cache, of as many blocks as the model's."""
    model, longest = loaded.model, min(loaded.model.config.max_length, sizes.max_model_len)
    separate_rows(model, options.device)
    model.expect(longest)
    runner = Runner(model, sizes.num_blocks, options.block_size, torch.bfloat16)
    _captured(runner, _frozen(model), options, sizes)
    return DraftParts(loaded.name, runner, longest, loaded.cost, weight_bytes(model))


def _captured(runner: Runner, frozen: dict[str, FrozenLinear], options: EngineOptions, sizes: CachePlan) -> GraphReport:
    """Captures decoding steps, and resets what layers counted until now: no request has run yet."""
    report = runner.capture_decoding(options, sizes.max_model_len)
    for layer in frozen.values():
        layer.reset_counters()
    reset_token_counts(runner.model)
    return report


def parse_recipe(text: str) -> Literal["stored", "bf16"] | recipe.Recipe:
    """ "stored", "bf16", a recipe's name, or its JSON."""
    if text in ("stored", "bf16"):
        return cast(Literal["stored", "bf16"], text)
    parsed = recipe.from_json(text) if text.lstrip().startswith("{") else recipe.from_name(text)
    return "bf16" if parsed is None else parsed


def _path(text: str | None) -> Path | None:
    return None if text is None else real_path(text)


def separate_rows(model: AnyModel, device: str) -> None:
    """Makes every linear's rows independent of each other, and joins linears that can be joined.

    Our CPU kernels are written and tested for this. Other products choose their order of sums by the number of rows.
    """
    for layer in model.modules():
        if isinstance(layer, FrozenLinear):
            layer.make_rows_independent()
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu:
        use_batch_invariant_products(model)
    if on_cpu or not isinstance(model, Encoder):
        model.join()


def _cache_scales(model_dir: Path, options: EngineOptions) -> list[KvScale]:
    """One for each layer. ScalesError when the model has none: a guessed scale would cost quality unnoticed."""
    scales = kv_scales(model_dir, _path(options.scales))
    if not scales:
        raise ScalesError(
            f"An FP8 cache needs the scales of keys and values and {model_dir} has none: calibrate with --kv-cache, or "
            "serve with --kv-cache-dtype bf16."
        )
    if all(float(scale) == 1 for pair in scales.values() for scale in pair):
        log.warning(
            "All KV-cache scales of %s are 1, which tools write that have not calibrated them; calibrate with "
            "--kv-cache, or serve with --kv-cache-dtype bf16, if answers are worse than with that.",
            model_dir,
        )
    device = torch.device(options.device)
    return [KvScale.of(*(scale.to(device) for scale in scales[layer])) for layer in sorted(scales)]


def _calibrated(model_dir: Path, frozen: dict[str, FrozenLinear], options: EngineOptions) -> Calibrated:
    """The rules and histories from which the served scales were made; no histories if only the weights' files have
    scales."""
    path = _path(options.scales) or model_dir / FILE_NAME
    if not present(path) or all(layer.input_scale is None for layer in frozen.values()):
        return Calibrated(DelayedScaling(), {})
    state = load_scales(path, model_dir)
    entries = {name: entry for name in frozen if (entry := state.tensors.get(f"{name}.input")) is not None}
    histories = {name: entry.amax_history for name, entry in entries.items() if entry.amax_history is not None}
    return Calibrated(delayed(state.recipe) or DelayedScaling(), histories)
