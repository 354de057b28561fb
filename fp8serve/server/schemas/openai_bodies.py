"""The bodies of `/v1/completions` and `/v1/chat/completions`.

The bodies have OpenAI's fields and the widely used ones of vLLM: `top_k, min_p, repetition_penalty, ignore_eos,
min_tokens, stop_token_ids, bad_words, skip_special_tokens, include_stop_str_in_output, chat_template_kwargs`.
compatibility_fields.py lists further fields, which are mapped, ignored or refused. All other fields are refused.
"""

from typing import Annotated, Any, Self

from annotated_types import Ge, Le
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import INT32, MAX_LOGPROBS, SamplingParams, StopString, TokenId, Tokens
from fp8serve.server.schemas.bodies import Body, LogitBias, Strict, TemplateVariables, explicit_options, fields_of
from fp8serve.server.schemas.compatibility_fields import CHAT, COMPLETION, SAMPLING, STORAGE, with_compatibility_fields
from fp8serve.server.schemas.messages import (
    AllowedTools,
    Effort,
    Ending,
    Message,
    Tool,
    ToolChoice,
    Tools,
    named_tools,
    prompt_ending,
    requires_call,
)
from fp8serve.server.schemas.response_format import StructuredOutputFields

OPENAI_MAX_STOP_STRINGS = 4  # OpenAI's limit; /generate has the engine's limit
Stop = StopString | Annotated[list[StopString], Field(max_length=OPENAI_MAX_STOP_STRINGS)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
RENAMED_FIELDS = ("max_new_tokens", "logprobs", "prompt_logprobs", "json_schema", "regex", "grammar")
"""Fields of SamplingParams that clients set by other names: `max_tokens`, `logprobs` (of another type in chats), `echo`
and `StructuredOutputFields`."""


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's; with include_usage, every chunk has the usage so far


@fields_of(SamplingParams, exclude=RENAMED_FIELDS, optional=True)
class SamplingBody(Body, StructuredOutputFields):
    """The fields of both bodies. `temperature`, `top_p` and `stop` have OpenAI's bounds."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    top_k: Annotated[int, Ge(-1), Le(INT32)] | None = None  # -1 means all tokens, as in vLLM
    logit_bias: LogitBias | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None  # vLLM's
    return_token_ids: bool | None = None  # vLLM's; the response also has the token ids of prompts and completions
    return_tokens_as_token_ids: bool | None = None  # vLLM's; log-probabilities name a token "token_id:N"

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream: true")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_are_not_streamed(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise PydanticCustomError("prompt_logprobs", "prompt_logprobs cannot be streamed; leave out stream")
        return self

    @model_validator(mode="after")
    def _token_ids_are_not_streamed(self) -> Self:
        if self.stream and self.return_token_ids:
            raise PydanticCustomError("return_token_ids", "return_token_ids cannot be streamed; leave out stream")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """The number of returned choices for each prompt."""
        return self.n or 1

    def sampling_values(self) -> dict[str, Any]:
        """Returns keyword arguments of SamplingParams, without the number of tokens and the log-probabilities."""
        values = explicit_options(self, SamplingParams, RENAMED_FIELDS)
        if self.top_k is not None:
            values["top_k"] = max(self.top_k, 0)
        if self.top_p == 0:  # only the most likely token remains, as in greedy decoding
            values |= {"temperature": 0.0, "top_p": 1.0}
        return values | self.constraint()


@with_compatibility_fields(COMPLETION, SAMPLING)
class CompletionBody(SamplingBody):
    """The body of `POST /v1/completions`. `prompt` is a text, a list of texts, a list of token ids, or a list of such
    lists."""

    prompt: str | Ids | Texts | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Ge(0), Le(INT32)] | None = None  # with 0, only the prompt is returned (`echo`)
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None  # OpenAI's limit
    best_of: Annotated[int, Field(ge=1)] | None = None  # the number of candidates for the `n` most probable choices
    echo: bool | None = None  # text and logprobs begin with the prompt

    @model_validator(mode="after")
    def _best_of_is_at_least_n(self) -> Self:
        if self.best_of is not None and self.best_of < self.num_choices:
            raise PydanticCustomError("best_of", "best_of must be at least n")
        if self.stream and self.selects_best:
            raise PydanticCustomError("best_of", "best_of cannot be streamed; leave out stream or best_of")
        return self

    @model_validator(mode="after")
    def _returns_prompt_or_completion(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise PydanticCustomError("max_tokens", "max_tokens: 0 needs echo: true or prompt_logprobs")
        return self

    @property
    def num_candidates(self) -> int:
        """The number of generated choices for each prompt, of which `num_choices` are returned."""
        return self.best_of or self.num_choices

    @property
    def selects_best(self) -> bool:
        return self.num_candidates > self.num_choices

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts as a list."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def params(self, max_tokens: int) -> SamplingParams:
        """Returns the sampling parameters. With `max_tokens` 0, one token is generated but not returned."""
        counts = [n for n in (self.prompt_logprobs, self.logprobs if self.echo else None) if n is not None]
        prompt_logprobs = max(counts, default=None)
        logprobs = 0 if self.selects_best and self.logprobs is None else self.logprobs  # best_of compares logprobs
        options = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, **self.sampling_values()}
        return SamplingParams(max_new_tokens=max(1, max_tokens), **options)


@with_compatibility_fields(CHAT, SAMPLING, STORAGE)
class ChatBody(SamplingBody):
    """The body of `POST /v1/chat/completions`. Without `max_tokens` or `max_completion_tokens`, the output may fill the
    context."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    chat_template_kwargs: TemplateVariables | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # vLLM's; the model continues the last message
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None  # vLLM's; a variable of the chat template

    @model_validator(mode="after")
    def _limits_and_logprobs_are_consistent(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _the_last_message_can_be_continued(self) -> Self:
        prompt_ending(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self

    @model_validator(mode="after")
    def _tool_choice_is_declared(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise PydanticCustomError("tools", "tools holds {name} more than once", {"name": duplicate})
        if (named := named_tools(self.tool_choice)) and not named.issubset(names):
            raise PydanticCustomError("tool_choice", "tool_choice names a tool that is not in tools")
        if self.requires_call and not names:
            raise PydanticCustomError("tool_choice", "tool_choice: required needs tools")
        return self

    @property
    def requires_call(self) -> bool:
        return requires_call(self.tool_choice)

    @property
    def visible_tools(self) -> list[Tool]:
        """The tools in the prompt."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        named = named_tools(self.tool_choice) if isinstance(self.tool_choice, AllowedTools) else None
        return tools if named is None else [tool for tool in tools if tool.function.name in named]

    @property
    def ending(self) -> Ending:
        """How the rendered prompt ends."""
        return prompt_ending(self.messages, self.add_generation_prompt, self.continue_final_message)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def params(self, max_tokens: int) -> SamplingParams:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        options = {"logprobs": logprobs, "prompt_logprobs": self.prompt_logprobs, **self.sampling_values()}
        return SamplingParams(max_new_tokens=max_tokens, **options)
