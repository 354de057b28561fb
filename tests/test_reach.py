"""A change reaches every file of tests that imports, names or starts what changed; the others are left out."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

import fp8serve.bench.ops
import fp8serve.calibration.pipeline
import fp8serve.engine.worker
import fp8serve.server.launch
import fp8serve.train.finetune  # noqa: F401 (each is looked at in sys.modules)
from tests.reach import COMMAND_LINE, COMMANDS, Modules

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "fp8serve/__init__.py": '_MODULES = {\n  "Engine": "fp8serve.engine.engine",\n  "merge": "fp8serve.merging",\n}',
    "fp8serve/engine/__init__.py": "",
    "fp8serve/engine/engine.py": "def step():\n    from .cache import (\n        Cache,\n        Page,\n    )\n",
    "fp8serve/engine/cache.py": "",
    "fp8serve/engine/data.json": "{}",
    "fp8serve/merging.py": "",
    "fp8serve/cli.py": (
        "from fp8serve.commands import merge, serve\n"
        'COMMANDS = {\n    "merge": merge, "serve": serve,\n}\nfor a in {"jobs": jobs.app}.items(): pass\n'
    ),
    "fp8serve/commands/__init__.py": "",
    "fp8serve/commands/jobs.py": "from fp8serve.commands.serve import find_key\n",
    "fp8serve/commands/merge.py": "from fp8serve.merging import merge\n",
    "fp8serve/commands/serve.py": "from fp8serve.engine import engine\n",
    "calibrate/__init__.py": "",
    "calibrate/pipeline.py": "",
    "tests/__init__.py": "",
    "tests/unit/__init__.py": "",
    "tests/unit/helper.py": "from fp8serve.merging import merge",
    "tests/unit/child.py": "import fp8serve.calibration.pipeline",
    "tests/unit/test_import.py": "from .helper import merge\n",
    "tests/unit/test_public.py": "import fp8serve\nfp8serve.Engine()\n",
    "tests/unit/test_other_name.py": "import fp8serve as fp8\nfp8.Engine()\n",
    "tests/unit/test_patch.py": 'monkeypatch.setattr("fp8serve.engine.cache.SIZE", 1)\n',
    "tests/unit/test_merge.py": 'from fp8serve.cli import main\nmain(["merge", "a"])\n',
    "tests/unit/test_program.py": 'run(sys.executable, "-m", "fp8serve", "merge", "a")\n',
    "tests/unit/test_jobs.py": 'from fp8serve.cli import main\nmain(["jobs"])\n',
    "tests/unit/test_serve.py": 'run("python -m fp8serve.cli serve model")\n',
    "tests/unit/test_child.py": 'PATH = Path(__file__).with_name("child.py")\n',
    "tests/unit/test_page.py": 'PAGE = Path(__file__).parents[2] / "docs/page.md"\n',
    "tests/unit/test_directory.py": "run(cwd=Path(__file__).parents[2])\n",
    "tests/live/__init__.py": "",
    "tests/live/conftest.py": "import fp8serve.engine.engine",
    "tests/live/test_empty.py": "",
}
TESTS = {Path(name).stem.removeprefix("test_") for name in FILES if "/test_" in name}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


ENGINE = {"public", "other_name", "serve", "empty", "page"}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("fp8serve/engine/engine.py", ENGINE),
        ("fp8serve/engine/cache.py", ENGINE | {"patch"}),
        ("fp8serve/engine/data.json", ENGINE | {"patch"}),
        ("fp8serve/engine/deleted.py", ENGINE | {"patch"}),
        ("fp8serve/merging.py", {"import", "merge", "program", "other_name", "page"}),
        ("fp8serve/commands/serve.py", {"serve", "page"}),
        ("fp8serve/commands/jobs.py", {"jobs", "page"}),
        ("fp8serve/cli.py", {"merge", "program", "jobs", "serve", "page"}),
        ("calibrate/pipeline.py", {"child", "page"}),
        ("tests/unit/helper.py", {"import", "page"}),
        ("tests/unit/test_jobs.py", {"jobs", "page"}),
        ("tests/live/conftest.py", {"empty", "page"}),
        ("docs/page.md", {"page"}),
        ("CHANGELOG.md", {"page"}),
        ("fp8serve/__init__.py", TESTS - {"directory"}),
        ("csrc/cpu/gemm.cpp", TESTS),
        ("Makefile", TESTS),
    ],
)
def test_a_change_reaches_what_names_it(root: Path, changed: str, reached: set[str]) -> None:
    tests = sorted((root / "tests").rglob("test_*.py"))
    unreached = Modules(root).unreached(tests, [changed])
    assert {path.stem.removeprefix("test_") for path in tests if path not in unreached} == reached


def test_one_file_of_a_change_is_enough(root: Path) -> None:
    tests = [root / "tests/unit/test_import.py", root / "tests/unit/test_patch.py"]
    assert Modules(root).unreached(tests, ["CHANGELOG.md"]) == tests
    assert Modules(root).unreached(tests, ["CHANGELOG.md", "fp8serve/merging.py"]) == tests[1:]
    assert Modules(root).unreached(tests, ["CHANGELOG.md", "fp8serve/merging.py", "Makefile"]) == []


def test_a_file_from_elsewhere_always_runs(root: Path) -> None:
    elsewhere = root / "elsewhere" / "test_it.py"
    assert Modules(root).unreached([elsewhere], ["CHANGELOG.md", "fp8serve/merging.py"]) == []


def test_every_name_that_a_module_holds_is_one_that_it_reaches() -> None:
    """The modules of this process, as they were really imported."""
    modules = Modules(ROOT)
    compared = 0
    for name, module in sorted(sys.modules.items()):
        if name not in modules.paths or name in ("fp8serve", COMMAND_LINE) or name.startswith(COMMANDS):
            continue
        for value in list(vars(module).values()):
            owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            is_part = isinstance(value, ModuleType) and value.__name__.startswith(f"{name}.")  # imported by another
            if isinstance(owner, str) and owner in modules.paths and not is_part:
                assert owner in modules.reach(name), (name, owner)
                compared += 1
    assert compared > 1000


def test_all_commands_are_known() -> None:
    modules = Modules(ROOT)
    assert {*modules.commands.values()} <= modules.paths.keys()
    assert modules.commands["eval"] == f"{COMMANDS}.evaluate"
    assert {"serve", "jobs", "models", "key", "bench"} <= modules.commands.keys()
    assert modules.attributes["Engine"] == "fp8serve.engine.engine"
    assert len(modules.attributes) == len(sys.modules["fp8serve"].__all__) - 1
