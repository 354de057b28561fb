"""Bodies of `/v1/embeddings` (OpenAI), `/v1/rerank` (Jina, Cohere), `/v1/score` and `/classify` (vLLM).

`texts` is what sizes are checked of, `LISTED` the field that a client is told.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fp8serve.server.schemas.bodies import Body
from fp8serve.server.schemas.openai_bodies import Ids, Texts


class Truncating(Body):
    """Of a text, or a pair of texts, at most `truncate_prompt_tokens` tokens are read (vLLM); -1, `truncate` (Text
    Embeddings Inference) or `truncation` (Jina, Voyage): as many as the model can. Without, a longer one is refused."""

    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | Literal[-1] | None = None
    truncate: bool | None = None
    truncation: bool | None = None

    def most(self, longest: int) -> int | None:
        """How many tokens are read at most, of a model that reads `longest`; None: all, or the text is refused."""
        if self.truncate_prompt_tokens is None:
            return longest if self.truncate or self.truncation else None
        return longest if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class EmbeddingBody(Truncating):
    """`input`: a text, some texts, token ids, or some lists of ids. prompt_name: which of the model's prompts is put
    before texts."""

    model: str | None = None
    input: str | Ids | Texts | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
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
    input: str | Texts
    user: str | None = None

    LISTED: ClassVar[str] = "input"

    @property
    def texts(self) -> list[str]:
        """One item for each text."""
        return [self.input] if isinstance(self.input, str) else self.input


class RerankBody(Truncating):
    """`documents`, most relevant first. max_tokens_per_doc: how many of each are read (Cohere)."""

    model: str | None = None
    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None

    LISTED: ClassVar[str] = "documents"

    @property
    def texts(self) -> list[str]:
        """One item for each score."""
        return self.documents


class ScoreBody(Truncating):
    """`text_1` with each of `text_2`; a list in both: one by one."""

    model: str | None = None
    text_1: str | Texts
    text_2: str | Texts

    LISTED: ClassVar[str] = "text_2"

    @property
    def texts(self) -> list[str]:
        """One item for each score."""
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2
