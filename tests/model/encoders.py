"""Tiny random encoders, as transformers and sentence-transformers write them."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40,
}  # fmt: skip
BERT = transformers.BertConfig(**SIZES)
MODERN = transformers.ModernBertConfig(
    **(SIZES | {"num_hidden_layers": 4, "hidden_size": 128}), local_attention=10, pad_token_id=0, bos_token_id=2,
    eos_token_id=3, cls_token_id=2, sep_token_id=3,
)  # fmt: skip
FAMILIES = [
    BERT,
    transformers.BertConfig(**SIZES, hidden_act="gelu_pytorch_tanh"),
    transformers.RobertaConfig(**SIZES, type_vocab_size=1, pad_token_id=1),
    transformers.XLMRobertaConfig(**SIZES, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5),
]


def randomized(model: Any) -> Any:
    """Adds noise to biases and norms, whose initial values 0 and 1 would hide a missing term. Returns the model."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def make(folder: Path, config: Any, kind: Any = transformers.AutoModel) -> None:
    """Writes a random model and a tokenizer of letters to `folder`."""
    torch.manual_seed(0)
    randomized(kind.from_config(config)).save_pretrained(folder)
    letters(folder)


def letters(folder: Path) -> None:
    """Writes a tokenizer in which each letter is a token."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(chr, range(97, 123))]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(words[:4])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(folder / "tokenizer.json"))


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 90, (length,), generator=torch.Generator().manual_seed(seed))


def pooled(
    folder: Path,
    mode: str,
    normalize: bool = False,
    max_length: int | None = None,
    prompts: dict[str, str] | None = None,
    default: str | None = None,
) -> None:
    """Adds the files of sentence-transformers to the directory."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Normalize": "Normalize"} if normalize else {})
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
    settings = {"prompts": prompts or {}, "default_prompt_name": default}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
