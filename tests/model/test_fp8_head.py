"""Checkpoints with an FP8 embedding, output head or router: every command reads them, and `convert` keeps their
codes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fp8serve.cli import main
from fp8serve.errors import ModelError
from fp8serve.model.adapter_merge import merge
from fp8serve.model.checkpoint import load_servable, load_trainable, open_checkpoint
from fp8serve.model.format_conversion import convert_format
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.verify import verify
from tests.model import checkpoints as drafts
from tests.model.checkpoints import Draft
from tests.model.oracle import IDS, all_logits, write_tokenizer
from tests.model.test_interop import quantization
from tests.tiny import SENTENCES

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Base = Callable[[], Draft]


def with_fp8(base: Base, per: str, spelled: str = "weight_scale", *names: str, static_head: bool = False) -> Draft:
    """Returns a draft with the given matrices in FP8, configured as by the tools of compressed-tensors."""
    draft = base()
    for name in names:
        weight = draft.tensors[f"{name}.weight"].float()
        scale = drafts.amax_of(weight, per) / 448
        draft.tensors[f"{name}.weight"] = (weight / drafts.spread(scale, weight)).to(torch.float8_e4m3fn)
        draft.tensors[f"{name}.{spelled}"] = scale
    if static_head:
        draft.tensors[f"{HEAD}.input_scale"] = torch.tensor([0.01])
    for key in ("ignore", "ignored_layers", "modules_to_not_convert"):
        if HEAD in names:
            draft.config["quantization_config"].pop(key, None)
    return draft


def tied(draft: Draft) -> Draft:
    draft.config["tie_word_embeddings"] = True
    return Draft({k: t for k, t in draft.tensors.items() if not k.startswith(HEAD)}, draft.config)


def tied_and_stored(draft: Draft) -> Draft:
    copies = {k.replace(EMBEDDING, HEAD): t.clone() for k, t in draft.tensors.items() if k.startswith(EMBEDDING)}
    return Draft(draft.tensors | copies, draft.config | {"tie_word_embeddings": True})


BOTH = (EMBEDDING, HEAD)
CASES: dict[str, tuple[Base, tuple[str, ...]]] = {
    "static": (lambda: with_fp8(drafts.static, "tensor", "weight_scale", *BOTH, static_head=True),
               ("compressed-tensors", "fp8", "modelopt")),
    "static, the head alone": (lambda: with_fp8(drafts.static, "tensor", "weight_scale", HEAD, static_head=True),
                               ("compressed-tensors", "fp8", "modelopt")),
    "static, the embedding in rows": (lambda: with_fp8(drafts.static, "row", "weight_scale", EMBEDDING),
                                      ("compressed-tensors",)),
    "rows": (lambda: with_fp8(drafts.rows, "row", "weight_scale", *BOTH), ("compressed-tensors", "modelopt")),
    "blocks": (lambda: with_fp8(drafts.blocks, "block", "weight_scale_inv", *BOTH), ("compressed-tensors", "fp8")),
    "weights alone": (lambda: with_fp8(lambda: drafts.fp8("ct-weights", "row"), "row", "weight_scale", *BOTH),
                      ("compressed-tensors",)),
    "tied": (lambda: tied(with_fp8(drafts.rows, "row", "weight_scale", *BOTH)), ("compressed-tensors", "modelopt")),
    "tied and stored": (lambda: tied_and_stored(with_fp8(drafts.rows, "row", "weight_scale", *BOTH)),
                        ("compressed-tensors", "modelopt")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enlarges the embedding of drafts to the vocabulary of the tests' tokenizer."""
    monkeypatch.setattr(drafts, "VOCABULARY", 320)
    monkeypatch.setitem(drafts.CONFIG, "vocab_size", 320)


@pytest.mark.parametrize(("name", "format_"), [(n, f) for n, (_, formats) in CASES.items() for f in formats])
def test_convert_keeps_every_code_and_scale(name: str, format_: str, tmp_path: Path) -> None:
    source = CASES[name][0]().write(tmp_path / "source")
    convert_format(source, tmp_path / "out", format_)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert before.quantized_matrices
    assert before.quantized_matrices == after.quantized_matrices
    for matrix in before.quantized_matrices:
        one, other = before.quantized_matrix(matrix), after.quantized_matrix(matrix)
        assert one is not None
        assert other is not None
        assert torch.equal(one.weight_q.view(torch.uint8), other.weight_q.view(torch.uint8))
        assert torch.equal(one.weight_scale_inv, other.weight_scale_inv)
        assert one.input_scale == other.input_scale
    logits = [all_logits(cast(Decoder, load_servable(folder)), IDS) for folder in (source, tmp_path / "out")]
    assert torch.equal(*logits)
    assert [f for f in verify(tmp_path / "out") if f.severity == "error"] == []


