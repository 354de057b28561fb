"""Fields of a body that are options of another package: names, types, bounds and texts come from its dataclass.

    @fields_of(SamplingParams, optional=True)
    class GenerateParameters(Strict): ...

A field that the body declares itself is not changed, so a protocol can have a rule of its own.
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import Field, create_model

from fp8serve.options import Option, options_of
from fp8serve.server.schemas.bodies import Strict

Body = TypeVar("Body", bound=Strict)
NOTHING: Mapping[str, str] = MappingProxyType({})


def fields_of(
    source: type, *, leave_out: Collection[str] = (), renamed: Mapping[str, str] = NOTHING, optional: bool = False
) -> Callable[[type[Body]], type[Body]]:
    """Adds the options of `source`, under the wire's names if they are `renamed`. `optional`: null or a missing field
    leaves the choice to `source`.
    """

    def derive(body: type[Body]) -> type[Body]:
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
