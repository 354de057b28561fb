"""Renders a model's chat template in a child process with limits of CPU time and memory (limited_process.py).

A chat template is an untrusted program, so commands, jobs and the Python API do not run it in their own process. A
`LimitedTemplate` starts `python -m fp8serve.model.text.limited_template` for the first rendering, and ends it when the
`LimitedTemplate` is garbage-collected. The child process compiles the template and processes one batch of conversations
for each message that it reads, including all renderings that assistant_spans.py needs. Each rendering has its own limit
of CPU time. If a batch exceeds a limit, its conversations are sent again one by one, so that only the faulty one gets
an error. A template that has exceeded a limit with a single conversation is not run again.

A process that has limits itself, such as the server's parser process, uses a `ChatTemplate`. The tokenizer runs in the
caller's process, without limits.
"""

import json
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import lru_cache
from typing import Any

from fp8serve.errors import Fp8ServeError, ModelError, RequestError, one_line
from fp8serve.model.text.assistant_spans import Conversation, SpannedText, SpecialTokens, assistant_spans
from fp8serve.model.text.chat import NO_VARIABLES, ChatTemplate, Message, to_json_value
from fp8serve.model.text.limited_process import JobResult, LimitedProcess, serve, set_cpu_limit
from fp8serve.processes import Head, describe_error, to_exception

MODULE = "fp8serve.model.text.limited_template"
CPU_SECONDS, MEMORY_BYTES = 5.0, 1 << 30
"""CPU time of one rendering, and memory for a batch; a conversation of a million tokens needs a twentieth of each."""


class LimitedTemplate:
    """A `ChatTemplate` that runs in a child process with limits. Thread-safe, also in processes that are forked later.

    The arguments are those of `ChatTemplate`. Methods also raise ModelError if the source is not a template, or if
    compiling or rendering it exceeds a limit.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], today: date | None = None) -> None:
        self.source = source
        self._template = json.dumps([source, special_tokens, None if today is None else today.isoformat()])
        self._process = LimitedProcess(MODULE, CPU_SECONDS, MEMORY_BYTES)
        self._failure = ""
        weakref.finalize(self, self._process.close)

    @property
    def takes_tools(self) -> bool:
        return bool(self._result("takes_tools"))

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """See `ChatTemplate.render`."""
        return str(self._result("render", messages, add_generation_prompt, dict(variables)))

    def render_to_continue(self, messages: list[Message], variables: Mapping[str, Any] = NO_VARIABLES) -> str:
        """See `ChatTemplate.render_to_continue`."""
        return str(self._result("render_to_continue", messages, dict(variables)))

    def assistant_spans(
        self, conversations: Sequence[Conversation], tokens: SpecialTokens
    ) -> list[SpannedText | Fp8ServeError]:
        """Returns `assistant_spans.assistant_spans` of each conversation, or the error that it raised."""
        token_lists = [sorted(tokens.end), sorted(tokens.all)]
        calls = [[c.messages, sorted(c.skip), dict(c.variables), *token_lists] for c in conversations]
        results = self._results("assistant_spans", calls) if calls else []
        return [r if isinstance(r, Fp8ServeError) else (r[0], [(a, b) for a, b in r[1]]) for r in results]

    def _result(self, name: str, *arguments: Any) -> Any:
        (result,) = self._results(name, [arguments])
        if isinstance(result, Fp8ServeError):
            raise result
        return result

    def _results(self, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls the function `name` with each list of arguments in the child process and returns results or errors."""
        try:
            if self._failure:
                raise ModelError(self._failure)
            return self._send(name, calls)
        except (ModelError, RequestError) as error:
            if len(calls) > 1:
                return [result for call in calls for result in self._results(name, [call])]
            if isinstance(error, ModelError):
                self._failure = str(error)
            return [error]

    def _send(self, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Raises RequestError if a message is not valid JSON, and ModelError if a limit is exceeded."""
        try:
            body = json.dumps([to_json_value(call) for call in calls]).encode()
        except (ValueError, RecursionError) as error:  # a number of 4,300 digits, or deeply nested lists
            raise RequestError(f"A chat message cannot be written as JSON: {one_line(error)}.") from None
        head = {"op": name, "template": self._template}
        _, content = self._process.run_job("The model's chat template", head, body)
        return [to_exception(entry) if "error" in entry else entry["result"] for entry in json.loads(content)]


def result_or_error(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of the call, or the Fp8ServeError that it raised."""
    try:
        return call(*arguments)
    except Fp8ServeError as error:
        return error
    except RecursionError:
        return RequestError("The conversation is nested too deeply.")


# -- child process -----------------------------------------------------------------------------------------------------


class _TimedTemplate(ChatTemplate):
    """A template that restarts the CPU-time limit of the process for each rendering."""

    def render(self, *arguments: Any, **options: Any) -> str:
        set_cpu_limit(CPU_SECONDS)
        return super().render(*arguments, **options)


@lru_cache(1)
def _compiled(template: str) -> ChatTemplate:
    source, special_tokens, today = json.loads(template)
    return _TimedTemplate(source, special_tokens, None if today is None else date.fromisoformat(today))


def _spans(
    template: ChatTemplate,
    messages: list[Message],
    skip: list[int],
    variables: dict[str, Any],
    end: list[str],
    special: list[str],
) -> SpannedText:
    tokens = SpecialTokens(frozenset(end), frozenset(special))
    return assistant_spans(template, Conversation(messages, skip, variables), tokens)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "takes_tools": lambda template: template.takes_tools,
    "render": lambda template, messages, prompt, variables: template.render(messages, prompt, variables=variables),
    "render_to_continue": ChatTemplate.render_to_continue,
    "assistant_spans": _spans,
}


def _call_function(head: Head, body: bytes) -> JobResult:
    entries = []
    for arguments in json.loads(body):
        result = result_or_error(lambda values: FUNCTIONS[head["op"]](_compiled(head["template"]), *values), arguments)
        entries.append(describe_error(result) if isinstance(result, Fp8ServeError) else {"result": result})
    return {}, json.dumps(entries).encode()


def main() -> int:
    serve(dict.fromkeys(FUNCTIONS, _call_function))
    return 0


if __name__ == "__main__":
    sys.exit(main())
