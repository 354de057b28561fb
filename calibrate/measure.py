"""The cost of FP8 in quality: per token (perplexity, KL, agreement) and per linear layer (SQNR, saturation).

Tokens: the reference and the FP8 model read the same sequences in lockstep and are compared on the logits of every
scored token. Logits are made `LOGIT_ROWS` tokens at a time, because [tokens, vocabulary] in FP32 is the largest tensor
of the whole pass (2048 tokens of a 128k vocabulary: 1 GiB).

Layers: at every FP8 linear both results are computed from the same input, the actual one of the FP8 model, so a layer
is charged with its own error and not with that of the layers before it. SQNR = 10 log10(sum y^2 / sum (y - y_fp8)^2) in
dB, sums in FP64 over all tokens. About 25 dB is usual for E4M3 per tensor; a value below 15 deserves a closer look.

The grid of E4M3 has 16 exponents. The lowest holds zero and seven subnormal values, one step apart; each of the others
holds a binade, from 2^-6 up to 2^8, of eight values (the highest of seven: 448 is the largest). A value in a binade is
rounded by at most a sixteenth of itself, a subnormal one by up to all of itself. So the share of elements in each
exponent shows whether a scale puts a tensor where the format is precise.

Outliers: one scale for all channels leaves the small ones little of the format, if one channel is thousands of times
larger than the others. That is justified if the weights for this channel are large as well. If they are small, the
channel's size is useless, and smoothing removes it.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fp8serve.calibration.data import IGNORED
from fp8serve.calibration.result import CastReport, ChannelReport, LayerReport, Quality
from fp8serve.errors import DataError, ModelError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.monitor import tally
from fp8serve.fp8.ops.arithmetic import FP8_MAX, expand
from fp8serve.model.building import Model

E4M3 = torch.float8_e4m3fn
TOP_CODE = 0x7E
SLICE = 1 << 22  # elements that are widened to FP32 at a time
LOGIT_ROWS = 256


@dataclass
class GridTally:
    """Counts and sums over all elements that were added.

    peak: the largest magnitude, in units of the grid. channels: the largest in each column, in the tensor's units, [K].
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(128, dtype=torch.int64))  # by code without its sign
    peak: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    channels: Tensor | None = None

    def add(self, x: Tensor, q: Tensor, scale_inv: Tensor) -> None:
        """Adds x [M, K], its cast q E4M3 [M, K], and scale_inv of any granularity."""
        largest = x.abs().amax(0).float().cpu()
        self.channels = largest if self.channels is None else torch.maximum(self.channels, largest)
        codes = q.view(torch.uint8).flatten() & 0x7F
        self.counts += torch.bincount(codes, minlength=128).cpu()
        rows = max(1, SLICE // max(1, q.shape[1]))
        scales = torch.broadcast_to(expand(scale_inv, *q.shape), q.shape)
        for exact, got, scale in zip(*(torch.split(t, rows) for t in (x, q, scales)), strict=True):
            wide, back = exact.float(), got.float() * scale
            self.peak = max(self.peak, float((wide.abs() / scale).max()))
            self.signal += float(wide.square().sum(dtype=torch.float64))
            self.noise += float((wide - back).square_().sum(dtype=torch.float64))

    def report(self) -> CastReport | None:
        """None when nothing was added."""
        elements = int(self.counts.sum())
        if elements == 0:
            return None
        zeros, *shares = (_short(int(c) / elements) for c in (self.counts[0], *self._binades()))
        top = _short(int(self.counts[TOP_CODE]) / elements)
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
    """10 log10 of the ratio of two powers. None: there is no noise (or no signal), so the ratio has no meaning."""
    return None if noise == 0 or signal == 0 else 10 * math.log10(signal / noise)


def _short(share: float) -> float:
    """Rounded to four digits, more than a page shows, because calibration.json has thousands of these."""
    return float(f"{share:.4g}")


def outlier(inputs: Tensor | None, columns: Tensor | None) -> ChannelReport | None:
    """From the largest magnitudes of an input's channels and of the weights that read each, both [K].

    None: nothing was seen, or most channels are zero.
    """
    if inputs is None or columns is None:
        return None
    sizes, weights = inputs / inputs.median(), columns / columns.median()
    useless = torch.where(weights > 0, sizes / weights, 0)  # a channel that no weight reads does not matter
    if not useless.isfinite().all():
        return None
    channel = int(useless.argmax())
    return ChannelReport(channel, _rounded_ratio(sizes[channel]), _rounded_ratio(weights[channel]))


def _rounded_ratio(ratio: Tensor) -> float:
    return float(f"{float(ratio):.4g}")


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
    the values of input and weight land (measure.py)."""

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
        counts = tally(x, q, expand(scale_inv, *q.shape))
        self.elements += x.numel()
        self.saturated += int(counts.saturated)
        self.rounded_to_top += int(counts.rounded_to_top)
        self.underflowed += int(counts.underflowed)
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
        result = outlier(self.input.channels, self.weight.channels)
        return LayerReport(name, self.sqnr_db, *fractions, kl, self.input.report(), self.weight.report(), result)
