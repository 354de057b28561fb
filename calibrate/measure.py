"""Measures the error of quantization by token (perplexity, KL divergence, agreement) and linear (SQNR, saturation).

Tokens: both models, the reference and the quantized one, read the same sequences, and the logits of every scored token
are compared. Logits are computed for `LOGITS_PER_SLICE` tokens at a time, because [tokens, vocabulary] in FP32 is the
largest tensor of the whole pass (2048 tokens of a 128k vocabulary: 1 GiB).

Layers: at every quantized linear both outputs are computed from the same input, the one that occurs in the quantized
model. So the error of a layer does not include the errors of earlier layers. SQNR = 10 log10(sum y^2 / sum (y - y_q)^2)
in dB, with sums in FP64 over all tokens. About 25 dB is usual for E4M3 with one scale per tensor; below 15 dB a layer
needs attention.

Exponents: E4M3 has 16 exponents. The lowest has zero and seven subnormal values with equal steps. Each of the others is
a binade of eight values, from 2^-6 up to 2^8; the highest binade has seven values, because 448 is the largest. Rounding
changes a value in a binade by at most a sixteenth of itself, and a subnormal value by up to all of itself. So the
fraction of elements with each exponent shows whether the scale puts a tensor into the precise part of the format.
E2M1, the format of 4-bit weights, has 4 exponents: 0 and 0.5, 1 and 1.5, 2 and 3, 4 and 6.

Outliers: if one channel is thousands of times larger than the other channels, one scale for all channels leaves them
only the lowest exponents. This is justified if the weights of the large channel are large as well. If they are small,
the size of the channel is useless, and smoothing removes it.

All sums and counts stay on the device of the tensors, because each read of a value would wait for the device.
`read_tallies` copies the statistics of all linears to the CPU at once.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fp8serve.calibration.data import scored_rows
from fp8serve.calibration.result import CastReport, ChannelReport, LayerReport, Quality
from fp8serve.errors import DataError, ModelError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.monitor import tally
from fp8serve.fp8.ops.arithmetic import FP8_MAX, expand
from fp8serve.fp8.ops.e2m1 import E2M1_MAX, expand_scale
from fp8serve.fp8.ops.four_bit import code_values, unpack_codes
from fp8serve.model.building import Model

SLICE_ELEMENTS = 1 << 22  # elements that are converted to FP32 at a time
LOGITS_PER_SLICE = 256  # tokens
FloatSum = Tensor | float  # a sum in FP64: a tensor [] on the device after the first addition
IntSum = Tensor | int


@dataclass(frozen=True)
class Grid:
    """The numbers of an element format, whose codes without the sign are in the order of their magnitudes."""

    largest: float
    top_code: int  # the code of `largest`
    codes_per_binade: int


E4M3 = Grid(FP8_MAX[torch.float8_e4m3fn], 0x7E, 8)
E2M1 = Grid(E2M1_MAX, 7, 2)


@dataclass
class GridTally:
    """Statistics of a cast to E4M3, or of a weight's cast to 4 bits, over all elements that were added.

    `counts` [128] are the numbers of elements by code without its sign. `peak` is the largest magnitude after scaling,
    FP32. `channels` [K] are the largest magnitudes of each column before scaling.
    """

    counts: Tensor | None = None
    peak: Tensor | None = None
    signal: FloatSum = 0.0
    noise: FloatSum = 0.0
    channels: Tensor | None = None
    grid: Grid = E4M3

    def add(self, x: Tensor, q: Tensor, scale_inv: Tensor, global_scale: Tensor | None = None) -> None:
        """Adds a tensor x [M, K] and its cast: q, E4M3 [M, K] or E2M1 codes [M, K/2], and the scales that dequantize
        it."""
        is_4bit = q.dtype is torch.uint8
        self.grid = E2M1 if is_4bit else E4M3
        largest = x.abs().amax(0).float()
        self.channels = largest if self.channels is None else torch.maximum(self.channels, largest)
        counts = count_codes((unpack_codes(q) & 7 if is_4bit else q.view(torch.uint8) & 0x7F).flatten())
        self.counts = counts if self.counts is None else self.counts + counts
        rows = max(1, SLICE_ELEMENTS // max(1, x.shape[1]))
        expanded = expand_scale(scale_inv) if is_4bit else torch.broadcast_to(expand(scale_inv, *q.shape), q.shape)
        expanded = expanded if global_scale is None else expanded * global_scale.reshape(-1, 1)
        for x_rows, q_rows, s_inv in zip(*(torch.split(t, rows) for t in (x, q, expanded)), strict=True):
            values = code_values(unpack_codes(q_rows)) if is_4bit else q_rows.float()
            exact, dequantized = x_rows.float(), values * s_inv
            peak = (exact.abs() / s_inv).max()
            self.peak = torch.fmax(torch.zeros_like(peak) if self.peak is None else self.peak, peak)
            self.signal = self.signal + exact.square().sum(dtype=torch.float64)
            self.noise = self.noise + (exact - dequantized).square_().sum(dtype=torch.float64)

    def report(self) -> CastReport | None:
        """Returns the statistics, or None if nothing was added."""
        counts: list[int] = [] if self.counts is None else self.counts.tolist()
        elements = sum(counts)
        if elements == 0:
            return None
        size, top_code = self.grid.codes_per_binade, self.grid.top_code
        binades = [sum(counts[code : code + size]) for code in range(0, top_code + 1, size)]
        binades[0] -= counts[0]
        zeros, *shares = (_round_share(count / elements) for count in (counts[0], *binades))
        top = _round_share(counts[top_code] / elements)
        return CastReport(sqnr(self.signal, self.noise), self._headroom(), zeros, tuple(shares), top)

    def _headroom(self) -> float | None:
        peak = 0.0 if self.peak is None else float(self.peak)
        if peak == 0 or not math.isfinite(peak):
            return None
        return round(math.log2(self.grid.largest / peak), 4) + 0.0  # avoids minus zero


def count_codes(codes: Tensor) -> Tensor:
    """Returns the numbers of elements, int64 [128], with each code from 0 to 127.

    `bincount` is the fastest on a CPU, but on a GPU it waits for the device to learn the largest code.
    """
    if codes.device.type == "cpu":
        return torch.bincount(codes, minlength=128)
    return scatter_counts(codes)


def scatter_counts(codes: Tensor) -> Tensor:
    """Does the same as `count_codes` without waiting for the device."""
    counts = torch.zeros(128, dtype=torch.int64, device=codes.device)
    return counts.scatter_add_(0, codes.long(), torch.ones((), dtype=torch.int64, device=codes.device).expand_as(codes))


def sqnr(signal: FloatSum, noise: FloatSum) -> float | None:
    """Returns 10 log10 of the ratio of two powers, or None if there is no noise or no signal."""
    signal, noise = float(signal), float(noise)
    return None if noise == 0 or signal == 0 else 10 * math.log10(signal / noise)


def _round_share(share: float) -> float:
    """Rounds to four significant digits, because calibration.json has thousands of these numbers."""
    return float(f"{share:.4g}")


def outlier(inputs: Tensor | None, columns: Tensor | None) -> ChannelReport | None:
    """Returns the channel that is largest relative to its weights, from the amaxes [K] of inputs and weight columns.

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
    nll: FloatSum = 0.0
    reference_nll: FloatSum = 0.0
    kl: FloatSum = 0.0
    same_top1: IntSum = 0

    def add(self, targets: Tensor, logits: Tensor, reference: Tensor | None = None) -> None:
        """Adds targets, int64 [T] without IGNORE_INDEX, and the logits of both models, FP32 [T, vocab]."""
        log_p = log_softmax(logits, dim=-1)
        self.tokens += targets.numel()
        self.nll = self.nll + _nll(log_p, targets)
        if reference is not None:
            log_r = log_softmax(reference, dim=-1)
            self.reference_nll = self.reference_nll + _nll(log_r, targets)
            self.kl = self.kl + (log_r.exp() * (log_r - log_p)).sum(dtype=torch.float64)
            self.same_top1 = self.same_top1 + (logits.argmax(-1) == reference.argmax(-1)).sum()

    def quality(self, compared: bool) -> Quality:
        if self.tokens == 0:
            raise DataError("The held-out samples have no token to score; give longer texts or completions.")
        perplexity = _perplexity(float(self.nll), self.tokens, "quantized model" if compared else "model")
        if not compared:
            return Quality(self.tokens, perplexity)
        reference = _perplexity(float(self.reference_nll), self.tokens, "reference model")
        kl = max(0.0, float(self.kl) / self.tokens)
        return Quality(self.tokens, perplexity, reference, kl, int(self.same_top1) / self.tokens)


