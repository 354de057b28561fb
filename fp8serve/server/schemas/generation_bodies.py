"""The bodies of the native routes.

The shape of `/generate` is text-generation-inference's plus `input_ids`, `model`, and the sampling parameters it lacks.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import SamplingParams, TokenId, Tokens
from fp8serve.server.schemas.answer_form import Formed, Grammar, Text
from fp8serve.server.schemas.bodies import Body, LogitBias, TemplateVariables, fields_of
from fp8serve.server.schemas.foreign_fields import GENERATE, with_foreign_fields
from fp8serve.server.schemas.messages import Message, Tools, ending_of

SPELT_OTHERWISE = ("logprobs", "prompt_logprobs", "json_schema", "regex", "grammar")
"""Fields of SamplingParams that are spelt otherwise here: `top_n_tokens` or `details`, and the fields of `Formed`."""


@with_foreign_fields(GENERATE)
@fields_of(SamplingParams, leave_out=SPELT_OTHERWISE, optional=True)
class GenerateParameters(Formed):
    """Sampling, as text-generation-inference spells it. Greedy unless `do_sample` or a sampling parameter is given."""

    do_sample: bool = False
    truncate: Tokens | None = None
    return_full_text: bool | None = None
    details: bool = False
    top_n_tokens: Annotated[int, Field(ge=0, le=5)] | None = None  # text-generation-inference takes 5
    decoder_input_details: bool | None = None
    grammar: Grammar | Text | None = None
    logit_bias: LogitBias | None = None

    @model_validator(mode="after")
    def _prompts_are_details(self) -> Self:
        if self.decoder_input_details and not self.details:
            raise PydanticCustomError("decoder_input_details", "decoder_input_details needs details: true")
        return self


class GenerateBody(Body):
    """`POST /generate`: `inputs` (text) or `input_ids` (tokens), not both."""

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
    """`POST /tokenize`: a `prompt`, or `messages` rendered through the model's chat template."""

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
        ending_of(self.messages or [], self.add_generation_prompt, self.continue_final_message)
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool = False
