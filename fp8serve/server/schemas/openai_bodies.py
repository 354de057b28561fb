"""The bodies of `/v1/completions` and `/v1/chat/completions`, strictly.

OpenAI's fields, and those of vLLM that are in wide use (`top_k, min_p, repetition_penalty, ignore_eos, min_tokens,
stop_token_ids, bad_words, skip_special_tokens, include_stop_str_in_output, chat_template_kwargs`). foreign_fields.py
lists those of other projects that are mapped, ignored or refused. Any other name is refused.
"""

from typing import Annotated, Any, Self

from annotated_types import Ge, Le
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import INT32, MAX_LOGPROBS, SamplingParams, StopString, TokenId, Tokens
from fp8serve.server.schemas.answer_form import Formed, Text
from fp8serve.server.schemas.bodies import Body, LogitBias, Strict, TemplateVariables, fields_of, given
from fp8serve.server.schemas.foreign_fields import CHAT, COMPLETION, SAMPLED, STORED, with_foreign_fields
from fp8serve.server.schemas.messages import (
    AllowedTools,
    Effort,
    Ending,
    Message,
    Tool,
    ToolChoice,
    Tools,
    ending_of,
    must_call,
    named_by,
)

MAX_STOPS = 4  # as OpenAI documents it; /generate accepts as many as the engine
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]


SPELT_OTHERWISE = ("max_new_tokens", "logprobs", "prompt_logprobs", "json_schema", "regex", "grammar")
"""Fields of SamplingParams that are spelt otherwise here: `max_tokens`, `logprobs`, `echo` and those of `Formed`."""


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, every chunk has the usage so far


@fields_of(SamplingParams, leave_out=SPELT_OTHERWISE, optional=True)
class SampledBody(Body, Formed):
    """The common fields of both routes. `temperature`, `top_p` and `stop` have the bounds that OpenAI documents."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    top_k: Annotated[int, Ge(-1), Le(INT32)] | None = None  # vLLM's -1 means all
    logit_bias: LogitBias | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None  # as vLLM answers it
    grammar: Text | None = None

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

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def returned(self) -> int:
        """Choices of each prompt."""
        return self.n or 1

    def sampling_values(self) -> dict[str, Any]:
        """Keyword arguments of SamplingParams, except the number of tokens and the log-probabilities."""
        values = given(self, SamplingParams, SPELT_OTHERWISE)
        if self.top_k is not None:
            values["top_k"] = max(self.top_k, 0)
        if self.top_p == 0:  # keeps only the likeliest token, as greedy decoding does
            values |= {"temperature": 0.0, "top_p": 1.0}
        return values | self.form()


@with_foreign_fields(COMPLETION, SAMPLED)
class CompletionBody(SampledBody):
    """`POST /v1/completions`. `prompt`: a text, some texts, token ids, or some lists of ids."""

    prompt: str | Ids | Texts | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Ge(0), Le(INT32)] | None = None  # 0: the prompt alone, which `echo` returns
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None  # as OpenAI documents it
    best_of: Annotated[int, Field(ge=1)] | None = None  # answers of which the `n` most probable are returned
    echo: bool | None = None  # the prompt before the answer, in its log-probabilities as well

    @model_validator(mode="after")
    def _the_best_are_chosen_at_the_end(self) -> Self:
        if self.best_of is not None and self.best_of < self.returned:
            raise PydanticCustomError("best_of", "best_of must be at least n")
        if self.stream and self.chooses:
            raise PydanticCustomError("best_of", "best_of cannot be streamed; leave out stream or best_of")
        return self

    @model_validator(mode="after")
    def _something_is_returned(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise PydanticCustomError("max_tokens", "max_tokens: 0 needs echo: true or prompt_logprobs")
        return self

    @property
    def generated(self) -> int:
        """Answers to each prompt, of which some are returned."""
        return self.best_of or self.returned

    @property
    def chooses(self) -> bool:
        return self.generated > self.returned

    def prompts(self) -> list[str | list[int]]:
        """One item for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def params(self, max_tokens: int) -> SamplingParams:
        """The parameters. If no token is wanted, one is generated to end the request, and not shown."""
        counts = [
            number for number in (self.prompt_logprobs, self.logprobs if self.echo else None) if number is not None
        ]
        of_prompt = max(counts, default=None)
        logprobs = 0 if self.chooses and self.logprobs is None else self.logprobs  # the best are chosen by them
        options = {"logprobs": logprobs, "prompt_logprobs": of_prompt, **self.sampling_values()}
        return SamplingParams(max_new_tokens=max(1, max_tokens), **options)


@with_foreign_fields(CHAT, SAMPLED, STORED)
class ChatBody(SampledBody):
    """`POST /v1/chat/completions`. Without `max_tokens` or `max_completion_tokens` the answer may fill the context."""

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
    continue_final_message: bool | None = None  # the model goes on with the last of messages, as in vLLM
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None  # vLLM's; for the chat template

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _the_last_message_can_be_continued(self) -> Self:
        ending_of(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self

    @model_validator(mode="after")
    def _tools_are_there(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise PydanticCustomError("tools", "tools holds {name} more than once", {"name": twice})
        if (named := named_by(self.tool_choice)) and not named.issubset(names):
            raise PydanticCustomError("tool_choice", "tool_choice names a tool that is not in tools")
        if self.must_call and not names:
            raise PydanticCustomError("tool_choice", "tool_choice: required needs tools")
        return self

    @property
    def must_call(self) -> bool:
        return must_call(self.tool_choice)

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is shown."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        named = named_by(self.tool_choice) if isinstance(self.tool_choice, AllowedTools) else None
        return tools if named is None else [tool for tool in tools if tool.function.name in named]

    @property
    def ending(self) -> Ending:
        """What the model is to write."""
        return ending_of(self.messages, self.add_generation_prompt, self.continue_final_message)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def params(self, max_tokens: int) -> SamplingParams:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        options = {"logprobs": logprobs, "prompt_logprobs": self.prompt_logprobs, **self.sampling_values()}
        return SamplingParams(max_new_tokens=max_tokens, **options)
