"""How many tokens the experts of a mixture get while they are observed, and which get none.

An expert that no token reaches has no amax, so no scale can be found for its inputs. The error names the expert; no
scale is made up. Without more data, every token can be routed through every expert while observing: an expert is then
measured on tokens that its router sends elsewhere, and the model's result does not change.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from fp8serve.model.building import Model
from fp8serve.model.network.experts import every_expert, mixtures, reset_token_counts

Counts = dict[str, Tensor]  # by the name of a mixture: tokens that each expert was given, int64 [E]
NAMED = 3  # of many


@contextmanager
def counting(decoder: Model, *, all_experts: bool) -> Iterator[Counts]:
    """Inside the context, tokens are counted from zero; the counts are available at the end. all_experts: all tokens
    run through all experts, but are counted where the router sends them."""
    counts = Counts()
    reset_token_counts(decoder)
    with every_expert(decoder) if all_experts else nullcontext():
        yield counts
    counts |= {name: mixture.tokens.cpu().clone() for name, mixture in mixtures(decoder).items()}


def added(shares: Sequence[Counts]) -> Counts:
    """The counts of several processes."""
    return {name: torch.stack([share[name] for share in shares]).sum(0) for name in shares[0]}


def starved(counts: Mapping[str, Tensor]) -> list[str]:
    """The names of the experts without a token."""
    return [f"{name}.experts.{i}" for name, tokens in counts.items() for i, n in enumerate(tokens.tolist()) if n == 0]


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def said_of_experts(counts: Mapping[str, Tensor], *, all_experts: bool) -> tuple[str, ...]:
    """A sentence for the report where experts went without tokens."""
    names = starved(counts)
    if not names:
        return ()
    told = "their scales come from tokens of other experts" if all_experts else "nothing of them was observed"
    return (f"The router sent no calibration token to {listed(names)}; {told}.",)
