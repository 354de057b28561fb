"""A model's chat template, rendered in a process with limits; and that process.

A template is a stranger's program (chat.py), so commands, jobs and the Python API do not run it themselves. A
`LimitedTemplate` starts `python -m fp8serve.model.text.limited_template` at the first rendering, and ends it when it is
garbage itself. The process compiles the template, and renders a batch of conversations for each frame it gets: the
messages travel once, and all renderings that tell an assistant's words from the rest (turns.py) are made there. Each
rendering has its own limit of processor time. If a batch of several exceeds a limit, its conversations are tried one by
one, so that the right one is refused. A template that has exceeded a limit with one conversation alone is not run
again.

A process that has limits itself, such as a server's parser process, runs a plain `ChatTemplate`. What is not limited:
memory on macOS (limited_process.py), and the tokenizer, which runs in the caller's process.
"""

import json
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import lru_cache
from typing import Any

from fp8serve.errors import Fp8ServeError, ModelError, RequestError, one_line
from fp8serve.model.text.chat import NOTHING, ChatTemplate, Message, plain
from fp8serve.model.text.limited_process import Answer, LimitedProcess, allow, serve
from fp8serve.model.text.turns import Conversation, MarkedText, Markers, assistant_spans
from fp8serve.processes import Head, describe_error, error_of

MODULE = "fp8serve.model.text.limited_template"
SECONDS, MEMORY = 5.0, 1 << 30
"""Processor time of one rendering, and memory for a batch; a conversation of a million tokens takes a twentieth."""


class LimitedTemplate:
    """A template and the special tokens that it may write. Thread-safe, also in a process that was forked later.

    today: see `ChatTemplate`, whose errors the methods raise. ModelError also: the source is no template, or it takes
    more time or memory than it may.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], today: date | None = None) -> None:
        self.source = source
        self._template = json.dumps([source, special_tokens, None if today is None else today.isoformat()])
        self._process = LimitedProcess(MODULE, SECONDS, MEMORY)
        self._failure = ""
        weakref.finalize(self, self._process.close)

    @property
    def takes_tools(self) -> bool:
        return bool(self._result("takes_tools"))

    def render(
        self, messages: list[Message], add_generation_prompt: bool = True, *, variables: Mapping[str, Any] = NOTHING
    ) -> str:
        """See `ChatTemplate.render`."""
        return str(self._result("render", messages, add_generation_prompt, dict(variables)))

    def render_begun(self, messages: list[Message], variables: Mapping[str, Any] = NOTHING) -> str:
        """See `ChatTemplate.render_begun`."""
        return str(self._result("render_begun", messages, dict(variables)))

    def assistant_spans(
        self, conversations: Sequence[Conversation], markers: Markers
    ) -> list[MarkedText | Fp8ServeError]:
        """`turns.assistant_spans` of each conversation, or its error."""
        ends = [sorted(markers.end), sorted(markers.special)]
        calls = [[c.messages, sorted(c.skip), dict(c.variables), *ends] for c in conversations]
        results = self._results("assistant_spans", calls) if calls else []
        return [r if isinstance(r, Fp8ServeError) else (r[0], [(a, b) for a, b in r[1]]) for r in results]

    def _result(self, name: str, *arguments: Any) -> Any:
        (result,) = self._results(name, [arguments])
        if isinstance(result, Fp8ServeError):
            raise result
        return result

    def _results(self, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """The result of each call, or its error."""
        try:
            if self._failure:
                raise ModelError(self._failure)
            return self._exchange(name, calls)
        except (ModelError, RequestError) as error:
            if len(calls) > 1:
                return [result for call in calls for result in self._results(name, [call])]
            if isinstance(error, ModelError):
                self._failure = str(error)
            return [error]

    def _exchange(self, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """RequestError: a message cannot be sent. ModelError: a limit was exceeded."""
        try:
            body = json.dumps([plain(call) for call in calls]).encode()
        except (ValueError, RecursionError) as error:  # a number of 4,300 digits; lists in lists
            raise RequestError(f"A chat message cannot be written as JSON: {one_line(error)}.") from None
        head = {"op": name, "template": self._template}
        _, content = self._process.perform("The model's chat template", head, body)
        return [error_of(answer) if "error" in answer else answer["result"] for answer in json.loads(content)]


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of the call, or the error of ours that it raised."""
    try:
        return call(*arguments)
    except Fp8ServeError as error:
        return error
    except RecursionError:
        return RequestError("The conversation is nested too deeply.")


# -- the process -------------------------------------------------------------------------------------------------------


class _TimedTemplate(ChatTemplate):
    def render(self, *arguments: Any, **options: Any) -> str:
        allow(SECONDS)
        return super().render(*arguments, **options)


@lru_cache(1)
def _compiled(template: str) -> ChatTemplate:
    source, special_tokens, today = json.loads(template)
    return _TimedTemplate(source, special_tokens, None if today is None else date.fromisoformat(today))


def _takes_tools(template: ChatTemplate) -> bool:
    return template.takes_tools


def _render(template: ChatTemplate, messages: list[Message], prompted: bool, variables: dict[str, Any]) -> str:
    return template.render(messages, prompted, variables=variables)


def _spans(
    template: ChatTemplate,
    messages: list[Message],
    skip: list[int],
    variables: dict[str, Any],
    end: list[str],
    special: list[str],
) -> MarkedText:
    markers = Markers(frozenset(end), frozenset(special))
    return assistant_spans(template, Conversation(messages, skip, variables), markers)


CALLS: dict[str, Callable[..., Any]] = {
    "takes_tools": _takes_tools,
    "render": _render,
    "render_begun": ChatTemplate.render_begun,
    "assistant_spans": _spans,
}


def _perform(head: Head, body: bytes) -> Answer:
    answers = []
    for arguments in json.loads(body):
        result = outcome(lambda values: CALLS[head["op"]](_compiled(head["template"]), *values), arguments)
        answers.append(describe_error(result) if isinstance(result, Fp8ServeError) else {"result": result})
    return {}, json.dumps(answers).encode()


def main() -> int:
    serve(dict.fromkeys(CALLS, _perform))
    return 0


if __name__ == "__main__":
    sys.exit(main())
