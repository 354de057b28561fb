"""Loads a model directory for an engine: the model, its tokenizer, the KV cache and everything else in `LoadedModel`.

A recipe may compute one dynamic scale for a whole activation tensor. Then the requests of a batch would change each
other's results. So the engine computes a dynamic scale for each token's row instead.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from fp8serve.engine.bad_words import Bans
from fp8serve.engine.defaults import gpu_memory_fraction, with_device
from fp8serve.engine.draft_model import DraftParts, LoadedDraft, draft_config, load_draft
from fp8serve.engine.grammar import Grammars
from fp8serve.engine.graphs import GraphReport
from fp8serve.engine.input_counters import InputCounters
from fp8serve.engine.memory import CachePlan, check_length, gpu_memory_info, plan_cache, plan_gpu_cache, weight_bytes
from fp8serve.engine.options import EngineOptions, KvDtype
from fp8serve.engine.packing import Packer, modules_to_pack
from fp8serve.engine.request import EngineLimits
from fp8serve.engine.runner import Runner
from fp8serve.engine.saved_prefixes import SavedPrefixes, open_prefixes
from fp8serve.engine.scale_monitor import Calibration, ScaleMonitor, describe_input_scale
from fp8serve.engine.streaming import WeightStreamer, check_copies, create_streamer
from fp8serve.engine.task import check_generates
from fp8serve.engine.weights import check_weights, exchange_weights
from fp8serve.errors import MachineError, ModelError, RequestError, ScalesError
from fp8serve.fp8 import ops, recipe
from fp8serve.fp8.attention import KvScale
from fp8serve.fp8.batch_invariant import has_batch_invariant_products, use_batch_invariant_products
from fp8serve.fp8.frozen import FrozenLinear, make_rows_independent
from fp8serve.fp8.ops.arithmetic import E8M0
from fp8serve.fp8.recipe import DelayedScaling, Float8CurrentScaling, as_delayed
from fp8serve.fp8.selfcheck import prepare_device
from fp8serve.model import parity
from fp8serve.model.building import AnyModel, Model
from fp8serve.model.checkpoint import kv_scales, kv_scales_error, load_servable, open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.model_config import ModelConfig, computed_by_notes
from fp8serve.model.config.sharding import shard_config
from fp8serve.model.config.wrappers import unused_part_notes
from fp8serve.model.formats.microscaling import widened_notes
from fp8serve.model.formats.scales import FILE_NAME, load_scales
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.experts import expert_row_counts, mixtures, reset_token_counts
from fp8serve.model.storage.files import present
from fp8serve.model.storage.opening import real_path
from fp8serve.model.stored_checkpoint import dropped_inputs_notes, ignored_notes, matrices_notes
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.processes import Phases

if TYPE_CHECKING:
    from fp8serve.engine.rank_group import RankGroup

log = logging.getLogger("fp8serve.engine")
FP8_CACHE_DIFFERS = (
    "The FP8 cache rounds keys and values, and a fine-tune does not; to round them, too, use fp8serve.log_probs with "
    'kv_cache_dtype="fp8", or Forward(..., cache=scales) in your own trainer.'
)
ROLLED_SCALES_DIFFER = "Scales of inputs follow the traffic (roll_history), and training uses the stored scales."
SUMS_DIFFER = "The sums over the ranks of tensor_parallel have another order than in training; invariant avoids them."
FP8_HEAD_DIFFERS = "The head is in FP8 (head_dtype), and training computes logits in BF16."
MAX_GPU_HEAD_DIM = 512  # of csrc/cuda/attention.cu


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, with the other parts of an engine that depend on it."""

    model_dir: Path
    options: EngineOptions  # with the values that were derived for a GPU, and with kv_cache_dtype
    config: ModelConfig
    tokenizer: Tokenizer | None
    grammars: Grammars
    bans: Bans
    plan: CachePlan
    runner: Runner
    frozen: dict[str, FrozenLinear]  # the layers in FP8 or in 4 bits except the head, by their names in the checkpoint
    graphs: GraphReport
    packer: Packer
    streamer: WeightStreamer | None  # if memory has no room for all weights
    scale_monitor: ScaleMonitor
    prefixes: SavedPrefixes | None
    draft: DraftParts | None
    differences: list[str]  # reasons why log-probabilities differ from those of training (model/parity.py)

    def info(self) -> dict[str, Any]:
        """Returns the model, its options and its limits, as a JSON object."""
        config, options = self.config, self.options
        return {
            "model": str(self.model_dir),
            "architecture": config.architecture,
            "computed_by": "fp8serve" if config.computed_by is None else "transformers",
            "recipe": options.recipe,
            "quantized_layers": len(self.frozen),
            "input_scales": ", ".join(sorted({describe_input_scale(layer) for layer in self.frozen.values()})) or None,
            "device": options.device,
            "threads": torch.get_num_threads(),
            "dtype": str(next(self.runner.model.parameters()).dtype).removeprefix("torch."),
            "kv_cache_dtype": options.kv_cache_dtype,
            "head_dtype": options.head_dtype,
            "invariant": options.invariant,
            "tensor_parallel": options.tensor_parallel,
            "max_model_len": self.plan.max_model_len,
            "max_num_seqs": options.num_seqs,
            "max_batch_tokens": options.step_tokens,
            "max_prefill_tokens": options.prefill_tokens,
            "gpu_memory": options.gpu_memory,
            "speculative_tokens": options.drafted_tokens,
            "draft_model": None if self.draft is None else self.draft.info(),
            "block_size": options.block_size,
            "num_blocks": self.plan.num_blocks,
            "kv_cache_bytes": self.plan.cache_bytes,
            "weight_bytes": weight_bytes(self.runner.model),
            "streamed_bytes": 0 if self.streamer is None else self.streamer.streamed_bytes,
            "vocab_size": config.vocab_size,
            "eos_token_ids": list(config.eos_token_ids),
            "kernels": ops.backends(torch.device(options.device).type),
            "cuda_graphs": self.graphs.text(),
            "log_probs_as_trained": not self.differences,
            "log_probs_differ_because": self.differences,
        }

    def after_replaced_weights(self, model_dir: Path | None) -> "LoadedModel":
        """Resets the scale monitor after the weights were replaced. Returns a copy without saved prefixes, which belong
        to the old weights. `model_dir` is the directory of the new weights, or None if they are tensors."""
        calibration = Calibration(DelayedScaling(), {})
        if model_dir is not None:
            calibration = _read_calibration(model_dir, self.frozen, replace(self.options, scales=None))
        self.scale_monitor.reset(calibration)
        return replace(self, prefixes=None)

    def limits(self) -> EngineLimits:
        """Returns the limits against which requests are checked."""
        plan, config = self.plan, self.config
        has_tokenizer = self.tokenizer is not None
        size = self.options.block_size
        return EngineLimits(plan.max_model_len, plan.num_blocks, size, config.vocab_size, has_tokenizer)

    def rows(self, tokens: int, sampled: int) -> dict[str, int]:
        """Returns how many rows each FP8 layer has read after `tokens` tokens were computed and `sampled` of them
        needed logits."""
        pruned = set(self.runner.model.pruned_names())
        rows = {name: sampled if name in pruned else tokens for name in self.frozen}
        return rows | expert_row_counts(self.runner.model)


