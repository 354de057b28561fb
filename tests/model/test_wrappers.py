"""Multimodal checkpoints: the language model inside is served and trained, and the other parts are omitted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8 import ops
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.inspection import inspect
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer
from tests.model.oracle import SIZES, YARN, all_logits, state_for, write_tokenizer
from tests.model.test_hostile import WRONG, json_paths, outcome, replaced

IDS = list(range(3, 40))
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MINISTRAL = YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
TEXTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral": ("Mistral3", {"model_type": "mistral"}, {"head_dim": 16, "image_size": 28, "patch_size": 14}),
    "ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "head_dim": 32, "rope_parameters": MINISTRAL},
        {"head_dim": 16, "image_size": 28, "patch_size": 14},
    ),
    "gemma3_text": (
        "Gemma3",
        {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 8, "pad_token_id": 2},
        {"image_size": 28, "patch_size": 14},
    ),
}


def make(kind: str, out: Path, tied: bool | None = None, **save: Any) -> Any:
    """Writes a multimodal model to `out` in BF16. Returns transformers' model, loaded from there."""
    name, text, vision = TEXTS[kind]
    torch.manual_seed(0)
    architecture = getattr(transformers, f"{name}ForConditionalGeneration")
    image = {"image_token_index": 319} | ({"mm_tokens_per_image": 4} if name == "Gemma3" else {})
    config = architecture.config_class(
        text_config=SIZES | text,
        vision_config=VISION | vision,
        **image,
        **({} if tied is None else {"tie_word_embeddings": tied}),
    )
    model = architecture(config).bfloat16().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(out, **save)
    # loaded again because `.bfloat16()` rounded rotary frequencies; eager attention as in the other tests of Gemma
    return architecture.from_pretrained(out, dtype=torch.bfloat16, attn_implementation="eager").eval()


def spelled(new: str) -> Callable[[str], str]:
    """Returns a function that renames a key of transformers 4 to that of transformers 5."""

    def rename(key: str) -> str:
        if key.startswith("language_model.model."):
            return key.replace("language_model.model.", "model.language_model.")
        return key.replace("language_model.lm_head", "lm_head") if "lm_head" in key else f"model.{key}"

    return rename if new == "new" else str


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = directory / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    save_file(change(tensors), file, {"format": "pt"})


