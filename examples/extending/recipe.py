"""Two ways to a recipe of your own: a rule for the scales of an existing one, and a recipe that did not exist.

docs/extending/recipe.md explains each part.

    python examples/extending/recipe.py
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8serve import DelayedScaling, Float8CurrentScaling, autocast, convert, scaling_state
from fp8serve.fp8.spec import specs_of


# A rule: which of the amaxes of the last steps makes the scale. Slot 0 is the present step.
def second_largest(history: Tensor) -> Tensor:
    """history FP32 [N] -> amax FP32 []: one outlier among the last N steps does not make the scale small."""
    return history.topk(2).values[1]


# A recipe: inputs have one scale from their own content, weights one for each output channel. Training and serving read
# `specs` and not the recipe, so a combination of formats that exist needs no other code.
@dataclass(frozen=True)
class CurrentInputsRowWeights(Float8CurrentScaling):
    """Inputs and gradients per tensor, weights per output channel; nothing is remembered from step to step."""

    def __post_init__(self, backward_override: str | None) -> None:
        super().__post_init__(backward_override)
        inputs = self.specs.linear["input"]
        self._set_specs(specs_of(inputs, self.fp8_format.backward, weight=replace(inputs, granularity="row")))


def trained(recipe: Any, steps: int = 60) -> tuple[nn.Module, float]:
    """A small network, and its last loss."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    optimizer, target = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(32, 32) / 6
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(64, 32)
        with autocast(recipe=recipe):
            loss = (model(x) - x @ target).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model, float(loss.detach())


def main() -> None:
    model, loss = trained(DelayedScaling(amax_history_len=16, amax_compute_algo=second_largest))
    state = scaling_state(cast(Any, model)[0])["input"]
    # A state holds the scale of the next step: the rule, applied before the newest amax left the staging slot.
    expected = 448 / second_largest(torch.cat([state.amax_history[-1:], state.amax_history[1:]]))
    print(f"second largest amax    loss {loss:.4f}, scale {float(state.scale):.2f}")
    assert 0.5 < float(state.scale / expected) < 2, (state.scale, expected)

    recipe = CurrentInputsRowWeights()
    for role, spec in recipe.specs.linear.items():
        print(f"{role:12} {spec.element}, a scale per {spec.granularity}")
    _, loss = trained(recipe)
    print(f"inputs per tensor, weights per row    loss {loss:.4f}")
    assert loss < 0.2, loss


if __name__ == "__main__":
    main()
