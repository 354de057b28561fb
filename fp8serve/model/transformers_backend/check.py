"""A model that was just loaded, held to its class: two short sequences, packed by us and one by one by transformers.

By this a class is found out in which a token reads another than by attention, whose positions come from elsewhere, or
that does something to logits behind its last layer. Rounding and FP8 scales that two sequences share leave a few
percent; a term that is missing leaves more.
"""

from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.attention import causal_attention
from fp8serve.model.network.decoder import rotated
from fp8serve.model.network.experts import mixtures
from fp8serve.model.transformers_backend.attention import SERVED
from fp8serve.model.transformers_backend.network import TransformersModel

LENGTHS = [5, 9]
TOLERANCE = 0.2  # of the norm of a token's hidden state
MOST = 0.5  # of the tokens of a mixture: rounding sends one that is between two experts to the other


@torch.no_grad()
def check_against_class(model: TransformersModel) -> None:
    """ModelError: the class computes something else."""
    name, device = model.config.architecture, model.embedding.weight.device
    ids = torch.randint(model.config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    sequences = list(torch.split(ids.to(device), LENGTHS))
    ours = torch.split(_ours(model, sequences).float(), LENGTHS)
    for sequence, found in zip(sequences, ours, strict=True):
        hidden, said, logits = _theirs(model, sequence)
        if not torch.equal(said, logits):
            raise ModelError(f"{name} changes the logits behind its last layer, which only a family computes.")
        near = (found - hidden).norm(dim=-1) <= TOLERANCE * hidden.norm(dim=-1)
        if float(near.float().mean()) < (MOST if mixtures(model) else 1):
            raise ModelError(f"{name} gives other hidden states by our attention than by transformers' own.")


def _ours(model: TransformersModel, sequences: list[Tensor]) -> Tensor:
    """Hidden states of all sequences in one pass."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, LENGTHS, *model.attention_options(layer))

    positions = torch.cat([torch.arange(len(sequence), device=sequence.device) for sequence in sequences])
    return model(torch.cat(sequences), positions, rotated(attend))  # type: ignore[no-any-return]


def _theirs(model: TransformersModel, sequence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states, what the head makes of them, logits) by the class alone."""
    built: Any = model.whole[0]
    seen: list[tuple[Tensor, Tensor]] = []
    hook = model.head.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    try:
        built.set_attn_implementation("eager")
        logits = built(input_ids=sequence[None], use_cache=False).logits
    finally:
        hook.remove()
        built.set_attn_implementation(SERVED)
    return seen[0][0][0].float(), seen[0][1], logits
