"""Imports point one way: fp8 <- model <- {engine, calibration, train} <- server <- command line."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import fp8serve

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "fp8": {"fp8", "errors", "options", "processes"},
    "model": {"model", "fp8", "errors", "options", "processes"},
    "engine": {"engine", "model", "fp8", "errors", "options", "processes", "ending", "logs"},
    "calibration": {"calibration", "model", "fp8", "errors", "options", "ranks"},
    "train": {"train", "model", "fp8", "errors", "options", "processes", "ending", "ranks"},
    "client": {"client", "errors", "options"},
    "chat": {"chat", "client", "engine", "model", "errors", "options", "terminal"},
    "server": {"server", "engine", "train", "model", "fp8", "errors", "options", "processes", "ending", "logs"},
}
MORE = {"fp8serve.train.methods.grpo.rollouts": {"engine"}}
"""A policy is trained on what a server says, so that one module of training runs one."""
FOUNDATION = {
    "faults", "named_models", "settings", "metrics", "vllm_metrics", "tasks", "tracing", "usage",
}  # fmt: skip
ALLOWED_IN_SERVER = {
    "answers": {"answers"},
    **dict.fromkeys(FOUNDATION, {"answers"} | FOUNDATION),
    "schemas": {"schemas"},
    "access": {"access"} | FOUNDATION,
    "http": {"http", "access"} | FOUNDATION,
    "serving": {"serving", "answers"} | FOUNDATION,
    "parsing": {"parsing", "serving", "schemas"} | FOUNDATION,
    "finetuning": {"finetuning", "parsing", "serving", "schemas"} | FOUNDATION,
    "data_directory": FOUNDATION,
    "server_state": {"access", "data_directory", "finetuning", "parsing", "serving"} | FOUNDATION,
    "api": {"api", "access", "server_state", "finetuning", "parsing", "serving", "schemas", "http", "answers"}
    | FOUNDATION,
    "app": {"api", "data_directory", "server_state", "finetuning", "serving", "http"} | FOUNDATION,
    "launch": {"app", "server_state", "serving", "http"} | FOUNDATION,
}
ALLOWED_IN_MODEL = {
    "storage": {"storage"},
    "text": {"text", "storage"},
    "config": {"config", "storage", "transformers_backend"},  # which describes what has no family
    "network": {"network", "config", "storage"},
    "transformers_backend": {"transformers_backend", "network", "config", "storage"},
    "formats": {"formats", "transformers_backend", "config", "storage"},
}
"""What a room of `model/` may import of it. Modules that lie in no room, `gguf` and `verify` may import any."""
API_FAMILIES = ("native", "openai", "anthropic_messages", "responses")
NOTHING_OF_OURS = {
    "fp8serve.fp8.spec",
    "fp8serve.fp8.amax_rules",
    "fp8serve.fp8.ops.arithmetic",
    "fp8serve.engine.sampling_params",
    "fp8serve.engine.output",
    "fp8serve.errors",
    "fp8serve.ending",
    "fp8serve.options",
    "fp8serve.processes",
}
FOUNDATIONS = ("fp8serve.errors", "fp8serve.options")
MADE_OF = ("fp8serve.fp8.spec", "fp8serve.fp8.amax_rules")  # what a recipe is made of; NOTHING_OF_OURS, too
NO_TORCH = {
    "fp8serve.fp8.spec",
    "fp8serve.fp8.recipe",
    "fp8serve.engine.sampling_params",
    "fp8serve.engine.output",
    "fp8serve.engine.kv_cache",
    "fp8serve.engine.scheduler",
    "fp8serve.model.resident",
    "fp8serve.model.storage.headers",
}


@cache
def sources() -> dict[str, Path]:
    """Every module by its installed name."""
    homes = {"fp8serve": ROOT / "fp8serve", "fp8serve.calibration": ROOT / "calibrate"}
    files = {(home, path) for home, folder in homes.items() for path in folder.rglob("*.py")}
    named = {".".join((home, *path.relative_to(homes[home]).with_suffix("").parts)): path for home, path in files}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def imports(module: str, path: Path) -> set[str]:
    """Absolute names of all modules that `path` imports, inside functions too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            found |= {".".join(filter(None, (base, node.module, alias.name))) for alias in node.names}
    return found


