"""An option is declared once, in a dataclass that checks it; command line, HTTP API and docs derive from it."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
import typer
from annotated_types import Ge, Gt, Le, Len
from pydantic import ValidationError
from pydantic_core import PydanticKnownError, core_schema
from typer.testing import CliRunner

from docs.options_page import page
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.engine.sampling_params import MAX_STOP_STRINGS, SamplingParams
from fp8serve.errors import RecipeError, RequestError
from fp8serve.options import About, check, describe_violation, known_fields, options_of
from fp8serve.server.schemas import generation_bodies, openai_bodies
from fp8serve.server.schemas.finetune_bodies import FinetuneBody
from fp8serve.server.schemas.generation_bodies import GenerateParameters
from fp8serve.server.schemas.openai_bodies import OPENAI_MAX_STOP_STRINGS, ChatBody, CompletionBody
from fp8serve.train.config import API_NAMES, NOT_IN_API, TrainConfig

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Oven:
    """An example."""

    heat: Annotated[float, Gt(0), Le(300), About("How hot.")] = 180.0
    trays: Annotated[int | None, Ge(1), About("How many.", unset="all")] = None
    cakes: Annotated[tuple[Annotated[str, Len(1)], ...], Len(0, 2), About("What to bake.", flag="--cake")] = ()
    mode: Annotated[Literal["air", "grill"], About("How.")] = "air"
    light: Annotated[bool, About("Light inside.")] = False
    secret: Annotated[int, About("Not on the command line.", flag="")] = 1
    timer: Annotated[tuple[float, float], About("From and to, in minutes.", flag="")] = (0.0, 1.0)

    def __post_init__(self) -> None:
        check(self, RequestError)


@pytest.mark.parametrize("error_type", get_args(core_schema.ErrorType))
def test_no_type_of_pydantics_errors_leaks_its_words(error_type: str) -> None:
    """Covers error types that no option can cause yet, too."""
    context = {
        "error": "the reason", "gt": 1, "ge": 1, "lt": 1, "le": 1, "multiple_of": 2, "field_type": "List",
        "min_length": 1, "max_length": 1, "actual_length": 3, "pattern": "a", "expected": "'a' or 'b'", "class": "Path",
        "class_name": "X", "discriminator": "type", "tag": "x", "expected_tags": "'a'", "method_name": "f",
        "attribute": "a", "encoding": "utf8", "encoding_error": "e", "tz_expected": 0, "tz_actual": 1,
        "expected_schemes": "http", "expected_version": 4, "max_digits": 3, "decimal_places": 2, "whole_digits": 2,
    }  # fmt: skip
    try:
        error = PydanticKnownError(error_type, context)  # type: ignore[arg-type]
    except TypeError:  # this type has no context
        error, context = PydanticKnownError(error_type), {}  # type: ignore[arg-type]
    clause = describe_violation("field", {"type": error_type, "msg": error.message(), "ctx": context})
    assert clause.startswith("field")
    for words in (" should ", "Input", "input should", "alue error", "ssertion", "field required", "Extra"):
        assert words not in clause


def test_the_message_of_a_validator_is_quoted_without_the_name_of_its_exception() -> None:
    context = {"error": ValueError("the tray is hot.")}
    assert (
        describe_violation("tray", {"type": "value_error", "msg": "Value error, the tray is hot.", "ctx": context})
        == "tray: the tray is hot"
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"timer": [1.5]}, "timer[1] is missing."),
        ({"heat": 0}, "heat must be greater than 0, not 0."),
        ({"heat": True}, "heat must be a number, not true."),
        ({"heat": float("nan")}, "heat must be a finite number, not nan."),
        ({"trays": 1.0}, "trays must be a whole number, not 1.0."),
        ({"cakes": ["a", ""]}, "cakes[1] must have at least 1 character, not ''."),
        ({"cakes": ["a", "b", "c"]}, "cakes must have at most 2 items, not 3."),
        ({"mode": "wave"}, "mode must be 'air' or 'grill', not 'wave'."),
        ({"light": 1}, "light must be true or false, not 1."),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        Oven(**values)
    assert str(refused.value) == sentence


def test_a_list_becomes_the_tuple_that_is_declared() -> None:
    assert Oven(cakes=["a"]).cakes == ("a",)  # type: ignore[arg-type]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(RequestError, match="Oven has no field 'head'; it has heat, trays"):
        known_fields(Oven, {"head": 1})


def run(*args: str) -> tuple[int, str, list[Any]]:
    """Runs a command that takes an Oven; returns its exit status, its output and the parsed arguments."""
    parsed: list[Any] = []

    @with_options(heat=200.0)
    def bake(where: str, oven: OptionValues[Oven], loud: bool = False) -> None:
        """Bake."""
        parsed.extend((where, oven(), loud))

    app = typer.Typer(rich_markup_mode=None)
    app.command()(bake)
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.output, parsed


def test_a_command_gets_an_option_for_each_field() -> None:
    assert run("home") == (0, "", ["home", Oven(heat=200.0), False])
    status, _, parsed = run("home", "--heat", "90", "--trays", "2", "--cake", "a", "--cake", "b", "--light", "--loud")
    assert (status, parsed) == (0, ["home", Oven(90.0, 2, ("a", "b"), light=True), True])


def test_help_comes_from_the_field() -> None:
    status, text, _ = run("--help")
    text = " ".join(text.split())
    assert status == 0
    assert "How hot. [default: 200.0; 0<=x<=300]" in text
    assert "How many. [default: (all); x>=1]" in text
    assert "What to bake; repeat for several." in text
    assert "secret" not in text


VALUES = [["--heat", "301"], ["--heat", "nan"], ["--trays", "0"], ["--mode", "wave"], ["--secret", "1"]]


@pytest.mark.parametrize("args", VALUES)
def test_a_value_out_of_bounds_is_wrong_usage(args: list[str]) -> None:
    assert run("home", *args)[0] == 2


def test_named_values_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    parsed: list[Any] = []

    @with_options()
    def train(job: OptionValues[TrainConfig]) -> None:
        parsed.append(job(model="m"))

    app = typer.Typer()
    app.command()(train)
    arguments = ["--data", "d", "--out", "o", "--recipe-option", "margin=1", "--recipe-option", "fp8_format=E4M3"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert parsed[0].recipe_options == {"margin": 1, "fp8_format": "E4M3"}
    refused = CliRunner().invoke(app, [*arguments, "--recipe-option", "margin"]).exception
    assert isinstance(refused, RecipeError)
    assert "--recipe-option needs NAME=VALUE" in str(refused)


@pytest.mark.parametrize(
    ("body", "renamed"),
    [
        (GenerateParameters, generation_bodies.RENAMED_FIELDS),
        (CompletionBody, openai_bodies.RENAMED_FIELDS),
        (ChatBody, openai_bodies.RENAMED_FIELDS),
    ],
)
def test_every_sampling_parameter_is_on_the_wire(body: Any, renamed: tuple[str, ...]) -> None:
    """A parameter that is added to SamplingParams is in both APIs."""
    names = {o.name for o in options_of(SamplingParams)} - set(renamed)
    assert names <= body.model_fields.keys()


def test_a_fine_tune_over_http_has_the_trainer_s_defaults_and_bounds() -> None:
    body = FinetuneBody(file_id="f")
    for option in options_of(TrainConfig):
        name = API_NAMES.get(option.name, option.name)
        if option.name not in (*NOT_IN_API, "seq_len"):  # the default of seq_len over HTTP is at most the context
            default = getattr(body, name)
            assert (tuple(default) if isinstance(default, list) else default) == option.default, name
            if option.minimum is not None:
                with pytest.raises(ValidationError):
                    FinetuneBody(file_id="f", **{name: option.minimum - 1})


def test_stop_strings_are_limited_by_the_engine_and_to_four_in_openais_api() -> None:
    assert GenerateParameters(stop=["x"] * MAX_STOP_STRINGS)  # type: ignore[call-arg]  # from SamplingParams
    for body, most in ((GenerateParameters, MAX_STOP_STRINGS), (CompletionBody, OPENAI_MAX_STOP_STRINGS)):
        prompt = {} if body is GenerateParameters else {"prompt": "a"}
        with pytest.raises(ValidationError):
            body(stop=["x"] * (most + 1), **prompt)  # type: ignore[arg-type]


def test_the_page_of_options_is_up_to_date() -> None:
    assert page() == (ROOT / "docs/options.md").read_text(), "run: make options"
    assert "``" not in page()  # an empty default; the site would show two backquotes


def test_pydantic_is_imported_with_the_first_value_that_is_checked() -> None:
    code = (
        "import sys, fp8serve, fp8serve.cli; assert 'pydantic' not in sys.modules\n"
        "fp8serve.engine.sampling_params.SamplingParams(); assert 'pydantic' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