@pytest.mark.parametrize("spelling", ["old", "new"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", TEXTS)
def test_logits_equal_those_of_the_whole_model_on_text(kind: str, tied: bool, spelling: str, tmp_path: Path) -> None:
    theirs = make(kind, tmp_path, tied)
    rename = spelled(spelling)
    rewrite(tmp_path, lambda tensors: {rename(key): tensor for key, tensor in tensors.items()})
    model = load_servable(tmp_path, "bf16")
    with torch.no_grad():
        actual, expected = all_logits(model, IDS), theirs(torch.tensor([IDS])).logits[0].float()
    assert (actual - expected).square().mean().sqrt() < 8 * torch.finfo(torch.bfloat16).eps * expected.std()
    assert model.config.tie_word_embeddings == tied
    assert model.config.model_type == kind
    assert open_checkpoint(tmp_path).omitted_modules == ("multi_modal_projector", "vision_tower")


def test_inspect_names_the_omitted_parts(tmp_path: Path) -> None:
    make("mistral", tmp_path)
    assert inspect(tmp_path)["notes"] == [
        f"Only the language model in {tmp_path} is used; multi_modal_projector and vision_tower are left out."
    ]


def quantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantizes like Mistral's static FP8 releases: BF16 scales per tensor, by transformers' names."""
    result: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        result[key] = tensor
        if key.startswith("language_model.model.layers") and key.endswith("proj.weight"):
            scale_inv = (tensor.abs().max().float() / 448).bfloat16()
            result[key] = ops.quantize(tensor, scale=scale_inv.float().reciprocal())[0]
            result[key.replace(".weight", ".weight_scale_inv")] = scale_inv
            result[key.replace(".weight", ".activation_scale")] = torch.tensor(0.03125 + len(result) / 4096).bfloat16()
    return result


def make_static(directory: Path) -> None:
    make("ministral3", directory)
    rewrite(directory, quantized)
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = {
        "activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(raw))


def test_static_scales_of_the_file_are_used_unchanged(tmp_path: Path) -> None:
    make_static(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    model = load_servable(tmp_path)
    for name in model.linear_names():
        layer, key = model.get_submodule(name), f"language_model.{name}"
        assert isinstance(layer, FrozenLinear)
        assert torch.equal(layer.weight_q.view(torch.uint8), tensors[f"{key}.weight"].view(torch.uint8))
        assert torch.equal(layer.weight_scale_inv, tensors[f"{key}.weight_scale_inv"].float())
        assert layer.input_scale is not None
        assert torch.equal(layer.input_scale, tensors[f"{key}.activation_scale"].float().reciprocal())


def test_only_the_language_model_is_written(tmp_path: Path) -> None:
    source, out = tmp_path / "whole", tmp_path / "text"
    theirs = make("ministral3", source)
    write_hf_directory(out, read_text_config(source), open_checkpoint(source))
    auto: Any = transformers.AutoModelForCausalLM
    alone = auto.from_pretrained(out, dtype=torch.bfloat16, attn_implementation="eager")
    assert type(alone).__name__ == "Ministral3ForCausalLM"
    ids = torch.tensor([IDS])
    with torch.no_grad():
        assert torch.equal(alone(ids).logits, theirs(ids).logits)


def test_a_calibrated_wrapper_is_written_as_the_language_model(tmp_path: Path) -> None:
    source, out = tmp_path / "whole", tmp_path / "fp8"
    make("mistral", source)
    write_calibrated(out, source, state_for(source))
    assert read_config(out).architecture == "MistralForCausalLM"
    assert open_checkpoint(out).omitted_modules == ()
    auto: Any = transformers.AutoModelForCausalLM
    with torch.no_grad():
        theirs = auto.from_pretrained(out, dtype=torch.bfloat16)(torch.tensor([IDS])).logits[0].float()
        ours = all_logits(load_servable(out), IDS)
    assert (theirs - ours).square().mean().sqrt() < 0.1 * ours.std()


def test_a_wrapper_is_trained_as_the_language_model(tmp_path: Path) -> None:
    source, data = tmp_path / "whole", tmp_path / "data.jsonl"
    make("ministral3", source)
    write_tokenizer(source)
    data.write_text("".join(json.dumps({"text": f"row {i} of the data"}) + "\n" for i in range(4)))
    sizes = {"batch_size": 2, "seq_len": 32, "max_steps": 2, "amax_history_len": 4}
    config = TrainConfig.from_dict({"model": str(source), "data": [str(data)], "out": str(tmp_path / "out"), **sizes})
    result = Trainer(config).run()
    assert (result.status, result.step) == ("succeeded", 2)
    assert result.model is not None
    assert read_config(result.model).architecture == "Ministral3ForCausalLM"
    assert load_servable(result.model).config.query_scaling == read_config(source).query_scaling


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "that of Mistral3ForConditionalGeneration with a text_config, but it has null"),
        ({"text_config": {"model_type": "qwen2"}}, "text_config of .* is of the type 'qwen2', which is not supported"),
        ({"architectures": ["PixtralForCausalLM"]}, r"it has \['PixtralForCausalLM'\]"),
    ],
)
def test_multimodal_models_of_other_architectures_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make("mistral", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


def test_wrong_values_of_every_key_are_reported_in_one_sentence(tmp_path: Path) -> None:
    make("ministral3", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    keys = {key: raw[key] for key in ("architectures", "model_type", "text_config", "dtype")}
    for place in json_paths(keys):
        for value in WRONG:
            (tmp_path / "config.json").write_text(json.dumps(raw | replaced(keys, place, value)))
            outcome(lambda: open_checkpoint(tmp_path), f"{place} = {value!r:.60}")


def test_a_tensor_under_both_spellings_is_refused(tmp_path: Path) -> None:
    make("mistral", tmp_path)
    rewrite(tmp_path, lambda t: t | {"model.language_model.norm.weight": t["language_model.model.norm.weight"].clone()})
    with pytest.raises(ModelError, match=r"holds the tensor model\.norm\.weight under two names"):
        open_checkpoint(tmp_path)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    make("mistral", tmp_path)
    rewrite(tmp_path, lambda t: t | {"audio_tower.weight": torch.zeros(4)})
    with pytest.raises(ModelError, match=r"holds the tensor audio_tower\.weight"):
        open_checkpoint(tmp_path)
