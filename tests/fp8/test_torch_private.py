"""Private names of PyTorch: which of them an upgrade has taken away, and that one module alone uses any."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8serve
from fp8serve.fp8 import torch_private

ROOT = Path(fp8serve.__file__).parent


@pytest.mark.parametrize("name", torch_private.NAMES)
def test_torch_still_has(name: str) -> None:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            assert hasattr(found, part), f"torch has no {name} any more; it {torch_private.NAMES[name]}"
            found = getattr(found, part)
        return


def test_the_list_is_complete() -> None:
    used = set(private_names(ast.parse(inspect.getsource(torch_private))))
    listed = {**torch_private.NAMES, **torch_private.MAY_BE_MISSING}
    assert {name.rpartition(".")[2] for name in used} <= {part for n in listed for part in n.split(".")}


def test_no_other_module_uses_a_private_name() -> None:
    modules = [path for path in ROOT.rglob("*.py") if path.name != "torch_private.py"]
    assert len(modules) > 100
    assert {str(p): names for p in modules if (names := list(private_names(ast.parse(p.read_text()))))} == {}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Every `torch...` attribute and import of which a part begins with one underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{a.name}" for a in node.names if is_private(f"{node.module}.{a.name}"))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
            name = ast.unparse(node)
            is_operator = name.startswith("torch.ops.")  # ATen's names are operators, not attributes of Python
            if name.startswith(("torch.", "Variable.")) and not is_operator and is_private(name):
                yield name


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