def _nll(log_p: Tensor, targets: Tensor) -> Tensor:
    return -log_p.gather(1, targets[:, None]).sum(dtype=torch.float64)


def _perplexity(nll: float, tokens: int, model: str) -> float:
    mean = nll / tokens
    if not math.isfinite(mean) or mean > 700:  # e^709 is the largest double
        raise ModelError(f"The loss of the {model} on the held-out samples is {mean}; check its weights and scales.")
    return math.exp(mean)


def add_logits(
    tally: TokenTally, targets: Tensor, model: tuple[Model, Tensor], reference: tuple[Model, Tensor] | None = None
) -> None:
    """Adds the logits of both models in slices; each model is a pair (decoder, hidden states [T, hidden])."""
    for rows in torch.split(scored_rows(targets), LOGITS_PER_SLICE):
        reference_logits = reference[0].logits(reference[1][rows]) if reference else None
        tally.add(targets[rows], model[0].logits(model[1][rows]), reference_logits)


@dataclass
class LayerTally:
    """Statistics of one linear: signal and noise power of its output, saturation and underflow of its input, and the
    casts of its input and its weight."""

    signal: FloatSum = 0.0
    noise: FloatSum = 0.0
    saturated: IntSum = 0
    rounded_to_top: IntSum = 0
    underflowed: IntSum = 0
    elements: int = 0
    input: GridTally = field(default_factory=GridTally)
    weight: GridTally = field(default_factory=GridTally)

    def add_output(self, exact: Tensor, quantized: Tensor) -> None:
        signal = exact.double()
        self.signal = self.signal + signal.square().sum()
        self.noise = self.noise + (signal - quantized.double()).square().sum()

    def add_input(self, x: Tensor, q: Tensor, scale_inv: Tensor) -> None:
        """Adds an input x [M, K] and its cast q [M, K] with scale_inv of any granularity."""
        counts = tally(x, q, expand(scale_inv, *q.shape))
        self.elements += x.numel()
        self.saturated = self.saturated + counts.saturated
        self.rounded_to_top = self.rounded_to_top + counts.rounded_to_top
        self.underflowed = self.underflowed + counts.underflowed
        self.input.add(x, q, scale_inv)

    def add_weight(self, weight: Tensor, linear: FrozenLinear) -> None:
        """Adds a weight [N, K] in high precision, and the linear that has it quantized."""
        self.weight.add(weight.detach(), *linear.quantized_weight)

    @property
    def sqnr_db(self) -> float | None:
        """The SQNR of the output in dB, or None if there is no noise or no signal."""
        return sqnr(self.signal, self.noise)

    def report(self, name: str, kl: float | None = None) -> LayerReport:
        counts = self.saturated, self.rounded_to_top, self.underflowed
        saturated, rounded_to_top, underflowed = (int(count) / max(self.elements, 1) for count in counts)
        channel = outlier(self.input.channels, self.weight.channels)
        casts = self.input.report(), self.weight.report()
        return LayerReport(name, self.sqnr_db, saturated, rounded_to_top, underflowed, kl, *casts, channel)


def read_tallies(tallies: Iterable[LayerTally]) -> None:
    """Moves all statistics to the CPU in one transfer, before they are reported."""
    parts = [part for tally in tallies for part in (tally, tally.input, tally.weight)]
    entries = [(vars(part), name) for part in parts for name, value in vars(part).items() if isinstance(value, Tensor)]
    if not entries:
        return
    tensors: list[Tensor] = [fields[name] for fields, name in entries]
    # FP64 holds FP32 numbers and all counts below 2^53 exactly.
    values = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu()
    slices = torch.split(values, [tensor.numel() for tensor in tensors])
    for (fields, name), tensor, part in zip(entries, tensors, slices, strict=True):
        fields[name] = part.to(tensor.dtype).view(tensor.shape)
