"""Training, calibration and serving give transformers' logits, also beyond the sliding windows of the layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.calibration import data, passes
from fp8serve.engine.engine import Engine
from fp8serve.model.checkpoint import load_trainable
from fp8serve.train.forward import Network, PackedBatch
from tests.model.oracle import make_model

WINDOW = 8
QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
MODELS = {"mistral-window": {}, "qwen2-window": {}, "qwen3": QWEN, "gemma2": {}, "gemma3": {}, "gemma3-stretched": {},
          "granite": {}, "smollm3": {}, "phi3-window": {}, "phi3-long": {}, "olmo2": {}, "olmo3": {},
          "olmo3-stretched": {}, "glm": {}, "glm4": {}, "ministral3": {}, "cohere": {},
          "cohere-qk-norm": {}, "cohere2": {}, "stablelm": {}, "stablelm-parallel": {}}  # fmt: skip
LENGTHS = [100, 37]
IDS = torch.randint(3, 256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])


def trained(directory: Path) -> Tensor:
    batch = PackedBatch(IDS, POSITIONS, LENGTHS, torch.arange(len(IDS)), IDS)
    logits: Tensor = Network(load_trainable(directory))(batch)
    return logits


def calibrated(directory: Path) -> Tensor:
    decoder = load_trainable(directory)
    hidden = passes.forward(decoder, data.Batch(IDS, POSITIONS, IDS, LENGTHS))
    return decoder.logits(hidden)


def served(directory: Path, lengths: list[int] = LENGTHS, **options: Any) -> Tensor:
    """Serves in chunks of 24 tokens at most, on cached prefixes; returns the logits of the last 32 tokens."""
    engine = Engine(directory, recipe="bf16", max_batch_tokens=24, max_num_seqs=4, **options)
    run, outputs = engine.loaded.runner.run, []

    def watched(*work: Any) -> Tensor:
        outputs.append(run(*work).clone())
        return outputs[-1]

    engine.loaded.runner.run = watched  # type: ignore[method-assign]
    for ids in IDS[: sum(lengths)].split(lengths):
        for end in range(len(ids) - 32, len(ids)):
            list(engine.generate([ids[: end + 1].tolist()], max_new_tokens=1))
    return torch.cat([logits for logits in outputs if len(logits)])


PATHS: dict[str, tuple[Callable[[Path], Tensor], int]] = {
    "training": (trained, max(LENGTHS)),
    "calibration": (calibrated, max(LENGTHS)),
    "serving": (served, 32),
}


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("kind", "path"), [(k, r) for k in MODELS for r in PATHS if (k, r) != ("phi3-long", "serving")]
)
def test_logits_equal_transformers_beyond_the_window(kind: str, path: str, tmp_path: Path) -> None:
    theirs = make_model(kind, tmp_path, overrides=MODELS[kind])
    compute, newest = PATHS[path]
    with torch.no_grad():
        actual = compute(tmp_path)
        expected = torch.cat([theirs(ids[None]).logits[0, -newest:].float() for ids in IDS.split(LENGTHS)])
    error = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(("length", "max_model_len"), [(100, None), (60, 64)])
def test_length_dependent_frequencies_are_those_of_the_longest_sequence(
    length: int, max_model_len: int | None, tmp_path: Path
) -> None:
    """transformers chooses the frequencies in every call and caches nothing; the trained context is 64 tokens."""
    theirs = make_model("phi3-long", tmp_path)
    with torch.no_grad():
        actual = served(tmp_path, [length], max_model_len=max_model_len)
        expected = torch.cat([theirs(IDS[None, : end + 1]).logits[0, -1:] for end in range(length - 32, length)])
    error = (actual - expected.float()).square().mean().sqrt() / expected.float().square().mean().sqrt()
    assert error < 8 * torch.finfo(torch.bfloat16).eps


def test_ignoring_the_window_changes_the_logits(tmp_path: Path) -> None:
    """Shows that the test above would notice a path that ignores the window."""
    windowed = make_model("mistral-window", tmp_path)
    ids = IDS[None, :100]
    with torch.no_grad():
        near = windowed(ids).logits
        windowed.config.sliding_window = None
        far = windowed(ids).logits
    assert (near - far).square().mean().sqrt() > 0.1 * far.square().mean().sqrt()
    assert torch.equal(near[:, :WINDOW], far[:, :WINDOW])
