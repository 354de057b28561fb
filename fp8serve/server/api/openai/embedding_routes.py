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
from fp8serve.server.parsing.texts import TextRequest
from fp8serve.server.schemas.embedding_bodies import (
    ClassifyBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    TruncationFields,
)
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


# -- routes ------------------------------------------------------------------------------------------------------------


@router.post("/classify", summary="Classify texts")
async def classify(body: ClassifyBody, request: Request, state: StateDep) -> ClassifyResponse:
    """Returns the most likely label of each text, and the probabilities of all labels, as vLLM's route does."""
    served = state.served(body.model, "classify")
    labels = _labels(served)
    limit = max_tokens_read(body, served, is_pair=False)
    texts = [TextRequest(text, None, limit) for text in body.texts]
    probs, tokens = await _classify(body, texts, served, request, state)
    data = [
        Classification(
            index=i, label=labels[max(range(len(row)), key=row.__getitem__)], probs=row, num_classes=len(row)
        )
        for i, row in enumerate(probs)
    ]
    return ClassifyResponse(
        id=request.scope["request_id"],
        created=int(time.time()),
        model=body.model or served.source.model_id,
        data=data,
        usage=text_usage(tokens),
    )


@router.post("/v1/embeddings", summary="Embed texts")
async def embeddings(body: EmbeddingBody, request: Request, state: StateDep) -> EmbeddingsResponse:
    """Returns an embedding for each text. The prompt `prompt_name`, or the model's default prompt if it has one, is
    prepended to each text."""
    served, options = state.served(body.model, "embed"), _TextOptions(body.dimensions, body.prompt_name)
    vectors, tokens = await _embed(body, body.texts, options, request, served, state)
    is_base64 = body.encoding_format == "base64"
    data = [
        Embedding(index=i, embedding=base64.b64encode(vector).decode() if is_base64 else _floats(vector))
        for i, vector in enumerate(vectors)
    ]
    return EmbeddingsResponse(model=body.model or served.source.model_id, data=data, usage=text_usage(tokens))


@router.post("/v1/rerank", summary="Sort documents by their relevance to a query")
async def rerank(body: RerankBody, request: Request, state: StateDep) -> RerankResponse:
    """Uses the score of a cross-encoder, or the cosine similarity of embeddings. Documents of equal relevance keep
    their order."""
    documents = body.texts
    pairs = [(body.query, document) for document in documents]
    served = state.served(body.model, "classify", "embed")
    scores, tokens = await _relevance_scores(body, pairs, request, served, state)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    results = [
        RerankResult(
            index=i,
            relevance_score=scores[i],
            document=RankedDocument(text=documents[i]) if body.return_documents else None,
        )
        for i in order
    ]
    name = body.model or served.source.model_id
    return RerankResponse(id=request.scope["request_id"], model=name, results=results, usage=text_usage(tokens))


