"""The bodies of the native routes, strictly: unknown fields, coerced types, NaN, infinity and lone surrogates are
refused.

`Strict` is the base of every object that a client sends, `Body` of the outermost one. Bounds that depend on the
server (context length, number of prompts) are checked in the handlers, before anything reaches the engine. The shape
of `/generate` is text-generation-inference's plus `input_ids`, `model`, and the sampling parameters it lacks; its
fields that we do not implement are listed in `REFUSED` and may only hold their do-nothing value, so that nothing is
ever silently ignored.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 4
MAX_STOP_CHARS = 256

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Strict(BaseModel):
    """No unknown fields, no coercion, no NaN or infinity."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_default=False, protected_namespaces=()
    )

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Field name -> the values that ask for nothing; any other is refused by name."""

    @model_validator(mode="after")
    def _refuse_unimplemented(self) -> Self:
        for name, harmless in self.REFUSED.items():
            if getattr(self, name) not in harmless:
                raise PydanticCustomError(
                    "unsupported_parameter", "this server does not implement {name}; leave it out", {"name": name}
                )
        return self


class Body(Strict):
    """An outermost object: also checks that every string in it is well-formed Unicode."""

    @model_validator(mode="before")
    @classmethod
    def _well_formed(cls, data: Any) -> Any:
        if not well_formed(data):
            raise PydanticCustomError("surrogate", "a string holds half of a surrogate pair, which no text does")
        return data


def well_formed(value: Any) -> bool:
    """Whether every string inside `value`, keys included, is Unicode text. Iterative: nesting costs no stack."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if not _encodable(item):
                return False
        elif isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return True


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Grammar(Strict):
    """Accepted as a shape, refused as a request (see GenerateParameters.REFUSED)."""

    type: Literal["json", "regex", "json_schema"]
    value: Any


class GenerateParameters(Strict):
    """Sampling, as text-generation-inference spells it. Greedy unless `do_sample` or a sampling parameter is given."""

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "adapter_id": (None,),
        "best_of": (None, 1),
        "decoder_input_details": (False, None),
        "grammar": (None,),
        "typical_p": (None,),
        "watermark": (False, None),
    }

    max_new_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    do_sample: bool = False
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Seed | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    truncate: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_full_text: bool | None = None
    details: bool = False
    top_n_tokens: Annotated[int, Field(ge=0, le=5)] | None = None
    adapter_id: str | None = None
    best_of: int | None = None
    decoder_input_details: bool | None = None
    grammar: Grammar | None = None
    typical_p: float | None = None
    watermark: bool | None = None


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
        return self


class Message(Strict):
    """One turn of a conversation; `content` is a text or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list["TextPart"], Field(min_length=1, max_length=256)] | str
    name: Annotated[str, Field(max_length=64)] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def plain(self) -> dict[str, str]:
        """What chat templates understand: a role and a string. `developer` is OpenAI's newer word for `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


class TextPart(Strict):
    type: Literal["text"]
    text: str


class TokenizeBody(Body):
    """`POST /tokenize`: a `prompt`, or `messages` rendered through the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_source", "give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool = False


class ActivateBody(Body):
    """`POST /models/{name}/activate`: a finished job's id, or "base" for the model the server was started with."""

    source: Annotated[str, Field(min_length=1, max_length=128)]


class ActivateJobBody(Body):
    """`POST /finetune/{id}/activate`: nothing, or the step that the job's result must be of."""

    step: Annotated[int, Field(ge=1, le=10**9)] | None = None