def load(
    model_dir: Path,
    options: EngineOptions,
    network: Model | None = None,
    phases: Phases | None = None,
    group: "RankGroup | None" = None,
) -> LoadedModel:
    """Loads a model directory. With `network`, its weights are used. All ranks of a `group` call this function,
    and each gets its part of the model. Raises the errors of `Engine`.

    `phases` measures opening the device (with the kernels' self-check), reading the weights, allocating the KV cache,
    capturing graphs, and the rest.
    """
    phases = phases or Phases()
    options = open_device(model_dir, options)
    device = torch.device(options.device)
    phases.end("device")
    config = read_config(model_dir)
    cached_config = config
    if group is not None:
        cached_config = shard_config(config, group.ranks.size)
        if options.kv_cache_bytes is not None:
            options = replace(options, kv_cache_bytes=options.kv_cache_bytes // group.ranks.size)
    check_generates(model_dir, options.task)
    if device.type == "cuda" and config.head_dim > MAX_GPU_HEAD_DIM:
        raise ModelError(
            f"{model_dir} has a head dimension of {config.head_dim}, and attention on a GPU supports at most "
            f"{MAX_GPU_HEAD_DIM}; serve it on a CPU."
        )
    if options.invariant and device.type == "cuda" and options.block_size & (options.block_size - 1):
        raise RequestError(f"invariant needs a block_size that is a power of 2, found {options.block_size}.")
    if options.kv_cache_dtype is None:
        options = replace(options, kv_cache_dtype=derive_kv_cache_dtype(model_dir, options, network is None))
    cache_dtype = torch.float8_e4m3fn if options.kv_cache_dtype == "fp8" else torch.bfloat16
    draft_dir = None if options.draft_model is None else Path(options.draft_model)
    draft_model_config = None if draft_dir is None else draft_config(draft_dir, model_dir, config)
    # On a CPU, a cache that does not fit is refused before the weights are loaded.
    plan = partial(plan_cache, cached_config, options, cache_dtype, draft=draft_model_config)
    cache_plan = None if device.type == "cuda" else plan() if group is None else group.ranks.run_on_first(plan)
    check_length(config, options)
    model = network or _load_model(model_dir, options, group)
    loaded_draft = None if draft_dir is None else load_draft(draft_dir, model, options)
    streamer = None
    if cache_plan is not None and network is None and group is None:
        draft_bytes = 0 if loaded_draft is None else weight_bytes(loaded_draft.model)
        streamer = create_streamer(model, model_dir, cache_plan.cache_bytes + draft_bytes)
    if streamer is not None and options.max_prefill_tokens is None:  # a step is long, however few tokens it has
        options = replace(options, max_prefill_tokens=options.step_tokens)
    phases.end("weights")
    frozen = _frozen(model)
    if options.invariant:
        uses_mx = any(layer.weight_scale_inv.dtype == E8M0 and not layer.is_4bit for layer in frozen.values())
        log.info("%s", parity.use_invariant_mode(options.device, config, uses_mx))
    scales_follow_batch = any(layer.input_spec.depends_on_batch for layer in frozen.values())
    prepare_for_serving(model, options.device, joins=streamer is None)
    cache_scales = _cache_scales(model_dir, options) if options.kv_cache_dtype == "fp8" else None
    scales = _path(options.scales)
    if cache_scales is None and network is None and (reason := kv_scales_error(model_dir, scales)) is not None:
        log.warning("%s: the KV cache is BF16. It cannot be FP8 with this model's scales: %s", model_dir, reason)
    if cache_plan is None:
        cache_plan, options = plan_gpu_cache(model, cached_config, options, cache_dtype, draft_model_config)
        if group is not None:
            cache_plan = min(group.ranks.gather(cache_plan), key=lambda plan: plan.num_blocks)
        log.info(
            "on %s: %d sequences, %d tokens a step, %d prompt tokens while others decode, %d tokens of KV cache in %s",
            device,
            options.num_seqs,
            options.step_tokens,
            options.prefill_tokens,
            cache_plan.num_blocks * options.block_size,
            options.kv_cache_dtype,
        )
    model.set_max_length(cache_plan.max_model_len)
    create_runner: Callable[..., Runner] = Runner
    create_counters: Callable[..., InputCounters] = InputCounters
    create_packer: Callable[..., Packer] = Packer
    if group is not None and group.ranks.is_first:
        from fp8serve.engine import leader  # here, because it imports DTensor, which takes a second

        create_runner = partial(leader.LeadingRunner, group)
        create_counters = partial(leader.LeadingCounters, group)
        create_packer = partial(leader.LeadingPacker, group)
    runner = create_runner(
        model,
        cache_plan.num_blocks,
        options.block_size,
        cache_dtype,
        cache_scales,
        options.max_lora_rank,
        cached_config.num_kv_heads,
    )
    runner.adapters.streamer = streamer
    counters = create_counters(frozen, (stack for experts in mixtures(model).values() for stack in experts.stacks()))
    phases.end("cache")
    graphs = _capture_graphs(runner, frozen, options, cache_plan)
    phases.end("graphs")
    draft = None if loaded_draft is None else _prepare_draft(loaded_draft, cache_plan, options)
    tokenizer = Tokenizer.from_dir(model_dir) if present(model_dir / "tokenizer.json") else None
    checkpoint = open_checkpoint(model_dir)
    omitted = unused_part_notes(model_dir, checkpoint.omitted_modules)
    notes = omitted, widened_notes(checkpoint.shards), computed_by_notes(config), matrices_notes(checkpoint)
    for note in chain(*notes, dropped_inputs_notes(checkpoint), ignored_notes(checkpoint)):
        log.warning("%s: %s", model_dir, note)
    calibration = Calibration(DelayedScaling(), {}) if network else _read_calibration(model_dir, frozen, options)
    training_recipe = Float8CurrentScaling() if scales_follow_batch else calibration.recipe
    differences = list(parity.differences(training_recipe, config, options.device, cache_plan.max_model_len))
    differences += [FP8_CACHE_DIFFERS] if cache_scales is not None else []
    differences += [ROLLED_SCALES_DIFFER] if options.roll_history else []
    differences += [FP8_HEAD_DIFFERS] if options.head_dtype != "bf16" else []
    differences += [SUMS_DIFFER] if group is not None and not options.invariant else []
    models = [model] if draft is None else [model, draft.runner.model]
    loaded = LoadedModel(
        model_dir=model_dir,
        options=options,
        config=config,
        tokenizer=tokenizer,
        grammars=Grammars(model_dir / "tokenizer.json", config.vocab_size, config.eos_token_ids),
        bans=Bans(tokenizer, config.vocab_size, config.eos_token_ids),
        plan=cache_plan,
        runner=runner,
        frozen=frozen,
        graphs=graphs,
        packer=create_packer([] if device.type == "cuda" or streamer else modules_to_pack(*models)),
        streamer=streamer,
        scale_monitor=ScaleMonitor(frozen, counters, calibration, options),
        prefixes=open_prefixes(model_dir, config, options, cache_plan),
        draft=draft,
        differences=differences,
    )
    phases.end("tokenizer and grammars")
    return loaded


def _load_model(model_dir: Path, options: EngineOptions, group: "RankGroup | None") -> Model:
    """Loads the network, or this rank's part of it. Parts are taken on the CPU, because a GPU may be smaller than the
    model."""
    recipe, scales = parse_recipe(options.recipe), _path(options.scales)
    if group is None:
        if not options.device.startswith("cuda"):
            check_copies(model_dir, options)
        return load_servable(model_dir, recipe, scales, options.device, head=options.head_dtype)
    from fp8serve.model.network.sharding import shard_decoder

    model = load_servable(model_dir, recipe, scales, "cpu", head=options.head_dtype)
    shard_decoder(cast(Decoder, model), group.shard, invariant=options.invariant)
    return model.to(options.device)


def open_device(model_dir: Path, options: EngineOptions) -> EngineOptions:
    """Sets the number of threads, and chooses or checks the device. Returns the options with the device, and on a GPU
    with a value for gpu_memory; call this before the weights are loaded. Raises the errors of `check_device`."""
    options = with_device(options, model_dir)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = check_device(options.device)
    if device.type == "cpu" or options.gpu_memory is not None:
        return options
    return replace(options, gpu_memory=gpu_memory_fraction(*gpu_memory_info(device)))


def derive_kv_cache_dtype(model_dir: Path, options: EngineOptions, has_stored_weights: bool) -> KvDtype:
    """Returns the element type of the KV cache for options without one. It is fp8 only if the model is served as it is
    stored, because the cache's scales belong to the stored weights. Unusable scales are reported later."""
    if torch.device(options.device).type == "cpu" or not has_stored_weights or options.recipe != "stored":
        return "bf16"
    quantization = open_checkpoint(model_dir).quantization
    try:
        scales = kv_scales(model_dir, _path(options.scales))
    except (ModelError, ScalesError):
        return "bf16"
    declares_fp8 = quantization is not None and quantization.has_fp8_cache
    is_calibrated = any(float(scale) != 1 for pair in scales.values() for scale in pair)
    return "fp8" if declares_fp8 and is_calibrated else "bf16"


def check_device(name: str) -> torch.device:
    """Returns the device of this name. Raises MachineError if this machine does not have it, or if its GPU cannot run
    the compiled kernels."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MachineError(f"There is no device {name!r}; use auto, cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MachineError(f"The device {name} was requested, but PyTorch finds no GPU here; use --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MachineError(f"The device {name} was requested, but PyTorch finds {torch.cuda.device_count()} GPU here.")
    prepare_device(device)
    return device


def read_weights(model_dir: Path, loaded: LoadedModel, device: str | None = None) -> dict[str, Tensor]:
    """Returns the tensors of another directory of the same model, read with the recipe of `loaded` to `device`, by
    default the device of the engine. Raises ModelError if the directory holds another model."""
    options = loaded.options
    if _architecture(read_config(model_dir)) != _architecture(loaded.config):
        raise ModelError(
            f"{model_dir} has another configuration than {loaded.model_dir}; load weights of the same model."
        )
    recipe, device = parse_recipe(options.recipe), device or options.device
    model = load_servable(model_dir, recipe, None, device, head=options.head_dtype)
    make_rows_independent(model)
    for name, layer in _frozen(model).items():
        if name not in loaded.frozen or layer.input_spec != loaded.frozen[name].input_spec:
            raise ModelError(f"{model_dir} quantizes the input of {name} differently from {loaded.model_dir}.")
    return model.state_dict()


@dataclass
class StagedWeights:
    """Weights that can be exchanged for those of the running engine: new ones, or after an exchange the old ones."""

    model_dir: Path
    version: int
    tensors: dict[str, Tensor]
    cache_scales: list[KvScale] | None


def stage_weights(model_dir: Path, loaded: LoadedModel, version: int) -> StagedWeights:
    """Reads and checks all weights of `model_dir`, so that invalid weights cannot make the exchange fail.

    If a GPU has no room for them beside the served weights, all of them are staged in main memory, provided that none
    needs a cast. Raises ModelError or ScalesError if they do not suit the engine, and MachineError if there is no
    memory for them.
    """
    options = loaded.options
    if read_config(model_dir).eos_token_ids != loaded.config.eos_token_ids:
        raise ModelError(f"{model_dir} ends its answers with other tokens than {loaded.model_dir}.")
    if present(model_dir / "tokenizer.json") != (loaded.tokenizer is not None):
        raise ModelError(f"{model_dir} and {loaded.model_dir} differ in whether they have a tokenizer.")
    cache_scales = _cache_scales(model_dir, options) if options.kv_cache_dtype == "fp8" else None
    try:
        tensors = read_weights(model_dir, loaded)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        if options.recipe != "stored" or options.head_dtype != "bf16":
            raise MachineError(f"There is no memory for {model_dir} beside the served weights.") from None
        tensors = read_weights(model_dir, loaded, "cpu")
    check_weights(loaded.runner.model, tensors)
    return StagedWeights(model_dir, version, tensors, cache_scales)


def exchange_staged(loaded: LoadedModel, staged: StagedWeights, version: int) -> tuple[LoadedModel, StagedWeights]:
    """Serves the staged weights. Returns the engine's new parts, and the replaced weights, with their `version`."""
    tensors = exchange_weights(loaded.runner.model, staged.tensors)
    loaded.runner.update_graphs()
    cache_scales = loaded.runner.exchange_cache_scales(staged.cache_scales)
    replaced = StagedWeights(loaded.model_dir, version, tensors, cache_scales)
    return replace(loaded.after_replaced_weights(staged.model_dir), model_dir=staged.model_dir), replaced


def _architecture(config: ModelConfig) -> ModelConfig:
    """Returns the configuration without the fields in which weights of the same model may differ."""
    return replace(config, dtype="bfloat16", eos_token_ids=())


def _frozen(model: Model) -> dict[str, FrozenLinear]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}
    layers.pop(model.head_name, None)
    return layers


