"""An option is a field of a frozen dataclass; the field's type has everything else about it.

    temperature: Annotated[float, Ge(0), Le(100), About("0 takes the likeliest token every time.")] = 1.0

The bounds are those of `annotated_types`, which pydantic checks when the dataclass is made (`check`). The field is the
only place for the default, the bounds and the text: the command line (`commands/from_options.py`), the bodies of HTTP
(`server/schemas/derived.py`) and the page docs/options.md are made from `options_of`. Nothing here imports pydantic
before a value is checked, so that `import fp8serve` does not wait for it.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from urllib.parse import SplitResult, urlsplit

from annotated_types import Ge, Gt, Le

from fp8serve.errors import Fp8ServeError, RequestError, shown


@dataclass(frozen=True)
class About:
    """The text about an option, and its name on the command line where that differs from the field's.

    `unset`: the meaning of a default of None or (). `flag`: its name on the command line; None: the field's; "": it has
    none. `narrowed`: the type on the command line, if the field takes more. `private`: a secret, or a path on this
    machine, which `/info` does not show.
    """

    text: str
    unset: str = ""
    flag: str | None = None
    metavar: str | None = None
    narrowed: Any = None
    private: bool = False


@dataclass(frozen=True)
class Option:
    """A field as the generated interfaces need it. `kind`: its whole annotation; `about`: its text."""

    name: str
    kind: Any
    default: Any  # MISSING: it is required
    about: About

    @property
    def plain(self) -> Any:
        """The annotation without bounds and text: `int | None`."""
        return get_args(self.kind)[0]

    def bound(self, *marks: type) -> float | None:
        """The bound of one of the kinds `marks`, such as Ge."""
        result = (m for m in get_args(self.kind)[1:] if isinstance(m, marks))
        return next((value for mark in result for value in vars_of(mark).values()), None)

    @property
    def least(self) -> float | None:
        return self.bound(Ge, Gt)

    @property
    def most(self) -> float | None:
        return self.bound(Le)


def vars_of(mark: Any) -> dict[str, Any]:
    """The values of a dataclass, shallowly."""
    return {f.name: getattr(mark, f.name) for f in fields(mark)}


@cache
def options_of(cls: Any) -> tuple[Option, ...]:
    """The fields of `cls` that have an `About`, in their order."""
    hints = get_type_hints(cls, include_extras=True)
    result = ((f, _about(hints[f.name])) for f in fields(cls))
    return tuple(Option(f.name, hints[f.name], _default(f), about) for f, about in result if about is not None)


def _about(kind: Any) -> About | None:
    marks = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((m for m in marks if isinstance(m, About)), None)


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def check(options: Any, error: type[Fp8ServeError]) -> None:
    """Called by `__post_init__` of a dataclass: checks that each value has its field's type and is within its bounds;
    else raises `error` with one sentence. A list becomes the tuple that the field declares.
    """
    from pydantic import ValidationError

    try:
        arguments = {name: tuple(v) if isinstance(v, list) else v for name, v in vars_of(options).items()}
        values = _validator(options.__class__).validate_python(arguments)
    except ValidationError as failure:
        raise error(_sentence(failure.errors()[0])) from None
    for name, value in values.items():
        object.__setattr__(options, name, value)


@cache
def _validator(cls: Any) -> Any:
    """Strict: neither a text nor a boolean is a number. NaN and infinity are refused."""
    import typing_extensions
    from pydantic import ConfigDict, TypeAdapter

    typed_dict: Any = typing_extensions.TypedDict
    values = typed_dict(cls.__name__, get_type_hints(cls, include_extras=True))
    values.__pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)
    return TypeAdapter(values)


def _sentence(complaint: Mapping[str, Any]) -> str:
    """Pydantic's complaint with the option's name, and what was found."""
    field, *place = complaint["loc"]
    name = f"{field}" + "".join(f"[{part}]" for part in place if isinstance(part, int))
    return f"{rule(name, complaint)}, not {shown(_input(complaint))}."


def rule(name: str, complaint: Mapping[str, Any]) -> str:
    """A clause that says what `name` must be, of one of pydantic's errors: "threads must be a whole number".

    A validator of ours has written its own clause, which follows the name.
    """
    kind, values = str(complaint["type"]), dict(complaint.get("ctx") or {})
    for suffix in ("_type", "_parsing", "_from_float"):
        kind = kind.removesuffix(suffix)
    if kind in _KINDS:
        return f"{name} must be {_KINDS[kind]}"
    if kind in _RULES:
        text = _RULES[kind].format_map({key: str(value).removesuffix(".0") for key, value in values.items()})
        one = re.sub(r"\b1 (item|character)s\b", r"1 \1", text)
        return f"{name} must {one}"
    message = str(complaint["msg"])
    return f"{name}: {message[:1].lower()}{message[1:]}"


_KINDS = {
    "int": "a whole number", "float": "a number", "finite_number": "a finite number", "string": "text",
    "bool": "true or false", "list": "a list", "tuple": "a list", "dict": "an object", "model": "an object",
    "model_attributes": "an object", "dataclass": "an object", "mapping": "an object", "none_required": "null",
    "path": "a path", "int_parsing_size": "a smaller number", "string_unicode": "text in UTF-8",
}  # fmt: skip
"""What a value must be, by the types of pydantic's errors without their endings."""
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
"""Likewise, with the values that pydantic adds."""


def _input(complaint: Mapping[str, Any]) -> Any:
    """The value that was refused, or its length if that is what is wrong."""
    return (complaint.get("ctx") or {}).get("actual_length") or complaint["input"]


def known_fields(cls: type, data: object) -> dict[str, Any]:
    """`data` as keyword arguments of dataclass `cls`; RequestError for an unknown name, which is never dropped."""
    if not isinstance(data, Mapping):
        raise RequestError(f"{cls.__name__} must be an object, not {type(data).__name__}.")
    names = [f.name for f in fields(cls)]
    if unknown := sorted(set(data) - set(names)):
        raise RequestError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(names)}.")
    return dict(data)


def http_address(text: str) -> SplitResult | None:
    """The parts of an absolute http or https URL that a program can ask; None for any other text.

    `urlsplit` takes nearly everything, and complains of a wrong port only when it is read.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as the resolver does: no label is empty or too long
    except ValueError:  # UnicodeError is one
        return None
    is_plain = text.isascii() and text.isprintable() and " " not in text
    return parts if is_plain and parts.scheme in ("http", "https") and host and port != 0 else None
