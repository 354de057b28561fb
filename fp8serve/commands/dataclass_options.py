"""Creates command-line options from dataclasses. An option's type, bounds, default and help come from its field.

    @with_options(temperature=0.0)
    def command(model: Model, sampling: OptionValues[SamplingParams], json: AsJson = False) -> None:
        engine.generate(prompts, **sampling.values)

A parameter of the type `OptionValues` becomes an option for each field with an `About`. The keyword arguments of
`with_options` are defaults of the command. `sampling()` creates the dataclass, which checks the values.
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
class OptionValues(Generic[T]):
    """The values of the options of the dataclass `kind`. Options without a value are missing."""

    kind: type[T]
    values: Mapping[str, Any]

    def __call__(self, **more: Any) -> T:
        """Creates the dataclass from the values and from `more`. Raises the errors of the dataclass."""
        return self.kind(**{**self.values, **more})


def with_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a function with `OptionValues` parameters as a command, with `defaults` for some options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        kinds = {name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) is OptionValues}

        @wraps(command)
        def run(**arguments: Any) -> None:
            options = {name: OptionValues(kind, _pop_values(kind, arguments)) for name, kind in kinds.items()}
            command(**arguments, **options)

        run.__signature__ = inspect.Signature(_parameters(command, kinds, defaults))  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in run.__signature__.parameters.values()}  # type: ignore[attr-defined]
        return run

    return decorate


def _parameters(
    command: Callable[..., None], kinds: Mapping[str, type], defaults: Mapping[str, Any]
) -> list[inspect.Parameter]:
    """Returns the parameters of `command` with options in place of each `OptionValues`, keyword-only for typer."""
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name in kinds:
            parameters += [_parameter(o, defaults.get(o.name, o.default)) for o in shown_options(kinds[parameter.name])]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return parameters


def shown_options(kind: type) -> list[Option]:
    """Returns the options of the dataclass `kind` that have a flag on the command line."""
    return [option for option in options_of(kind) if option.about.flag != ""]


def _parameter(option: Option, default: Any) -> inspect.Parameter:
    plain, is_repeatable = _value_type(option)
    typer_option = typer.Option(
        *_flags(option, plain),
        help=option.about.text.removesuffix(".") + ("; repeat for several." if is_repeatable else "."),
        show_default=_default_text(option, default),
        metavar=option.about.metavar,
        **_bounds(option, plain),
    )
    typer_default = inspect.Parameter.empty if default is MISSING else None if is_repeatable else default
    kind = (list[plain] if default is MISSING else list[plain] | None) if is_repeatable else plain  # type: ignore[valid-type]
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=typer_default, annotation=Annotated[kind, typer_option]
    )


def _default_text(option: Option, default: Any) -> str | bool:
    """Returns the text of the default in the help. True means that typer shows the default itself."""
    if default in (None, (), {}):
        return option.about.unset or False
    return ", ".join(map(str, default)) if isinstance(default, tuple) else True


def _value_type(option: Option) -> tuple[Any, bool]:
    """Returns the type of the option's value, and whether the option may be repeated."""
    value_type = option.about.narrowed or option.value_type
    for kind in (value_type, *get_args(value_type)):  # Files, or Files | None
        if get_origin(kind) is tuple:
            return _without_annotation(get_args(kind)[0]), True
    return (str, True) if get_origin(value_type) is Mapping else (value_type, False)


def _without_annotation(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _flags(option: Option, plain: Any) -> list[str]:
    """Returns the option's flag, or [] if typer should derive it. A switch gets its flag, so that it has no --no-."""
    if option.about.flag is not None:
        return [option.about.flag]
    return ["--" + option.name.replace("_", "-")] if plain is bool else []


def _bounds(option: Option, plain: Any) -> dict[str, Any]:
    """Returns the bounds that typer checks. The dataclass checks all bounds, also those that the help leaves out."""
    if get_origin(plain) is tuple or not {int, float} & {plain, *get_args(plain)}:
        return {}
    bounds = {"min": option.minimum, "max": option.maximum}
    return {name: value for name, value in bounds.items() if value is not None and abs(value) < MAX_BOUND}


def _pop_values(kind: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """Removes the options of `kind` from `arguments`, and returns those with a value."""
    values = [(option, arguments.pop(option.name)) for option in shown_options(kind)]
    return {o.name: _value(o, value) for o, value in values if value is not None and value != []}


def _value(option: Option, value: Any) -> Any:
    if get_origin(option.value_type) is Mapping:
        return parse_assignments(str(option.about.flag), value)
    return tuple(value) if isinstance(value, list) else value


def parse_assignments(flag: str, arguments: Sequence[str], example: str = "margin=1") -> dict[str, Any]:
    """Returns {"margin": 1} for ["margin=1"]. A value that is not JSON is a string. Raises RecipeError without "="."""
    options = {}
    for text in arguments:
        name, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(f"{flag} needs NAME=VALUE, such as {example}, not {text!r}.")
        options[name] = _json_or_text(value)
    return options


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