@router.post("/v1/score", summary="Score pairs of texts")
async def score(body: ScoreBody, request: Request, state: StateDep) -> ScoreResponse:
    """Uses the score of a cross-encoder, or the cosine similarity of embeddings."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = body.texts
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many."
        raise Fault(Code.INVALID_PARAMETER, message, param="text_1")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    served = state.served(body.model, "classify", "embed")
    scores, tokens = await _relevance_scores(body, pairs, request, served, state)
    return ScoreResponse(
        id=request.scope["request_id"],
        created=int(time.time()),
        model=body.model or served.source.model_id,
        data=[Score(index=i, score=score) for i, score in enumerate(scores)],
        usage=text_usage(tokens),
    )


# -- embeddings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TextOptions:
    """How texts are embedded. `documents` are the indexes of the texts that are documents. At most `document_limit`
    tokens of a document are read."""

    dimensions: int | None = None
    prompt_name: str | None = None
    document_limit: int | None = None
    documents: range = range(0)

    def prompt(self, served: ServedWeights, texts: Sequence[Prompt]) -> str:
        """Returns the prompt that is prepended to the texts. Raises Fault if the model has no such prompt or a text is
        token ids."""
        info = served.engine.info
        if self.prompt_name is None:
            return str(info.get("prompt", ""))
        prompts: dict[str, str] = info.get("prompts", {})
        if self.prompt_name not in prompts:
            names = ", ".join(prompts) or "none"
            raise Fault(
                Code.INVALID_PARAMETER, f"This model has no prompt of that name; it has {names}.", param="prompt_name"
            )
        if not all(isinstance(text, str) for text in texts):
            message = "A prompt is put before texts, and input holds token ids; leave out prompt_name."
            raise Fault(Code.INVALID_PARAMETER, message, param="prompt_name")
        return prompts[self.prompt_name]


async def _relevance_scores(
    body: RerankBody | ScoreBody,
    pairs: Sequence[tuple[str, str]],
    request: Request,
    served: ServedWeights,
    state: ServerState,
) -> tuple[list[float], int]:
    """Returns the score of each pair and the number of tokens. Equal texts are embedded once."""
    if served.engine.limits.task == "classify":
        return await _cross_encode(body, pairs, request, served, state)
    first, second = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
    limit = body.max_tokens_per_doc if isinstance(body, RerankBody) else None
    if limit is None:  # without a limit for documents, a text has the same embedding on both sides
        second = [text for text in second if text not in set(first)]
    options = _TextOptions(document_limit=limit, documents=range(len(first), len(first) + len(second)))
    vectors, tokens = await _embed(body, [*first, *second], options, request, served, state)
    first_vectors = dict(zip(first, vectors, strict=False))
    second_vectors = (first_vectors if limit is None else {}) | dict(zip(second, vectors[len(first) :], strict=True))
    return [_cosine(first_vectors[a], second_vectors[b]) for a, b in pairs], tokens


async def _embed(
    body: EmbeddingBody | RerankBody | ScoreBody,
    texts: Sequence[Prompt],
    options: _TextOptions,
    request: Request,
    served: ServedWeights,
    state: ServerState,
) -> tuple[list[bytes], int]:
    """Returns the embeddings as bytes of FP32 and the number of tokens. The request is validated completely before any
    text is embedded."""
    if (task := served.engine.limits.task) != "embed":
        purpose = "writes text" if task == "generate" else "scores labels"
        message = f"This model {purpose} and makes no vectors; name an embedding model for this route."
        raise Fault(Code.INVALID_PARAMETER, message, param="model")
    state.parser.size_limits(served.engine.limits.max_model_len).check(body)
    prompt, limit = options.prompt(served, texts), max_tokens_read(body, served, is_pair=False)
    with served.lease(), served.admission.reserve(1) as reservation:
        token_ids = await _tokenize(texts, body.TEXTS_FIELD, prompt, limit, options, served, request, state)
        tokens = [len(ids) for ids in token_ids]
        with encoder_slot(tokens, reservation, request.scope["tenant_request"]):
            vectors = await until_disconnect(request, served.engine.embed(token_ids, options.dimensions))
    return vectors, sum(tokens)


async def _tokenize(
    texts: Sequence[Prompt],
    field: str,
    prompt: str,
    limit: int | None,
    options: _TextOptions,
    served: ServedWeights,
    request: Request,
    state: ServerState,
) -> list[list[int]]:
    """Returns the token ids of each text with the prompt prepended. Inputs that are token ids get no prompt."""
    requests = [
        TextRequest(
            prompt + text, None, limit, options.document_limit if i in options.documents else None, prefix=prompt
        )
        for i, text in enumerate(texts)
        if isinstance(text, str)
    ]
    encoded = await until_disconnect(request, state.parser.encode_texts(served, requests, field)) if requests else []
    tokenized = iter(encoded)
    rows = [next(tokenized)[0] if isinstance(text, str) else text for text in texts]
    rows = [served.tokenizer.truncate_ids(ids, limit) if limit else ids for ids in rows]
    for ids in rows:
        check_fit(served, len(ids), field)
    return rows


def _floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def _cosine(first: bytes, second: bytes) -> float:
    a, b = _floats(first), _floats(second)
    norm = math.sqrt(_dot(a, a) * _dot(b, b))
    return max(-1.0, min(1.0, _dot(a, b) / norm)) if norm else 0.0


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


# -- labels ------------------------------------------------------------------------------------------------------------


async def _cross_encode(
    body: RerankBody | ScoreBody,
    pairs: Sequence[tuple[str, str]],
    request: Request,
    served: ServedWeights,
    state: ServerState,
) -> tuple[list[float], int]:
    """Returns the score of each pair and the number of tokens. Raises Fault if the model has more than one label."""
    if (labels := len(_labels(served))) != 1:
        message = f"This model scores {labels} labels and no relevance; send the texts to /classify."
        raise Fault(Code.INVALID_PARAMETER, message, param="model")
    limit, pair_texts = max_tokens_read(body, served, is_pair=True), served.engine.info.get("pair")
    document_limit = body.max_tokens_per_doc if isinstance(body, RerankBody) else None
    texts = [TextRequest(first, second, limit, document_limit, pair_texts) for first, second in pairs]
    scores, tokens = await _classify(body, texts, served, request, state)
    return [row[0] for row in scores], tokens


def _labels(served: ServedWeights) -> list[str]:
    """Returns the labels of a model. Raises Fault if it is no classifier."""
    if served.engine.limits.task != "classify":
        message = "This model has no labels; name a classifier or a cross-encoder for this route."
        raise Fault(Code.INVALID_PARAMETER, message, param="model")
    labels: list[str] = served.engine.info["labels"]
    return labels


async def _classify(
    body: ClassifyBody | RerankBody | ScoreBody,
    texts: Sequence[TextRequest],
    served: ServedWeights,
    request: Request,
    state: ServerState,
) -> tuple[list[list[float]], int]:
    """Returns the scores of all labels for each text or pair of texts, and the number of tokens."""
    state.parser.size_limits(served.engine.limits.max_model_len).check(body)
    with served.lease(), served.admission.reserve(1) as reservation:
        encoded = await until_disconnect(request, state.parser.encode_texts(served, texts, body.TEXTS_FIELD))
        token_ids, segments = [ids for ids, _ in encoded], [segment for _, segment in encoded]
        tokens = [len(ids) for ids in token_ids]
        with encoder_slot(tokens, reservation, request.scope["tenant_request"]):
            scores = await until_disconnect(request, served.engine.classify(token_ids, segments))
    return scores, sum(tokens)


# -- the engine --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def encoder_slot(tokens: Sequence[int], reservation: Reservation, tenant_request: TenantRequest) -> Iterator[None]:
    """Encloses an engine call for texts that have `tokens` tokens each: admits it and counts the tokens for the tenant.
    Raises Fault if the engine refuses the texts or has stopped, or if the texts exceed a limit of the tenant or of the
    queue."""
    tenant_request.reserve_tokens(sum(tokens))
    outcome: Outcome = "failed"
    (slot,) = reservation.admit([sum(tokens)])  # a request takes one slot, whatever its number of texts
    try:
        tenant_request.usage.prompt_tokens += sum(tokens)
        yield
        outcome = "ok"
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error)) from None
    except Fp8ServeError as error:
        raise Fault(Code.ENGINE_DOWN, f"The engine stopped while it was answering: {error}", retry_after=2) from None
    finally:
        slot.close(outcome)


def max_tokens_read(body: TruncationFields, served: ServedWeights, *, is_pair: bool) -> int | None:
    """Returns the number of tokens that are read of a text or a pair of texts, or None if it is not limited. Raises
    Fault if the limit exceeds the model's context or leaves no room for text."""
    context = served.engine.limits.max_model_len
    limit = body.truncation_limit(context)
    if limit is None or limit == context:
        return limit
    message, special_tokens = "", served.tokenizer.special_token_counts[is_pair]
    if limit > context:
        message = f"truncate_prompt_tokens is {limit}, but this model reads {context} tokens of a text at most."
    elif limit <= special_tokens:
        message = (
            f"truncate_prompt_tokens is {limit}; with {special_tokens} special tokens this leaves no room for text."
        )
    if message:
        raise Fault(Code.INVALID_PARAMETER, message, param="truncate_prompt_tokens")
    return limit


def text_usage(tokens: int) -> TextUsage:
    return TextUsage(prompt_tokens=tokens, total_tokens=tokens)
