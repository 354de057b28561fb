"""Checks Kubernetes manifests on standard input against the schemas of their kinds. An unknown field is an error.

    helm template chat deploy/helm/fp8serve | python deploy/check.py SCHEMAS

SCHEMAS is a directory of CustomResourceDefinitions (YAML). For the kinds of Kubernetes itself it also holds
api/openapi-spec/swagger.json of kubernetes/kubernetes. Rules in CEL (x-kubernetes-validations) are not evaluated.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

Schema = dict[str, Any]
Kind = tuple[str, str]  # apiVersion and kind


def read_schemas(directory: Path) -> dict[Kind, Schema]:
    """Returns the schemas of all kinds that the files of a directory define."""
    schemas: dict[Kind, Schema] = {}
    for path in sorted(directory.iterdir()):
        try:
            schemas |= _schemas_of_file(path)
        except (ValueError, KeyError, yaml.YAMLError):
            sys.exit(f"{path} has no schemas that can be read.")
    return schemas


def _schemas_of_file(path: Path) -> dict[Kind, Schema]:
    if path.suffix == ".json":
        return dict(_kinds_of_openapi(json.loads(path.read_text())["definitions"]))
    if path.suffix not in (".yaml", ".yml"):
        return {}
    documents = filter(None, yaml.load_all(path.read_text(), yaml.CSafeLoader))
    definitions = [document["spec"] for document in documents if document.get("kind") == "CustomResourceDefinition"]
    return {kind: schema for definition in definitions for kind, schema in _kinds_of_definition(definition)}


def _kinds_of_openapi(definitions: dict[str, Schema]) -> Iterator[tuple[Kind, Schema]]:
    strict_definitions = {name: strict(schema) for name, schema in definitions.items()}
    for name, schema in definitions.items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            api_version = "/".join(filter(None, (kind["group"], kind["version"])))
            reference = {"$ref": f"#/definitions/{name}", "definitions": strict_definitions}
            yield (api_version, kind["kind"]), reference


def _kinds_of_definition(spec: dict[str, Any]) -> Iterator[tuple[Kind, Schema]]:
    for version in spec["versions"]:
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}  # the API server knows its fields
        yield (f"{spec['group']}/{version['name']}", spec["names"]["kind"]), schema


def strict(schema: Schema) -> Schema:
    """Returns a copy of a schema that allows no property that it does not name."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = strict(schema[key])
    if schema.get("format") == "int-or-string":
        result["type"] = ["integer", "string"]
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and not is_open:
        result["additionalProperties"] = False
    return result


def problems(manifest: dict[str, Any], schemas: dict[Kind, Schema]) -> Iterator[str]:
    """Yields what is wrong with a manifest."""
    kind = manifest.get("apiVersion", ""), manifest.get("kind", "")
    if kind not in schemas:
        yield f"no schema of {' '.join(kind)}"
        return
    for error in jsonschema_rs.Draft4Validator(schemas[kind]).iter_errors(manifest):
        yield f"{'.'.join(map(str, error.instance_path))}: {error.message}"


def check(manifests: Iterable[dict[str, Any]], schemas: dict[Kind, Schema]) -> int:
    """Prints what is wrong with each manifest, and returns the number of manifests that have a problem."""
    num_wrong = 0
    for manifest in manifests:
        messages = list(problems(manifest, schemas))
        num_wrong += bool(messages)
        name = f"{manifest.get('apiVersion')} {manifest.get('kind')} {manifest.get('metadata', {}).get('name')}"
        print(f"{name}: {'; '.join(messages) or 'valid'}")
    return num_wrong


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    documents = [document for document in yaml.safe_load_all(sys.stdin) if document]
    if not documents:
        sys.exit("standard input has no manifest.")
    sys.exit(1 if check(documents, read_schemas(Path(sys.argv[1]))) else 0)
