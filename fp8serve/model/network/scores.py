"""Logits of labels as scores."""

from torch import Tensor

from fp8serve.model.config.encoder import ScoreActivation


def scored(logits: Tensor, activation: ScoreActivation) -> Tensor:
    """[texts, labels]."""
    if activation == "none":
        return logits
    return logits.softmax(1) if activation == "softmax" else logits.sigmoid()
