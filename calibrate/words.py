"""Figures and names in readable form, for tables on the terminal and on the page."""

import re
from collections.abc import Sequence

from .result import CalibrationReport, LayerReport, Quality

NONE = "–"
LONG_NAME = re.compile(r".*?layers\.(\d+)\.(?:\w+\.)??(\w+)(?:\.(input|weight|grad_output))?")


def number(value: float | None) -> str:
    """Four digits."""
    return NONE if value is None else f"{value:.4g}"


def decibels(value: float | None) -> str:
    """None: no error."""
    return "exact" if value is None else f"{value:.1f} dB"


def percent(fraction: float | None) -> str:
    """Of a fraction 0..1."""
    if fraction is None:
        return NONE
    return "under 0.0001 %" if 0 < fraction < 1e-6 else f"{100 * fraction:.3g} %"


def size(count: float) -> str:
    """Bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def short(name: str) -> str:
    """model.layers.3.mlp.down_proj.input -> layer 3 down_proj input."""
    found = LONG_NAME.fullmatch(name)
    return " ".join(("layer", *filter(None, found.groups()))) if found else name


def count(number: int, what: str) -> str:
    """1 input, 2 inputs."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def change(quality: Quality) -> str:
    """Of perplexity, in percent; empty without a reference."""
    if not quality.reference_perplexity:
        return ""
    return f" ({100 * (quality.perplexity / quality.reference_perplexity - 1):+.2f} %)"


def cost(layer: LayerReport, quality: Quality) -> str:
    """What the layer's FP8 adds to the KL divergence, and its share of the total."""
    if layer.kl is None:
        return ""
    part = f", {percent(layer.kl / quality.kl_divergence)} of the model's" if quality.kl_divergence else ""
    return f" (KL {layer.kl:.2g} nats{part})"


def counts(samples: int, documents: int) -> str:
    """Of what was read."""
    return f"{count(samples, 'sample')} from {count(documents, 'document')}"


def outlier_of(layer: LayerReport) -> str:
    """The channel of its input that is farthest from the others; empty where none is known."""
    if (found := layer.outlier) is None:
        return ""
    return f"channel {found.channel}: {found.size:,.4g} times, its weights {found.weights:.3g} times"


def kept_bytes(report: CalibrationReport) -> str:
    """The size of the linears that stay in BF16."""
    return f"{size(sum(kept.bytes for kept in report.kept))} more than in FP8"
