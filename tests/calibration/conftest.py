"""A tiny random model that `transformers` itself wrote, with a byte-pair tokenizer trained on the shipped passages."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fp8serve.calibration.data import PASSAGES
from fp8serve.model.text.examples import TextExample, read_examples

VOCAB = 512


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE with <s> before every text and </s> as its end."""
    texts = [e.text for e in read_examples([PASSAGES]) if isinstance(e, TextExample)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def write_model(folder: Path, seed: int = 0, **changes: object) -> Path:
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")
