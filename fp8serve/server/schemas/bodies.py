"""The base classes of request bodies. They refuse unknown fields, coercion, NaN, infinity, invalid Unicode and deep
nesting.

`Strict` is the base of all objects in requests and `Body` of the outermost object. `COMPATIBILITY_FIELDS`
(compatibility_fields.py) are fields of other APIs; a refused one may only have a value that changes nothing. Limits of
this server, such as the number of prompts, are checked in `parsing/sizes.py`.

`fields_of` adds the options of a dataclass as fields, with their names, types, bounds and descriptions, unless the body
declares them:

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

from fp8serve.engine.sampling_params import MAX_BIASED_TOKENS
from fp8serve.options import Option, options_of

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Bias],
    Field(max_length=MAX_BIASED_TOKENS, description="Added to the logits of these tokens, by token id."),
]


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    if reserved := sorted(RESERVED_VARIABLES & variables.keys()):
        raise PydanticCustomError("template_variable", "{name} is set by the server", {"name": reserved[0]})
    return variables


RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
TemplateVariables = Annotated[
    dict[str, Any],
    Field(max_length=64, description="Additional variables for the model's chat template."),
    AfterValidator(_check_variables),
]


@dataclass(frozen=True)
class CompatibilityField:
    """A request field of another API that the body does not declare.

    Args:
        to: the field to which a mapped field is renamed.
        note: why a field is ignored, or what to send instead of a refused field.
        neutral_values: the values of a refused field, other than null, that change nothing.
    """

    name: str
    project: str
    treatment: Literal["mapped", "ignored", "refused"]
    to: str = ""
    note: str = ""
    neutral_values: tuple[Any, ...] = ()

    @property
    def description(self) -> str:
        if self.treatment == "mapped":
            return f"Mapped to `{self.to}`."
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in self.neutral_values)
        values = f", except {neutral}" if self.neutral_values else ""
        return f"{self.treatment.capitalize()}{values}. {self.note}".strip()

    def is_neutral(self, value: Any) -> bool:
        """Returns whether the value changes nothing. 1.0 equals 1, but true does not."""
        return any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self.neutral_values
        )


class Strict(BaseModel):
    """The base class of objects in requests. It refuses unknown fields, coercion, NaN and infinity, and treats null as
    an omitted field."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_default=False, protected_namespaces=()
    )

    COMPATIBILITY_FIELDS: ClassVar[dict[str, CompatibilityField]] = {}

    @model_validator(mode="before")
    @classmethod
    def _omit_nulls(cls, data: Any) -> Any:
        """Removes null from declared fields, so that they get their defaults. Unknown fields stay and are refused."""
        if not isinstance(data, dict) or None not in data.values():
            return data
        declared = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in data.items() if value is not None or key not in declared}

    @model_validator(mode="after")
    def _refuse_unimplemented(self) -> Self:
        for name in self.model_fields_set & self.COMPATIBILITY_FIELDS.keys():
            field, value = self.COMPATIBILITY_FIELDS[name], getattr(self, name)
            if field.treatment == "refused" and value is not None and not field.is_neutral(value):
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "this server does not implement {name}; leave it out",
                    {"name": name, "instead": field.note},
                )
        return self


MAX_LEVELS = 200
"""The largest nesting depth of a body. Recursive JSON code fails at a depth of about 480. Schemas have a lower limit of
128."""


class Body(Strict):
    """The base class of request bodies. It also renames mapped fields, limits the nesting depth, and refuses strings
    that are invalid Unicode."""

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = [cls.COMPATIBILITY_FIELDS[name] for name in cls.COMPATIBILITY_FIELDS.keys() & data.keys()]
        names = {field.name: field.to for field in fields if field.treatment == "mapped"}
        if duplicate := next((old for old, new in names.items() if data[old] is not None and new in data), None):
            context = {"old": duplicate, "new": names[duplicate]}
            raise PydanticCustomError("twice", "give either {old} or {new}", context)
        renamed = {new: data[old] for old, new in names.items() if data[old] is not None}
        return {k: v for k, v in data.items() if k not in names} | renamed if names else data

    @model_validator(mode="before")
    @classmethod
    def _check_text_and_depth(cls, data: Any) -> Any:
        level = [data]
        for _ in range(MAX_LEVELS + 1):
            if not all(_is_valid_unicode(item) for item in level if isinstance(item, str)):
                raise PydanticCustomError("surrogate", "a string is invalid Unicode: it holds half of a surrogate pair")
            if not (level := list(_members(level))):
                return data
        raise PydanticCustomError(
            "nesting", "objects and lists are nested deeper than {levels}", {"levels": MAX_LEVELS}
        )


def _members(level: Iterable[Any]) -> Iterator[Any]:
    """Yields the keys and values of the objects and the elements of the lists in `level`."""
    for item in level:
        if isinstance(item, dict):
            yield from item
            yield from item.values()
        elif isinstance(item, list):
            yield from item


def _is_valid_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


BodyT = TypeVar("BodyT", bound=Strict)
NO_NAMES: Mapping[str, str] = MappingProxyType({})


def fields_of(
    source: type, *, exclude: Collection[str] = (), renamed: Mapping[str, str] = NO_NAMES, optional: bool = False
) -> Callable[[type[BodyT]], type[BodyT]]:
    """Returns a class decorator that adds the options of the dataclass `source` as fields. `renamed` maps names of
    options to names of fields. With `optional`, the fields default to None, which stands for the default of `source`.
    """

    def add_fields(body: type[BodyT]) -> type[BodyT]:
        options = {renamed.get(o.name, o.name): o for o in options_of(source) if o.name not in exclude}
        fields: dict[str, Any] = {
            name: _field(option, optional) for name, option in options.items() if name not in body.model_fields
        }
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields)

    return add_fields


def explicit_options(body: Strict, source: type, exclude: Collection[str] = ()) -> dict[str, Any]:
    """Returns the options of `source` that the request sets, as keyword arguments of `source`."""
    names = (o.name for o in options_of(source) if o.name not in exclude)
    return {name: value for name in names if (value := getattr(body, name, None)) is not None}


def _field(option: Option, optional: bool) -> tuple[Any, Any]:
    json_type = _json_type(option)
    if optional:
        return json_type | None, Field(None, description=option.about.text)
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    return json_type, Field(default, description=option.about.text)


def _json_type(option: Option) -> Any:
    """Returns the type of an option's field. Tuples are lists in JSON."""
    type_ = option.about.narrowed or option.value_type
    if get_origin(type_) is tuple:
        type_ = list[get_args(type_)[0]]  # type: ignore[misc]  # mypy expects a static type
    return Annotated[(type_, *get_args(option.annotation)[1:])]
