"""The bodies of the native generation and tokenizer routes.

The body of `/generate` is what Hugging Face's InferenceClient sends, with the additional fields `input_ids` and `model`
and additional sampling parameters.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import SamplingParams, TokenId, Tokens
from fp8serve.server.schemas.bodies import Body, LogitBias, TemplateVariables, fields_of
from fp8serve.server.schemas.messages import Message, Tools, prompt_ending
from fp8serve.server.schemas.response_format import StructuredOutputFields

RENAMED_FIELDS = ("logprobs", "prompt_logprobs", "json_schema", "regex", "grammar")
"""Fields of SamplingParams that clients set by other names: `top_n_tokens`, `details` and `StructuredOutputFields`."""


@fields_of(SamplingParams, exclude=RENAMED_FIELDS, optional=True)
class GenerateParameters(StructuredOutputFields):
    """The parameters of `/generate`. Decoding is greedy unless `do_sample` or a parameter that only affects sampling is
    set."""

    do_sample: bool = False
    truncate: Tokens | None = None
    return_full_text: bool | None = None
    details: bool = False
    top_n_tokens: Annotated[int, Field(ge=0, le=5)] | None = None
    decoder_input_details: bool | None = None
    logit_bias: LogitBias | None = None

    @model_validator(mode="after")
    def _decoder_input_details_need_details(self) -> Self:
        if self.decoder_input_details and not self.details:
            raise PydanticCustomError("decoder_input_details", "decoder_input_details needs details: true")
        return self


class GenerateBody(Body):
    """The body of `POST /generate` with either `inputs` (text) or `input_ids` (token ids)."""

    inputs: Annotated[str, Field(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = None
    parameters: GenerateParameters = GenerateParameters()
    stream: bool = False
    model: str | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.inputs is None) == (self.input_ids is None):
            raise PydanticCustomError("one_prompt", "give either inputs or input_ids")
        if self.stream and self.parameters.decoder_input_details:
            raise PydanticCustomError("decoder_input_details", "decoder_input_details cannot be streamed")
        return self


class TokenizeBody(Body):
    """The body of `POST /tokenize` with either `prompt` or `messages`, which the model's chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_source", "give either prompt or messages")
        if self.tools and self.messages is None:
            raise PydanticCustomError("tools", "tools needs messages")
        if self.messages is None and self.chat_template_kwargs is not None:
            raise PydanticCustomError("chat_template_kwargs", "chat_template_kwargs needs messages")
        prompt_ending(self.messages or [], self.add_generation_prompt, self.continue_final_message)
        return self


class DetokenizeBody(Body):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool = False
