"""The channel of an input that stands out most from the others, given the size of the weights that read it.

One scale for all channels leaves the small ones little of the format: E4M3 has full precision over 15 binades, and a
channel that is thousands of times larger than the others takes most of them. That is justified if the weights for this
channel are large as well. If they are small, the channel's size is useless, and smoothing removes it.
"""

import torch
from torch import Tensor

from .result import ChannelReport


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
    return ChannelReport(channel, _short(sizes[channel]), _short(weights[channel]))


def _short(ratio: Tensor) -> float:
    return float(f"{float(ratio):.4g}")
