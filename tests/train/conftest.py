"""A tiny model, data of each kind, and a configuration that trains in a second."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8serve.calibration.pipeline import calibrate
from fp8serve.train.config import TrainConfig
from fp8serve.train.scratch import write_random_model

WORDS = (
    *("red", "green", "blue", "one", "two", "three", "cat", "dog", "fox", "runs"),
    *("jumps", "sleeps", "over", "under", "the", "a", "lazy", "quick"),
)
TEXTS = [" ".join(WORDS[(i * 7 + j * 3) % len(WORDS)] for j in range(24)) for i in range(24)]

Configure = Callable[..., TrainConfig]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "model"
    return write_random_model(out, TEXTS, vocab_size=320, hidden_size=64, layers=2, heads=4, kv_heads=2, context=128)


@pytest.fixture(scope="session")
def fp8_dir(model_dir: Path) -> Path:
    """The tiny model, calibrated."""
    out = model_dir.parent / "fp8"
    calibrate(model_dir, out=out, samples=4, seq_len=16)
    return out


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompt rows and chats: part of their tokens carry loss."""
    prompts = [{"prompt": text[:40], "completion": text[40:80]} for text in TEXTS[:8]]
    chats = [
        {"messages": [{"role": "user", "content": t[:30]}, {"role": "assistant", "content": t[30:60]}]}
        for t in TEXTS[8:16]
    ]
    return write_lines(tmp_path / "data.jsonl", prompts + chats)


@pytest.fixture
def configure(tmp_path: Path, model_dir: Path, data: Path) -> Configure:
    def make(**values: Any) -> TrainConfig:
        base: dict[str, Any] = {
            "model": str(model_dir), "data": [str(data)], "out": str(tmp_path / "out"), "batch_size": 4, "seq_len": 64,
            "max_steps": 6, "lr": 1e-3, "warmup_steps": 2,
        }  # fmt: skip
        recipe = values.get("recipe", "delayed")
        return TrainConfig.from_dict({**base, **({"amax_history_len": 16} if recipe == "delayed" else {}), **values})

    return make
