"""What the tests of every architecture share: its logits and those of transformers, and the marks of their files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.model.checkpoint import load_servable
from tests.compatibility.cases import NAMES
from tests.model.oracle import SIZES, all_logits

CONTEXT: int = SIZES["max_position_embeddings"]  # type: ignore[assignment]
IDS = torch.randint(3, 256, (CONTEXT,), generator=torch.Generator().manual_seed(1))
# Smoke tests: a dense family, a mixture, latent attention, and one that transformers computes.
SAMPLES = ("llama", "qwen3_moe", "deepseek_v3", "gpt2")
OF_EVERY_ARCHITECTURE = [
    pytest.mark.slow,
    # scope="module" runs all tests of one model before the next model
    pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=pytest.mark.smoke) if name in SAMPLES else name for name in NAMES],
        scope="module",
    ),
]
ModelDir = Callable[[str], tuple[Path, Any]]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the root mean square of the difference, relative to that of the expected values."""
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@torch.no_grad()
def logits_of(theirs: Any, ids: Tensor = IDS[:60]) -> Tensor:
    logits: Tensor = theirs(ids[None]).logits[0].float()
    return logits


@torch.no_grad()
def ours(directory: Path, recipe: Any = "stored", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return all_logits(load_servable(directory, recipe, dtype=dtype), IDS[:60].tolist())
