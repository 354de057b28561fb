"""A trainer's present model as a server would hold it: quantized with the scales of the next step.

These are, bit for bit, the tensors that `export` writes and an engine loads; here they go from memory to memory
(`Engine.load_weights`).
"""

import torch
from torch import Tensor, nn

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.model.building import Model, build_on_meta
from fp8serve.model.config.mixture import keeps_fp32
from fp8serve.train.forward import Forward


def served_state(forward: Forward) -> dict[str, Tensor]:
    """The tensors of `served_model`, named as `engine.weights` names them."""
    return served_model(forward).state_dict()


@torch.no_grad()
def served_model(forward: Forward) -> Model:
    """The served model of a whole model in training, with tensors of its own, which further training does not change.

    ScalesError: a layer has no scale yet under a delayed recipe.
    """
    recipe, decoder = forward.recipe, forward.network.decoder
    linears = {} if recipe is None or recipe.override_linear_precision[0] else forward.linears
    model = build_on_meta(decoder.config, torch.bfloat16)
    for name, parameter in decoder.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner not in linears:
            held = parameter.detach().to(parameter.dtype if keeps_fp32(name) else torch.bfloat16, copy=True)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(held, requires_grad=False))
    for name, linear in linears.items():
        bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16, copy=True)
        frozen = FrozenLinear.from_linear(linear, recipe, out_dtype=torch.bfloat16)  # type: ignore[arg-type]
        frozen.bias = bias
        model.set_submodule(name, frozen)
    model.tie()
    return model.eval()
