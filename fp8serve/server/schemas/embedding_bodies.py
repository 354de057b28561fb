"""Bodies of `/v1/embeddings` (OpenAI), `/v1/rerank` (Jina, Cohere), `/v1/score` and `/classify` (vLLM).

Sizes are checked on `texts`; `LISTED` is the field that an error names.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from fp8serve.server.schemas.bodies import Body, Strict
from fp8serve.server.schemas.openai_bodies import Ids, Texts


def _expects(kinds: str) -> WrapValidator:
    """One sentence for a value of no allowed kind, instead of an error about the first kind."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("kind_of_input", "give {kinds}", {"kinds": kinds}) from None

    return WrapValidator(check)


TextOrTexts = Annotated[str | Texts, _expects("a text, or a list of one or more texts")]


class Truncating(Body):
    """At most `truncate_prompt_tokens` tokens of a text, or a pair of texts, are read (vLLM); with -1, `truncate` (Text
    Embeddings Inference) or `truncation` (Jina, Voyage), as many as the model reads. Otherwise a longer text is
    refused."""

    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | Literal[-1] | None = None
    truncate: bool | None = None
    truncation: bool | None = None

    def most(self, longest: int) -> int | None:
        """How many tokens are read at most by a model that reads `longest`; None: all, or the text is refused."""
        if self.truncate_prompt_tokens is None:
            return longest if self.truncate or self.truncation else None
        return longest if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class EmbeddingBody(Truncating):
    """`input`: a text, some texts, token ids, or some lists of ids. prompt_name: which of the model's prompts is put
    before texts."""

    model: str | None = None
    input: Annotated[
        str | Ids | Texts | Annotated[list[Ids], Field(min_length=1, fail_fast=True)],
        _expects("a text, some texts, token ids or some lists of token ids, and no empty list"),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    user: str | None = None

    LISTED: ClassVar[str] = "input"

    @property
    def texts(self) -> list[str | list[int]]:
        """One item for each vector."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return list(self.input)


class ClassifyBody(Truncating):
    """`input`: a text, or some."""

    model: str | None = None
    input: TextOrTexts
    user: str | None = None

    LISTED: ClassVar[str] = "input"

    @property
    def texts(self) -> list[str]:
        """One item for each text."""
        return [self.input] if isinstance(self.input, str) else self.input


class Document(Strict):
    """As Cohere's and Jina's clients may send it."""

    text: str


class RerankBody(Truncating):
    """`documents`, texts or objects that hold one, most relevant first. max_tokens_per_doc: how many of each are read
    (Cohere)."""

    model: str | None = None
    query: str
    documents: Annotated[
        list[str | Document], Field(min_length=1), _expects('a list of one or more texts, or objects {"text": ...}')
    ]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None

    LISTED: ClassVar[str] = "documents"

    @property
    def texts(self) -> list[str]:
        """One item for each score."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreBody(Truncating):
    """`text_1` with each of `text_2`; a list in both: one by one."""

    model: str | None = None
    text_1: TextOrTexts
    text_2: TextOrTexts

    LISTED: ClassVar[str] = "text_2"

    @property
    def texts(self) -> list[str]:
        """One item for each score."""
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2
