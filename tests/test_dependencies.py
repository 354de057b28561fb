"""A test file depends on what it imports, runs and reads."""

import json
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.dependencies import (
    CLI,
    COMMANDS,
    EVERY_FILE,
    FEW_SOURCES,
    FOLDERS,
    RENAMED_COMMANDS,
    ROOT,
    Sources,
    command_words,
    is_changed,
    reachable,
)
from tests.tiny import write_tiny_model

FILES = {
    "fp8serve/__init__.py": '_MODULES = {"Linear": "fp8serve.layers.linear"}',
    "fp8serve/cli.py": "from fp8serve.commands import evaluate, serve",
    "fp8serve/commands/evaluate.py": "def command():\n    from fp8serve import Linear",
    "fp8serve/commands/serve.py": "def command():\n    from fp8serve.server import app",
    "fp8serve/layers/__init__.py": "",
    "fp8serve/layers/linear.py": '"""See fp8serve.server.app."""\nfrom .ops import cast',
    "fp8serve/layers/ops.py": "",
    "fp8serve/server/__init__.py": "",
    "fp8serve/server/app.py": 'WORKER, PAGES = "fp8serve.server.worker", "console"\nHELP = "see fp8serve.Linear"',
    "fp8serve/server/worker.py": "def main():\n    from fp8serve.calibration.data import PASSAGES",
    "fp8serve/server/console/page.html": "",
    "calibrate/__init__.py": "",
    "calibrate/data.py": 'PASSAGES = Path(__file__).with_name("passages.jsonl")',
    "calibrate/passages.jsonl": "",
    "docs/numbers.md": "",
    "tests/conftest.py": "import fp8serve.layers.linear",
    "tests/helpers.py": "def use_linear():\n    import fp8serve\n    fp8serve.Linear()",
    "tests/test_all.py": 'ROOT = Path(__file__).parents[1]\nPAGES = ROOT.glob("*.md")',
    "tests/test_command_line.py": 'from fp8serve.cli import main\nmain(["eval"])',
    "tests/test_every_command.py": "from fp8serve.cli import main, names\nfor name in names: main([name])",
    "tests/test_child.py": 'CODE = "from fp8serve.layers.ops import cast; cast()"',
    "tests/test_helped.py": "from tests import helpers",
    "tests/test_pages.py": 'PAGES = Path(__file__).parents[1] / "docs"',
    "tests/test_word.py": 'WORD = "docs"',
    "tests/server/conftest.py": "from fp8serve.server.app import app",
    "tests/server/stored/old.json": "",
    "tests/server/test_app.py": "",
    "tests/server/test_stored.py": 'OLD = Path(__file__).with_name("stored")',
    "tests/csrc/test_kernels.py": "",
    "tests/cuda/test_kernels.py": "",
}  # fmt: skip
LAYERS = {"child", "command_line", "every_command", "helped"}
SERVER = {"every_command", "server/app", "server/stored"}
ALWAYS = {"all"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("fp8serve/layers/linear.py", LAYERS - {"child"}),  # by import, by a public name, by a command
        ("fp8serve/layers/ops.py", LAYERS),  # relative import, code in a string
        ("fp8serve/layers/__init__.py", LAYERS),
        ("fp8serve/cli.py", {"command_line", "every_command"}),
        ("fp8serve/commands/serve.py", {"command_line", "every_command"}),  # which the command line imports
        ("fp8serve/server/app.py", SERVER),  # not by the docstring of another module
        ("fp8serve/server/worker.py", SERVER),
        ("fp8serve/server/console/page.html", SERVER),
        ("calibrate/data.py", SERVER),
        ("calibrate/passages.jsonl", SERVER),
        ("docs/numbers.md", {"pages"}),
        ("README.md", set()),
        ("tests/helpers.py", {"helped"}),
        ("tests/server/conftest.py", {"server/app", "server/stored"}),
        ("tests/server/stored/old.json", {"server/stored"}),
        ("tests/test_child.py", {"child"}),
        ("csrc/cuda/gemm.cu", {"cuda/kernels"}),
        ("csrc/scales.h", {"cuda/kernels", "csrc/kernels", *LAYERS, "pages", "word"}),
        ("csrc/cpu/gemm.cpp", {"csrc/kernels", *LAYERS, "pages", "word"}),
    ],
)
def test_a_change_affects_what_depends_on_it(changed: str, tests: set[str], root: Path) -> None:
    names = {
        str(path.with_name(path.name.removeprefix("test_")).with_suffix(""))
        for path in (Path(file).relative_to("tests") for file in Sources(root).affected_tests([changed]))
    }
    assert names == tests | ALWAYS


@cache
def sources() -> Sources:
    return Sources(ROOT)


def affected(changed: str) -> set[str]:
    return sources().affected_tests([changed])


def folders(changed: str) -> set[str]:
    """Returns the folders of the tests that a change affects, without tests that read every file."""
    return {test.split("/")[1] for test in affected(changed) - affected("LICENSE") if test.count("/") > 1}


def test_a_page_affects_the_tests_that_read_pages() -> None:
    assert {"tests/test_docs.py", "tests/fp8/test_numerics_page.py"} <= affected("docs/numerics.md")
    assert "tests/test_search.py" in affected("docs/static/scorer.js")
    assert not folders("docs/numerics.md") & {"cuda", "engine", "train", "calibration"}


def test_a_route_affects_the_server_and_neither_kernels_nor_training() -> None:
    tests = affected("fp8serve/server/api/openai/chat_routes.py")
    assert {"tests/server/api/test_openapi.py", "tests/server/console/test_chat.py", "tests/test_main_job.py"} <= tests
    assert not folders("fp8serve/server/api/openai/chat_routes.py") & {"cuda", "csrc", "fp8"}
    assert not tests & {
        "tests/model/test_hostile.py",
        "tests/train/sharded/test_stops.py",
        "tests/engine/test_client.py",
    }


