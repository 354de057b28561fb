"""`verify` on a corpus of faulty checkpoints ("poisons"): each gets the right finding, and good checkpoints get
none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.cli import main
from fp8serve.errors import ModelError
from fp8serve.model.export import write_calibrated
from fp8serve.model.verify import CHECKS, verify
from tests.model import checkpoints as drafts
from tests.model.checkpoints import Draft
from tests.model.oracle import state_for

UP, DOWN, Q = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"
CACHE = "model.layers.1.self_attn"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
UE8M0 = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}


def torchao() -> Draft:
    kind = {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": {"granularity": None}}
    draft = drafts.fp8({"quant_method": "torchao", "quant_type": {"default": kind}}, "row", "_weight_scale")
    for key in [key for key in draft.tensors if key.endswith("._weight_scale")]:
        draft.tensors[key.replace("_scale", "_qdata")] = draft.tensors.pop(key.replace("._weight_scale", ".weight"))
    return draft


def static_experts() -> Draft:
    """Stacked experts as transformers writes them: one weight scale each for gate and up, and one input scale per
    expert."""
    draft = drafts.stacked()
    for key in [key for key in draft.tensors if key.endswith("_scale_inv") and ".experts." not in key]:
        draft.tensors[key] = draft.tensors[key].max()
        draft.tensors[key.replace("weight_scale_inv", "input_scale")] = torch.tensor(0.01)
    for key in [key for key in draft.tensors if key.endswith("experts.gate_up_proj")]:
        weight = torch.randn(draft.tensors[key].shape) * 0.02
        scale = weight.unflatten(1, (2, -1)).abs().amax((2, 3)) / 448
        codes = weight / scale.repeat_interleave(weight.shape[1] // 2, 1)[..., None]
        draft.tensors[key] = codes.to(torch.float8_e4m3fn)
        draft.tensors[f"{key}_scale_inv"] = scale[..., None]
        draft.tensors[f"{key}_activation_scale"] = torch.full((len(weight),), 0.01)
    draft.config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    return draft


def e8m0() -> Draft:
    return drafts.fp8(UE8M0, "block", "scale", lambda s: s.to(torch.float8_e8m0fnu), power_of_2=True)


def exponent(value: int) -> Callable[[Draft], None]:
    def poison(draft: Draft) -> None:
        draft.tensors[f"{UP}.scale"].view(torch.uint8)[0, 0] = value

    return poison


def without_last(key: str) -> Callable[[Draft], None]:
    def poison(draft: Draft) -> None:
        draft.tensors[key] = draft.tensors[key][:-1].clone()

    return poison


GOOD: dict[str, Callable[[], Draft]] = {
    "BF16": drafts.plain,
    "compressed-tensors, static": drafts.static,
    "compressed-tensors, static in FP32": lambda: drafts.fp8("ct-static", inputs="input_scale"),
    "compressed-tensors, per channel and token": drafts.rows,
    "compressed-tensors, blocks": lambda: drafts.fp8("ct-block", "block", convert_scale=lambda s: s.bfloat16()),
    "compressed-tensors, weights alone": lambda: drafts.fp8("ct-weights", "row"),
    "fp8, static as vLLM reads it": lambda: drafts.fp8("fp8-static", inputs="input_scale"),
    "fp8, static as transformers reads it": lambda: drafts.fp8(
        "fp8-static", spelled="weight_scale_inv", inputs="activation_scale"
    ),
    "fp8, dynamic": lambda: drafts.fp8("fp8-dynamic"),
    "fp8, blocks": drafts.blocks,
    "fp8, blocks with scales in E8M0": lambda: drafts.fp8(
        UE8M0, "block", "scale", lambda s: s.to(torch.float8_e8m0fnu), power_of_2=True
    ),
    "fp8, blocks with scales in BF16": lambda: drafts.fp8("fp8-block", "block", "weight_scale_inv", Tensor.bfloat16),
    "ModelOpt": lambda: drafts.fp8("modelopt", inputs="input_scale", cache="{}_proj.{}_scale"),
    "ModelOpt, per channel": lambda: drafts.fp8("modelopt-channel", "row", convert_scale=lambda s: s.reshape(-1)),
    "ModelOpt, blocks": lambda: drafts.fp8(
        "modelopt-block", "block", convert_scale=lambda s: s.reshape(len(s), 1, s.shape[1], 1)
    ),
    "fbgemm": lambda: drafts.fp8({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "row"),
    "torchao, per row": lambda: drafts.fp8("fp8-dynamic", "row"),
    "torchao, as it flattens tensors": lambda: torchao(),
    "stacked experts, static": lambda: static_experts(),
    "MXFP8": lambda: drafts.mx(8),
    "MXFP4": lambda: drafts.mx(4),
    "shards": drafts.sharded,
    "a tied output layer that is stored": drafts.tied,
    "a language model inside a multimodal one": drafts.wrapped,
    "stacked experts": drafts.stacked,
}


@pytest.mark.parametrize("name", GOOD)
def test_good_checkpoints_have_no_findings(name: str, tmp_path: Path) -> None:
    assert verify(GOOD[name]().write(tmp_path / "m")) == []


@pytest.mark.parametrize(
    ("format_", "recipe"),
    [("compressed-tensors", r) for r in ("delayed", "delayed by row", "w8a16", "current", "rowwise", "block", "mxfp8")]
    + [("fp8", r) for r in ("delayed", "current", "block")]
    + [("modelopt", r) for r in ("delayed", "rowwise", "mxfp8")],
)
def test_checkpoints_written_by_fp8serve_have_no_errors(format_: str, recipe: str, tmp_path: Path) -> None:
    source = drafts.plain().write(tmp_path / "source")
    write_calibrated(tmp_path / "out", source, state_for(source, recipe), format=format_)
    assert [finding for finding in verify(tmp_path / "out") if finding.severity == "error"] == []


def scaled(key: str, by: float) -> Callable[[Draft], None]:
    def poison(draft: Draft) -> None:
        draft.tensors[key] = draft.tensors[key] * by

    return poison


def put(key: str, value: Any, at: tuple[int, ...] | None = None) -> Callable[[Draft], None]:
    """Sets a tensor, or one of its elements."""

    def poison(draft: Draft) -> None:
        if at is None:
            draft.tensors[key] = value if isinstance(value, Tensor) else torch.full_like(draft.tensors[key], value)
        else:
            draft.tensors[key][at] = value

    return poison


def drop(*keys: str) -> Callable[[Draft], None]:
    def poison(draft: Draft) -> None:
        for key in keys:
            del draft.tensors[key]

    return poison


def each(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[Draft], None]:
    def poison(draft: Draft) -> None:
        for key in [key for key in draft.tensors if key.endswith(suffix)]:
            draft.tensors[key] = change(draft.tensors[key])

    return poison


def rename(old: str, new: str) -> Callable[[Draft], None]:
    def poison(draft: Draft) -> None:
        for key in [key for key in draft.tensors if key.endswith(old)]:
            draft.tensors[key.removesuffix(old) + new] = draft.tensors.pop(key)

    return poison


def quant_config(**changes: Any) -> Callable[[Draft], None]:
    """Changes quantization_config."""

    def poison(draft: Draft) -> None:
        draft.config["quantization_config"] |= changes

    return poison


def config(**changes: Any) -> Callable[[Draft], None]:
    def poison(draft: Draft) -> None:
        draft.config |= changes

    return poison


def requantized(by: float) -> Callable[[Draft], None]:
    """Quantizes the weight UP again with a scale `by` times as large, and stores that scale."""

    def poison(draft: Draft) -> None:
        scale = draft.tensors[f"{UP}.weight_scale"].float()
        weight = draft.tensors[f"{UP}.weight"].float() * scale
        codes = (weight / (scale * by)).clamp(-448, 448)
        draft.tensors[f"{UP}.weight"] = codes.to(torch.float8_e4m3fn)
        draft.tensors[f"{UP}.weight_scale"] = scale * by

    return poison


def uncalibrated_cache(draft: Draft) -> None:
    each(".k_scale", torch.ones_like)(draft)
    each(".v_scale", torch.ones_like)(draft)


def twice(draft: Draft) -> None:
    draft.tensors[f"{UP}.weight_scale_inv"] = 1 / draft.tensors[f"{UP}.weight_scale"].float()


def to_bf16(draft: Draft) -> None:
    draft.tensors[f"{UP}.weight"] = draft.tensors[f"{UP}.weight"].bfloat16()


def bare(draft: Draft) -> None:
    to_bf16(draft)
    drop(f"{UP}.weight_scale", f"{UP}.input_scale")(draft)


def all_bf16(draft: Draft) -> None:
    plain = drafts.plain()
    draft.tensors = plain.tensors


def without_config(draft: Draft) -> None:
    del draft.config["quantization_config"]


def e5m2(draft: Draft) -> None:
    draft.tensors[f"{UP}.weight"] = draft.tensors[f"{UP}.weight"].float().to(torch.float8_e5m2)


def fp8_norm(draft: Draft) -> None:
    draft.tensors["model.norm.weight"] = draft.tensors["model.norm.weight"].float().to(torch.float8_e4m3fn)


def as_int(draft: Draft) -> None:
    draft.tensors[f"{UP}.weight_scale"] = torch.tensor([1], dtype=torch.int32)


NAN, INF = float("nan"), float("inf")
Poison = Callable[[Draft], None]

# name: (checkpoint, change, (expected check, part of the expected tensor's name))
POISONS: dict[str, tuple[Callable[[], Draft], Poison, tuple[str, str]]] = {
    "weight scale NaN": (drafts.static, put(f"{UP}.weight_scale", NAN), ("nan", f"{UP}.weight_scale")),
    "weight scale infinite": (drafts.static, put(f"{UP}.weight_scale", INF), ("infinite", f"{UP}.weight_scale")),
    "weight scale zero": (drafts.static, put(f"{UP}.weight_scale", 0), ("zero", f"{UP}.weight_scale")),
    "weight scale negative": (drafts.static, put(f"{UP}.weight_scale", -0.001), ("negative", f"{UP}.weight_scale")),
    "one row's scale NaN": (drafts.rows, put(f"{UP}.weight_scale", NAN, (7, 0)), ("nan", f"{UP}.weight_scale")),
    "one row's scale zero": (drafts.rows, put(f"{UP}.weight_scale", 0, (7, 0)), ("zero", f"{UP}.weight_scale")),
    "one block's scale huge": (
        drafts.blocks, put(f"{UP}.weight_scale_inv", 3.0, (1, 1)), ("implausible", f"{UP}.weight_scale_inv")),
    "one block's scale negative": (
        drafts.blocks, put(f"{UP}.weight_scale_inv", -1.0, (0, 1)), ("negative", f"{UP}.weight_scale_inv")),
    "input scale NaN": (drafts.static, put(f"{UP}.input_scale", NAN), ("nan", f"{UP}.input_scale")),
    "input scale infinite": (drafts.static, put(f"{UP}.input_scale", INF), ("infinite", f"{UP}.input_scale")),
    "input scale zero": (drafts.static, put(f"{UP}.input_scale", 0), ("zero", f"{UP}.input_scale")),
    "k scale zero": (drafts.static, put(f"{CACHE}.k_scale", 0), ("zero", f"{CACHE}.k_scale")),
    "v scale never loaded": (drafts.static, put(f"{CACHE}.v_scale", -1), ("negative", f"{CACHE}.v_scale")),
    "v scale NaN": (drafts.static, put(f"{CACHE}.v_scale", NAN), ("nan", f"{CACHE}.v_scale")),
    "MX exponent NaN": (lambda: drafts.mx(8), put(f"{UP}.weight_scale", 255, (3, 1)), ("nan", f"{UP}.weight_scale")),
    "MX exponent too large": (
        lambda: drafts.mx(8), put(f"{UP}.weight_scale", 250, (3, 1)), ("implausible", f"{UP}.weight_scale")),
    "reciprocal MX scale": (
        lambda: drafts.mx(8), lambda d: put(f"{UP}.weight_scale", 254 - d.tensors[f"{UP}.weight_scale"])(d),
        ("reciprocal", f"{UP}.weight_scale")),
    "an MX code NaN": (lambda: drafts.mx(8), put(f"{UP}.weight", NAN, (0, 0)), ("nan", f"{UP}.weight")),
    "a code NaN": (drafts.static, put(f"{UP}.weight", NAN, (0, 0)), ("nan", f"{UP}.weight")),
    "a norm NaN": (drafts.static, put("model.norm.weight", NAN, (3,)), ("nan", "model.norm.weight")),
    "reciprocal weight scale": (
        drafts.static, lambda d: put(f"{UP}.weight_scale", 1 / d.tensors[f"{UP}.weight_scale"])(d),
        ("reciprocal", f"{UP}.weight_scale")),
    "reciprocal weight scales": (
        drafts.blocks, each(".weight_scale_inv", torch.reciprocal), ("reciprocal", f"{UP}.weight_scale_inv")),
    "reciprocal input scale": (
        drafts.static, lambda d: put(f"{UP}.input_scale", 1 / d.tensors[f"{UP}.input_scale"])(d),
        ("reciprocal", f"{UP}.input_scale")),
    "reciprocal input scales": (
        drafts.static, each(".input_scale", torch.reciprocal), ("reciprocal", f"{UP}.input_scale")),
    "amax in place of the weight scale": (
        drafts.static, scaled(f"{UP}.weight_scale", 448), ("implausible", f"{UP}.weight_scale")),
    "amaxes in place of all weight scales": (
        drafts.static, each(".weight_scale", lambda s: s * 448), ("implausible", f"{UP}.weight_scale")),
    "weight scale 2^11 too small": (
        drafts.static, scaled(f"{UP}.weight_scale", 2.0**-11), ("implausible", f"{UP}.weight_scale")),
    "input scale 2^15 too small": (
        drafts.static, scaled(f"{UP}.input_scale", 2.0**-15), ("implausible", f"{UP}.input_scale")),
    "input scale of 1e30": (drafts.static, put(f"{UP}.input_scale", 1e30), ("implausible", f"{UP}.input_scale")),
    "weight cast without a scale": (drafts.static, requantized(2.0**13), ("stale", f"{UP}.weight")),
    "scale made for larger weights": (drafts.static, requantized(8.0), ("stale", f"{UP}.weight")),
    "scale made for smaller weights": (drafts.static, requantized(1 / 4), ("stale", f"{UP}.weight")),
    "all weight scales 1": (drafts.static, each(".weight_scale", torch.ones_like), ("default", "weight_scale")),
    "all input scales 1": (drafts.static, each(".input_scale", torch.ones_like), ("default", "input_scale")),
    "all cache scales 1": (
        drafts.static, uncalibrated_cache,
        ("default", "k_scale")),
    "no weight scale": (drafts.static, drop(f"{UP}.weight_scale"), ("missing", f"{UP}.weight")),
    "no weight scales at all": (
        drafts.rows, lambda d: drop(*[k for k in d.tensors if k.endswith("weight_scale")])(d),
        ("missing", f"{UP}.weight")),
    "a norm in FP8": (drafts.static, fp8_norm, ("missing", "model.norm.weight")),
    "no input scale": (drafts.static, drop(f"{UP}.input_scale"), ("missing", UP)),
    "no v scale": (drafts.static, drop(f"{CACHE}.v_scale"), ("missing", CACHE)),
    "a layer without cache scales": (
        drafts.static, drop(f"{CACHE}.k_scale", f"{CACHE}.v_scale"), ("missing", CACHE)),
    "a cache scheme without scales": (
        lambda: drafts.fp8("ct-static", inputs="input_scale"),
        quant_config(kv_cache_scheme={"num_bits": 8, "type": "float"}),
        ("missing", "quantization_config")),
    "packed weights without scales": (
        lambda: drafts.mx(4), drop(f"{UP}.weight_scale"), ("missing", f"{UP}.weight_packed")),
    "a renamed scale": (
        drafts.static, rename(f"{UP}.weight_scale", f"{UP}.weight_scales"), ("unknown", "weight_scales")),
    "amaxes in place of scales": (drafts.static, rename(".input_scale", ".input_amax"), ("unknown", "input_amax")),
    "a zero point": (drafts.static, put(f"{UP}.weight_zero_point", torch.zeros(1)), ("unknown", "weight_zero_point")),
    "cache scales of a layer that is not there": (
        drafts.static, put("model.layers.9.self_attn.k_scale", torch.ones(1)),
        ("orphan", "model.layers.9.self_attn.k_scale")),
    "a scale of nothing": (drafts.static, drop(f"{UP}.weight"), ("orphan", f"{UP}.weight_scale")),
    "a weight left in BF16 beside its scale": (drafts.static, to_bf16, ("orphan", f"{UP}.weight_scale")),
    "a scale under two names": (drafts.static, twice, ("duplicate", UP)),
    "a scale of the wrong shape": (
        drafts.rows, put(f"{UP}.weight_scale", torch.full((drafts.INNER - 1, 1), 1e-4)),
        ("shape", f"{UP}.weight_scale")),
    "blocks transposed": (
        drafts.blocks, lambda d: put(f"{UP}.weight_scale_inv", d.tensors[f"{UP}.weight_scale_inv"].t().contiguous())(d),
        ("shape", f"{UP}.weight_scale_inv")),
    "an input scale for each channel": (
        drafts.static, put(f"{UP}.input_scale", torch.full((drafts.HIDDEN,), 0.01)), ("shape", f"{UP}.input_scale")),
    "a k scale for each head": (
        drafts.static, put(f"{CACHE}.k_scale", torch.full((4, 1, 1), 0.01)), ("shape", f"{CACHE}.k_scale")),
    "an empty scale": (drafts.static, put(f"{UP}.weight_scale", torch.zeros(0)), ("shape", f"{UP}.weight_scale")),
    "a scale of whole numbers": (drafts.static, as_int, ("dtype", f"{UP}.weight_scale")),
    "a weight in E5M2": (drafts.static, e5m2, ("dtype", f"{UP}.weight")),
    "FP8 without quantization_config": (drafts.static, without_config, ("config", ".weight")),
    "quantization_config without FP8": (drafts.static, all_bf16, ("config", "quantization_config")),
    "an ignored layer in FP8": (drafts.static, quant_config(ignore=["lm_head", UP]), ("config", f"{UP}.weight")),
    "a layer of no group": (
        drafts.static,
        lambda d: d.config["quantization_config"]["config_groups"]["group_0"].update(targets=["re:.*self_attn.*"]),
        ("config", f"{UP}.weight")),
    "a layer that is not FP8 and not ignored": (
        drafts.static, bare,
        ("config", f"{UP}.weight")),
    "input scales of dynamic inputs": (
        drafts.rows, put(f"{UP}.input_scale", torch.tensor([0.01])), ("config", f"{UP}.input_scale")),
    "rows where blocks were said": (
        drafts.rows, lambda d: config(quantization_config=drafts.quantization("fp8-block"))(d),
        ("config", "weight_scale")),
    "an exponent of E8M0 that is NaN": (e8m0, exponent(255), ("nan", f"{UP}.scale")),
    "an exponent of E8M0 far above the others": (e8m0, exponent(160), ("implausible", f"{UP}.scale")),
    "a stack with the scales of fewer experts": (
        drafts.stacked, without_last(f"{EXPERTS}_scale_inv"), ("shape", EXPERTS)),
    "an expert whose scale is zero": (
        drafts.stacked, put(f"{EXPERTS}_scale_inv", 0, (2, 0, 0)), ("zero", f"{EXPERTS}_scale_inv")),
    "a stack without scales": (drafts.stacked, drop(f"{EXPERTS}_scale_inv"), ("missing", EXPERTS)),
    "an expert whose input's scale is NaN": (
        static_experts, put(f"{EXPERTS}_activation_scale", NAN, (1,)), ("nan", f"{EXPERTS}_activation_scale")),
    "a stack with the input scales of fewer experts": (
        static_experts, without_last(f"{EXPERTS}_activation_scale"), ("shape", f"{EXPERTS}_activation_scale")),
    "experts without input scales": (static_experts, drop(f"{EXPERTS}_activation_scale"), ("missing", EXPERTS)),
    "a tensor of torchao without its scale": (torchao, drop(f"{UP}._weight_scale"), ("missing", f"{UP}._weight_qdata")),
    "a reciprocal scale of torchao": (torchao, each("_weight_scale", torch.reciprocal), ("reciprocal", UP)),
    "an unknown method": (drafts.static, quant_config(quant_method="gptq"), ("format", "quantization_config")),
    "an output layer that is tied and another": (
        drafts.static, config(tie_word_embeddings=True), ("tied", "lm_head.weight")),
    "an output layer that is nowhere": (drafts.static, drop("lm_head.weight"), ("tied", "lm_head.weight")),
}  # fmt: skip


@pytest.mark.parametrize("name", POISONS)
def test_poison_is_found(name: str, tmp_path: Path) -> None:
    base, poison, (check, tensor) = POISONS[name]
    draft = base()
    poison(draft)
    findings = verify(draft.write(tmp_path / "m"))
    assert any(finding.check == check and tensor in finding.tensor for finding in findings), findings


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def moved(folder: Path) -> None:
    def swap(index: dict[str, Any]) -> None:
        places = index["weight_map"]
        key = next(key for key in places if places[key].startswith("model-00001") and key.endswith("_proj.weight"))
        places[key] = places[key].replace("00001", "00002", 1)

    edited(folder, swap)


def truncated(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


FILE_POISONS: dict[str, tuple[Callable[[Path], Any], tuple[str, str]]] = {
    "a shard is missing": (lambda f: (f / "model-00002-of-00003.safetensors").unlink(), ("index", "")),
    "a shard is cut off": (truncated, ("unreadable", "model-00002-of-00003.safetensors")),
    "a shard is no safetensors file": (
        lambda f: (f / "model-00001-of-00003.safetensors").write_bytes(b"<html>not found</html>"),
        ("unreadable", "model-00001"),
    ),
    "the index places a tensor elsewhere": (moved, ("index", "_proj.weight")),
    "the index forgets a scale": (
        lambda f: edited(f, lambda index: index["weight_map"].pop(f"{UP}.weight_scale")),
        ("index", f"{UP}.weight_scale"),
    ),
    "the index names what is nowhere": (
        lambda f: edited(f, lambda index: index["weight_map"].update({"more": "model-00001-of-00003.safetensors"})),
        ("index", "more"),
    ),
    "a single file of an older save": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model-00001-of-00003.safetensors").read_bytes()),
        ("index", "model.safetensors"),
    ),
    "the index leaves the directory": (
        lambda f: edited(f, lambda index: index["weight_map"].update({"more": "../model.safetensors"})),
        ("index", "index.json"),
    ),
    "the index states another size": (
        lambda f: edited(f, lambda index: index["metadata"].update(total_size=1)),
        ("index", "index.json"),
    ),
    "the index has no map": (lambda f: edited(f, lambda index: index.pop("weight_map")), ("index", "index.json")),
    "config.json is no JSON": (lambda f: (f / "config.json").write_text("{"), ("unreadable", "config.json")),
}


@pytest.mark.parametrize("name", FILE_POISONS)
def test_damaged_files_are_found(name: str, tmp_path: Path) -> None:
    poison, (check, tensor) = FILE_POISONS[name]
    folder = drafts.sharded().write(tmp_path / "m")
    poison(folder)
    findings = verify(folder)
    assert any(finding.check == check and tensor in finding.tensor for finding in findings), findings


def test_a_scales_file_of_another_calibration_is_found(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = drafts.plain().write(tmp_path / "source")
    write_calibrated(tmp_path / "out", source, state_for(source, "delayed"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors[f"{UP}.input_scale"] *= 1.5
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    assert [(f.check, f.tensor) for f in verify(tmp_path / "out")] == [("stale", f"{UP}.input_scale")]


def test_the_corpus_is_as_large_as_promised() -> None:
    assert len(POISONS) + len(FILE_POISONS) >= 40
    assert len(GOOD) >= 12
    assert len(set(CHECKS)) == len(CHECKS)


def test_verify_checks_a_single_file_or_shard(tmp_path: Path) -> None:
    whole, parts = drafts.static().write(tmp_path / "whole"), drafts.sharded().write(tmp_path / "parts")
    assert verify(whole / "model.safetensors") == []
    shard = verify(parts / "model-00001-of-00003.safetensors")
    assert {finding.check for finding in shard} <= {"missing", "orphan"}  # tensors of the other shards


def test_a_path_without_a_checkpoint_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no .safetensors file"):
        verify(tmp_path)
    with pytest.raises(ModelError, match="There is no"):
        verify(tmp_path / "nothing")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_an_unsupported_format_is_one_finding(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = drafts.static()
    each(".weight", lambda w: w.float().to(torch.int32) if w.dtype is torch.float8_e4m3fn else w)(draft)
    rename(".weight_scale", ".scales")(draft)
    quant_config(quant_method=method)(draft)
    folder = draft.write(tmp_path / "m")
    (finding,) = verify(folder)
    assert f"quantized by '{method}'" in finding.what
    assert main(["verify", str(folder)]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1
    assert printed.err.endswith("cannot be verified.\n")


def test_the_exit_status_tells_good_checkpoints_from_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = drafts.static().write(tmp_path / "good")
    assert main(["verify", str(good)]) == 0
    assert "no error in its scales and quantized weights" in capsys.readouterr().out
    draft = drafts.static()
    put(f"{UP}.input_scale", 0)(draft)
    bad = draft.write(tmp_path / "bad")
    assert main(["verify", str(bad)]) == 1
    printed = capsys.readouterr()
    assert f"error, zero: {UP}.input_scale holds zero, 1 of 1; quantize or calibrate the model again." in printed.out
    assert "1 error that would make outputs wrong" in printed.err
    assert main(["verify", str(bad), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["good"]
    assert report["findings"][0]["tensor"] == f"{UP}.input_scale"


def test_warnings_do_not_change_the_exit_status(tmp_path: Path) -> None:
    draft = drafts.static()
    each(".input_scale", torch.ones_like)(draft)
    assert main(["verify", str(draft.write(tmp_path / "m"))]) == 0
