"""The bodies of `/v1/embeddings` (OpenAI), `/v1/rerank` (Jina, Cohere), `/v1/score` and `/classify` (vLLM).

Limits apply to the property `texts`. Errors about these texts name the field `TEXTS_FIELD`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from fp8serve.server.schemas.bodies import Body, Strict
from fp8serve.server.schemas.openai_bodies import Ids, Texts


def _expects(kinds: str) -> WrapValidator:
    """Returns a validator with one error for all types of a union, instead of an error about its first type."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("kind_of_input", "give {kinds}", {"kinds": kinds}) from None

    return WrapValidator(check)


TextOrTexts = Annotated[str | Texts, _expects("a text, or a list of one or more texts")]


class TruncationFields(Body):
    """The fields that truncate a text, or a pair of texts. `truncate_prompt_tokens` (vLLM) is the number of tokens that
    are read; -1 stands for the model's context. `truncate` (Text Embeddings Inference) and `truncation` (Jina, Voyage)
    mean the same as -1. Without these fields, texts beyond the context are refused."""

    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | Literal[-1] | None = None
    truncate: bool | None = None
    truncation: bool | None = None

    def truncation_limit(self, context: int) -> int | None:
        """Returns the number of tokens that are read of a text, or None if texts are not truncated. `context` is the
        context length of the model."""
        if self.truncate_prompt_tokens is None:
            return context if self.truncate or self.truncation else None
        return context if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class EmbeddingBody(TruncationFields):
    """The body of `POST /v1/embeddings`. `input` is a text, a list of texts, a list of token ids, or a list of such
    lists. `prompt_name` names the prompt of the model that is prepended to texts."""

    model: str | None = None
    input: Annotated[
        str | Ids | Texts | Annotated[list[Ids], Field(min_length=1, fail_fast=True)],
        _expects("a text, some texts, token ids or some lists of token ids, and no empty list"),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    user: str | None = None

    TEXTS_FIELD: ClassVar[str] = "input"

    @property
    def texts(self) -> list[str | list[int]]:
        """The inputs, one for each embedding."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return list(self.input)


class ClassifyBody(TruncationFields):
    """The body of `POST /classify`."""

    model: str | None = None
    input: TextOrTexts
    user: str | None = None

    TEXTS_FIELD: ClassVar[str] = "input"

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class Document(Strict):
    """A document as an object, which Cohere's and Jina's clients may send."""

    text: str


class RerankBody(TruncationFields):
    """The body of `POST /v1/rerank`. `max_tokens_per_doc` is the number of tokens that are read of each document
    (Cohere)."""

    model: str | None = None
    query: str
    documents: Annotated[
        list[str | Document], Field(min_length=1), _expects('a list of one or more texts, or objects {"text": ...}')
    ]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None

    TEXTS_FIELD: ClassVar[str] = "documents"

    @property
    def texts(self) -> list[str]:
        """The documents, one for each score."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreBody(TruncationFields):
    """The body of `POST /v1/score`. One `text_1` is paired with every `text_2`. Lists of equal length are paired
    element by element."""

    model: str | None = None
    text_1: TextOrTexts
    text_2: TextOrTexts

    TEXTS_FIELD: ClassVar[str] = "text_2"

    @property
    def texts(self) -> list[str]:
        """The second texts, one for each score."""
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2
