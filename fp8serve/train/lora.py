"""A run that trains an adapter: the base as it is served, LoRA or DoRA beside its projections, nothing else trained.

The base is loaded as `serve` loads it: FP8 weights stay views of the mapped file, inputs are cast by the stored scales.
So the adapter learns to correct the very numbers that will be served, and no second form of the weights is in memory. A
checkpoint holds the adapter's masters and moments; to continue from it, a run needs the base model, too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fp8serve.errors import ModelError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.lora import LoraLinear
from fp8serve.fp8.recipe import Recipe
from fp8serve.model.adapters import adaptable, chosen, write_adapter
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.formats.peft import PeftConfig
from fp8serve.train.config import TrainConfig

PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")


def peft_config(config: TrainConfig) -> PeftConfig:
    """PEFT's configuration of the adapter that a job trains."""
    rank = cast(int, config.lora_rank)
    return PeftConfig(rank, 2.0 * rank if config.lora_alpha is None else config.lora_alpha, dora=config.dora)


def adapted_model(config: TrainConfig) -> Model:
    """The job's base with new adapters; only these have gradients. ModelError, ScalesError: see `load_servable`."""
    base = Path(config.model)
    model = load_servable(base, base_recipe(config), device=config.device)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, FrozenLinear):
            module.make_rows_independent()
    peft, random = peft_config(config), torch.Generator().manual_seed(config.seed)
    for name in chosen(list(adaptable(model.config)), config.lora_targets):
        scaling = peft.scaling(name)
        layer = LoraLinear(
            model.get_submodule(name), peft.rank, scaling, dora=peft.dora, dropout=config.lora_dropout, generator=random
        )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return model


def base_recipe(config: TrainConfig) -> Literal["stored", "bf16"] | Recipe:
    """How the base computes: "delayed" uses its stored scales. ModelError if it has none."""
    if config.recipe != "delayed":
        return config.fp8_recipe or "bf16"
    if not open_checkpoint(config.model).has_scales:
        raise ModelError(
            f"{config.model} stores no scales; calibrate it, or choose --recipe current, rowwise, block or bf16."
        )
    return "stored"


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The masters of all adapters, by `{linear}.lora_A` and so on."""
    return {name: p for name, p in model.named_parameters() if name.rpartition(".")[2] in PARTS}


def write_result(folder: Path, config: TrainConfig, masters: Mapping[str, Tensor]) -> None:
    """Writes the adapter's files from the masters in a checkpoint."""
    linears = list(adaptable(read_config(config.model)))
    write_adapter(folder, config.model, peft_config(config), masters, linears, dropout=config.lora_dropout)