def _prepare_draft(loaded: LoadedDraft, cache_plan: CachePlan, options: EngineOptions) -> DraftParts:
    """Adds a KV cache, with as many blocks as the model's, to the draft model."""
    model, max_length = loaded.model, min(loaded.model.config.max_length, cache_plan.max_model_len)
    prepare_for_serving(model, options.device)
    model.set_max_length(max_length)
    runner = Runner(model, cache_plan.num_blocks, options.block_size, torch.bfloat16)
    _capture_graphs(runner, _frozen(model), options, cache_plan, with_prompts=False)
    return DraftParts(loaded.name, runner, max_length, loaded.cost)


def _capture_graphs(
    runner: Runner,
    frozen: dict[str, FrozenLinear],
    options: EngineOptions,
    cache_plan: CachePlan,
    with_prompts: bool = True,
) -> GraphReport:
    """Captures steps, and then resets the layers' counters, because no request has run yet."""
    report = runner.capture_steps(options, cache_plan.max_model_len, with_prompts=with_prompts)
    for layer in frozen.values():
        layer.reset_counters()
    reset_token_counts(runner.model)
    return report


def parse_recipe(text: str) -> Literal["stored", "bf16"] | recipe.Recipe:
    """Parses "stored", "bf16", the name of a recipe, or a recipe as JSON."""
    if text in ("stored", "bf16"):
        return cast(Literal["stored", "bf16"], text)
    parsed = recipe.from_json(text) if text.lstrip().startswith("{") else recipe.from_name(text)
    return "bf16" if parsed is None else parsed


