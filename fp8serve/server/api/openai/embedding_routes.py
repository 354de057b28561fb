"""The routes of encoders: `/v1/embeddings`, `/classify`, and `/v1/rerank` and `/v1/score`.

The last two ask a cross-encoder, or compute the cosine of two texts' vectors.
"""

import base64
import math
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from fastapi import APIRouter, Request

from fp8serve.errors import Fp8ServeError, RequestError
from fp8serve.server.access.limits import TenantRequest
from fp8serve.server.api.routing import Answer, BoundedRoute, StateDep, absent
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.parsing.request_parser import Prompt, check_fit
from fp8serve.server.parsing.texts import TextRequest
from fp8serve.server.schemas.embedding_bodies import ClassifyBody, EmbeddingBody, RerankBody, ScoreBody, Truncating
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.admission import Outcome, Reservation
from fp8serve.server.serving.served import Served

T = TypeVar("T")
router = APIRouter(tags=["OpenAI"], route_class=BoundedRoute)


class Vector(Answer):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # base64 of FP32, little-endian, if requested


class TextUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class Vectors(Answer):
    object: Literal["list"] = "list"
    model: str
    data: list[Vector]
    usage: TextUsage


class RankedDocument(Answer):
    text: str


class Ranked(Answer):
    index: int
    relevance_score: float
    document: RankedDocument | None = absent()


class Ranking(Answer):
    id: str
    model: str
    results: list[Ranked]
    usage: TextUsage


class Score(Answer):
    object: Literal["score"] = "score"
    index: int
    score: float


class Scores(Answer):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: TextUsage


class Classification(Answer):
    index: int
    label: str  # the likeliest
    probs: list[float]  # of every label, in their order
    num_classes: int


class Classifications(Answer):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: TextUsage


# -- routes ------------------------------------------------------------------------------------------------------------


@router.post("/classify", summary="The likeliest label of each text")
async def classify(body: ClassifyBody, request: Request, state: StateDep) -> Classifications:
    """By a classifier, with the score of every label. This is vLLM's route."""
    served = state.served(body.model, "classify")
    labels = _labels(served)
    most = most_tokens(body, served, is_pair=False)
    rows, tokens = await _scores(body, [TextRequest(text, None, most) for text in body.texts], served, request, state)
    data = [
        Classification(
            index=i, label=labels[max(range(len(row)), key=row.__getitem__)], probs=row, num_classes=len(row)
        )
        for i, row in enumerate(rows)
    ]
    return Classifications(
        id=request.scope["request_id"],
        created=int(time.time()),
        model=body.model or served.source.model_id,
        data=data,
        usage=usage(tokens),
    )


@router.post("/v1/embeddings", summary="One vector for each text")
async def embeddings(body: EmbeddingBody, request: Request, state: StateDep) -> Vectors:
    """By an embedding model. The named prompt, or the model's default one if it has any, is put before the texts."""
    served, reading = state.served(body.model, "embed"), _Reading(body.dimensions, body.prompt_name)
    vectors, tokens = await _vectors(body, body.texts, reading, request, served, state)
    as_text = body.encoding_format == "base64"
    data = [
        Vector(index=i, embedding=base64.b64encode(v).decode() if as_text else _numbers(v))
        for i, v in enumerate(vectors)
    ]
    return Vectors(model=body.model or served.source.model_id, data=data, usage=usage(tokens))


@router.post("/v1/rerank", summary="Documents by their relevance to a query")
async def rerank(body: RerankBody, request: Request, state: StateDep) -> Ranking:
    """By a cross-encoder's own score, or the cosine of vectors; documents of equal relevance keep their order."""
    documents = body.texts
    pairs = [(body.query, document) for document in documents]
    served = state.served(body.model, "classify", "embed")
    scores, tokens = await _relevance(body, pairs, request, served, state)
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    results = [
        Ranked(
            index=i,
            relevance_score=scores[i],
            document=RankedDocument(text=documents[i]) if body.return_documents else None,
        )
        for i in best
    ]
    name = body.model or served.source.model_id
    return Ranking(id=request.scope["request_id"], model=name, results=results, usage=usage(tokens))


