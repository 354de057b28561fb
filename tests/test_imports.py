"""Imports point one way: fp8 <- model <- {engine, calibration, train} <- server <- command line."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import fp8serve

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "fp8": {"fp8", "errors", "options", "processes"},
    "model": {"model", "fp8", "errors", "options", "processes"},
    "engine": {"engine", "model", "fp8", "errors", "options", "processes", "logs", "ranks"},
    "calibration": {"calibration", "charts", "model", "fp8", "errors", "options", "ranks"},
    "train": {"train", "model", "fp8", "errors", "options", "processes", "ranks"},
    "client": {"client", "errors", "options"},
    "chat": {"chat", "client", "engine", "model", "errors", "options", "terminal"},
    "server": {"server", "engine", "train", "model", "fp8", "errors", "options", "processes", "logs"},
    "integrations": {
        "integrations",
        "commands",
        "server",
        "engine",
        "model",
        "errors",
        "options",
        "processes",
        "hub",
        "cli",
    },
}
MORE = {"fp8serve.train.methods.grpo.rollouts": {"engine"}}
"""GRPO generates its rollouts with an engine."""
FOUNDATION = {
    "faults", "named_models", "settings", "metrics", "vllm_metrics", "tracing", "usage",
}  # fmt: skip
ALLOWED_IN_SERVER = {
    "output_parsers": {"output_parsers"},
    **dict.fromkeys(FOUNDATION, {"output_parsers"} | FOUNDATION),
    "schemas": {"schemas"},
    "access": {"access"} | FOUNDATION,
    "http": {"http", "access"} | FOUNDATION,
    "serving": {"serving", "output_parsers"} | FOUNDATION,
    "parsing": {"parsing", "serving", "schemas"} | FOUNDATION,
    "finetuning": {"finetuning", "access", "parsing", "serving", "schemas"} | FOUNDATION,
    "data_directory": FOUNDATION,
    "server_state": {"access", "data_directory", "finetuning", "parsing", "serving"} | FOUNDATION,
    "api": {"api", "access", "server_state", "finetuning", "parsing", "serving", "schemas", "http", "output_parsers"}
    | FOUNDATION,
    "app": {"api", "data_directory", "server_state", "finetuning", "serving", "http"} | FOUNDATION,
    "launch": {"app", "server_state", "serving", "http"} | FOUNDATION,
}
ALLOWED_IN_MODEL = {
    "storage": {"storage"},
    "text": {"text", "storage"},
    "config": {"config", "storage", "transformers_backend"},  # which describes architectures without a family
    "network": {"network", "config", "storage"},
    "transformers_backend": {"transformers_backend", "network", "config", "storage"},
    "formats": {"formats", "config", "storage"},
}
"""What a subpackage of `model/` may import from it. Modules that lie directly in `model/`, `gguf` and `verify` may
import all of them."""
API_FAMILIES = ("native", "openai", "anthropic_messages", "responses")
NOTHING_OF_OURS = {
    "fp8serve.fp8.spec",
    "fp8serve.fp8.amax_rules",
    "fp8serve.fp8.ops.arithmetic",
    "fp8serve.engine.sampling_params",
    "fp8serve.engine.output",
    "fp8serve.errors",
    "fp8serve.charts",
    "fp8serve.options",
    "fp8serve.processes",
}
FOUNDATIONS = ("fp8serve.errors", "fp8serve.options")
MADE_OF = ("fp8serve.fp8.spec", "fp8serve.fp8.amax_rules")  # imported by recipe.py; both are in NOTHING_OF_OURS
NO_TORCH = {
    "fp8serve.fp8.spec",
    "fp8serve.fp8.recipe",
    "fp8serve.engine.sampling_params",
    "fp8serve.engine.output",
    "fp8serve.engine.kv_cache",
    "fp8serve.engine.scheduler",
    "fp8serve.model.config.model_config",
    "fp8serve.model.device",
    "fp8serve.model.storage.headers",
}


@cache
def sources() -> dict[str, Path]:
    """Every module by its installed name."""
    homes = {"fp8serve": ROOT / "fp8serve", "fp8serve.calibration": ROOT / "calibrate"}
    files = {(home, path) for home, folder in homes.items() for path in folder.rglob("*.py")}
    named = {".".join((home, *path.relative_to(homes[home]).with_suffix("").parts)): path for home, path in files}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports() -> dict[str, set[str]]:
    """The absolute names that each module imports, including imports inside functions."""
    return {module: imported_names(module, path) for module, path in sources().items()}


def imported_names(module: str, path: Path) -> set[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            names |= {".".join(filter(None, (base, node.module, alias.name))) for alias in node.names}
    return names


def part(name: str, of: str = "fp8serve") -> str:
    """Returns the child of package `of` that a name lies in, or "" if it lies in none, such as `__version__`."""
    first = name.removeprefix(f"{of}.").split(".")[0] if name.startswith(f"{of}.") else ""
    return "" if first.startswith("__") else first


def wrong_imports(package: str, allowed: dict[str, set[str]]) -> dict[str, list[str]]:
    """Returns the forbidden imports of every module of `package`: names in parts that its own part may not import."""
    wrong = {}
    for module, names in imports().items():
        if (own := part(module, package)) in allowed:
            permitted = {"", *allowed[own], *MORE.get(module, set())}
            wrong[module] = sorted(name for name in names if part(name, package) not in permitted)
    return {module: names for module, names in wrong.items() if names}


def test_arrows_point_one_way() -> None:
    assert not wrong_imports("fp8serve", ALLOWED)


def test_arrows_in_the_server_point_one_way() -> None:
    assert {part(module, "fp8serve.server") for module in sources()} - {""} <= ALLOWED_IN_SERVER.keys()
    assert not wrong_imports("fp8serve.server", ALLOWED_IN_SERVER)


def test_arrows_in_models_point_one_way() -> None:
    assert not wrong_imports("fp8serve.model", ALLOWED_IN_MODEL)


def test_families_of_routes_do_not_import_each_other() -> None:
    api = "fp8serve.server.api"
    everything = {part(name, api) for names in imports().values() for name in names}
    assert not wrong_imports(api, {family: everything - set(API_FAMILIES) | {family} for family in API_FAMILIES})


def test_independent_modules_and_restricted_packages() -> None:
    """Some modules import no others of fp8serve. Only the server imports FastAPI, only the registry torch.library."""
    wrong = {}
    for module, names in imports().items():
        ours = {name for name in names if name.startswith("fp8serve")}
        refused = set()
        if module in NOTHING_OF_OURS:
            refused |= {name for name in ours if not name.startswith(FOUNDATIONS)}
        if module == "fp8serve.fp8.recipe":
            refused |= {name for name in ours if not name.startswith(("fp8serve.errors", *MADE_OF))}
        if module in NO_TORCH:
            refused |= {name for name in names if name.split(".")[0] == "torch"}
        if part(module) != "server" and module != "fp8serve.cli":
            refused |= {name for name in names if name.split(".")[0] == "fastapi"}
        if module != "fp8serve.fp8.ops.registry":
            refused |= {name for name in names if name.startswith("torch.library")}
        if refused:
            wrong[module] = sorted(refused)
    assert not wrong


def test_every_public_name_is_importable_from_the_top() -> None:
    promised = {"Monitor", "NormLinear", "SiluMulLinear", "DotProductAttention", "Linear", "autocast", "convert"}
    assert promised <= set(fp8serve.__all__)
    for name in fp8serve.__all__:
        assert getattr(fp8serve, name) is not None
    assert dir(fp8serve) == sorted(fp8serve.__all__)


def test_recipes_need_no_torch() -> None:
    """The modules are imported under both of their names."""
    code = (
        "import sys; from fp8serve.recipe import DelayedScaling; import fp8serve\n"
        "assert fp8serve.DelayedScaling is DelayedScaling; print('torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "False"
