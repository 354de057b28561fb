"""Options are annotated fields of frozen dataclasses:

    temperature: Annotated[float, Ge(0), Le(100), About("0 takes the likeliest token every time.")] = 1.0

The field is the only place of the default, the bounds and the help text. The command line
(`commands/dataclass_options.py`), HTTP request bodies (`server/schemas/bodies.py`) and docs/options.md are derived from
`options_of`. `check` validates the bounds of `annotated_types` with pydantic, which is imported only then, so that
`import fp8serve` is fast.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from urllib.parse import SplitResult, urlsplit

from annotated_types import Ge, Gt, Le

from fp8serve.errors import Fp8ServeError, RequestError, one_line, shown

AUTO = "auto"  # the device that model/device.py chooses
DEVICE_HELP = "cpu, cuda, or auto: a GPU if fp8serve can use it and the model fits."


@dataclass(frozen=True)
class About:
    """The help text of an option and its properties on the command line.

    Args:
        text: the help text.
        unset: the meaning of the default None or ().
        flag: the name on the command line; None for the field's name, "" if the command line has no such option.
        metavar: the placeholder of the value in help texts.
        narrowed: the type on the command line and in request bodies, if the field accepts further types.
        private: whether `/info` hides the option, because it is a secret or a path.
    """

    text: str
    unset: str = ""
    flag: str | None = None
    metavar: str | None = None
    narrowed: Any = None
    private: bool = False


@dataclass(frozen=True)
class Option:
    """A field of a dataclass that is an option. `annotation` is its type with bounds and help text."""

    name: str
    annotation: Any
    default: Any  # MISSING if the option is required
    about: About

    @property
    def value_type(self) -> Any:
        """The type without bounds and help text, such as `int | None`."""
        return get_args(self.annotation)[0]

    def bound(self, *classes: type) -> float | None:
        """Returns the bound of one of these classes of `annotated_types`, or None."""
        bounds = (item for item in get_args(self.annotation)[1:] if isinstance(item, classes))
        return next((value for bound in bounds for value in _field_values(bound).values()), None)

    @property
    def minimum(self) -> float | None:
        return self.bound(Ge, Gt)

    @property
    def maximum(self) -> float | None:
        return self.bound(Le)


def _field_values(instance: Any) -> dict[str, Any]:
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


@cache
def options_of(cls: Any) -> tuple[Option, ...]:
    """Returns the fields of the dataclass `cls` that have an `About`, in their order."""
    hints = get_type_hints(cls, include_extras=True)
    options = []
    for f in fields(cls):
        metadata = get_args(hints[f.name])[1:] if get_origin(hints[f.name]) is Annotated else ()
        if (about := next((item for item in metadata if isinstance(item, About)), None)) is not None:
            default = f.default if f.default_factory is MISSING else f.default_factory()
            options.append(Option(f.name, hints[f.name], default, about))
    return tuple(options)


def check(options: Any, error: type[Fp8ServeError]) -> None:
    """Validates the types and bounds of a dataclass of options. The dataclass calls this in `__post_init__`. Raises
    `error` for an invalid value. Lists become tuples.
    """
    from pydantic import ValidationError

    names, validator = _names_and_validator(options.__class__)
    values = {name: getattr(options, name) for name in names}
    arguments = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    try:
        valid = validator.validate_python(arguments)
    except ValidationError as validation_error:
        raise error(_message(validation_error.errors()[0])) from None
    for name, value in values.items():
        if valid[name] is not value:
            object.__setattr__(options, name, valid[name])


@cache
def _names_and_validator(cls: Any) -> tuple[tuple[str, ...], Any]:
    """Returns the names of the fields, and a strict validator, which refuses strings and booleans as numbers, NaN and
    infinity."""
    import typing_extensions
    from pydantic import ConfigDict, TypeAdapter

    typed_dict: Any = typing_extensions.TypedDict
    fields_dict = typed_dict(cls.__name__, get_type_hints(cls, include_extras=True))
    fields_dict.__pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)
    return tuple(f.name for f in fields(cls)), TypeAdapter(fields_dict)


def _message(error: Mapping[str, Any]) -> str:
    field, *location = error["loc"]
    name = f"{field}" + "".join(f"[{part}]" for part in location if isinstance(part, int))
    invalid = (error.get("ctx") or {}).get("actual_length") or error["input"]  # the length, if that is invalid
    value = "" if error["type"] in _STATEMENTS else f", not {shown(invalid)}"
    return f"{describe_violation(name, error)}{value}."


def describe_violation(name: str, error: Mapping[str, Any]) -> str:
    """Returns one of pydantic's errors as a clause that states the rule which `name` breaks: "threads must be a whole
    number". For an error of a validator of fp8serve, the clause is the name and the validator's message. The words with
    which pydantic begins its messages, such as "Input should", are omitted.
    """
    error_type, values = str(error["type"]), dict(error.get("ctx") or {})
    if error_type in _STATEMENTS:
        return f"{name} {_STATEMENTS[error_type]}"
    for suffix in ("_type", "_parsing", "_from_float"):
        error_type = error_type.removesuffix(suffix)
    if error_type in _TYPE_NAMES:
        return f"{name} must be {_TYPE_NAMES[error_type]}"
    if error_type in _RULES:
        text = _RULES[error_type].format_map({key: str(value).removesuffix(".0") for key, value in values.items()})
        singular = re.sub(r"\b1 (item|character)s\b", r"1 \1", text)
        return f"{name} must {singular}"
    if error_type in ("value_error", "assertion_error"):  # their messages begin with the name of the exception
        return f"{name}: {one_line(values.get('error', error['msg']))}"
    message = str(error["msg"])
    if (match := _MESSAGE_OF_A_RULE.match(message)) is not None:
        return f"{name} must {message[match.end() :]}"
    return f"{name}: {message[:1].lower()}{message[1:]}"


_STATEMENTS = {
    "missing": "is missing", "missing_argument": "is missing", "missing_keyword_only_argument": "is missing",
    "missing_positional_only_argument": "is missing", "extra_forbidden": "is not a known field",
    "unexpected_keyword_argument": "is not a known field",
}  # fmt: skip
"""The clauses about fields that are missing or unknown, by the type of pydantic's error."""
_MESSAGE_OF_A_RULE = re.compile(r"[A-Z]\w*( \w+){0,3} should ")
"""The words before the rule in pydantic's messages. They are removed if the type of error has no entry below."""
_TYPE_NAMES = {
    "int": "a whole number", "float": "a number", "finite_number": "a finite number", "string": "text",
    "bool": "true or false", "list": "a list", "tuple": "a list", "dict": "an object", "model": "an object",
    "model_attributes": "an object", "dataclass": "an object", "mapping": "an object", "none_required": "null",
    "path": "a path", "int_parsing_size": "a smaller number", "string_unicode": "text in UTF-8",
}  # fmt: skip
"""The name of the required type, by the type of pydantic's error without its suffix."""
_RULES = {
    "greater_than": "be greater than {gt}", "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}", "less_than_equal": "be at most {le}",
    "multiple_of": "be a multiple of {multiple_of}", "literal_error": "be {expected}", "enum": "be {expected}",
    "too_short": "have at least {min_length} items", "too_long": "have at most {max_length} items",
    "string_too_short": "have at least {min_length} characters",
    "string_too_long": "have at most {max_length} characters",
    "string_pattern_mismatch": "match the regular expression {pattern}",
    "union_tag_invalid": "have a {discriminator} that is one of {expected_tags}",
    "union_tag_not_found": "have a {discriminator}",
}  # fmt: skip
"""Further rules, with placeholders for the values of pydantic's error."""


def known_fields(cls: type, data: object) -> dict[str, Any]:
    """Returns `data` as keyword arguments of the dataclass `cls`. Raises RequestError for an unknown field."""
    if not isinstance(data, Mapping):
        raise RequestError(f"{cls.__name__} must be an object, not {type(data).__name__}.")
    names = [f.name for f in fields(cls)]
    if unknown := sorted(set(data) - set(names)):
        raise RequestError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(names)}.")
    return dict(data)


def http_address(text: str) -> SplitResult | None:
    """Returns the parts of a valid http or https URL, or None.

    `urlsplit` alone accepts nearly every text. It checks the port only when `port` is read.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # fails for empty and too long labels, as in the resolver
    except ValueError:  # the base class of UnicodeError
        return None
    is_plain = text.isascii() and text.isprintable() and " " not in text
    return parts if is_plain and parts.scheme in ("http", "https") and host and port != 0 else None