@router.post("/v1/score", summary="How close pairs of texts are")
async def score(body: ScoreBody, request: Request, state: StateDep) -> Scores:
    """By a cross-encoder's own score, or the cosine of their vectors."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = body.texts
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many."
        raise Fault(Code.INVALID_PARAMETER, message, param="text_1")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    served = state.served(body.model, "classify", "embed")
    scores, tokens = await _relevance(body, pairs, request, served, state)
    return Scores(
        id=request.scope["request_id"],
        created=int(time.time()),
        model=body.model or served.source.model_id,
        data=[Score(index=i, score=score) for i, score in enumerate(scores)],
        usage=usage(tokens),
    )


# -- vectors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """How a body's texts are read. documents: the indexes of the texts of which at most `document` tokens are read."""

    dimensions: int | None = None
    prompt_name: str | None = None
    document: int | None = None
    documents: range = range(0)

    def prompt(self, served: Served, texts: Sequence[Prompt]) -> str:
        """The prompt to put before texts. Fault: the model has none of that name, or the input is token ids."""
        info = served.engine.info
        if self.prompt_name is None:
            return str(info.get("prompt", ""))
        prompts: dict[str, str] = info.get("prompts", {})
        if self.prompt_name not in prompts:
            known = ", ".join(prompts) or "none"
            raise Fault(
                Code.INVALID_PARAMETER, f"This model has no prompt of that name; it has {known}.", param="prompt_name"
            )
        if not all(isinstance(text, str) for text in texts):
            message = "A prompt is put before texts, and input holds token ids; leave out prompt_name."
            raise Fault(Code.INVALID_PARAMETER, message, param="prompt_name")
        return prompts[self.prompt_name]


async def _relevance(
    body: RerankBody | ScoreBody,
    pairs: Sequence[tuple[str, str]],
    request: Request,
    served: Served,
    state: ServerState,
) -> tuple[list[float], int]:
    """The score of each pair, and how many tokens were read; with vectors each different text is read once."""
    if served.engine.limits.task == "classify":
        return await _cross_encode(body, pairs, request, served, state)
    first, second = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
    document = body.max_tokens_per_doc if isinstance(body, RerankBody) else None
    if document is None:  # a text is read in the same way in both places
        second = [text for text in second if text not in set(first)]
    reading = _Reading(document=document, documents=range(len(first), len(first) + len(second)))
    vectors, tokens = await _vectors(body, [*first, *second], reading, request, served, state)
    one = dict(zip(first, vectors, strict=False))
    other = (one if document is None else {}) | dict(zip(second, vectors[len(first) :], strict=True))
    return [_cosine(one[a], other[b]) for a, b in pairs], tokens


async def _vectors(
    body: EmbeddingBody | RerankBody | ScoreBody,
    texts: Sequence[Prompt],
    reading: _Reading,
    request: Request,
    served: Served,
    state: ServerState,
) -> tuple[list[bytes], int]:
    """The vectors as FP32, and how many tokens were read. What can be refused is refused before work is done."""
    if (task := served.engine.limits.task) != "embed":
        does = "writes text" if task == "generate" else "scores labels"
        message = f"This model {does} and makes no vectors; name an embedding model for this route."
        raise Fault(Code.INVALID_PARAMETER, message, param="model")
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    before, most = reading.prompt(served, texts), most_tokens(body, served, is_pair=False)
    with served.lease(), served.admission.reserve(1) as reservation:
        ids_of_texts = await _read(texts, before, most, reading, served, request, state)
        tokens, tenant_request = [len(ids) for ids in ids_of_texts], request.scope["tenant_request"]
        embed = partial(served.engine.embed, ids_of_texts, reading.dimensions)
        vectors = await until_disconnect(request, at_once(embed, tokens, reservation, tenant_request))
    return vectors, sum(tokens)


async def _read(
    texts: Sequence[Prompt],
    before: str,
    most: int | None,
    reading: _Reading,
    served: Served,
    request: Request,
    state: ServerState,
) -> list[list[int]]:
    """Token ids of each text, with `before` put before it; inputs that are ids stay as they are."""
    texts_to_read = [
        TextRequest(before + text, None, most, reading.document if i in reading.documents else None, before=before)
        for i, text in enumerate(texts)
        if isinstance(text, str)
    ]
    read = iter(await until_disconnect(request, state.parser.texts(served, texts_to_read)) if texts_to_read else [])
    rows = [next(read)[0] if isinstance(text, str) else text for text in texts]
    rows = [served.tokenizer.first_of(ids, most) if most else ids for ids in rows]
    for ids in rows:
        check_fit(served, len(ids))
    return rows


