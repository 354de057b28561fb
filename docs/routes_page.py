"""docs/routes.md, made from the server's own OpenAPI description and its table of scopes: `make routes`."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8serve.server.access.scopes import OPENED_BY
from fp8serve.server.app import create_app
from fp8serve.server.http.scope import OPEN_PATHS
from fp8serve.server.settings import Settings

JsonObject = dict[str, Any]
HEAD = """# Routes

Made by `make routes` from the OpenAPI description that a server gives at `/openapi.json`; its `/docs` shows the same
with the type of every field. [clients.md](clients.md) says how OpenAI's and Anthropic's clients use these routes, and
[operating.md](operating.md#api-keys-tenants-and-scopes) what the scopes of a key are. Fields in bold must be given.
Failures are HTTP statuses with the `code` that the body of an error names.
"""
# The headings of the page, by the tag of an operation, in the order in which they appear.
GROUPS = {
    "generation": "Generation",
    "OpenAI": "OpenAI's protocol, embeddings and ranking",
    "Anthropic": "Anthropic's protocol",
    "fine-tuning": "Fine-tuning",
    "models": "Models",
    "trainers": "Weights from a trainer",
    "server": "The server itself",
}


def page() -> str:
    """The whole text."""
    with tempfile.TemporaryDirectory() as data:
        app = create_app(Settings(model=Path("model"), data_dir=Path(data)))
        document = app.openapi()
        asyncio.run(app.state.server.close())
    found: dict[str, list[str]] = {tag: [] for tag in GROUPS}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found[operation["tags"][0]].append(_section(document, method.upper(), path, operation))
    groups = [f"## {title}\n\n" + "\n".join(found[tag]) for tag, title in GROUPS.items()]
    return HEAD + "\n" + "\n".join(groups)


def _section(document: JsonObject, method: str, path: str, operation: JsonObject) -> str:
    parts = [f"### `{method} {path}`", _sentences(operation), *_body(document, operation), *_parameters(operation)]
    return "\n\n".join([*parts, _answers(document, method, path, operation)]) + "\n"


def _sentences(operation: JsonObject) -> str:
    said = " ".join(operation.get("description", "").split())
    return f"{operation['summary']}. {said}".strip()


def _body(document: JsonObject, operation: JsonObject) -> Iterator[str]:
    """The fields that a body may have, and one that is taken as it is."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = _resolved(document, content.get("schema", {}))
        needed = schema.get("required", [])
        fields = [f"**`{name}`**" if name in needed else f"`{name}`" for name in _own(schema)]
        if fields:
            yield f"Body: {', '.join(fields)}."
        if "example" in content:
            yield f"```json\n{json.dumps(content['example'])}\n```"


def _own(schema: JsonObject) -> list[str]:
    """The properties that are not other projects' (clients.md lists those)."""
    return [name for name, about in schema.get("properties", {}).items() if "x-foreign" not in about]


def _parameters(operation: JsonObject) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for parameter in operation.get("parameters", []):
        places.setdefault(parameter["in"], []).append(f"`{parameter['name']}`")
    for place, names in places.items():
        yield f"In the {place}: {', '.join(names)}."


def _answers(document: JsonObject, method: str, path: str, operation: JsonObject) -> str:
    """What an answer has, the scope that it takes, and the ways to fail."""
    status, success = next((s, r) for s, r in operation["responses"].items() if s.startswith("2"))
    media = ", ".join(f"`{kind}`" for kind in success["content"])
    schema = _resolved(document, success["content"].get("application/json", {}).get("schema", {}))
    fields = ", ".join(f"`{name}`" for name in schema.get("properties", {}))
    has = f" with {fields}" if fields else ""
    failed = [f"{code} {said['description']}" for code, said in operation["responses"].items() if code != status]
    lines = [f"* answer: {status}, {media}{has}", f"* scope: {_scope(method, path)}"]
    if path not in OPEN_PATHS:
        lines.append(f"* failures: {'; '.join(failed)}")
    return "\n".join(lines)


def _scope(method: str, path: str) -> str:
    if path in OPEN_PATHS:
        return "none; no key is needed"
    route = f"{method} {path}"
    opening = [scope for scope, routes in OPENED_BY.items() if route in {r.replace(":path", "") for r in routes}]
    return f"`{opening[0]}`" if opening else "any key"


def _resolved(document: JsonObject, schema: JsonObject) -> JsonObject:
    """The schema that a reference stands for."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


if __name__ == "__main__":
    print(page(), end="")
