"""The cost of FP8 in quality: per token (perplexity, KL, agreement) and per linear layer (SQNR, saturation).

Tokens: the reference and the FP8 model read the same sequences in lockstep and are compared on the logits of every
scored token. Logits are made `LOGIT_ROWS` tokens at a time, because [tokens, vocabulary] in FP32 is the largest tensor
of the whole pass (2048 tokens of a 128k vocabulary: 1 GiB).

Layers: at every FP8 linear both results are computed from the same input, the actual one of the FP8 model, so a layer
is charged with its own error and not with that of the layers before it. SQNR = 10 log10(sum y^2 / sum (y - y_fp8)^2) in
dB, sums in FP64 over all tokens. About 25 dB is usual for E4M3 per tensor; a value below 15 deserves a closer look.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fp8serve.errors import DataError, ModelError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.monitor import tally
from fp8serve.fp8.ops.arithmetic import expand
from fp8serve.model.building import Model

from .data import IGNORED
from .grid import GridTally, sqnr
from .outliers import outlier
from .result import LayerReport, Quality

LOGIT_ROWS = 256


@dataclass
class TokenTally:
    """Sums over scored tokens, in FP64."""

    tokens: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0

    def add(self, targets: Tensor, logits: Tensor, reference: Tensor | None = None) -> None:
        """targets int64 [T] without IGNORED; logits and reference FP32 [T, vocab]."""
        log_p = log_softmax(logits, dim=-1)
        self.tokens += targets.numel()
        self.nll += _nll(log_p, targets)
        if reference is not None:
            log_r = log_softmax(reference, dim=-1)
            self.reference_nll += _nll(log_r, targets)
            self.kl += float((log_r.exp() * (log_r - log_p)).sum(dtype=torch.float64))
            self.agreed += int((logits.argmax(-1) == reference.argmax(-1)).sum())

    def quality(self, compared: bool) -> Quality:
        if self.tokens == 0:
            raise DataError("The held-out samples have no token to score; give longer texts or completions.")
        own = _perplexity(self.nll, self.tokens, "FP8 model" if compared else "model")
        if not compared:
            return Quality(self.tokens, own)
        reference = _perplexity(self.reference_nll, self.tokens, "reference model")
        return Quality(self.tokens, own, reference, max(0.0, self.kl / self.tokens), self.agreed / self.tokens)


def _nll(log_p: Tensor, targets: Tensor) -> float:
    return float(-log_p.gather(1, targets[:, None]).sum(dtype=torch.float64))


def _perplexity(nll: float, tokens: int, which: str) -> float:
    mean = nll / tokens
    if not math.isfinite(mean) or mean > 700:  # e^709 is the largest double
        raise ModelError(f"The loss of the {which} on the held-out samples is {mean}; check its weights and scales.")
    return math.exp(mean)


def add_logits(
    tally: TokenTally, targets: Tensor, model: tuple[Model, Tensor], reference: tuple[Model, Tensor] | None = None
) -> None:
    """Score hidden states [T, hidden] against targets [T] in slices; `model` and `reference` are (decoder, hidden)."""
    scored = (targets != IGNORED).nonzero().squeeze(1)
    for rows in torch.split(scored, LOGIT_ROWS):
        other = reference[0].logits(reference[1][rows]) if reference else None
        tally.add(targets[rows], model[0].logits(model[1][rows]), other)


@dataclass
class LayerTally:
    """Signal and noise power of one linear's output, how much of its input FP8 could not hold (`tally`), and where
    the values of input and weight land (grid.py)."""

    signal: float = 0.0
    noise: float = 0.0
    saturated: int = 0
    rounded_to_top: int = 0
    underflowed: int = 0
    elements: int = 0
    input: GridTally = field(default_factory=GridTally)
    weight: GridTally = field(default_factory=GridTally)

    def add_output(self, exact: Tensor, got: Tensor) -> None:
        wide = exact.double()
        self.signal += float(wide.square().sum())
        self.noise += float((wide - got.double()).square().sum())

    def add_input(self, x: Tensor, q: Tensor, scale_inv: Tensor) -> None:
        """x [M, K] and its cast: FP8 data of its shape and their scale_inv, of any granularity."""
        found = tally(x, q, expand(scale_inv, *q.shape))
        self.elements += x.numel()
        self.saturated += int(found.saturated)
        self.rounded_to_top += int(found.rounded_to_top)
        self.underflowed += int(found.underflowed)
        self.input.add(x, q, scale_inv)

    def add_weight(self, weight: Tensor, linear: FrozenLinear) -> None:
        """weight [N, K] in high precision, and the linear that holds it in FP8."""
        self.weight.add(weight.detach(), linear.weight_q, linear.weight_scale_inv)

    @property
    def sqnr_db(self) -> float | None:
        """None: there is no noise (or no signal), so the ratio has no meaning."""
        return sqnr(self.signal, self.noise)

    def report(self, name: str, kl: float | None = None) -> LayerReport:
        of = max(self.elements, 1)
        fractions = (self.saturated / of, self.rounded_to_top / of, self.underflowed / of)
        found = outlier(self.input.channels, self.weight.channels)
        return LayerReport(name, self.sqnr_db, *fractions, kl, self.input.report(), self.weight.report(), found)
