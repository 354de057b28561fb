"""Training of LoRA and DoRA adapters at the projections of a frozen base model.

The base model is loaded as a server loads it: its FP8 weights are views of the mapped file, and inputs are cast with
the stored scales. The adapter therefore trains on the numbers that will be served, and no second copy of the weights is
in memory. A checkpoint holds the masters and moments of the adapter only, so a resumed run needs the base model, too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fp8serve.errors import ModelError
from fp8serve.fp8.frozen import make_rows_independent
from fp8serve.fp8.lora import LoraLinear
from fp8serve.fp8.recipe import Recipe
from fp8serve.model.adapters import write_adapter
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.model_config import adaptable_linear_names, select_linears
from fp8serve.model.formats.peft import PeftConfig
from fp8serve.train.config import TrainConfig

PARAMETER_NAMES = ("lora_A", "lora_B", "lora_magnitude_vector")


def peft_config(config: TrainConfig) -> PeftConfig:
    """Returns PEFT's configuration of the job's adapter."""
    rank = cast(int, config.lora_rank)
    return PeftConfig(rank, 2.0 * rank if config.lora_alpha is None else config.lora_alpha, dora=config.dora)


def adapted_model(config: TrainConfig) -> Model:
    """Returns the job's base model with new adapters, the only parameters with gradients. Raises ModelError or
    ScalesError if the base model cannot be served."""
    base = Path(config.model)
    model = load_servable(base, base_recipe(config), device=config.device)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    make_rows_independent(model)
    peft, random = peft_config(config), torch.Generator().manual_seed(config.seed)
    for name in select_linears(adaptable_linear_names(model.config), config.lora_targets):
        scaling = peft.scaling(name)
        layer = LoraLinear(
            model.get_submodule(name), peft.rank, scaling, dora=peft.dora, dropout=config.lora_dropout, generator=random
        )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return model


def base_recipe(config: TrainConfig) -> Literal["stored", "bf16"] | Recipe:
    """Returns the recipe of the base model; "delayed" uses its stored scales. Raises ModelError if it has none."""
    if config.recipe != "delayed":
        return config.fp8_recipe or "bf16"
    if not open_checkpoint(config.model).has_scales:
        raise ModelError(
            f"{config.model} stores no scales; calibrate it, or choose --recipe current, rowwise, block, mxfp8 or bf16."
        )
    return "stored"


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the masters of all adapters by name, such as `{linear}.lora_A`."""
    return {name: p for name, p in model.named_parameters() if name.rpartition(".")[2] in PARAMETER_NAMES}


def write_adapter_files(folder: Path, config: TrainConfig, masters: Mapping[str, Tensor]) -> None:
    linears = adaptable_linear_names(read_config(config.model))
    write_adapter(folder, config.model, peft_config(config), masters, linears, dropout=config.lora_dropout)
