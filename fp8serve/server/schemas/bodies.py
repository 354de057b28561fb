"""The common rules of all request bodies: no unknown fields, no coercion, no NaN, no infinity, no lone surrogate.

`Strict` is the base of every object that a client sends, `Body` of the outermost one. Fields that are not implemented
are listed in `REFUSED` and may only hold a value that has no effect, so that nothing is ever silently ignored. Bounds
that depend on the server (context length, number of prompts) are checked in `parsing/sizes.py`.
"""

from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import MAX_BIASED

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Bias],
    Field(max_length=MAX_BIASED, description="Added to the logits of these tokens, by token id."),
]


def _free(variables: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(OUR_VARIABLES & variables.keys()):
        raise PydanticCustomError("template_variable", "{name} is not for clients to set", {"name": taken[0]})
    return variables


OUR_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
TemplateVariables = Annotated[
    dict[str, Any],
    Field(max_length=64, description="Further variables of the model's chat template."),
    AfterValidator(_free),
]


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
    """The outermost object; it also checks that every string in it is well-formed Unicode."""

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
