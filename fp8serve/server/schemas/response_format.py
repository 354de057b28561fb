"""The request fields for structured outputs, of all supported APIs.

    response_format                                  OpenAI; also llama.cpp
    structured_outputs, guided_json, guided_regex,   vLLM, newer and older versions
    guided_choice, guided_grammar
    grammar                                          llama.cpp

Each field becomes `json_schema`, `regex` or `grammar` of SamplingParams, which the engine enforces for every token
(engine/grammar.py). `Constraint` is this keyword argument, or empty for free text.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import MAX_GRAMMAR_LENGTH
from fp8serve.server.schemas.bodies import Strict

JSON_OBJECT = '{"type": "object"}'
Constraint = dict[str, str]
Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Schema = dict[str, Any] | Text
Choices = Annotated[list[Text], Field(min_length=1, max_length=1024)]


class JsonSchema(Strict):
    """OpenAI's JSON schema. Only `schema` is used; it is enforced even if `strict` is false."""

    name: Annotated[str, Field(max_length=64)] = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]

    def params(self) -> Constraint:
        return {}


class JsonObjectFormat(Strict):
    """JSON mode. llama.cpp adds a JSON schema."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    def params(self) -> Constraint:
        return {"json_schema": json.dumps(self.schema_) if self.schema_ else JSON_OBJECT}


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    def params(self) -> Constraint:
        return {"json_schema": json.dumps(self.json_schema.schema_)}


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`. Exactly one of its fields is set."""

    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    def params(self) -> Constraint:
        return _only_constraint(self._constraints()) or {}

    def _constraints(self) -> dict[str, Constraint | None]:
        return {
            "json": _json_constraint(self.json_),
            "regex": _constraint("regex", self.regex),
            "choice": _choice_constraint(self.choice),
            "grammar": _constraint("grammar", self.grammar),
            "json_object": {"json_schema": JSON_OBJECT} if self.json_object else None,
        }

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        _only_constraint(self._constraints())
        return self


class StructuredOutputFields(Strict):
    """The fields that constrain the output. At most one of them is set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    grammar: Text | None = None

    def constraint(self) -> Constraint:
        """Returns the constraint as a keyword argument of SamplingParams."""
        return _only_constraint(self._constraints()) or {}

    def _constraints(self) -> dict[str, Constraint | None]:
        names = ("response_format", "structured_outputs")
        constraints = {name: value.params() for name in names if (value := getattr(self, name)) is not None}
        return constraints | {
            "guided_json": _json_constraint(self.guided_json),
            "guided_regex": _constraint("regex", self.guided_regex),
            "guided_choice": _choice_constraint(self.guided_choice),
            "guided_grammar": _constraint("grammar", self.guided_grammar),
            "grammar": _constraint("grammar", self.grammar),
        }

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        _only_constraint(self._constraints())
        return self


def _only_constraint(constraints: dict[str, Constraint | None]) -> Constraint | None:
    """Returns the constraint of the only field that is set, or None if none is set. Raises PydanticCustomError if two
    fields are set."""
    fields = [name for name, constraint in constraints.items() if constraint]
    if len(fields) > 1:
        raise PydanticCustomError(
            "one_form", "give either {one} or {other}, not both", {"one": fields[0], "other": fields[1]}
        )
    return constraints[fields[0]] if fields else None


def _constraint(param: str, text: str | None) -> Constraint | None:
    return None if text is None else {param: text}


def _json_constraint(schema: dict[str, Any] | str | None) -> Constraint | None:
    return _constraint("json_schema", json.dumps(schema) if isinstance(schema, dict) else schema)


def _choice_constraint(choices: list[str] | None) -> Constraint | None:
    """Returns a grammar that allows only these texts. Lark's string syntax is that of JSON."""
    return _constraint(
        "grammar",
        None if choices is None else "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices),
    )
