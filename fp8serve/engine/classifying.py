"""Sequence classification: computes a score for every label of a text or a pair of texts. A cross-encoder (reranker) is
a classifier with one label.

The logits of the labels come from an encoder's head, from a decoder's head, or from two tokens of a decoder.
Qwen3-Reranker has no head. Its prompt asks whether a document answers a query, and the score is computed from the
logits of "yes" and "no" as the next token. Converted models with a head of one label (`Qwen3ForSequenceClassification`)
read the same prompt. The prompt below is copied from the model's page, because no published file of the model has it.
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
from fp8serve.model.config.modules_json import LOGIT_SCORE, check_module_folder, read_modules
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.pooling import to_scores
from fp8serve.model.storage.files import read_json
from fp8serve.model.text.tokenizer import Tokenizer

PairTemplate = tuple[str, str, str]  # the texts before the query, between query and document, and after the document
QWEN3_TEMPLATE: PairTemplate = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: ",
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
Pair = tuple[str, str]


@dataclass(frozen=True)
class EncoderScorer:
    """Scores texts with an encoder's classification head. The tokenizer joins the two texts of a pair."""

    model: Encoder
    head: Head
    template: None = None

    @property
    def num_segments(self) -> int:
        """The number of token types that the model distinguishes."""
        return self.model.config.type_vocab_size

    def prompt(self, text: str, second: str | None) -> tuple[str, str | None]:
        """Returns the texts unchanged."""
        return text, second

    def logits(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns the logits, FP32 [texts, labels], from the hidden states [tokens, H] of texts of these lengths."""
        return self.model.logits(hidden, lengths)


@dataclass(frozen=True)
class DecoderScorer:
    """Scores a text by the decoder's output at its last token. `yes_no_ids` are two token ids, for a decoder that has
    no classification head."""

    model: Model
    head: Head
    template: PairTemplate | None
    yes_no_ids: tuple[int, int] | None = None
    num_segments: int = 2  # a tokenizer may return two token types, which the model ignores

    def prompt(self, text: str, second: str | None) -> tuple[str, str | None]:
        """Fills a pair into the template. Without a template or a second text, returns the texts unchanged."""
        if second is None or self.template is None:
            return text, second
        before, between, behind = self.template
        return f"{before}{text}{between}{second}{behind}", None

    def logits(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns the logits, FP32 [texts, labels], from the hidden states [tokens, H] of texts of these lengths. The
        head runs on one text at a time."""
        rows = torch.cat([self.model.logits(hidden[end - 1 : end]) for end in accumulate(lengths)])
        if self.yes_no_ids is None:
            return rows
        yes, no = self.yes_no_ids
        return rows[:, yes : yes + 1] - rows[:, no : no + 1]


def make_scorer(model: AnyModel, tokenizer: Tokenizer, model_dir: Path) -> EncoderScorer | DecoderScorer:
    """Returns the scorer of a classifier or reranker. Raises ModelError if the model is neither."""
    head = model.config.head
    if isinstance(model, Encoder):
        if head is None:
            raise ModelError(f"{model_dir} holds {model.config.architecture}, which has no labels; it embeds.")
        return EncoderScorer(model, head)
    is_qwen3 = model.config.model_type == "qwen3"
    if head is not None:
        return DecoderScorer(model, head, QWEN3_TEMPLATE if is_qwen3 and len(head.labels) == 1 else None)
    if not is_qwen3:
        raise ModelError(f"{model_dir} holds {model.config.architecture}, which has no labels.")
    if tokenizer.encode(""):
        raise ModelError(f"The tokenizer of {model_dir} adds tokens around a text, which Qwen3-Reranker's does not.")
    return DecoderScorer(model, Head(("yes",), "sigmoid"), QWEN3_TEMPLATE, _yes_no_ids(tokenizer, model_dir))


def _yes_no_ids(tokenizer: Tokenizer, model_dir: Path) -> tuple[int, int]:
    """Returns the token ids of "yes" and "no". Raises ModelError if the model directory declares other tokens, because
    the prompt that belongs to them is unknown."""
    ids = _single_token("yes", tokenizer), _single_token("no", tokenizer)
    if (folder := read_modules(model_dir).get(LOGIT_SCORE)) is not None:
        path = model_dir / check_module_folder(folder, LOGIT_SCORE, model_dir) / "config.json"
        config = read_json(path, root=model_dir)
        if (config.get("true_token_id"), config.get("false_token_id")) != ids:
            raise ModelError(
                f"{path} scores by other tokens than yes and no ({ids}), and the prompt for those tokens is unknown."
            )
    return ids


def _single_token(text: str, tokenizer: Tokenizer) -> int:
    """Returns the id of a text that is one token. Raises ModelError if the text is not one token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ModelError(f"The tokenizer splits {text!r} into {len(ids)} tokens, and a reranker needs it as one token.")
    return ids[0]


@dataclass(frozen=True)
class Classified:
    """The result for some texts. `logits` and `scores` are FP32 [texts, labels], and `tokens` has the number of tokens
    of each text."""

    logits: Tensor
    scores: Tensor
    tokens: list[int]


class Classifier:
    """A model with a classification head (such as `BertForSequenceClassification`) or a reranker, loaded from its
    directory.

    `options` are the fields of EngineOptions. Raises the errors of `Embedder`, and ModelError if the model has no
    labels.
    """

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        self.encoder = TextEncoder(model_dir, EngineOptions.of(options), "classify")
        self.scorer = make_scorer(self.encoder.model, self.encoder.tokenizer, Path(model_dir))
        self.head: Head = self.scorer.head

    def classify(self, texts: Sequence[str | Pair]) -> Classified:
        """Returns the scores of every text or pair of texts. Raises RequestError if a text is too long."""
        if isinstance(texts, str) or not texts:
            raise RequestError("classify takes a list of one or more texts, or pairs of texts.")
        pairs = [self.scorer.prompt(*((text, None) if isinstance(text, str) else text)) for text in texts]
        encoded = [self.encoder.tokenizer.encode_pair(*pair) for pair in pairs]
        return self.classify_ids([ids for ids, _ in encoded], [segments for _, segments in encoded])

    @torch.inference_mode()
    def classify_ids(self, sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> Classified:
        """Returns the scores of tokenized texts. `segments` is 0 for tokens of the first text of a pair and 1 for
        tokens of the second. Raises the errors of `check`."""
        self.check(sequences, segments)
        logits = self.encoder.run(sequences, self.scorer.logits, segments).cpu()
        return Classified(logits, to_scores(logits, self.head.activation), [len(ids) for ids in sequences])

    def check(self, sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> None:
        """Raises RequestError if a text is empty or too long, a token id is unknown, or the segments are invalid."""
        num_segments = self.scorer.num_segments
        for ids, token_segments in zip(sequences, segments, strict=True):
            self.encoder.check(ids)
            if len(ids) != len(token_segments) or not all(0 <= segment < num_segments for segment in token_segments):
                raise RequestError(f"Every token needs a segment number from 0 to {num_segments - 1}.")
