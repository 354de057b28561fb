"""Turns a client's request into the engine's input: checked bodies, prompts as token ids, without delaying others.

A text that cannot fit the context, whatever its tokens are, is refused by its length (`model/text/text_bound.py`). This
does not apply to a text that `truncate` will cut, nor to a conversation, whose template may leave parts out.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi.exceptions import RequestValidationError

from fp8serve.errors import Fp8ServeError, MachineError, TokenizerError
from fp8serve.logs import LogFormat
from fp8serve.model.text.tokenizer_facts import TokenTable
from fp8serve.server.faults import Code, Fault
from fp8serve.server.parsing.parser_pool import SHORT, Allowance, ParserPool
from fp8serve.server.parsing.sizes import Sizes, too_long
from fp8serve.server.parsing.texts import EncodedText, TextRequest
from fp8serve.server.schemas.messages import Ending, Message, plain_messages
from fp8serve.server.serving.generation import Echo
from fp8serve.server.serving.served import Served
from fp8serve.server.settings import ServerLimits

Ids = tuple[int, ...]
MAX_CHECKED_FORMS = 64
SHORT_SECONDS = 2.0
"""Processor time to tokenize a short text, a thousand times what it takes: others wait for the same processes."""
Prompt = str | list[int]


class RequestParser:
    """Reads prompts and bodies within the limits of one server."""

    def __init__(self, limits: ServerLimits, log_format: LogFormat = "plain") -> None:
        self.pool = ParserPool(limits.reading_bytes, log_format)
        self.limits = limits
        self._tables = asyncio.Lock()
        self._good_forms: dict[bytes, None] = {}  # read recently, the oldest first
        self.allowance = Allowance(limits.reading_seconds, limits.reading_memory)

    async def prompts(self, served: Served, prompts: Sequence[Prompt], cut: int | None = None) -> list[Ids]:
        """Token ids of each prompt; with `cut`, only the last so many. Fault for one that is empty or too long."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts if cut is None else ():
            check_fit(served, served.tokenizer.fewest_tokens(text), "at least ")
        encoded = iter(await self._encode(served, texts, cut) if texts else [])
        all_ids = [next(encoded) if isinstance(prompt, str) else _last(prompt, cut) for prompt in prompts]
        for ids in all_ids:
            check_fit(served, len(ids))
        return [tuple(ids) for ids in all_ids]

    async def texts(self, served: Served, requests: Sequence[TextRequest]) -> list[EncodedText]:
        """The token ids of each text, or pair of texts, and for each id its text; all have the same `around` and
        `before`.

        Fault: one is too long, or has no tokens.
        """
        texts = [text or "" for one in requests for text in (one.first, one.second)]
        for one in requests:
            least = sum(map(served.tokenizer.fewest_tokens, (one.first, one.second or "")))
            check_fit(served, 0 if one.is_cut else least, "at least ")
        pieces = [text.encode() for text in texts]
        head = {
            "op": "pairs",
            "lengths": [len(piece) for piece in pieces],
            "forms": [(one.second is None, one.most, one.document) for one in requests],
            "around": requests[0].around,
            "before": requests[0].before,
        }
        read = (await self._ask(served, head, b"".join(pieces)))[0]["pairs"]
        for ids, _ in read:
            check_fit(served, len(ids))
        return [(ids, segments) for ids, segments in read]

    async def _encode(self, served: Served, texts: list[str], cut: int | None) -> list[list[int]]:
        pieces = [text.encode() for text in texts]
        head = {"op": "encode", "lengths": [len(p) for p in pieces], "special": True, "keep": cut}
        return await self._ids(served, head, b"".join(pieces))

    async def conversation(
        self, served: Served, messages: list[Message], variables: dict[str, Any], ending: Ending
    ) -> tuple[Ids, str]:
        """The conversation through the model's own template, and the text of its last tokens. Fault when the model has
        no template, or it refuses the messages."""
        head = {"op": "chat", "ending": ending, "variables": variables, "keep": None}
        answer, _ = await self._ask(served, head, plain(messages))
        return tuple(_fitting(served, answer["prompts"])[0]), answer["end"]

    async def echoes(self, served: Served, prompts: Sequence[Ids], skip_special: bool) -> list[Echo]:
        """The texts of prompts, with or without special tokens."""
        head = {"op": "echo", "skip": skip_special}
        texts, lengths = json.loads(await self.render(served, head, json.dumps(prompts).encode()))
        return list(map(Echo, texts, lengths))

    async def need_token_texts(self, served: Served) -> None:
        """Has the texts of all tokens written down in `served.tokenizer.table`, if they are not yet."""
        async with self._tables:
            if served.tokenizer.table is None:
                head = {"op": "table", "size": served.engine.limits.vocab_size}
                served.tokenizer.table = TokenTable(await self.render(served, head, b""))

    async def count(self, served: Served, messages: list[Message], variables: dict[str, Any], ending: Ending) -> int:
        """How many tokens the conversation has, even if they are more than the context holds."""
        head = {"op": "count", "ending": ending, "variables": variables}
        return int((await self._ask(served, head, plain(messages)))[0]["count"])

    async def form(self, form: dict[str, str]) -> None:
        """RequestError when answers cannot have the form, a field of SamplingParams and its text."""
        text = json.dumps(form).encode()
        if form and text not in self._good_forms:
            await self.pool.read({"op": "form"}, text, self.allowance)
            self._good_forms[text] = None
            if len(self._good_forms) > MAX_CHECKED_FORMS:
                self._good_forms.pop(next(iter(self._good_forms)))

    async def _ids(self, served: Served, head: dict[str, Any], body: bytes) -> list[list[int]]:
        answer, _ = await self._ask(served, head, body)
        return _fitting(served, answer["prompts"])

    async def render(self, served: Served, head: dict[str, Any], body: bytes) -> bytes:
        """The JSON that a parser process answers with."""
        return (await self._ask(served, head, body))[1]

    async def _ask(self, served: Served, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        place = {
            "directory": str(served.source.directory.resolve()),
            "most": served.engine.limits.max_model_len,
            "template_cpu": self.limits.template_seconds,
        }
        is_short = head["op"] in ("encode", "pairs") and len(body) <= SHORT
        allowance = replace(self.allowance, cpu=min(self.allowance.cpu, SHORT_SECONDS)) if is_short else self.allowance
        try:
            return await self.pool.read(head | place, body, allowance)
        except MachineError:
            raise
        except TokenizerError as error:
            raise Fault(Code.TOKENIZER_ERROR, str(error)) from None
        except Fp8ServeError as error:
            if "variables" not in head:
                raise Fault(Code.INVALID_PARAMETER, str(error)) from None
            raise Fault(Code.TEMPLATE_ERROR, str(error), param="messages") from None

    def sizes(self, context: int) -> Sizes:
        """How much one request may hold for weights with such a context."""
        return Sizes(self.limits.prompts, self.limits.chat_messages, context, self.limits.texts)

    async def body(self, model: type[Any], raw: bytes, folder: Path, context: int) -> bytes:
        """`raw` as `model` understands it. Rows are written into `folder`, and one empty row stands for them.

        RequestValidationError, as FastAPI would raise it, or Fault.
        """
        limits = {"rows": self.limits.rows, "row_bytes": self.limits.row_bytes, "sizes": vars(self.sizes(context))}
        head = {"op": "check", "model": f"{model.__module__}:{model.__name__}", "folder": str(folder), **limits}
        answer, content = await self.pool.read(head, raw, self.allowance)
        if "complaint" in answer:
            raise RequestValidationError([answer["complaint"]])
        if "fault" in answer:
            raise Fault(Code(answer["code"]), **answer["fault"])
        return content

    async def look_at_rows(self, job: str, about: bytes) -> bytes:
        """A parser process's report on training data, as JSON. Raises the data's own errors."""
        allowance = Allowance(self.limits.validation_seconds, self.limits.validation_memory)
        return (await self.pool.look_at_rows({"op": job}, about, allowance))[1]

    async def close(self) -> None:
        await self.pool.close()


def check_fit(served: Served, tokens: int, least: str = "") -> None:
    """Fault when so many tokens of a prompt leave no room for an answer, or there are none."""
    most = served.engine.limits.max_model_len
    if tokens > most:
        raise too_long(tokens, most, least)
    if tokens == 0 and not least:
        raise Fault(Code.INVALID_PARAMETER, "The prompt has no tokens.", param="inputs")


def plain(messages: list[Message]) -> bytes:
    """Messages as a template wants them, as JSON."""
    return json.dumps(plain_messages(messages), ensure_ascii=False).encode()


def _fitting(served: Served, prompts: list[dict[str, Any]]) -> list[list[int]]:
    """The ids of prompts that a parser process has read. Fault: one is too long."""
    for prompt in prompts:
        check_fit(served, prompt["count"], "" if prompt["exact"] else "at least ")
    return [prompt["ids"] for prompt in prompts]


def _last(ids: list[int], cut: int | None) -> list[int]:
    return ids[-cut:] if cut else ids