def room(name: str) -> str:
    """The part of the package a name lies in; attributes of the package itself, such as __version__, lie in none."""
    part = name.split(".")[1] if name.startswith("fp8serve.") else ""
    return "" if part.startswith("__") else part


@pytest.mark.parametrize("module", sorted(m for m in sources() if room(m) in ALLOWED))
def test_arrows_point_one_way(module: str) -> None:
    allowed = ALLOWED[room(module)] | MORE.get(module, set())
    wrong = {i for i in imports(module, sources()[module]) if room(i) and room(i) not in allowed}
    assert not wrong, f"{module} may import only {sorted(allowed)}, not {sorted(wrong)}"


def server_room(name: str) -> str:
    """The part of the server that a name lies in."""
    return name.removeprefix("fp8serve.server.").split(".")[0] if name.startswith("fp8serve.server.") else ""


@pytest.mark.parametrize("module", sorted(m for m in sources() if server_room(m)))
def test_arrows_in_the_server_point_one_way(module: str) -> None:
    allowed = ALLOWED_IN_SERVER[server_room(module)]
    wrong = {i for i in imports(module, sources()[module]) if server_room(i) and server_room(i) not in allowed}
    assert not wrong, f"{module} may import only {sorted(allowed)} of the server, not {sorted(wrong)}"


def model_room(name: str) -> str:
    """The part of `model/` that a name lies in."""
    return name.removeprefix("fp8serve.model.").split(".")[0] if name.startswith("fp8serve.model.") else ""


@pytest.mark.parametrize("module", sorted(m for m in sources() if model_room(m) in ALLOWED_IN_MODEL))
def test_arrows_in_models_point_one_way(module: str) -> None:
    allowed = ALLOWED_IN_MODEL[model_room(module)]
    wrong = {i for i in imports(module, sources()[module]) if model_room(i) and model_room(i) not in allowed}
    assert not wrong, f"{module} may import only {sorted(allowed)} of model/, not {sorted(wrong)}"


@pytest.mark.parametrize("family", API_FAMILIES)
def test_neither_family_of_routes_knows_the_other(family: str) -> None:
    others = tuple(f"fp8serve.server.api.{other}" for other in API_FAMILIES if other != family)
    for module, path in sources().items():
        if module.startswith(f"fp8serve.server.api.{family}"):
            assert not {i for i in imports(module, path) if i.startswith(others)}, module


@pytest.mark.parametrize("module", sorted(sources()))
def test_special_rules(module: str) -> None:
    found = imports(module, sources()[module])
    tops = {i.split(".")[0] for i in found}
    if module in NOTHING_OF_OURS:
        assert not {i for i in found if i.startswith("fp8serve") and not i.startswith(FOUNDATIONS)}
    if module == "fp8serve.fp8.recipe":
        ours = {i for i in found if i.startswith("fp8serve")}
        assert not {i for i in ours if not i.startswith(("fp8serve.errors", *MADE_OF))}
    if module in NO_TORCH:
        assert "torch" not in tops
    if room(module) != "server" and module != "fp8serve.cli":
        assert "fastapi" not in tops
    if module != "fp8serve.fp8.ops.registry":
        assert not {i for i in found if i.startswith("torch.library")}


def test_every_public_name_is_importable_from_the_top() -> None:
    promised = {"Monitor", "NormLinear", "SiluMulLinear", "DotProductAttention", "Linear", "autocast", "convert"}
    assert promised <= set(fp8serve.__all__)
    for name in fp8serve.__all__:
        assert getattr(fp8serve, name) is not None
    assert dir(fp8serve) == sorted(fp8serve.__all__)


def test_recipes_need_no_torch() -> None:
    """Under both of their names."""
    code = (
        "import sys; from fp8serve.recipe import DelayedScaling; import fp8serve\n"
        "assert fp8serve.DelayedScaling is DelayedScaling; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