@pytest.mark.parametrize("name", CASES)
def test_every_command_reads_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = CASES[name][0]()
    source = draft.write(tmp_path / "source")
    write_tokenizer(source)
    (tmp_path / "data.txt").write_text("\n".join(SENTENCES * 4))
    monkeypatch.chdir(tmp_path)
    short = ["--data", "data.txt", "--seq-len", "16"]
    assert main(["inspect", "source"]) == 0
    assert main(["verify", "source"]) == 0
    assert main(["generate", "source", "a b", "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    assert main(["calibrate", "source", "--out", "fp8", *short, "--samples", "2", "--generated-samples", "0"]) == 0
    assert capsys.readouterr().err.count("stored in FP8 and computed in BF16, and will be written in BF16") == 1
    assert main(["finetune", "source", "--out", "run", *short, "--max-steps", "1", "--batch-size", "1"]) == 0
    assert capsys.readouterr().err.count("stored in FP8 and computed in BF16, and will be written in BF16") == 1
    adapter = ["--lora-rank", "2", "--max-steps", "1", "--batch-size", "1"]
    assert main(["finetune", "source", "--out", "adapter", *short, *adapter]) == 0
    assert "will be written in BF16" not in capsys.readouterr().err
    assert main(["inspect", "source", "fp8"]) == 0
    assert [open_checkpoint(folder).quantized_matrices for folder in ("fp8", "run/model")] == [[], []]


def test_the_embedding_is_read_exactly(tmp_path: Path) -> None:
    draft = with_fp8(drafts.rows, "row", "weight_scale", *BOTH)
    model = load_trainable(draft.write(tmp_path / "m"))
    for name in BOTH:
        weight = draft.tensors[f"{name}.weight"].float() * draft.tensors[f"{name}.weight_scale"]
        assert torch.equal(model.get_parameter(f"{name}.weight"), weight)


@pytest.mark.parametrize("names", [(HEAD,), (EMBEDDING,), BOTH])
def test_transformers_reads_what_is_written(names: tuple[str, ...], tmp_path: Path) -> None:
    source = with_fp8(drafts.rows, "row", "weight_scale", *names).write(tmp_path / "source")
    convert_format(source, tmp_path / "out", "compressed-tensors")
    auto: Any = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = load_trainable(source)
    for name in names:
        module = theirs.get_submodule(name)
        assert torch.equal(module.weight.float() * module.weight_scale, ours.get_parameter(f"{name}.weight"))
    theirs(torch.tensor([IDS]))


def test_a_model_with_only_its_embedding_in_fp8_is_served_in_high_precision(tmp_path: Path) -> None:
    draft = drafts.plain()
    draft.config["quantization_config"] = quantization("fp8-dynamic")
    folder = with_fp8(lambda: draft, "row", "weight_scale", EMBEDDING).write(tmp_path / "m")
    assert open_checkpoint(folder).runs_in_high_precision
    load_servable(folder)
    with pytest.raises(ModelError, match="holds no quantized layers"):
        convert_format(folder, tmp_path / "out", "compressed-tensors")


@pytest.mark.parametrize("format_", ["fp8", "modelopt"])
def test_formats_that_cannot_express_an_fp8_head_are_refused(format_: str, tmp_path: Path) -> None:
    source = with_fp8(drafts.static, "row", "weight_scale", EMBEDDING).write(tmp_path / "source")
    with pytest.raises(ModelError, match=f"'{format_}' cannot express that {EMBEDDING} is in FP8 and scaled otherwise"):
        convert_format(source, tmp_path / "out", format_)


def test_a_tied_head_with_other_scales_is_refused(tmp_path: Path) -> None:
    draft = tied_and_stored(with_fp8(drafts.rows, "row", "weight_scale", EMBEDDING))
    draft.tensors[f"{HEAD}.weight_scale"] *= 2
    with pytest.raises(ModelError, match="differs from"):
        open_checkpoint(draft.write(tmp_path / "m"))


def test_a_norm_in_fp8_is_refused_in_a_sentence(tmp_path: Path) -> None:
    draft = drafts.static()
    draft.tensors["model.norm.weight"] = draft.tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    draft.tensors["model.norm.weight_scale"] = torch.ones(1)
    with pytest.raises(ModelError, match=r"model.norm.weight is FP8 and not a matrix"):
        open_checkpoint(draft.write(tmp_path / "m"))


def test_merging_an_adapter_keeps_the_quantized_matrices(tmp_path: Path) -> None:
    source = CASES["static"][0]().write(tmp_path / "source")
    adapter, owner = tmp_path / "adapter", f"base_model.model.{drafts.NAMES[0]}"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    parts = {"lora_A": torch.randn(2, drafts.HIDDEN), "lora_B": torch.randn(drafts.HIDDEN, 2) * 0.01}
    save_file(
        {f"{owner}.{part}.weight": tensor for part, tensor in parts.items()}, adapter / "adapter_model.safetensors"
    )
    merge(source, adapter, tmp_path / "out", max_lost_fraction=1.0)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    for name in BOTH:
        assert torch.equal(*(t[f"{name}.weight"].view(torch.uint8) for t in (before, after)))
