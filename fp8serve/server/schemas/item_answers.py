"""The shapes of the answers of `/v1/responses`; `responses.py` has those of other routes."""

from typing import Literal

from fp8serve.server.schemas.responses import CachedTokens, JsonObject, ResponseShape

Status = Literal["completed", "incomplete"]


class OutputText(ResponseShape):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[None]


class OutputMessage(ResponseShape):
    id: str
    status: Status
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(ResponseShape):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ResponseShape):
    id: str
    status: Status
    type: Literal["reasoning"]
    summary: list[None]
    content: list[ReasoningText]


class OutputCall(ResponseShape):
    id: str
    status: Status
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ReasoningTokens(ResponseShape):
    reasoning_tokens: int


class ItemUsage(ResponseShape):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Incomplete(ResponseShape):
    reason: Literal["max_output_tokens"]


class ReasoningAsked(ResponseShape):
    effort: str | None
    summary: None


class TextAsked(ResponseShape):
    format: JsonObject


class ItemResponse(ResponseShape):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Status
    error: None
    incomplete_details: Incomplete | None
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ItemUsage
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    tools: list[JsonObject]
    tool_choice: str | JsonObject
    text: TextAsked
    reasoning: ReasoningAsked
    metadata: dict[str, str]
    user: str | None
    previous_response_id: None
    store: Literal[False]
    background: Literal[False]
    truncation: Literal["disabled"]
