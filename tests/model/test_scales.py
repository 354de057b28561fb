"""scales.safetensors: scales are read back as written, and every file that must not be served is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.errors import ScalesError
from fp8serve.fp8.recipe import DelayedScaling, to_json
from fp8serve.model.formats.scales import (
    ScalingCheckpoint,
    TensorScale,
    check_covers,
    fingerprint,
    load_scales,
    save_scales,
)
from tests.model.oracle import make_model

HISTORY = torch.tensor([0.0, 1.5, 2.0])
KEY = "model.layers.0.mlp.up_proj.input"
STATE = ScalingCheckpoint(
    DelayedScaling(amax_history_len=3),
    {
        KEY: TensorScale(torch.tensor(224.0), HISTORY),
        "model.layers.0.mlp.up_proj.grad_output": TensorScale(torch.tensor(1e-7)),
        "model.layers.0.self_attn.k": TensorScale(torch.tensor(3.0)),
    },
    "abc def",
    {"batches": 2, "tokens": 64, "tensors": {KEY: 2}},
    "fp8serve test",
)
METADATA = {"format": "fp8serve.scales", "version": "1", "recipe": to_json(STATE.recipe), "model": "abc",
            "observations": "{}", "created_by": "t"}  # fmt: skip


def test_round_trip_is_exact(tmp_path: Path) -> None:
    save_scales(tmp_path / "s", STATE)
    back = load_scales(tmp_path / "s")
    assert (back.recipe, back.model, back.observations, back.created_by) == (
        STATE.recipe,
        STATE.model,
        STATE.observations,
        STATE.created_by,
    )
    assert set(back.tensors) == set(STATE.tensors)
    for key, entry in STATE.tensors.items():
        assert torch.equal(back.tensors[key].scale, entry.scale)
    history = back.tensors[KEY].amax_history
    assert history is not None
    assert torch.equal(history, HISTORY)
    assert back.tensors["model.layers.0.self_attn.k"].amax_history is None


def test_file_has_the_published_layout(tmp_path: Path) -> None:
    save_scales(tmp_path / "s", STATE)
    tensors = load_file(tmp_path / "s")
    assert tensors[f"{KEY}.scale"].shape == ()
    assert tensors[f"{KEY}.amax_history"].tolist() == [0, 1.5, 2]
    assert {t.dtype for t in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_unusable_scale_is_refused_when_writing_and_reading(bad: float, tmp_path: Path) -> None:
    with pytest.raises(ScalesError, match=f"{KEY} has the scale {bad}, which cannot be served"):
        save_scales(tmp_path / "s", replace(STATE, tensors={KEY: TensorScale(torch.tensor(bad))}))
    assert not (tmp_path / "s").exists()
    save_file({f"{KEY}.scale": torch.tensor(bad)}, tmp_path / "s", METADATA)
    with pytest.raises(ScalesError, match="cannot be served"):
        load_scales(tmp_path / "s")


def refused(tmp_path: Path, message: str, tensors: dict[str, torch.Tensor] | None = None, **metadata: Any) -> None:
    good = {f"{KEY}.scale": torch.tensor(2.0)}
    merged = {k: v for k, v in (METADATA | metadata).items() if v is not None}
    save_file(good if tensors is None else tensors, tmp_path / "s", merged)
    with pytest.raises(ScalesError, match=message) as caught:
        load_scales(tmp_path / "s")
    assert "\n" not in str(caught.value)


def test_never_observed_is_refused(tmp_path: Path) -> None:
    counts = json.dumps({"tensors": {KEY: 0}})
    refused(tmp_path, f"{KEY} was never observed", observations=counts)
    silent = {f"{KEY}.scale": torch.tensor(2.0), f"{KEY}.amax_history": torch.zeros(4)}
    refused(tmp_path, f"{KEY} was never observed", tensors=silent)


@pytest.mark.parametrize(
    "key", [f"{KEY}.zero_point", f"{KEY}.scale_inv", "model.layers.0.mlp.up_proj.output.scale", "scale", "x.scale"]
)
def test_unknown_key_is_refused(key: str, tmp_path: Path) -> None:
    refused(tmp_path, "unknown key", tensors={f"{KEY}.scale": torch.tensor(2.0), key: torch.tensor(1.0)})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{KEY}.scale": torch.tensor([2.0])}, r"F32 \[\] was expected"),
        ({f"{KEY}.scale": torch.tensor(2.0, dtype=torch.bfloat16)}, r"F32 \[\] was expected"),
        ({f"{KEY}.scale": torch.tensor(2.0), f"{KEY}.amax_history": torch.ones(2, 2)}, r"F32 \[N\] was expected"),
        ({f"{KEY}.scale": torch.tensor(2.0), f"{KEY}.amax_history": torch.ones(0)}, r"F32 \[N\] was expected"),
        ({f"{KEY}.amax_history": torch.ones(2)}, "amax history of .* but no scale"),
        (
            {f"{KEY}.scale": torch.tensor(2.0), f"{KEY}.amax_history": torch.tensor([1, float("inf")])},
            "negative, infinite or NaN",
        ),
        (
            {f"{KEY}.scale": torch.tensor(2.0), f"{KEY}.amax_history": torch.tensor([1.0, -1.0])},
            "negative, infinite or NaN",
        ),
        ({}, "holds no scales"),
    ],
)
def test_wrong_tensors_are_refused(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    refused(tmp_path, message, tensors=tensors)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"version": "2"}, "is of version '2'; this fp8serve reads version 1"),
        ({"version": None}, "version None"),
        ({"format": "pt"}, "not a scales file of fp8serve: its format is 'pt'"),
        ({"recipe": "{"}, "recipe that cannot be read"),
        ({"recipe": '{"recipe": "DelayedScaling", "future": 1}'}, "recipe that cannot be read"),
        ({"observations": "[1]"}, "not a JSON object"),
        ({"observations": "{"}, "not valid JSON"),
        ({"surprise": "x"}, "unknown metadata: surprise"),
        ({"created_by": None}, "has missing or unknown metadata: created_by"),
    ],
)
def test_wrong_metadata_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(tmp_path, message, **metadata)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ScalesError, match="does not exist"):
        load_scales(tmp_path / "none")
    save_scales(tmp_path / "s", STATE)
    (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes()[:-3])
    with pytest.raises(ScalesError, match="truncated or damaged"):
        load_scales(tmp_path / "s")


def test_cover_needs_every_input_and_no_stranger() -> None:
    check_covers(STATE, ["model.layers.0.mlp.up_proj"], "x")
    with pytest.raises(ScalesError, match=r"down_proj\.input was never observed"):
        check_covers(STATE, ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"], "x")
    with pytest.raises(ScalesError, match="belongs to no FP8 layer"):
        check_covers(STATE, [], "x")


def test_fingerprint_depends_on_weights_and_not_on_sharding(
    model_dir: Callable[[str], Path], llama: Path, tmp_path: Path
) -> None:
    base = fingerprint(llama)
    make_model("llama", tmp_path / "sharded", max_shard_size="40KB")
    assert fingerprint(tmp_path / "sharded") == base
    assert fingerprint(model_dir("llama-bias")) != base
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert fingerprint(llama) == base
    (llama / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert fingerprint(llama) != base


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
RECORDED: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, "3b1f58f505a6ac755c451fa9a378ffde"),
    "mistral": ("Mistral", {"sliding_window": 6}, "3d3d52a8e7d069af95b53839f2ab1172"),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        "98a8370eea65abed7c31e0797b57f71a",
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}, "6c511430c66699953afa626a49ba67f1"),
    "olmo2": ("Olmo2", {}, "8b1aa7444669f390c155ef738bc6a266"),
    "glm": ("Glm", {}, "1ecdf8fc13a90544091c88afda91cc27"),
    "mixtral": ("Mixtral", {}, "918ffad3bd843ac38fb628bdf9b9f47e"),
    "phimoe": ("Phimoe", {}, "b6a66bc4c7ae4fd5914f0574f91aa222"),
    "gpt_oss": ("GptOss", {}, "b2aa2098e67583445fa2bddd65eeb490"),
    "gpt_neox": ("GPTNeoX", {}, "94119827ef6c00ff2e57432178b2b69d"),  # computed by transformers
}


@pytest.mark.parametrize("model_type", RECORDED)
def test_fingerprints_of_earlier_versions_are_unchanged(model_type: str, tmp_path: Path) -> None:
    name, keys, expected = RECORDED[model_type]
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip
    config = {"architectures": [f"{name}ForCausalLM"], "model_type": model_type, **sizes, **keys}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.arange(8).bfloat16()}, tmp_path / "model.safetensors")
    assert fingerprint(tmp_path) == expected


def test_fingerprint_sees_a_step_of_training(llama: Path) -> None:
    base = fingerprint(llama)
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.01
    save_file(tensors, llama / "model.safetensors")
    assert fingerprint(llama) != base


def test_scales_belong_to_their_model(llama: Path, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    save_scales(tmp_path / "s", replace(STATE, model=f"other {fingerprint(llama)}"))
    assert load_scales(tmp_path / "s", llama).recipe == STATE.recipe
    with pytest.raises(ScalesError, match="belongs to another model"):
        load_scales(tmp_path / "s", model_dir("llama-bias"))
