"""GPT-2 stores its weights transposed: they are transposed when files are read and written, and nowhere else."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fp8serve.calibration.pipeline import calibrate
from fp8serve.errors import ModelError
from fp8serve.fp8.recipe import from_name
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.model.verify import verify
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer
from tests.compatibility.cases import make
from tests.model.oracle import all_logits, write_tokenizer
from tests.train.test_trainer import after

SAMPLES = {"samples": 4, "seq_len": 48, "batch_size": 4}
LINEAR = "transformer.h.0.mlp.c_fc"  # 64 -> 96
IDS = list(range(3, 40))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gpt2")
    make("gpt2", out)
    write_tokenizer(out)
    return out


def test_the_published_file_is_read(gpt2: Path, tmp_path: Path) -> None:
    """Published names have no prefix, and there are mask buffers; `c_attn.bias` has the same suffix as a mask."""
    expected = {name: tensor.clone() for name, tensor in open_checkpoint(gpt2).items()}
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(gpt2 / "model.safetensors").items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 256, 256), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    save_file(tensors | masks, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert {name: t.shape for name, t in checkpoint.items()} == {name: t.shape for name, t in expected.items()}
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in expected.items())


def test_a_head_that_differs_from_the_tied_embedding_is_refused(gpt2: Path, tmp_path: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("recipe", ["rowwise", "block"])
def test_row_and_block_scales_are_transposed_with_their_weight(recipe: str, gpt2: Path, tmp_path: Path) -> None:
    calibrate(gpt2, out=tmp_path / "out", recipe=from_name(recipe), **SAMPLES)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors[f"{LINEAR}.weight"].shape == (64, 96)
    assert tensors[f"{LINEAR}.weight_scale"].shape == ((1, 96) if recipe == "rowwise" else (1, 1))
    now = load_servable(gpt2, from_name(recipe))
    assert torch.equal(all_logits(load_servable(tmp_path / "out"), IDS), all_logits(now, IDS))
    assert verify(tmp_path / "out") == []


def test_a_training_run_resumes_and_transformers_reads_its_result(gpt2: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "the in", "completion": " thing"}) + "\n")
    options = {"model": str(gpt2), "data": [str(data)], "seq_len": 32, "batch_size": 1, "max_steps": 2}
    through, stopped = (TrainConfig.from_dict({**options, "out": str(tmp_path / name)}) for name in ("a", "b"))
    Trainer(through).run()
    Trainer(stopped).run(stop=after(1))
    Trainer(stopped).run()
    steps = [tmp_path / name / "checkpoints/step-2" for name in ("a", "b")]
    assert len({(step / "model.safetensors").read_bytes() for step in steps}) == 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(steps[0], dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    assert torch.allclose(all_logits(load_servable(steps[0], "bf16", dtype=torch.float32), IDS), expected, atol=1e-4)
    assert load_servable(tmp_path / "a/model").linear_names() == load_servable(gpt2, "bf16").linear_names()
