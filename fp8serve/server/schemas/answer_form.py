"""The form that an answer must have, as each family of routes spells it: a JSON schema or a regular expression.

Both become `json_schema` or `regex` of SamplingParams, which the engine holds every token to (engine/grammar.py).
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from fp8serve.server.schemas.bodies import Strict

JSON_OBJECT = '{"type": "object"}'


class JsonSchema(Strict):
    """`schema` is what counts; OpenAI's other fields are for people, and `strict` holds here in any case."""

    name: Annotated[str, Field(max_length=64)] = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]

    def params(self) -> dict[str, str]:
        return {}


class JsonObjectFormat(Strict):
    type: Literal["json_object"]

    def params(self) -> dict[str, str]:
        return {"json_schema": JSON_OBJECT}


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    def params(self) -> dict[str, str]:
        return {"json_schema": json.dumps(self.json_schema.schema_)}


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
"""OpenAI's `response_format`."""


class JsonGrammar(Strict):
    type: Literal["json"]
    value: dict[str, Any]

    def params(self) -> dict[str, str]:
        return {"json_schema": json.dumps(self.value)}


class NamedJsonGrammar(Strict):
    type: Literal["json_schema"]
    value: JsonSchema

    def params(self) -> dict[str, str]:
        return {"json_schema": json.dumps(self.value.schema_)}


class RegexGrammar(Strict):
    type: Literal["regex"]
    value: str

    def params(self) -> dict[str, str]:
        return {"regex": self.value}


Grammar = Annotated[JsonGrammar | NamedJsonGrammar | RegexGrammar, Field(discriminator="type")]
"""text-generation-inference's `grammar`."""
