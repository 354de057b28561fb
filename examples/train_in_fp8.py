"""Train any torch module in FP8: convert its linear layers, put the forward pass under a recipe, and go on as before.

A small network learns a function under delayed scaling and, from the same start, in high precision. Prints both losses
and the scaling state of one layer.

    python examples/train_in_fp8.py
"""

import copy

import torch
from torch import nn

import fp8serve
from fp8serve import DelayedScaling, autocast, convert


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))


def train(model: nn.Module, recipe: DelayedScaling | None, steps: int = 200) -> float:
    """The loss of the last step; `recipe` None computes in high precision."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(256, 32, generator=data)
        target = (x[:, :1] * x[:, 1:2] + x[:, 2:3]).tanh()
        with autocast(enabled=recipe is not None, recipe=recipe):
            loss = (model(x) - target).square().mean()
        loss.backward()  # outside of the context: it computes as the forward pass did
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def main() -> None:
    in_fp8 = convert(network())  # every nn.Linear becomes an fp8serve.Linear that shares its weights
    in_high_precision = copy.deepcopy(network())
    print(f"loss in high precision {train(in_high_precision, None):.4f}")
    print(f"loss in FP8            {train(in_fp8, DelayedScaling(amax_history_len=16)):.4f}")
    for name, state in fp8serve.scaling_state(in_fp8[2]).items():
        print(f"{name:12} scale {float(state.scale):10.4f}  newest amax {float(state.amax_history[-1]):.4f}")


if __name__ == "__main__":
    main()
