"""Measures the error of FP8: per token (perplexity, KL divergence, agreement) and per linear (SQNR, saturation).

Tokens: the reference and the FP8 model read the same sequences, and the logits of every scored token are compared.
Logits are computed for `LOGITS_PER_SLICE` tokens at a time, because [tokens, vocabulary] in FP32 is the largest tensor
of the whole pass (2048 tokens of a 128k vocabulary: 1 GiB).

Layers: at every FP8 linear both outputs are computed from the same input, the one that occurs in the FP8 model. So the
error of a layer does not include the errors of earlier layers. SQNR = 10 log10(sum y^2 / sum (y - y_fp8)^2) in dB, with
sums in FP64 over all tokens. About 25 dB is usual for E4M3 with one scale per tensor; below 15 dB a layer needs
attention.

Exponents: E4M3 has 16 exponents. The lowest has zero and seven subnormal values with equal steps. Each of the others is
a binade of eight values, from 2^-6 up to 2^8; the highest binade has seven values, because 448 is the largest. A value
in a binade is rounded by at most a sixteenth of itself, a subnormal value by up to all of itself. So the fraction of
elements with each exponent shows whether the scale puts a tensor into the precise part of the format.

Outliers: if one channel is thousands of times larger than the other channels, one scale for all channels leaves them
only the lowest exponents. This is justified if the weights of the large channel are large as well. If they are small,
the size of the channel is useless, and smoothing removes it.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fp8serve.calibration.data import IGNORE_INDEX
from fp8serve.calibration.result import CastReport, ChannelReport, LayerReport, Quality
from fp8serve.errors import DataError, ModelError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.monitor import tally
from fp8serve.fp8.ops.arithmetic import FP8_MAX, expand
from fp8serve.model.building import Model

E4M3 = torch.float8_e4m3fn
MAX_CODE = 0x7E  # the code of 448 without its sign
SLICE_ELEMENTS = 1 << 22  # elements that are converted to FP32 at a time
LOGITS_PER_SLICE = 256  # tokens


@dataclass
class GridTally:
    """Statistics of a cast to E4M3 over all elements that were added.

    `peak` is the largest magnitude after scaling. `channels` [K] are the largest magnitudes of each column before
    scaling.
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(128, dtype=torch.int64))  # by code without its sign
    peak: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    channels: Tensor | None = None

    def add(self, x: Tensor, q: Tensor, scale_inv: Tensor) -> None:
        """Adds a tensor x [M, K] and its cast q, E4M3 [M, K], with scale_inv of any granularity."""
        largest = x.abs().amax(0).float().cpu()
        self.channels = largest if self.channels is None else torch.maximum(self.channels, largest)
        codes = q.view(torch.uint8).flatten() & 0x7F
        self.counts += torch.bincount(codes, minlength=128).cpu()
        rows = max(1, SLICE_ELEMENTS // max(1, q.shape[1]))
        scales = torch.broadcast_to(expand(scale_inv, *q.shape), q.shape)
        for x_rows, q_rows, scale in zip(*(torch.split(t, rows) for t in (x, q, scales)), strict=True):
            exact, dequantized = x_rows.float(), q_rows.float() * scale
            self.peak = max(self.peak, float((exact.abs() / scale).max()))
            self.signal += float(exact.square().sum(dtype=torch.float64))
            self.noise += float((exact - dequantized).square_().sum(dtype=torch.float64))

    def report(self) -> CastReport | None:
        """Returns the statistics, or None if nothing was added."""
        elements = int(self.counts.sum())
        if elements == 0:
            return None
        zeros, *shares = (_round_share(int(c) / elements) for c in (self.counts[0], *self._binades()))
        top = _round_share(int(self.counts[MAX_CODE]) / elements)
        return CastReport(sqnr(self.signal, self.noise), self._headroom(), zeros, tuple(shares), top)

    def _binades(self) -> Tensor:
        by_exponent = self.counts.view(16, 8).sum(1)
        by_exponent[0] -= self.counts[0]
        return by_exponent

    def _headroom(self) -> float | None:
        if self.peak == 0 or not math.isfinite(self.peak):
            return None
        return round(math.log2(FP8_MAX[E4M3] / self.peak), 4) + 0.0  # avoids minus zero


def sqnr(signal: float, noise: float) -> float | None:
    """Returns 10 log10 of the ratio of two powers, or None if there is no noise or no signal."""
    return None if noise == 0 or signal == 0 else 10 * math.log10(signal / noise)


def _round_share(share: float) -> float:
    """Rounds to four significant digits, because calibration.json has thousands of these numbers."""
    return float(f"{share:.4g}")


def outlier(inputs: Tensor | None, columns: Tensor | None) -> ChannelReport | None:
    """Returns the channel with the largest excess, from the amaxes [K] of an input's channels and of weight columns.

    Returns None if there are no amaxes, or if most channels are zero.
    """
    if inputs is None or columns is None:
        return None
    sizes, weights = inputs / inputs.median(), columns / columns.median()
    excess = torch.where(weights > 0, sizes / weights, 0)  # a channel that no weight reads has no effect
    if not excess.isfinite().all():
        return None
    channel = int(excess.argmax())
    return ChannelReport(channel, _round_share(float(sizes[channel])), _round_share(float(weights[channel])))


@dataclass
class TokenTally:
    """Sums over scored tokens, in FP64, from which the quality is computed."""

    tokens: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    kl: float = 0.0
    same_top1: int = 0

    def add(self, targets: Tensor, logits: Tensor, reference: Tensor | None = None) -> None:
        """Adds targets, int64 [T] without IGNORE_INDEX, and the logits of both models, FP32 [T, vocab]."""
        log_p = log_softmax(logits, dim=-1)
        self.tokens += targets.numel()
        self.nll += _nll(log_p, targets)
        if reference is not None:
            log_r = log_softmax(reference, dim=-1)
            self.reference_nll += _nll(log_r, targets)
            self.kl += float((log_r.exp() * (log_r - log_p)).sum(dtype=torch.float64))
            self.same_top1 += int((logits.argmax(-1) == reference.argmax(-1)).sum())

    def quality(self, compared: bool) -> Quality:
        if self.tokens == 0:
            raise DataError("The held-out samples have no token to score; give longer texts or completions.")
        perplexity = _perplexity(self.nll, self.tokens, "FP8 model" if compared else "model")
        if not compared:
            return Quality(self.tokens, perplexity)
        reference = _perplexity(self.reference_nll, self.tokens, "reference model")
        kl = max(0.0, self.kl / self.tokens)
        return Quality(self.tokens, perplexity, reference, kl, self.same_top1 / self.tokens)


def _nll(log_p: Tensor, targets: Tensor) -> float:
    return float(-log_p.gather(1, targets[:, None]).sum(dtype=torch.float64))


def _perplexity(nll: float, tokens: int, model: str) -> float:
    mean = nll / tokens
    if not math.isfinite(mean) or mean > 700:  # e^709 is the largest double
        raise ModelError(f"The loss of the {model} on the held-out samples is {mean}; check its weights and scales.")
    return math.exp(mean)


def add_logits(
    tally: TokenTally, targets: Tensor, model: tuple[Model, Tensor], reference: tuple[Model, Tensor] | None = None
) -> None:
    """Adds the logits of both models in slices; each model is a pair (decoder, hidden states [T, hidden])."""
    scored = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    for rows in torch.split(scored, LOGITS_PER_SLICE):
        reference_logits = reference[0].logits(reference[1][rows]) if reference else None
        tally.add(targets[rows], model[0].logits(model[1][rows]), reference_logits)


@dataclass
class LayerTally:
    """Statistics of one linear: signal and noise power of its output, saturation and underflow of its input, and the
    casts of its input and its weight."""

    signal: float = 0.0
    noise: float = 0.0
    saturated: int = 0
    rounded_to_top: int = 0
    underflowed: int = 0
    elements: int = 0
    input: GridTally = field(default_factory=GridTally)
    weight: GridTally = field(default_factory=GridTally)

    def add_output(self, exact: Tensor, quantized: Tensor) -> None:
        signal = exact.double()
        self.signal += float(signal.square().sum())
        self.noise += float((signal - quantized.double()).square().sum())

    def add_input(self, x: Tensor, q: Tensor, scale_inv: Tensor) -> None:
        """Adds an input x [M, K] and its cast q [M, K] with scale_inv of any granularity."""
        counts = tally(x, q, expand(scale_inv, *q.shape))
        self.elements += x.numel()
        self.saturated += int(counts.saturated)
        self.rounded_to_top += int(counts.rounded_to_top)
        self.underflowed += int(counts.underflowed)
        self.input.add(x, q, scale_inv)

    def add_weight(self, weight: Tensor, linear: FrozenLinear) -> None:
        """Adds a weight [N, K] in high precision, and the linear that has it in FP8."""
        self.weight.add(weight.detach(), linear.weight_q, linear.weight_scale_inv)

    @property
    def sqnr_db(self) -> float | None:
        """The SQNR of the output in dB, or None if there is no noise or no signal."""
        return sqnr(self.signal, self.noise)

    def report(self, name: str, kl: float | None = None) -> LayerReport:
        elements = max(self.elements, 1)
        fractions = (self.saturated / elements, self.rounded_to_top / elements, self.underflowed / elements)
        channel = outlier(self.input.channels, self.weight.channels)
        return LayerReport(name, self.sqnr_db, *fractions, kl, self.input.report(), self.weight.report(), channel)
