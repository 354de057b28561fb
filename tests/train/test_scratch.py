"""The from-nothing model is an ordinary Hugging Face directory."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8serve.errors import ModelError
from fp8serve.model.config.decoder import read_config
from fp8serve.train.scratch import write_random_model
from tests.model.readers import tensors_taken

TEXTS = ["The quick brown fox jumps over the lazy dog.", "Numbers: 0 1 2 3 4 5 6 7 8 9, and été."] * 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scratch") / "model"
    return write_random_model(out, TEXTS, vocab_size=320, hidden_size=64, layers=2, heads=4, kv_heads=2, context=64)


def test_transformers_loads_it(model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = "été: the lazy fox 42 <>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()
    assert model.config.eos_token_id == tokenizer.eos_token_id == read_config(model_dir).eos_token_ids[0]


def test_a_loader_of_all_safetensors_files_finds_only_the_weights(model_dir: Path) -> None:
    index = json.loads((model_dir / "model.safetensors.index.json").read_text())
    assert tensors_taken(model_dir) == sorted(index["weight_map"])


def test_chat_markers_are_single_tokens(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chat = [{"role": "user", "content": "dog"}, {"role": "assistant", "content": "fox"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|user|>dog<|end|><|assistant|>fox<|end|>"
    assert len([i for i in tokenizer(text).input_ids if i in tokenizer.all_special_ids or i < 4]) == 4
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>dog<|end|><|assistant|>"


def test_seed_decides_the_weights(tmp_path: Path, model_dir: Path) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64}
    same = write_random_model(tmp_path / "same", TEXTS, **sizes)
    other = write_random_model(tmp_path / "other", TEXTS, seed=1, **sizes)
    files = [(d / "model.safetensors").read_bytes() for d in (model_dir, same, other)]
    assert files[0] == files[1] != files[2]
    assert (same / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()


def test_an_existing_directory_is_not_overwritten(model_dir: Path) -> None:
    with pytest.raises(ModelError, match="exists"):
        write_random_model(model_dir, TEXTS)


def test_sizes_that_make_no_model_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a multiple"):
        write_random_model(tmp_path / "m", TEXTS, hidden_size=64, heads=3, kv_heads=2)
    assert list(tmp_path.iterdir()) == []
