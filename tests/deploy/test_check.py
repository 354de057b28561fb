"""deploy/check.py finds fields that a schema does not have, at any depth."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from .chart import ROOT

CHECK = ROOT / "deploy" / "check.py"
PORT = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
POOL = {
    "type": "object",
    "properties": {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "properties": {
                "ports": {"type": "array", "items": PORT},
                "selector": {"type": "object", "additionalProperties": {"type": "string"}},
                "template": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            },
        },
    },
}
DEFINITION = {
    "kind": "CustomResourceDefinition",
    "spec": {
        "group": "example.com",
        "names": {"kind": "Pool"},
        "versions": [{"name": "v1", "schema": {"openAPIV3Schema": POOL}}],
    },
}
OPENAPI = {
    "definitions": {
        "v1.Service": {
            "type": "object",
            "properties": {"apiVersion": {}, "kind": {}, "spec": {"$ref": "#/definitions/Spec"}},
            "x-kubernetes-group-version-kind": [{"group": "", "version": "v1", "kind": "Service"}],
        },
        "Spec": {"type": "object", "properties": {"target": {"type": "string", "format": "int-or-string"}}},
    }
}
POOL_HEAD = {"apiVersion": "example.com/v1", "kind": "Pool"}
SERVICE_HEAD = {"apiVersion": "v1", "kind": "Service"}


@pytest.fixture
def schemas(tmp_path: Path) -> Path:
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(DEFINITION))
    (tmp_path / "swagger.json").write_text(json.dumps(OPENAPI))
    return tmp_path


def run(schemas: Path, *manifests: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    text = yaml.safe_dump_all(manifests)
    return subprocess.run([sys.executable, CHECK, schemas], input=text, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "manifest",
    [
        POOL_HEAD | {"metadata": {"name": "p", "labels": {"a": "b"}}, "spec": {"ports": [{"number": 1}]}},
        POOL_HEAD | {"spec": {"selector": {"any": "label"}, "template": {"any": {"field": 1}}}},
        SERVICE_HEAD | {"spec": {"target": 80}},
        SERVICE_HEAD | {"spec": {"target": "http"}},
    ],
)
def test_a_right_manifest_is_valid(schemas: Path, manifest: dict[str, Any]) -> None:
    result = run(schemas, manifest)
    assert (result.returncode, result.stdout.endswith(": valid\n")) == (0, True), result.stdout + result.stderr


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (POOL_HEAD | {"specs": {}}, "'specs' was unexpected"),
        (POOL_HEAD | {"spec": {"ports": [{"number": 1, "name": "x"}]}}, "spec.ports.0: "),
        (POOL_HEAD | {"spec": {"ports": [{}]}}, '"number" is a required property'),
        (POOL_HEAD | {"spec": {"selector": {"a": 1}}}, "spec.selector.a: "),
        (SERVICE_HEAD | {"spec": {"port": 80}}, "'port' was unexpected"),
        (SERVICE_HEAD | {"kind": "Ingress"}, "no schema of v1 Ingress"),
    ],
)
def test_a_wrong_manifest_is_named_with_its_field(schemas: Path, manifest: dict[str, Any], message: str) -> None:
    right = POOL_HEAD | {"metadata": {"name": "right"}}
    result = run(schemas, right, manifest)
    assert result.returncode == 1
    assert message in result.stdout
    assert "example.com/v1 Pool right: valid" in result.stdout


def test_nothing_to_check_is_an_error(schemas: Path) -> None:
    for arguments in ((schemas,), (schemas / "none",), ()):
        command = [sys.executable, CHECK, *arguments]
        result = subprocess.run(command, input="", capture_output=True, text=True, check=False)
        assert result.returncode != 0
        assert "Traceback" not in result.stderr


def test_a_file_that_is_no_schema_is_named(schemas: Path) -> None:
    (schemas / "broken.json").write_text("{")
    result = run(schemas, POOL_HEAD)
    assert (result.returncode, result.stderr) == (1, f"{schemas / 'broken.json'} has no schemas that can be read.\n")
