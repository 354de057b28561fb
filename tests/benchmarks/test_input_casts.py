"""The casts whose cost benchmarks/input_casts.py measures."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
CASTS: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks/input_casts.py"))["CASTS"]


@pytest.mark.parametrize("name", CASTS)
def test_casts_keep_four_significant_bits(name: str) -> None:
    x = torch.randn(64, 200, generator=torch.Generator().manual_seed(0))
    actual = CASTS[name](x, float(x.abs().max()))
    mask = x.abs() > 0.01
    assert actual.shape == x.shape
    assert 0 < float(((actual - x).abs() / x.abs())[mask].max()) <= 1 / 16 + 1e-6


def test_the_largest_value_is_exact_except_with_power_of_two_scales() -> None:
    x = torch.full((1, 128), 0.3)
    for name, cast in CASTS.items():
        exact = torch.allclose(cast(x, 0.3), x, rtol=1e-6)
        assert exact == (name in ("per tensor", "per token", "per 1x128"))


def test_every_cast_is_measured(tmp_path: Path) -> None:
    model, text = write_tiny_model(tmp_path / "model"), tmp_path / "text.jsonl"
    text.write_text('{"text": "The second of two birds sang until the lamp was out, and then the first."}\n')
    program = [sys.executable, "benchmarks/input_casts.py", str(model), str(text), "--seq-len", "32"]
    output = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split("  ")[0].strip() for line in output.splitlines()] == list(CASTS)
