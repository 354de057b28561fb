"""Detecting NaN and infinity in weight files by their bits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8serve.errors import ModelError
from fp8serve.model.storage import headers

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)


def values(dtype: torch.dtype) -> torch.Tensor:
    """Returns the extreme finite values of both signs; for a one-byte type, every finite value."""
    if dtype.itemsize == 1:
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        return every[every.float().isfinite()]
    info = torch.finfo(dtype)
    numbers = torch.tensor([0.0, 1.0, info.max, info.tiny, info.smallest_normal / 2], dtype=torch.float64).to(dtype)
    return torch.cat([numbers, -numbers])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_only_finite_values_pass(dtype: torch.dtype, tmp_path: Path) -> None:
    good = values(dtype)
    save_file({"a": good, "n": torch.arange(5), "empty": torch.zeros(0, 3)}, tmp_path / "a.safetensors")
    headers.require_finite(tmp_path)
    bad = ["nan"] if dtype is torch.float8_e4m3fn else ["nan", "inf", "-inf"]
    for number in bad:
        spoiled = good.clone()
        spoiled[-1] = torch.tensor(float(number)).to(dtype)
        save_file({"a": good, "b.weight": spoiled}, tmp_path / "b.safetensors")
        with pytest.raises(ModelError, match=r"holds NaN or an infinity in b\.weight"):
            headers.require_finite(tmp_path)


def test_a_nonfinite_value_is_found_at_any_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "CHUNK_ELEMENTS", 7)
    for place in (0, 6, 7, 8, 22):
        weights = torch.zeros(23)
        weights[place] = torch.inf
        save_file({"w": weights}, tmp_path / "w.safetensors")
        with pytest.raises(ModelError, match="in w"):
            headers.require_finite(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", (2).to_bytes(8, "little") + b"{x"]
)
def test_a_broken_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"is not a complete safetensors file|has a header that is not"):
        headers.require_finite(tmp_path)
