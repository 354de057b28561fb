"""Log-probabilities of the tokens of a prompt, from the logits of the tokens before them.

A long prompt's logits would be the largest tensor of all, [tokens, vocabulary] in FP32, so they are made some rows at a
time and only the requested values are kept. A row's values depend only on its prompt, as in the sampler.
"""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from fp8serve.engine.output import TokenLogprob
from fp8serve.engine.sampling_params import MAX_LOGPROBS
from fp8serve.engine.scheduler import Work
from fp8serve.engine.sequence import Sequence
from fp8serve.engine.transfer import to_device

ROWS = 256  # of logits at a time
Tell = Callable[[Sequence, list[TokenLogprob]], None]


def score(logits: Callable[[Tensor], Tensor], hidden: Tensor, work: list[Work], tell: Tell) -> None:
    """hidden [R, hidden]: the rows of `work` whose logits are needed, in order. `tell` gets each prompt's new
    values."""
    starts = list(accumulate((item.wanted for item in work), initial=0))  # before `tell` is called, which changes them
    for start, item in zip(starts, work, strict=False):
        if positions := item.scored:
            tokens = item.seq.token_ids[positions.start + 1 : positions.stop + 1]
            rows = hidden[start : start + len(positions)]
            tell(item.seq, _scored(logits, rows, tokens, item.seq.params.prompt_logprobs or 0))


def sampling(work: list[Work], device: torch.device) -> Tensor:
    """int64: which of the rows whose logits are needed sample."""
    ends = accumulate(item.wanted for item in work)
    rows = [row for end, item in zip(ends, work, strict=True) for row in range(end - item.drawn, end)]
    return to_device(rows, torch.long, device)


def _scored(logits: Callable[[Tensor], Tensor], hidden: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """The log-probabilities of `tokens`, each by the row before it."""
    found: list[TokenLogprob] = []
    for rows in torch.split(hidden, ROWS):
        some = tokens[len(found) : len(found) + len(rows)]
        table = torch.log_softmax(logits(rows), -1)
        chosen = table.gather(1, to_device(some, torch.long, table.device)[:, None])
        best = table.topk(min(MAX_LOGPROBS, table.shape[-1]), -1)
        columns = (some, chosen[:, 0].tolist(), best.indices.tolist(), best.values.tolist())
        found += [TokenLogprob.ranked(*row, top) for row in zip(*columns, strict=True)]
    return found