def test_a_module_of_training_affects_no_server_whose_trainer_is_a_stub() -> None:
    tests = affected("fp8serve/train/optimizer.py")
    assert {"tests/train/test_trainer.py", "tests/server/test_live.py", "tests/test_main_job.py"} <= tests
    assert "tests/server/finetuning/test_finetune.py" in tests  # one of its tests names TRAINING_COMMAND
    assert "tests/server/api/test_openai.py" not in tests


def test_a_source_of_kernels_affects_the_tests_of_its_library() -> None:
    assert folders("csrc/cuda/casts.cu") == {"cuda", "benchmarks", "csrc"}  # csrc: one test reads all sources
    assert folders("csrc/cpu/casts.cpp") >= {"csrc", "fp8", "engine", "train"}
    assert not folders("csrc/cpu/casts.cpp") & {"server"}
    assert {"tests/model/test_four_bit.py", "tests/calibration/test_rounding.py"} <= affected("csrc/cpu/gemm_4bit.cpp")


def test_programs_and_processes_affect_the_tests_that_run_them() -> None:
    assert "tests/test_examples.py" in affected("fp8serve/fp8/recipe.py")
    assert "tests/test_ending.py" in affected("fp8serve/cli.py") & affected("fp8serve/commands/serve.py")
    assert "tests/train/sharded/test_stops.py" in affected("fp8serve/fp8/fsdp.py")
    assert "tests/fp8/test_numerics_page.py" in affected("tests/fp8/test_scaling.py")  # whose names it lists


def test_a_helper_affects_the_tests_that_use_it() -> None:
    assert "server" in folders("tests/server/fakes.py")
    assert not folders("tests/server/fakes.py") & {"cuda", "csrc", "train", "engine", "model"}
    assert "tests/cuda/test_races.py" in affected("tests/cuda/race_run.py")  # which runs it as a process


@pytest.mark.parametrize("test", FEW_SOURCES)
def test_races_and_kills_run_for_few_sources(test: str) -> None:
    deciding = {"tests/cuda/test_races.py": "csrc/cuda/gemm.cu"}.get(test, "fp8serve/train/checkpointing.py")
    assert test in affected(deciding)
    assert test in affected(test)
    assert test not in affected("fp8serve/fp8/ops/casts.py")
    for pattern in FEW_SOURCES[test]:
        assert any(ROOT.glob(pattern)), pattern


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chat", ["chat"]),
        ("jobs list", ["jobs"]),
        ("serve --port 0", ["serve"]),
        ("Run it again: fp8serve calibrate MODEL", ["calibrate"]),
        ("merge the adapter into its base", []),
    ],
)
def test_a_sentence_names_no_command(text: str, words: list[str]) -> None:
    assert command_words(text) == words


PRINT_FILES = """
import json, sys
from {module} import main
status = int(main(sys.argv[1:]))
files = [module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
print(json.dumps([status, files]))
"""


def imported_files(module: str, *args: str) -> set[str]:
    """Calls `main` of a module in a process with these arguments, and returns the files that the process imported."""
    code = PRINT_FILES.format(module=module)
    process = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, check=True)
    status, files = json.loads(process.stdout.splitlines()[-1])
    assert status == 0, process.stdout + process.stderr
    paths = [Path(file).relative_to(ROOT).as_posix() for file in files if Path(file).is_relative_to(ROOT)]
    return {path for path in paths if path.startswith(tuple(f"{folder}/" for folder in FOLDERS))}


def unexpected(files: set[str], entries: Iterable[str]) -> list[str]:
    """Returns the files that are no dependencies of these entries."""
    names = reachable(entries, sources().direct)
    return sorted(file for file in files if not any(is_changed(name, [file]) for name in names))


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "calibrate MODEL --out OUT --samples 2 --seq-len 16",
        "doctor MODEL",
        "eval MODEL --recipe bf16 --samples 2 --seq-len 16",
        "generate MODEL Hello --recipe bf16 --max-new-tokens 2",
        "inspect MODEL",
        "verify MODEL",
    ],
)
def test_a_process_imports_only_dependencies_of_its_command(command: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    paths = {"MODEL": str(model), "OUT": str(tmp_path / "out")}
    args = [paths.get(word, word) for word in command.split()]
    files = imported_files("fp8serve.cli", *args)
    assert len(files) > 30
    assert unexpected(files, [CLI, f"{COMMANDS}{RENAMED_COMMANDS.get(args[0], args[0])}.py()"]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "test", ["tests/model/test_scales.py", "tests/train/test_checkpoint.py", "tests/server/api/test_native.py"]
)
def test_a_test_imports_only_its_dependencies(test: str, tmp_path: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "pytest"), "-m", "not slow"]
    files = imported_files("pytest", test, *options)
    assert test in files
    assert unexpected(files, [*sources().entries(test), "tests/conftest.py"]) == []


def test_every_file_of_the_product_affects_a_test() -> None:
    entries = set[str]().union(*map(sources().entries, sources().tests()))
    names = reachable(entries, sources().direct)
    files = [path for folder in ("fp8serve", "calibrate") for path in (ROOT / folder).rglob("*") if path.is_file()]
    unused = {".pyc", ".so", ".typed"}
    paths = {str(path.relative_to(ROOT)) for path in files if path.suffix not in unused}
    assert [path for path in sorted(paths) if not any(is_changed(name, [path]) for name in names - {EVERY_FILE})] == []
