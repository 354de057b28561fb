"""Compares a newly loaded model with its class: two short sequences, packed by us and one by one by transformers.

The comparison detects a class in which tokens interact outside attention, or which takes positions from elsewhere.
Rounding, and FP8 scales that two sequences share, cause differences of a few percent; a missing term causes more.

In a mixture, rounding may send a token that is nearly undecided between two experts to the other one, whose output
differs. So our pass gets the experts that the class chose, and every token is compared; most of our own choices must be
the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8serve.errors import ModelError
from fp8serve.fp8.attention import causal_attention
from fp8serve.model.network.decoder import rotated
from fp8serve.model.network.experts import mixtures
from fp8serve.model.transformers_backend.attention import SERVED
from fp8serve.model.transformers_backend.network import TransformersModel

LENGTHS = [5, 9]
TOLERANCE = 0.2  # relative to the norm of a token's hidden state
MOST = 0.5  # fraction of the choices of experts
Choice = tuple[Tensor, Tensor]  # (experts, their weights), as a mixture's experts are called with
Hook = Callable[[nn.Module, Any], Any]


@torch.no_grad()
def check_against_class(model: TransformersModel) -> None:
    """ModelError: the class computes something different."""
    name, device = model.config.architecture, model.embedding.weight.device
    ids = torch.randint(model.config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    sequences = list(torch.split(ids.to(device), LENGTHS))
    chosen: dict[str, list[Choice]] = {mixture: [] for mixture in mixtures(model)}
    with _hooked(model, lambda mixture: lambda module, args: chosen[mixture].append(args[1:])):
        theirs = [_theirs(model, sequence) for sequence in sequences]
    agree: list[Tensor] = []
    with _hooked(model, lambda mixture: _imposing(chosen[mixture], agree)):
        found = _ours(model, sequences).float()
    expected = torch.cat(theirs)
    near = (found - expected).norm(dim=-1) <= TOLERANCE * expected.norm(dim=-1)
    if not near.all() or (agree and float(torch.cat(agree).float().mean()) < MOST):
        raise ModelError(f"{name} gives other hidden states by our attention than by transformers' own.")


@contextmanager
def _hooked(model: TransformersModel, hook: Callable[[str], Hook]) -> Iterator[None]:
    """Inside the context, the experts of every mixture are called through a hook."""
    hooks = [experts.register_forward_pre_hook(hook(name)) for name, experts in mixtures(model).items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _imposing(choices: list[Choice], agree: list[Tensor]) -> Hook:
    """Replaces the choices of one pass by those of all sequences, and records which are the same."""
    chosen, weights = (torch.cat(parts) for parts in zip(*choices, strict=True))

    def hook(module: nn.Module, args: Any) -> tuple[Tensor, Tensor, Tensor]:
        agree.append((args[1].sort(-1).values == chosen.sort(-1).values).all(-1))
        return args[0], chosen, weights

    return hook


def _ours(model: TransformersModel, sequences: list[Tensor]) -> Tensor:
    """Hidden states of all sequences in one pass."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, LENGTHS, *model.attention_options(layer))

    positions = torch.cat([torch.arange(len(sequence), device=sequence.device) for sequence in sequences])
    return model(torch.cat(sequences), positions, rotated(attend))  # type: ignore[no-any-return]


def _theirs(model: TransformersModel, sequence: Tensor) -> Tensor:
    """The hidden states that the class by itself gives its head."""
    built: Any = model.whole[0]
    seen: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    try:
        built.set_attn_implementation("eager")
        built(input_ids=sequence[None], use_cache=False)
    finally:
        hook.remove()
        built.set_attn_implementation(SERVED)
    return seen[0].float()