def _numbers(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def _cosine(one: bytes, other: bytes) -> float:
    a, b = _numbers(one), _numbers(other)
    size = math.sqrt(_dot(a, a) * _dot(b, b))
    return max(-1.0, min(1.0, _dot(a, b) / size)) if size else 0.0


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


# -- labels ------------------------------------------------------------------------------------------------------------


async def _cross_encode(
    body: RerankBody | ScoreBody,
    pairs: Sequence[tuple[str, str]],
    request: Request,
    served: Served,
    state: ServerState,
) -> tuple[list[float], int]:
    """One score for each pair, and how many tokens were read. Fault: the model has more than one label."""
    if (labels := len(_labels(served))) != 1:
        message = f"This model scores {labels} labels and no relevance; ask /classify for them."
        raise Fault(Code.INVALID_PARAMETER, message, param="model")
    most, around = most_tokens(body, served, is_pair=True), served.engine.info.get("pair")
    document = body.max_tokens_per_doc if isinstance(body, RerankBody) else None
    texts = [TextRequest(one, two, most, document, around) for one, two in pairs]
    rows, tokens = await _scores(body, texts, served, request, state)
    return [row[0] for row in rows], tokens


def _labels(served: Served) -> list[str]:
    """The model's labels. Fault: it has none."""
    if served.engine.limits.task != "classify":
        message = "This model has no labels; name a classifier or a cross-encoder for this route."
        raise Fault(Code.INVALID_PARAMETER, message, param="model")
    labels: list[str] = served.engine.info["labels"]
    return labels


async def _scores(
    body: ClassifyBody | RerankBody | ScoreBody,
    texts: Sequence[TextRequest],
    served: Served,
    request: Request,
    state: ServerState,
) -> tuple[list[list[float]], int]:
    """The score of every label for each text, or pair of texts, and how many tokens were read."""
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    with served.lease(), served.admission.reserve(1) as reservation:
        read = await until_disconnect(request, state.parser.texts(served, texts))
        ids, segments = [r[0] for r in read], [r[1] for r in read]
        tokens, classify = [len(i) for i in ids], partial(served.engine.classify, ids, segments)
        scores = await until_disconnect(
            request, at_once(classify, tokens, reservation, request.scope["tenant_request"])
        )
    return scores, sum(tokens)


# -- one call of the engine --------------------------------------------------------------------------------------------


async def at_once(
    call: Callable[[], Awaitable[T]], tokens: Sequence[int], reservation: Reservation, tenant_request: TenantRequest
) -> T:
    """The engine's answer to texts of so many tokens. Fault: it refuses them, has stopped, or they are too many."""
    tenant_request.reserve_tokens(sum(tokens))
    outcome: Outcome = "failed"
    (slot,) = reservation.admit([sum(tokens)])  # one, however many its texts are
    try:
        tenant_request.usage.prompt += sum(tokens)
        answer = await call()
        outcome = "ok"
        return answer
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error)) from None
    except Fp8ServeError as error:
        raise Fault(Code.ENGINE_DOWN, f"The engine stopped while it was answering: {error}", retry_after=2) from None
    finally:
        slot.close(outcome)


def most_tokens(body: Truncating, served: Served, *, is_pair: bool) -> int | None:
    """How many tokens of a text, or a pair, are read; None: all. Fault: more than the model reads, or too few for a
    text."""
    longest, most = served.engine.limits.max_model_len, body.most(served.engine.limits.max_model_len)
    if most is None or most == longest:
        return most
    message, around = "", served.tokenizer.around[is_pair]
    if most > longest:
        message = f"truncate_prompt_tokens is {most}, but this model reads {longest} tokens of a text at most."
    elif most <= around:
        message = f"truncate_prompt_tokens is {most}, and {around} tokens stand around the text alone; read more."
    if message:
        raise Fault(Code.INVALID_PARAMETER, message, param="truncate_prompt_tokens")
    return most


def usage(tokens: int) -> TextUsage:
    """OpenAI's usage of a request that reads tokens and generates none."""
    return TextUsage(prompt_tokens=tokens, total_tokens=tokens)