def _path(text: str | None) -> Path | None:
    return None if text is None else real_path(text)


def prepare_for_serving(model: AnyModel, device: str, *, joins: bool = True) -> None:
    """Makes the dynamic scales of a row independent of the other rows. On a CPU, and with invariant kernels on a GPU,
    it does the same with products.

    PyTorch's kernels choose the order of a product's sums by the number of rows. This project's kernels replace them.
    Linear layers that share an input are joined if `joins`, an encoder's only on a CPU.
    """
    make_rows_independent(model)
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu or has_batch_invariant_products(device):
        use_batch_invariant_products(model)
    if joins and (on_cpu or not isinstance(model, Encoder)):
        model.join()


def _cache_scales(model_dir: Path, options: EngineOptions) -> list[KvScale]:
    """Returns the scales of the FP8 cache, one pair for each layer. Raises ScalesError if the model has none, because
    other scales would degrade the quality without notice."""
    scales = kv_scales(model_dir, _path(options.scales))
    if not scales:
        raise ScalesError(
            f"An FP8 cache needs the scales of keys and values and {model_dir} has none: calibrate with --kv-cache, or "
            "serve with --kv-cache-dtype bf16."
        )
    if all(float(scale) == 1 for pair in scales.values() for scale in pair):
        log.warning(
            "All KV-cache scales of %s are 1, so they were probably not calibrated. If the quality is low, "
            "calibrate with --kv-cache, or serve with --kv-cache-dtype bf16.",
            model_dir,
        )
    device = torch.device(options.device)
    return [KvScale.of(*(scale.to(device) for scale in scales[layer])) for layer in sorted(scales)]


def _read_calibration(model_dir: Path, frozen: dict[str, FrozenLinear], options: EngineOptions) -> Calibration:
    """Returns the recipe and the amax histories of the served scales. There are no histories if only the weights' files
    have scales."""
    path = _path(options.scales) or model_dir / FILE_NAME
    if not present(path) or all(layer.input_scale is None for layer in frozen.values()):
        return Calibration(DelayedScaling(), {})
    state = load_scales(path, model_dir)
    entries = {name: entry for name in frozen if (entry := state.tensors.get(f"{name}.input")) is not None}
    histories = {name: entry.amax_history for name, entry in entries.items() if entry.amax_history is not None}
    return Calibration(as_delayed(state.recipe) or DelayedScaling(), histories)
