"""The form that an answer must have, as each family of clients spells it.

    response_format                                  OpenAI, and the schemas of other projects in it
    structured_outputs, guided_json, guided_regex,   vLLM, newer and older
    guided_choice, guided_grammar
    grammar                                          llama.cpp: a text; text-generation-inference: an object

All of them become `json_schema`, `regex` or `grammar` of SamplingParams, which the engine enforces for every token
(engine/grammar.py).
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import MAX_FORM_LENGTH
from fp8serve.server.schemas.bodies import Strict

JSON_OBJECT = '{"type": "object"}'
Form = dict[str, str]
Text = Annotated[str, Field(min_length=1, max_length=MAX_FORM_LENGTH)]
Schema = dict[str, Any] | Text
Choices = Annotated[list[Text], Field(min_length=1, max_length=1024)]


class JsonSchema(Strict):
    """Only `schema` counts; OpenAI's other fields are for people, and an answer here is always strict."""

    name: Annotated[str, Field(max_length=64)] = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]

    def params(self) -> Form:
        return {}


class JsonObjectFormat(Strict):
    """Any object, or one of a schema: `schema` is llama.cpp's, `value` text-generation-inference's."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    value: dict[str, Any] | None = None

    def params(self) -> Form:
        schema = self.schema_ or self.value
        return {"json_schema": json.dumps(schema) if schema else JSON_OBJECT}

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if self.schema_ is not None and self.value is not None:
            raise PydanticCustomError("one_form", "give either schema or value, not both")
        return self


class JsonSchemaFormat(Strict):
    """`value`: as text-generation-inference spells it."""

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    value: JsonSchema | None = None

    def params(self) -> Form:
        schema = self.json_schema or self.value
        return {} if schema is None else {"json_schema": json.dumps(schema.schema_)}

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if (self.json_schema is None) == (self.value is None):
            raise PydanticCustomError("json_schema", "give the schema in json_schema")
        return self


class JsonGrammar(Strict):
    type: Literal["json"]
    value: dict[str, Any]

    def params(self) -> Form:
        return {"json_schema": json.dumps(self.value)}


class NamedJsonGrammar(Strict):
    type: Literal["json_schema"]
    value: JsonSchema

    def params(self) -> Form:
        return {"json_schema": json.dumps(self.value.schema_)}


class RegexGrammar(Strict):
    type: Literal["regex"]
    value: str

    def params(self) -> Form:
        return {"regex": self.value}


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | JsonGrammar | RegexGrammar, Field(discriminator="type")
]
"""OpenAI's `response_format`, and the forms that text-generation-inference takes there."""
Grammar = Annotated[JsonGrammar | NamedJsonGrammar | RegexGrammar, Field(discriminator="type")]
"""text-generation-inference's `grammar`."""


class StructuredOutputs(Strict):
    """vLLM's object; one of its fields is given."""

    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    def params(self) -> Form:
        return _only(self.forms()) or {}

    def forms(self) -> dict[str, Form | None]:
        return {
            "json": _json_form(self.json_),
            "regex": _form("regex", self.regex),
            "choice": _choice_form(self.choice),
            "grammar": _form("grammar", self.grammar),
            "json_object": {"json_schema": JSON_OBJECT} if self.json_object else None,
        }

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        _only(self.forms())
        return self


class Formed(Strict):
    """The fields that say what form an answer has; at most one of them is given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    grammar: Any = None  # each family of routes spells it in its own way

    def form(self) -> Form:
        """As keyword arguments of SamplingParams."""
        return _only(self.forms()) or {}

    def forms(self) -> dict[str, Form | None]:
        """The forms by the fields that ask for them."""
        objects = ("response_format", "structured_outputs")
        given = {name: value.params() for name in objects if (value := getattr(self, name)) is not None}
        own = _form("grammar", self.grammar) if isinstance(self.grammar, str | None) else self.grammar.params()
        return given | {
            "guided_json": _json_form(self.guided_json),
            "guided_regex": _form("regex", self.guided_regex),
            "guided_choice": _choice_form(self.guided_choice),
            "guided_grammar": _form("grammar", self.guided_grammar),
            "grammar": own,
        }

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        _only(self.forms())
        return self


def _only(forms: dict[str, Form | None]) -> Form | None:
    """The only field that is given, if any; an error if there are two."""
    given = [name for name, form in forms.items() if form]
    if len(given) > 1:
        raise PydanticCustomError(
            "one_form", "give either {one} or {other}, not both", {"one": given[0], "other": given[1]}
        )
    return forms[given[0]] if given else None


def _form(kind: str, text: str | None) -> Form | None:
    return None if text is None else {kind: text}


def _json_form(schema: dict[str, Any] | str | None) -> Form | None:
    return _form("json_schema", json.dumps(schema) if isinstance(schema, dict) else schema)


def _choice_form(choices: list[str] | None) -> Form | None:
    """Texts of Lark are written like those of JSON."""
    return _form(
        "grammar",
        None if choices is None else "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices),
    )
