"""The routes for encoders: `/v1/embeddings`, `/classify`, `/v1/rerank` and `/v1/score`.

`/v1/rerank` and `/v1/score` use the score of a cross-encoder or the cosine similarity of embeddings.
"""

import base64
import contextlib
import math
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter, Request

from fp8serve.errors import Fp8ServeError, RequestError
from fp8serve.server.access.limits import TenantRequest
from fp8serve.server.api.routing import BoundedRoute, ResponseModel, StateDep, omit_if_none
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.parsing.request_parser import Prompt, check_fit
from fp8serve.server.parsing.texts import EncodedText, TextRequest
from fp8serve.server.schemas import embedding_bodies as bodies
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.admission import Outcome, Reservation
from fp8serve.server.serving.served_weights import ServedWeights

router = APIRouter(tags=["OpenAI"], route_class=BoundedRoute)


class Embedding(ResponseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # base64 of FP32, little-endian, if requested


class TextUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(ResponseModel):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: TextUsage


class RankedDocument(ResponseModel):
    text: str


class RerankResult(ResponseModel):
    index: int
    relevance_score: float
    document: RankedDocument | None = omit_if_none()


class RerankResponse(ResponseModel):
    id: str
    model: str
    results: list[RerankResult]
    usage: TextUsage


class Score(ResponseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: TextUsage


class Classification(ResponseModel):
    index: int
    label: str  # the most likely label
    probs: list[float]  # in the order of the model's labels
    num_classes: int


class ClassifyResponse(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: TextUsage


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncoderRequest:
    """A request to a model that embeds or classifies."""

    body: bodies.EmbeddingBody | bodies.ClassifyBody | bodies.RerankBody | bodies.ScoreBody
    request: Request
    served: ServedWeights
    state: ServerState

    @property
    def id(self) -> str:
        return str(self.request.scope["request_id"])

    @property
    def model(self) -> str:
        return self.body.model or self.served.source.model_id

    @property
    def document_limit(self) -> int | None:
        """The number of tokens that are read of a document, or None if it is not limited."""
        return self.body.max_tokens_per_doc if isinstance(self.body, bodies.RerankBody) else None

    @property
    def labels(self) -> list[str]:
        """The labels of the model. Raises Fault if it is no classifier."""
        if self.served.engine.limits.task != "classify":
            message = "This model has no labels; name a classifier or a cross-encoder for this route."
            raise Fault(Code.INVALID_PARAMETER, message, param="model")
        labels: list[str] = self.served.engine.info["labels"]
        return labels

    async def relevance_scores(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[float], int]:
        """Returns the score of each pair and the number of tokens. Equal texts are embedded once. Raises Fault for a
        classifier with more than one label."""
        if self.served.engine.limits.task == "classify":
            if (labels := len(self.labels)) != 1:
                message = f"This model scores {labels} labels and no relevance; send the texts to /classify."
                raise Fault(Code.INVALID_PARAMETER, message, param="model")
            limit, prompt_parts = self.max_tokens_read(is_pair=True), self.served.engine.info.get("pair")
            texts = [TextRequest(first, second, limit, self.document_limit, prompt_parts) for first, second in pairs]
            scores, tokens = await self.classify(texts)
            return [row[0] for row in scores], tokens
        first, second = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
        has_limit = self.document_limit is not None
        if not has_limit:  # a text then has the same embedding on both sides
            second = [text for text in second if text not in set(first)]
        vectors, tokens = await self.embed([*first, *second], first_document=len(first))
        queries = dict(zip(first, vectors, strict=False))
        documents = ({} if has_limit else queries) | dict(zip(second, vectors[len(first) :], strict=True))
        return [_cosine(queries[a], documents[b]) for a, b in pairs], tokens

    async def embed(
        self,
        texts: Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        first_document: int = 0,
    ) -> tuple[list[bytes], int]:
        """Returns the embeddings as bytes of FP32 and the number of tokens. Texts from the index `first_document` on
        are documents. The request is validated completely before any text is embedded."""
        engine, tokenizer = self.served.engine, self.served.tokenizer
        if (task := engine.limits.task) != "embed":
            purpose = "writes text" if task == "generate" else "scores labels"
            message = f"This model {purpose} and makes no vectors; name an embedding model for this route."
            raise Fault(Code.INVALID_PARAMETER, message, param="model")
        self._check_sizes()
        prompt, limit = self._prompt(prompt_name, texts), self.max_tokens_read(is_pair=False)
        limits = [self.document_limit if i >= first_document else None for i in range(len(texts))]
        requests = [
            TextRequest(prompt + text, None, limit, document_limit, prefix=prompt)
            for text, document_limit in zip(texts, limits, strict=True)
            if isinstance(text, str)
        ]
        with self.served.lease(), self.served.admission.reserve(1) as reservation:
            encoded = iter(await self._encode(requests) if requests else [])
            rows = [next(encoded)[0] if isinstance(text, str) else text for text in texts]  # token ids get no prompt
            rows = [tokenizer.truncate_ids(ids, limit) if limit else ids for ids in rows]
            for ids in rows:
                check_fit(self.served, len(ids), self.body.TEXTS_FIELD)
            with self._encoder_slot(rows, reservation):
                vectors = await until_disconnect(self.request, engine.embed(rows, dimensions))
        return vectors, sum(map(len, rows))

    async def classify(self, texts: Sequence[TextRequest]) -> tuple[list[list[float]], int]:
        """Returns the scores of all labels for each text or pair of texts, and the number of tokens."""
        self._check_sizes()
        with self.served.lease(), self.served.admission.reserve(1) as reservation:
            encoded = await self._encode(texts)
            rows, segments = [ids for ids, _ in encoded], [segment for _, segment in encoded]
            with self._encoder_slot(rows, reservation):
                scores = await until_disconnect(self.request, self.served.engine.classify(rows, segments))
        return scores, sum(map(len, rows))

    def max_tokens_read(self, *, is_pair: bool) -> int | None:
        """Returns the number of tokens that are read of a text or a pair of texts, or None if it is not limited. Raises
        Fault if the limit exceeds the model's context or leaves no room for text."""
        context = self.served.engine.limits.max_model_len
        limit = self.body.truncation_limit(context)
        if limit is None or limit == context:
            return limit
        message, special_tokens = "", self.served.tokenizer.special_token_counts[is_pair]
        if limit > context:
            message = f"truncate_prompt_tokens is {limit}, but this model reads {context} tokens of a text at most."
        elif limit <= special_tokens:
            message = (
                f"truncate_prompt_tokens is {limit}; with {special_tokens} special tokens this leaves no room for text."
            )
        if message:
            raise Fault(Code.INVALID_PARAMETER, message, param="truncate_prompt_tokens")
        return limit

    def _check_sizes(self) -> None:
        self.state.parser.size_limits(self.served.engine.limits.max_model_len).check(self.body)

    async def _encode(self, texts: Sequence[TextRequest]) -> list[EncodedText]:
        encoding = self.state.parser.encode_texts(self.served, texts, self.body.TEXTS_FIELD)
        return await until_disconnect(self.request, encoding)

    def _prompt(self, name: str | None, texts: Sequence[Prompt]) -> str:
        """Returns the prompt that is prepended to the texts. Raises Fault if the model has no such prompt or a text is
        token ids."""
        info = self.served.engine.info
        if name is None:
            return str(info.get("prompt", ""))
        prompts: dict[str, str] = info.get("prompts", {})
        if name not in prompts:
            message = f"This model has no prompt of that name; it has {', '.join(prompts) or 'none'}."
            raise Fault(Code.INVALID_PARAMETER, message, param="prompt_name")
        if not all(isinstance(text, str) for text in texts):
            message = "A prompt is put before texts, and input holds token ids; leave out prompt_name."
            raise Fault(Code.INVALID_PARAMETER, message, param="prompt_name")
        return prompts[name]

    @contextlib.contextmanager
    def _encoder_slot(self, rows: Sequence[list[int]], reservation: Reservation) -> Iterator[None]:
        """Encloses an engine call for texts with these token ids: admits it and counts the tokens for the tenant.
        Raises Fault if the engine refuses the texts or has stopped, or if the texts exceed a limit of the tenant or of
        the queue."""
        tokens = sum(map(len, rows))
        tenant_request: TenantRequest = self.request.scope["tenant_request"]
        tenant_request.reserve_tokens(tokens)
        outcome: Outcome = "failed"
        (slot,) = reservation.admit([tokens])  # a request takes one slot, whatever its number of texts
        try:
            tenant_request.usage.prompt_tokens += tokens
            yield
            outcome = "ok"
        except RequestError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error)) from None
        except Fp8ServeError as error:
            message = f"The engine stopped while it was answering: {error}"
            raise Fault(Code.ENGINE_DOWN, message, retry_after=2) from None
        finally:
            slot.close(outcome)


def _floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def _cosine(first: bytes, second: bytes) -> float:
    a, b = _floats(first), _floats(second)
    norm = math.sqrt(_dot(a, a) * _dot(b, b))
    return max(-1.0, min(1.0, _dot(a, b) / norm)) if norm else 0.0


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def text_usage(tokens: int) -> TextUsage:
    return TextUsage(prompt_tokens=tokens, total_tokens=tokens)


# -- routes ------------------------------------------------------------------------------------------------------------


@router.post("/classify", summary="Classify texts")
async def classify(body: bodies.ClassifyBody, request: Request, state: StateDep) -> ClassifyResponse:
    """Returns the most likely label of each text, and the probabilities of all labels, as vLLM's route does."""
    encoder = EncoderRequest(body, request, state.served(body.model, "classify"), state)
    labels, limit = encoder.labels, encoder.max_tokens_read(is_pair=False)
    probs, tokens = await encoder.classify([TextRequest(text, None, limit) for text in body.texts])
    data = [
        Classification(index=i, label=labels[row.index(max(row))], probs=row, num_classes=len(row))
        for i, row in enumerate(probs)
    ]
    usage = text_usage(tokens)
    return ClassifyResponse(id=encoder.id, created=int(time.time()), model=encoder.model, data=data, usage=usage)


@router.post("/v1/embeddings", summary="Embed texts")
async def embeddings(body: bodies.EmbeddingBody, request: Request, state: StateDep) -> EmbeddingsResponse:
    """Returns an embedding for each text. The prompt `prompt_name`, or the model's default prompt if it has one, is
    prepended to each text."""
    encoder = EncoderRequest(body, request, state.served(body.model, "embed"), state)
    vectors, tokens = await encoder.embed(body.texts, dimensions=body.dimensions, prompt_name=body.prompt_name)
    is_base64 = body.encoding_format == "base64"
    data = [
        Embedding(index=i, embedding=base64.b64encode(vector).decode() if is_base64 else _floats(vector))
        for i, vector in enumerate(vectors)
    ]
    return EmbeddingsResponse(model=encoder.model, data=data, usage=text_usage(tokens))


@router.post("/v1/rerank", summary="Sort documents by their relevance to a query")
async def rerank(body: bodies.RerankBody, request: Request, state: StateDep) -> RerankResponse:
    """Uses the score of a cross-encoder, or the cosine similarity of embeddings. Documents of equal relevance keep
    their order."""
    encoder = EncoderRequest(body, request, state.served(body.model, "classify", "embed"), state)
    scores, tokens = await encoder.relevance_scores([(body.query, document) for document in body.texts])
    documents = [RankedDocument(text=text) if body.return_documents else None for text in body.texts]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    results = [RerankResult(index=i, relevance_score=scores[i], document=documents[i]) for i in order]
    return RerankResponse(id=encoder.id, model=encoder.model, results=results, usage=text_usage(tokens))


@router.post("/v1/score", summary="Score pairs of texts")
async def score(body: bodies.ScoreBody, request: Request, state: StateDep) -> ScoreResponse:
    """Uses the score of a cross-encoder, or the cosine similarity of embeddings."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = body.texts
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many."
        raise Fault(Code.INVALID_PARAMETER, message, param="text_1")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    encoder = EncoderRequest(body, request, state.served(body.model, "classify", "embed"), state)
    scores, tokens = await encoder.relevance_scores(pairs)
    data, usage = [Score(index=i, score=value) for i, value in enumerate(scores)], text_usage(tokens)
    return ScoreResponse(id=encoder.id, created=int(time.time()), model=encoder.model, data=data, usage=usage)
