"""Validates request bodies and tokenizes prompts in parser processes, so that one request does not delay others.

A text that cannot fit the context, whatever its tokens are, is refused by its length (`model/text/token_bounds.py`).
This does not apply to texts that will be truncated, nor to conversations, of which a template may omit parts.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi.exceptions import RequestValidationError

from fp8serve.errors import Fp8ServeError, MachineError, TokenizerError
from fp8serve.logs import LogFormat
from fp8serve.model.text.limited_process import JobResult
from fp8serve.model.text.tokenizer_facts import TokenTable
from fp8serve.processes import Head
from fp8serve.server.faults import Code, Fault
from fp8serve.server.parsing.parser_pool import SHORT_BYTES, JobLimits, ParserPool
from fp8serve.server.parsing.sizes import SizeLimits, too_long
from fp8serve.server.parsing.texts import EncodedText, TextRequest
from fp8serve.server.schemas.messages import Ending, Message, plain_messages
from fp8serve.server.serving.generation import Echo
from fp8serve.server.serving.served_weights import ServedWeights
from fp8serve.server.settings import ServerLimits

Ids = tuple[int, ...]
MAX_CHECKED_GRAMMARS = 64
SHORT_SECONDS = 2.0
"""The limit of processor time for tokenizing a short text: a thousand times the usual time."""
Prompt = str | list[int]


class RequestParser:
    """Validates bodies and tokenizes prompts within the limits of one server."""

    def __init__(self, limits: ServerLimits, log_format: LogFormat = "plain") -> None:
        self.pool = ParserPool(limits.reading_bytes, log_format)
        self.limits = limits
        self._token_texts_lock = asyncio.Lock()
        self._valid_grammars: dict[bytes, None] = {}  # recently checked ones, the oldest first
        self.allowance = JobLimits(limits.reading_seconds, limits.reading_memory)

    async def encode_prompts(
        self, served: ServedWeights, prompts: Sequence[Prompt], field: str, max_tokens: int | None = None
    ) -> list[Ids]:
        """Returns the token ids of each prompt, truncated to the last `max_tokens`. Raises Fault for an empty or too
        long prompt. `field` is the field of the request that holds the prompts."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts if max_tokens is None else ():
            check_fit(served, served.tokenizer.min_token_count(text), field, "at least ")
        encoded: Iterator[list[int]] = iter(())
        if texts:
            pieces = [text.encode() for text in texts]
            head = {"op": "encode", "lengths": list(map(len, pieces)), "special": True, "max_tokens": max_tokens}
            answer, _ = await self.run_job(served, head, b"".join(pieces))
            encoded = iter(_checked_ids(served, answer["prompts"], field))
        all_ids = [next(encoded) if isinstance(prompt, str) else prompt[-(max_tokens or 0) :] for prompt in prompts]
        for ids in all_ids:
            check_fit(served, len(ids), field)
        return [tuple(ids) for ids in all_ids]

    async def encode_texts(
        self, served: ServedWeights, requests: Sequence[TextRequest], field: str
    ) -> list[EncodedText]:
        """Returns the token ids of each text or pair, and for each id the index of its text in the pair.

        All requests must have the same `prompt_parts` and `prefix`. Raises Fault if a text is too long or has no
        tokens. `field` is the field of the body that holds the texts.
        """
        texts = [text or "" for request in requests for text in (request.first, request.second)]
        for request in requests:
            lower_bound = sum(map(served.tokenizer.min_token_count, (request.first, request.second or "")))
            check_fit(served, 0 if request.is_truncated else lower_bound, field, "at least ")
        pieces = [text.encode() for text in texts]
        head = {
            "op": "pairs",
            "lengths": [len(piece) for piece in pieces],
            "limits": [(one.second is None, one.max_tokens, one.max_document_tokens) for one in requests],
            "prompt_parts": requests[0].prompt_parts,
            "prefix": requests[0].prefix,
        }
        pairs = (await self.run_job(served, head, b"".join(pieces)))[0]["pairs"]
        for ids, _ in pairs:
            check_fit(served, len(ids), field)
        return [(ids, segments) for ids, segments in pairs]

    async def encode_conversation(
        self, served: ServedWeights, messages: list[Message], variables: dict[str, Any], ending: Ending
    ) -> tuple[Ids, str]:
        """Returns the token ids of the conversation, rendered by the model's template, and the text of its last tokens.

        Raises Fault if the model has no template or the template refuses the messages.
        """
        head = {"op": "chat", "ending": ending, "variables": variables, "max_tokens": None}
        answer, _ = await self.run_job(served, head, messages_json(messages))
        return tuple(_checked_ids(served, answer["prompts"], "messages")[0]), answer["end"]

    async def render_echoes(self, served: ServedWeights, prompts: Sequence[Ids], skip_special: bool) -> list[Echo]:
        """Returns the texts of prompts, with or without special tokens."""
        head = {"op": "echo", "skip_special": skip_special}
        _, content = await self.run_job(served, head, json.dumps(prompts).encode())
        return list(map(Echo, *json.loads(content)))

    async def load_token_texts(self, served: ServedWeights) -> None:
        """Loads the texts of all tokens into `served.tokenizer.table`, unless they are loaded."""
        async with self._token_texts_lock:
            if served.tokenizer.table is None:
                head = {"op": "table", "size": served.engine.limits.vocab_size}
                _, content = await self.run_job(served, head, b"")
                served.tokenizer.table = TokenTable(content)

    async def count_tokens(
        self, served: ServedWeights, messages: list[Message], variables: dict[str, Any], ending: Ending
    ) -> int:
        """Returns the number of tokens of the conversation, which may exceed the context."""
        head = {"op": "count", "ending": ending, "variables": variables}
        return int((await self.run_job(served, head, messages_json(messages)))[0]["count"])

    async def check_grammar(self, grammar: dict[str, str]) -> None:
        """Raises RequestError if a grammar cannot be compiled. `grammar` maps a field of SamplingParams to its text."""
        text = json.dumps(grammar).encode()
        if grammar and text not in self._valid_grammars:
            await self.pool.run({"op": "check_grammar"}, text, self.allowance)
            self._valid_grammars[text] = None
            if len(self._valid_grammars) > MAX_CHECKED_GRAMMARS:
                self._valid_grammars.pop(next(iter(self._valid_grammars)))

    async def run_job(self, served: ServedWeights, head: Head, body: bytes) -> JobResult:
        """Runs a job of a parser process with the model's tokenizer. Returns the head and the body of its result."""
        model_fields = {
            "directory": served.directory,
            "context": served.engine.limits.max_model_len,
            "template_cpu": self.limits.template_seconds,
        }
        is_short = head["op"] in ("encode", "pairs") and len(body) <= SHORT_BYTES
        allowance = replace(self.allowance, cpu=min(self.allowance.cpu, SHORT_SECONDS)) if is_short else self.allowance
        try:
            return await self.pool.run(head | model_fields, body, allowance)
        except MachineError:
            raise
        except TokenizerError as error:
            raise Fault(Code.TOKENIZER_ERROR, str(error)) from None
        except Fp8ServeError as error:
            if "variables" not in head:
                raise Fault(Code.INVALID_PARAMETER, str(error)) from None
            raise Fault(Code.TEMPLATE_ERROR, str(error), param="messages") from None

    def size_limits(self, context: int) -> SizeLimits:
        """Returns the limits of one request to a model with this context length."""
        return SizeLimits(self.limits.prompts, self.limits.chat_messages, context, self.limits.texts)

    async def check_body(self, model: type[Any], raw: bytes, folder: Path, context: int) -> bytes:
        """Validates the body `raw` as the pydantic `model` and returns it as JSON.

        Rows of training data are written to files in `folder` and replaced by one empty row. Raises
        RequestValidationError as FastAPI would, or Fault.
        """
        limits = {
            "rows": self.limits.rows,
            "row_bytes": self.limits.row_bytes,
            "sizes": vars(self.size_limits(context)),
        }
        head = {"op": "check", "model": f"{model.__module__}:{model.__name__}", "folder": str(folder), **limits}
        answer, content = await self.pool.run(head, raw, self.allowance)
        if "complaint" in answer:
            raise RequestValidationError([answer["complaint"]])
        if "fault" in answer:
            raise Fault(Code(answer["code"]), **answer["fault"])
        return content

    async def inspect_rows(self, job: str, request: bytes) -> bytes:
        """Runs a job on training data and returns its result. Raises DataError for bad data."""
        allowance = JobLimits(self.limits.validation_seconds, self.limits.validation_memory)
        return (await self.pool.inspect_rows({"op": job}, request, allowance))[1]

    async def close(self) -> None:
        await self.pool.close()


def check_fit(served: ServedWeights, tokens: int, field: str, qualifier: str = "") -> None:
    """Raises Fault if the prompt in `field` of a request has no tokens or more than the context.

    `qualifier` is "at least " if `tokens` is a lower bound of the prompt's tokens.
    """
    context = served.engine.limits.max_model_len
    if tokens > context:
        raise too_long(tokens, context, qualifier)
    if tokens == 0 and not qualifier:
        raise Fault(Code.INVALID_PARAMETER, "The prompt has no tokens.", param=field)


def messages_json(messages: list[Message]) -> bytes:
    """Returns messages as JSON, in the form that chat templates expect."""
    return json.dumps(plain_messages(messages), ensure_ascii=False).encode()


def _checked_ids(served: ServedWeights, prompts: list[dict[str, Any]], field: str) -> list[list[int]]:
    """Returns the token ids of prompts that a parser process tokenized. Raises Fault as `check_fit` does."""
    for prompt in prompts:
        check_fit(served, prompt["count"], field, "" if prompt["exact"] else "at least ")
    return [prompt["ids"] for prompt in prompts]
