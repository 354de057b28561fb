"""Texts, or pairs of texts, in; a score for every label out: classifiers, and cross-encoders, which have one label.

The logits of labels come from an encoder's head, a decoder's head, or two tokens of a decoder. Qwen3-Reranker has no
head: after a prompt that asks whether a document answers a query, the score comes from the logits of "yes" and "no" as
the next token. Its conversion to a head of one label (`Qwen3ForSequenceClassification`) reads the same prompt. The
prompt is that of the model's page, because no file that is published with the model has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.engine.options import EngineOptions
from fp8serve.engine.text_encoder import TextEncoder
from fp8serve.errors import ModelError, RequestError
from fp8serve.model.building import AnyModel, Model
from fp8serve.model.config.encoder import Head
from fp8serve.model.config.sentence import LOGIT_SCORE, modules_of, one_folder
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.pooling import scored
from fp8serve.model.storage.files import read_json
from fp8serve.model.text.tokenizer import Tokenizer

Around = tuple[str, str, str]  # the texts before the query, between it and the document, and after that
QWEN3: Around = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: ",
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
Pair = tuple[str, str]


@dataclass(frozen=True)
class OfEncoder:
    """The head of an encoder, which reads a pair as its tokenizer writes it."""

    model: Encoder
    head: Head
    around: None = None

    @property
    def segments(self) -> int:
        """How many kinds of texts the model distinguishes."""
        return self.model.config.type_vocab_size

    def prompt(self, text: str, second: str | None) -> tuple[str, str | None]:
        return text, second

    def logits(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """hidden [tokens, H] of some texts -> FP32 [texts, labels]."""
        return self.model.logits(hidden, lengths)


@dataclass(frozen=True)
class OfDecoder:
    """Scores by a decoder's last token. words: the ids of yes and no, for a decoder without a head of labels."""

    model: Model
    head: Head
    around: Around | None
    words: tuple[int, int] | None = None
    segments: int = 2  # a tokenizer may distinguish them, but the model does not

    def prompt(self, text: str, second: str | None) -> tuple[str, str | None]:
        """The text to tokenize for a text, or a pair."""
        if second is None or self.around is None:
            return text, second
        before, between, behind = self.around
        return f"{before}{text}{between}{second}{behind}", None

    def logits(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """hidden [tokens, H] of some texts -> FP32 [texts, labels]; each text by itself."""
        rows = torch.cat([self.model.logits(hidden[end - 1 : end]) for end in accumulate(lengths)])
        if self.words is None:
            return rows
        yes, no = self.words
        return rows[:, yes : yes + 1] - rows[:, no : no + 1]


def labelled(model: AnyModel, tokenizer: Tokenizer, model_dir: Path) -> OfEncoder | OfDecoder:
    """How `model` scores. ModelError: it has no labels and is not a reranker."""
    head = model.config.head
    if isinstance(model, Encoder):
        if head is None:
            raise ModelError(f"{model_dir} holds {model.config.architecture}, which has no labels; it embeds.")
        return OfEncoder(model, head)
    is_qwen3 = model.config.model_type == "qwen3"
    if head is not None:
        return OfDecoder(model, head, QWEN3 if is_qwen3 and len(head.labels) == 1 else None)
    if not is_qwen3:
        raise ModelError(f"{model_dir} holds {model.config.architecture}, which has no labels.")
    if tokenizer.encode(""):
        raise ModelError(f"The tokenizer of {model_dir} adds tokens around a text, which Qwen3-Reranker's does not.")
    return OfDecoder(model, Head(("yes",), "sigmoid"), QWEN3, _words(tokenizer, model_dir))


def _words(tokenizer: Tokenizer, model_dir: Path) -> tuple[int, int]:
    """The ids of yes and no. ModelError: the directory's own file names others, which go with another prompt."""
    ids = _word("yes", tokenizer), _word("no", tokenizer)
    if (folder := modules_of(model_dir).get(LOGIT_SCORE)) is not None:
        path = model_dir / one_folder(folder, LOGIT_SCORE, model_dir) / "config.json"
        config = read_json(path, root=model_dir)
        if (config.get("true_token_id"), config.get("false_token_id")) != ids:
            raise ModelError(f"{path} scores by other tokens than yes and no, {ids}; their prompt is not known.")
    return ids


def _word(text: str, tokenizer: Tokenizer) -> int:
    """ModelError: it is not one token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ModelError(f"{text!r} is {len(ids)} tokens of this tokenizer; a model that judges answers it in one.")
    return ids[0]


@dataclass(frozen=True)
class Classified:
    """logits and scores FP32 [texts, labels]; tokens: how many of each text were read."""

    logits: Tensor
    scores: Tensor
    tokens: list[int]


class Classifier:
    """A directory of a model with a head of labels (`BertForSequenceClassification`), or of a decoder that judges.

    options: the fields of EngineOptions. Raises what `Embedder` raises, and ModelError if the model has no labels.
    """

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        self.encoder = TextEncoder(model_dir, EngineOptions.of(options), "classify")
        self.labelled = labelled(self.encoder.model, self.encoder.tokenizer, Path(model_dir))
        self.head: Head = self.labelled.head

    def classify(self, texts: Sequence[str | Pair]) -> Classified:
        """The scores of each text, or pair of texts. RequestError: one is too long."""
        if isinstance(texts, str) or not texts:
            raise RequestError("classify takes a list of one or more texts, or pairs of texts.")
        pairs = [self.labelled.prompt(*((text, None) if isinstance(text, str) else text)) for text in texts]
        read = [self.encoder.tokenizer.encode_pair(*pair) for pair in pairs]
        return self.classify_ids([ids for ids, _ in read], [segments for _, segments in read])

    @torch.inference_mode()
    def classify_ids(self, sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> Classified:
        """The scores of token ids. segments: 0 for tokens of the first text, 1 for the second. RequestError:
        `check`."""
        self.check(sequences, segments)
        logits = self.encoder.run(sequences, self.labelled.logits, segments).cpu()
        return Classified(logits, scored(logits, self.head.activation), [len(ids) for ids in sequences])

    def check(self, sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> None:
        """RequestError: a text is empty or too long, an id is unknown, or the segments do not match the tokens."""
        kinds = self.labelled.segments
        for ids, parts in zip(sequences, segments, strict=True):
            self.encoder.check(ids)
            if len(ids) != len(parts) or not all(0 <= part < kinds for part in parts):
                raise RequestError(f"Segments must be one for each token, of 0 to {kinds - 1}.")
