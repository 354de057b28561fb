"""`inspect` exits 0 exactly where the directory loads: for the good and the bad checkpoints of all tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.cli import main
from fp8serve.errors import Fp8ServeError
from fp8serve.model.checkpoint import kv_scales, open_checkpoint
from fp8serve.model.config.either import holds_encoder
from fp8serve.model.reading import load_reader
from tests.compatibility.cases import make
from tests.model import checkpoints as made
from tests.model.checkpoints import Draft
from tests.model.encoders import FAMILIES, MODERN
from tests.model.encoders import make as make_encoder
from tests.model.test_fp8_head import CASES as IN_FP8
from tests.model.test_interop import quantization
from tests.model.test_verify import FILE_POISONS, GOOD, NAN, POISONS, UP, each, put, told, without_config

Base = Callable[[], Draft]


def loads(folder: Path) -> bool:
    """Whether its weights can be served as they are stored, with the scales of its cache."""
    try:
        recipe = "stored" if open_checkpoint(folder).has_scales else "bf16"
        load_reader(folder, recipe)
        if not holds_encoder(folder):
            kv_scales(folder)
    except Fp8ServeError:
        return False
    return True


def agrees(folder: Path) -> bool:
    """Whether the model loads, and `inspect` says so."""
    found = loads(folder)
    assert main(["inspect", str(folder)]) == (0 if found else 1)
    return found


@pytest.mark.parametrize("name", GOOD)
def test_a_good_checkpoint(name: str, tmp_path: Path) -> None:
    agrees(GOOD[name]().write(tmp_path / "m"))


@pytest.mark.parametrize("name", IN_FP8)
def test_an_embedding_or_a_head_in_fp8(name: str, tmp_path: Path) -> None:
    assert agrees(IN_FP8[name][0]().write(tmp_path / "m"))


@pytest.mark.parametrize("name", POISONS)
def test_a_poisoned_checkpoint(name: str, tmp_path: Path) -> None:
    base, poison, _ = POISONS[name]
    draft = base()
    poison(draft)
    agrees(draft.write(tmp_path / "m"))


@pytest.mark.parametrize("name", FILE_POISONS)
def test_a_damaged_file(name: str, tmp_path: Path) -> None:
    folder = made.sharded().write(tmp_path / "m")
    FILE_POISONS[name][0](folder)
    agrees(folder)


def of_size(block: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Tensor]:
    """Scales as if each were of `block` x `block` numbers."""
    return lambda scale: scale.repeat_interleave(128 // block, 0).repeat_interleave(128 // block, 1).to(dtype)


def groups_of_32(draft: Draft) -> None:
    for name in made.NAMES:
        rows, columns = draft.tensors[f"{name}.weight"].shape
        draft.tensors[f"{name}.weight_scale"] = torch.full((rows, columns // 32), 1e-4)


UNLOADABLE: dict[str, tuple[Base, Callable[[Draft], Any]]] = {
    "blocks of another size than the config says": (made.blocks, each("weight_scale_inv", of_size(64))),
    "E8M0 as uint8 under 128 x 128": (
        made.blocks, each("weight_scale_inv", lambda s: s.to(torch.float8_e8m0fnu).view(torch.uint8))),
    "FP64 scales": (made.rows, each("weight_scale", Tensor.double)),
    "FP32 groups of 32": (made.rows, groups_of_32),
    "no quantization_config": (made.static, without_config),
    "a fused scale of three": (made.static, put(f"{UP}.weight_scale", torch.full((3,), 1e-4))),
    "static without input_scale": (made.rows, told(**quantization("ct-static"))),
    "a layer of no group": (
        made.rows, lambda d: d.config["quantization_config"]["config_groups"]["group_0"].update(targets=["x"])),
    "cache scales of only one layer": (
        made.rows, lambda d: [put(f"model.layers.0.self_attn.{r}_scale", torch.ones(1))(d) for r in "kv"]),
    "a k scale without a v scale": (made.rows, put("model.layers.0.self_attn.k_scale", torch.ones(1))),
    "a k scale that is NaN": (made.static, put("model.layers.0.self_attn.k_scale", NAN)),
    "an MXFP8 exponent too large": (lambda: made.mx(8), put(f"{UP}.weight_scale", 254, (0, 0))),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLOADABLE)
def test_what_nothing_can_load(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, change = UNLOADABLE[name]
    draft = base()
    change(draft)
    assert not agrees(draft.write(tmp_path / "m"))
    assert "cannot be served: " in capsys.readouterr().err


def test_a_scale_that_loading_does_not_read_is_no_reason(tmp_path: Path) -> None:
    draft = made.rows()
    draft.tensors[f"{UP}.input_scale"] = torch.zeros(1)
    assert agrees(draft.write(tmp_path / "m"))


@pytest.mark.parametrize("name", ["exaone4", "nemotron", "olmoe", "gpt2"])
def test_a_class_of_transformers_that_is_computed(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    assert agrees(tmp_path)


@pytest.mark.parametrize("config", [*FAMILIES, MODERN])
def test_an_encoder(config: Any, tmp_path: Path) -> None:
    make_encoder(tmp_path, config)
    assert agrees(tmp_path)
