"""Command-line options from dataclasses: type, bounds, default and help of each come from its field.

    @with_options(temperature=0.0)
    def command(model: Model, sampling: Chosen[SamplingParams], json: AsJson = False) -> None:
        engine.generate(prompts, **sampling.values)

A `Chosen` parameter becomes an option for every field with an `About`; the keyword arguments of `with_options` are this
command's own defaults. The values are checked when the command calls it: `sampling()`.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import wraps
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import typer

from fp8serve.errors import RecipeError
from fp8serve.options import Option, options_of

T = TypeVar("T")
MAX_BOUND = 10**6  # larger bounds only guard the machine and are left out of the help


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """The options of `kind` that the command line has values for."""

    kind: type[T]
    values: Mapping[str, Any]

    def __call__(self, **more: Any) -> T:
        """The options, with `more` from the command itself. Raises what `kind` raises."""
        return self.kind(**{**self.values, **more})


def with_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function that takes a `Chosen`; `defaults`: the command's own defaults."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        kinds = {name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) is Chosen}

        @wraps(command)
        def run(**source: Any) -> None:
            chosen = {name: Chosen(kind, _values(kind, source)) for name, kind in kinds.items()}
            command(**source, **chosen)

        run.__signature__ = inspect.Signature(_parameters(command, kinds, defaults))  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in run.__signature__.parameters.values()}  # type: ignore[attr-defined]
        return run

    return decorate


def _parameters(
    command: Callable[..., None], kinds: Mapping[str, type], defaults: Mapping[str, Any]
) -> list[inspect.Parameter]:
    """The parameters of `command`, with the options in place of each `Chosen`; typer needs keyword-only ones."""
    results: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name in kinds:
            results += [_parameter(o, defaults.get(o.name, o.default)) for o in shown_options(kinds[parameter.name])]
        else:
            results.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return results


def shown_options(kind: type) -> list[Option]:
    """The options of `kind` that the command line has."""
    return [option for option in options_of(kind) if option.about.flag != ""]


def _parameter(option: Option, default: Any) -> inspect.Parameter:
    plain, several = _typed(option)
    described = typer.Option(
        *_flags(option, plain),
        help=option.about.text.removesuffix(".") + ("; repeat for several." if several else "."),
        show_default=_default_text(option, default),
        metavar=option.about.metavar,
        **_range(option, plain),
    )
    retained = inspect.Parameter.empty if default is MISSING else None if several else default
    kind = (list[plain] if default is MISSING else list[plain] | None) if several else plain  # type: ignore[valid-type]
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=retained, annotation=Annotated[kind, described]
    )


def _default_text(option: Option, default: Any) -> str | bool:
    """The default as help shows it; True: typer's own way."""
    if default in (None, (), {}):
        return option.about.unset or False
    return ", ".join(map(str, default)) if isinstance(default, tuple) else True


def _typed(option: Option) -> tuple[Any, bool]:
    """The type of the option's value, and whether the option may be repeated."""
    plain = option.about.narrowed or option.plain
    for kind in (plain, *get_args(plain)):  # Files, or Files | None
        if get_origin(kind) is tuple:
            return _bare(get_args(kind)[0]), True
    return (str, True) if get_origin(plain) is Mapping else (plain, False)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _flags(option: Option, plain: Any) -> list[str]:
    """None: typer's own flag, from the name. A switch with a default has no opposite."""
    if option.about.flag is not None:
        return [option.about.flag]
    return ["--" + option.name.replace("_", "-")] if plain is bool else []


def _range(option: Option, plain: Any) -> dict[str, Any]:
    """Typer refuses values outside as wrong usage; the dataclass checks again, including bounds that are not shown."""
    if get_origin(plain) is tuple or not {int, float} & {plain, *get_args(plain)}:
        return {}
    bounds = {"min": option.least, "max": option.most}
    return {name: value for name, value in bounds.items() if value is not None and abs(value) < MAX_BOUND}


def _values(kind: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """Moves the options of `kind` out of `arguments`; omitted ones are left to the dataclass."""
    values = [(option, arguments.pop(option.name)) for option in shown_options(kind)]
    return {o.name: _value(o, value) for o, value in values if value is not None and value != []}


def _value(option: Option, value: Any) -> Any:
    if get_origin(option.plain) is Mapping:
        return pairs(str(option.about.flag), value)
    return tuple(value) if isinstance(value, list) else value


def pairs(flag: str, arguments: Sequence[str], such_as: str = "margin=1") -> dict[str, Any]:
    """{"margin": 1} of ["margin=1"]; a value that is not JSON is a string. Raises RecipeError for one without "="."""
    options = {}
    for text in arguments:
        name, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(f"{flag} wants NAME=VALUE, such as {such_as}, found {text!r}.")
        options[name] = _json_or_text(value)
    return options


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
