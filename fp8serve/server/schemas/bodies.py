"""The common rules of all request bodies: no unknown fields, no coercion, no NaN, no infinity, no lone surrogate,
no deep nesting.

`Strict` is the base of every object that a client sends, `Body` of the outermost one. Fields of other projects that are
not taken as they are stand in `FOREIGN` (foreign_fields.py): those that would change an answer may only hold a value
that asks for nothing. Bounds that depend on the server (context length, number of prompts) are checked in
`parsing/sizes.py`.

Fields that are options of another package take names, types, bounds and texts from its dataclass, unless the body
declares them itself:

    @fields_of(SamplingParams, optional=True)
    class GenerateParameters(Strict): ...
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import MAX_BIASED
from fp8serve.options import Option, options_of

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


@dataclass(frozen=True)
class ForeignField:
    """A field of another project's requests that is not taken as it is. `to`: our field, if it is mapped. `note`: why
    it is ignored, or what to send instead. `harmless`: values of a refused field, beside null, that ask for nothing.
    """

    name: str
    project: str
    treatment: Literal["mapped", "ignored", "refused"]
    to: str = ""
    note: str = ""
    harmless: tuple[Any, ...] = ()

    @property
    def sentence(self) -> str:
        if self.treatment == "mapped":
            return f"Mapped to `{self.to}`."
        values = f", except {', '.join(f'`{json.dumps(value)}`' for value in self.harmless)}" if self.harmless else ""
        return f"{self.treatment.capitalize()}{values}. {self.note}".strip()

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether the value is harmless; true is no number here, and 1.0 is 1."""
        return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.harmless)


class Strict(BaseModel):
    """No unknown fields, no coercion, no NaN or infinity; null as if the field were not there."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_default=False, protected_namespaces=()
    )

    FOREIGN: ClassVar[dict[str, ForeignField]] = {}

    @model_validator(mode="before")
    @classmethod
    def _omit_nulls(cls, data: Any) -> Any:
        """Null means that a field is not given: it gets its default, or is missing. Unknown names are retained."""
        if not isinstance(data, dict) or None not in data.values():
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in data.items() if value is not None or key not in known}

    @model_validator(mode="after")
    def _refuse_unimplemented(self) -> Self:
        for name in self.model_fields_set & self.FOREIGN.keys():
            row, value = self.FOREIGN[name], getattr(self, name)
            if row.treatment == "refused" and value is not None and not row.asks_for_nothing(value):
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "this server does not implement {name}; leave it out",
                    {"name": name, "instead": row.note},
                )
        return self


MAX_LEVELS = 200
"""Objects and lists inside one another in a body. Code that handles JSON by recursion fails at about 480, and schemas
are refused beyond 128."""


class Body(Strict):
    """The outermost object; it also renames mapped fields, bounds the nesting, and checks that every string is
    well-formed Unicode."""

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, data: Any) -> Any:
        rows = [cls.FOREIGN[name] for name in cls.FOREIGN.keys() & data.keys()] if isinstance(data, dict) else []
        names = {row.name: row.to for row in rows if row.treatment == "mapped"}
        if twice := next((old for old, new in names.items() if data[old] is not None and new in data), None):
            raise PydanticCustomError("twice", "give either {old} or {new}", {"old": twice, "new": names[twice]})
        renamed = {new: data[old] for old, new in names.items() if data[old] is not None}
        return {k: v for k, v in data.items() if k not in names} | renamed if names else data

    @model_validator(mode="before")
    @classmethod
    def _well_formed(cls, data: Any) -> Any:
        level = [data]
        for _ in range(MAX_LEVELS + 1):
            if not all(_encodable(item) for item in level if isinstance(item, str)):
                raise PydanticCustomError("surrogate", "a string holds half of a surrogate pair, which no text does")
            if not (level := list(_members(level))):
                return data
        raise PydanticCustomError(
            "nesting", "more than {levels} objects and lists stand inside one another", {"levels": MAX_LEVELS}
        )


def _members(level: Iterable[Any]) -> Iterator[Any]:
    """What the lists and objects of a level hold, keys included."""
    for item in level:
        if isinstance(item, dict):
            yield from item
            yield from item.values()
        elif isinstance(item, list):
            yield from item


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


AnyBody = TypeVar("AnyBody", bound=Strict)
NOTHING: Mapping[str, str] = MappingProxyType({})


def fields_of(
    source: type, *, leave_out: Collection[str] = (), renamed: Mapping[str, str] = NOTHING, optional: bool = False
) -> Callable[[type[AnyBody]], type[AnyBody]]:
    """Adds the options of `source`, under the wire's names if they are `renamed`. `optional`: null or a missing field
    leaves the choice to `source`.
    """

    def derive(body: type[AnyBody]) -> type[AnyBody]:
        options = {renamed.get(o.name, o.name): o for o in options_of(source) if o.name not in leave_out}
        added: dict[str, Any] = {
            name: _field(option, optional) for name, option in options.items() if name not in body.model_fields
        }
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **added)

    return derive


def given(body: Strict, source: type, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The options of `source` that `body` gives, as keyword arguments for it."""
    names = (o.name for o in options_of(source) if o.name not in leave_out)
    return {name: value for name in names if (value := getattr(body, name, None)) is not None}


def _field(option: Option, optional: bool) -> tuple[Any, Any]:
    kind = _as_json(option)
    if optional:
        return kind | None, Field(None, description=option.about.text)
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    return kind, Field(default, description=option.about.text)


def _as_json(option: Option) -> Any:
    """The type in JSON: a list if the option is a tuple."""
    plain = option.about.narrowed or option.plain
    if get_origin(plain) is tuple:
        plain = list[get_args(plain)[0]]  # type: ignore[misc]  # a type that is known when it runs
    return Annotated[(plain, *get_args(option.kind)[1:])]
