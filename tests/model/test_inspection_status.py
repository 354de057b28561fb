"""`inspect` exits with status 0 if and only if the directory loads, for the good and the poisoned checkpoints of all
tests."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.cli import main
from fp8serve.errors import Fp8ServeError
from fp8serve.model.checkpoint import kv_scales, kv_scales_error, load_any_servable, open_checkpoint
from fp8serve.model.config.decoder import is_encoder_directory
from tests.compatibility.cases import make
from tests.model import checkpoints as drafts
from tests.model.checkpoints import Draft
from tests.model.encoders import FAMILIES, MODERN
from tests.model.encoders import make as make_encoder
from tests.model.oracle import write_tokenizer
from tests.model.test_fp8_head import CASES as IN_FP8
from tests.model.test_interop import quantization
from tests.model.test_verify import (
    FILE_POISONS,
    GOOD,
    NAN,
    POISONS,
    UP,
    each,
    put,
    quant_config,
    without_config,
)

Base = Callable[[], Draft]


def loads(folder: Path) -> bool:
    """Returns whether the stored weights can be served, with the stored cache scales."""
    try:
        recipe = "stored" if open_checkpoint(folder).has_scales else "bf16"
        load_any_servable(folder, recipe)
        if not is_encoder_directory(folder):
            kv_scales(folder)
    except Fp8ServeError:
        return False
    return True


def agrees(folder: Path) -> bool:
    """Asserts that the status of `inspect` says whether the model loads. Returns whether it loads."""
    is_loadable = loads(folder)
    assert main(["inspect", str(folder)]) == (0 if is_loadable else 1)
    return is_loadable


@pytest.mark.parametrize("name", GOOD)
def test_a_good_checkpoint(name: str, tmp_path: Path) -> None:
    agrees(GOOD[name]().write(tmp_path / "m"))


@pytest.mark.parametrize("name", IN_FP8)
def test_an_embedding_or_a_head_in_fp8_can_be_served(name: str, tmp_path: Path) -> None:
    assert agrees(IN_FP8[name][0]().write(tmp_path / "m"))


@pytest.mark.parametrize("name", POISONS)
def test_a_poisoned_checkpoint(name: str, tmp_path: Path) -> None:
    base, poison, _ = POISONS[name]
    draft = base()
    poison(draft)
    agrees(draft.write(tmp_path / "m"))


@pytest.mark.parametrize("name", FILE_POISONS)
def test_a_damaged_file(name: str, tmp_path: Path) -> None:
    folder = drafts.sharded().write(tmp_path / "m")
    FILE_POISONS[name][0](folder)
    agrees(folder)


def with_blocks_of(block: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Tensor]:
    """Replaces scales by ones for blocks of `block` x `block` elements."""
    return lambda scale: scale.repeat_interleave(128 // block, 0).repeat_interleave(128 // block, 1).to(dtype)


def groups_of_32(draft: Draft) -> None:
    for name in drafts.NAMES:
        rows, columns = draft.tensors[f"{name}.weight"].shape
        draft.tensors[f"{name}.weight_scale"] = torch.full((rows, columns // 32), 1e-4)


UNLOADABLE: dict[str, tuple[Base, Callable[[Draft], Any]]] = {
    "blocks of another size than the config says": (drafts.blocks, each("weight_scale_inv", with_blocks_of(64))),
    "E8M0 as uint8 under 128 x 128": (
        drafts.blocks, each("weight_scale_inv", lambda s: s.to(torch.float8_e8m0fnu).view(torch.uint8))),
    "FP64 scales": (drafts.rows, each("weight_scale", Tensor.double)),
    "FP32 groups of 32": (drafts.rows, groups_of_32),
    "no quantization_config": (drafts.static, without_config),
    "a fused scale of three": (drafts.static, put(f"{UP}.weight_scale", torch.full((3,), 1e-4))),
    "static without input_scale": (drafts.rows, quant_config(**quantization("ct-static"))),
    "a layer of no group": (
        drafts.rows, lambda d: d.config["quantization_config"]["config_groups"]["group_0"].update(targets=["x"])),
    "cache scales of only one layer": (
        drafts.rows, lambda d: [put(f"model.layers.0.self_attn.{r}_scale", torch.ones(1))(d) for r in "kv"]),
    "a k scale without a v scale": (drafts.rows, put("model.layers.0.self_attn.k_scale", torch.ones(1))),
    "a k scale that is NaN": (drafts.static, put("model.layers.0.self_attn.k_scale", NAN)),
    "an MXFP8 exponent too large": (lambda: drafts.mx(8), put(f"{UP}.weight_scale", 254, (0, 0))),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLOADABLE)
def test_inspect_says_that_unloadable_checkpoints_cannot_be_served(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, change = UNLOADABLE[name]
    draft = base()
    change(draft)
    assert not agrees(draft.write(tmp_path / "m"))
    err = capsys.readouterr().err
    assert "cannot be served: " in err or "can be served with a BF16 cache only: " in err


def test_a_scale_that_is_not_read_does_not_change_the_status(tmp_path: Path) -> None:
    draft = drafts.rows()
    draft.tensors[f"{UP}.input_scale"] = torch.zeros(1)
    assert agrees(draft.write(tmp_path / "m"))


@pytest.mark.parametrize("name", ["exaone4", "nemotron", "olmoe", "gpt2"])
def test_a_model_of_the_transformers_backend(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    assert agrees(tmp_path)


@pytest.mark.parametrize("config", [*FAMILIES, MODERN])
def test_an_encoder(config: Any, tmp_path: Path) -> None:
    make_encoder(tmp_path, config)
    assert agrees(tmp_path)


LAYERS = range(drafts.CONFIG["num_hidden_layers"])
ONE = torch.full((1,), 0.01)
Cache = dict[str, Tensor]


def cache(
    value: Tensor | list[float], layers: Iterable[int] = LAYERS, keys: tuple[str, ...] = ("k_scale", "v_scale")
) -> Cache:
    """Returns cache scales of `value` for keys and values of each layer."""
    names = [f"model.layers.{layer}.self_attn.{key}" for layer in layers for key in keys]
    return {name: torch.as_tensor(value).clone() for name in names}


NAN_SCALE, INFINITE = [float("nan")], [float("inf")]
USABLE = {
    "FP32": cache(ONE), "FP16": cache(ONE.half()), "BF16": cache(ONE.bfloat16()), "a scalar": cache(ONE[0]),
    "E8M0": cache(torch.ones(1).to(torch.float8_e8m0fnu)), "ones": cache([1.0]), "none": {},
    "one of both": cache(ONE, keys=("kv_scale",)), "a subnormal FP16": cache(torch.tensor([6e-8]).half()),
    "ModelOpt": cache(ONE, keys=("k_proj.k_scale", "v_proj.v_scale")),
}  # fmt: skip
UNUSABLE = {
    "FP64": cache(ONE.double()), "INT32": cache(torch.ones(1, dtype=torch.int32)), "empty": cache([]),
    "E4M3": cache(torch.ones(1).to(torch.float8_e4m3fn)), "per head": cache([0.01, 0.02]),
    "per head, a column": cache([[0.01], [0.02]]), "zero": cache([0.0]), "negative": cache([-1.0]),
    "NaN": cache(NAN_SCALE), "infinite": cache(INFINITE), "tiny": cache([1e-39]), "large": cache([3e38]),
    "some layers": cache(ONE, range(1)), "keys alone": cache(ONE, keys=("k_scale",)),
    "one of both, and one of each": cache(ONE, keys=("k_scale", "v_scale", "kv_scale")),
    "a layer that is not there": cache(ONE, range(len(LAYERS) + 1)), "only such layers": cache(ONE, range(97, 99)),
    "one of both, and of keys": cache(ONE, keys=("k_scale", "kv_scale")),
}  # fmt: skip


def with_cache(scales: Cache, folder: Path) -> Path:
    draft = drafts.static()
    tensors = {key: tensor for key, tensor in draft.tensors.items() if not key.endswith(("k_scale", "v_scale"))}
    Draft(tensors | scales, draft.config).write(folder)
    write_tokenizer(folder)
    return folder


def generates(folder: Path, *options: str) -> bool:
    return main(["generate", str(folder), "a b", "--max-new-tokens", "1", *options]) == 0


@pytest.fixture
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enlarges the embedding of drafts to the vocabulary of the tests' tokenizer."""
    monkeypatch.setattr(drafts, "VOCABULARY", 320)
    monkeypatch.setitem(drafts.CONFIG, "vocab_size", 320)


@pytest.mark.usefixtures("vocabulary")
@pytest.mark.parametrize("name", USABLE)
def test_usable_cache_scales_are_served(name: str, tmp_path: Path) -> None:
    folder = with_cache(USABLE[name], tmp_path / "m")
    assert main(["inspect", str(folder)]) == 0
    assert main(["verify", str(folder)]) == (1 if name == "none" else 0)  # the configuration declares cache scales
    assert generates(folder)
    assert generates(folder, "--kv-cache-dtype", "fp8") == (name != "none")


@pytest.mark.usefixtures("vocabulary")
@pytest.mark.parametrize("name", UNUSABLE)
def test_every_command_names_cache_scales_that_cannot_be_used(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_cache(UNUSABLE[name], tmp_path / "m")
    reason = kv_scales_error(folder)
    assert reason is not None
    assert main(["inspect", str(folder)]) == 1
    assert f"can be served with a BF16 cache only: {reason}" in capsys.readouterr().err
    assert main(["verify", str(folder)]) == 1
    assert not generates(folder, "--kv-cache-dtype", "fp8")
    assert reason in capsys.readouterr().err
    assert generates(folder)
    assert f"the KV cache is BF16. It cannot be FP8 with this model's scales: {reason}" in caplog.text
