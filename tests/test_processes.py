"""fp8serve/processes.py starts every child process, and none imports modules from the current directory."""

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import ModelError
from fp8serve.model.config import decoder
from fp8serve.model.config.decoder import describe_in_child_process
from fp8serve.processes import Phases, describe_exit, module_command, module_path, phases_text, process_seconds
from fp8serve.train.methods.grpo.grading import FileGrader, RewardInput
from tests.patience import PATIENCE
from tests.test_imports import sources, tree

HOME = "fp8serve.processes"
REWARD = "fp8serve.train.methods.grpo.reward_process"  # runs the user's file in its own process
OTHER_STARTS = {
    "fp8serve.bench.figures": "git",
    "fp8serve.bench.quality_peers": "a command that the user gives",
    "fp8serve.doctor": "compilers and nvidia-smi",
    "fp8serve.engine.rank_group": "the ranks that rank_processes makes",
    "fp8serve.model.device": "torch/version.py, which it runs in its own process",
    "fp8serve.server.finetuning.job_runner": "the command that job_runner makes",
}
"""Modules that start a process without `module_command`, and the program that they run."""
START = re.compile(
    r"(subprocess|pty|multiprocessing)(\..*)?|concurrent\.futures\.ProcessPoolExecutor|asyncio\.(subprocess|create_sub.*)"
    r"|os\.(system|popen|fork|forkpty|exec.*|spawn.*|posix_spawn.*)|torch\.multiprocessing(\.spawn|\.start_processes)?"
    r"|runpy\..*|torch\.distributed\.launcher\..*"
)
MARK = "run from the current directory"


def names(module: str) -> Iterator[str]:
    """Dotted names that a module imports or uses, such as os.system."""
    for node in ast.walk(tree(sources()[module])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_python_is_started_in_one_place() -> None:
    wrong = {}
    for module in sources().keys() - {HOME}:
        used = set(names(module))
        starts = {name for name in used if START.fullmatch(name)}
        if "sys.executable" in used:
            wrong[module] = "starts Python without fp8serve.processes.module_command"
        elif starts and module not in OTHER_STARTS and module != REWARD and f"{HOME}.module_command" not in used:
            wrong[module] = f"uses {sorted(starts)} without module_command"
    assert not wrong


def child_modules() -> set[str]:
    """Returns the modules that `module_command` is called with."""
    texts = (path.read_text() for path in sources().values())
    return {name for text in texts for name in re.findall(r"\bmodule_command\(\s*\"([\w.]+)\"", text)}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a module of every name that a process may import."""
    folder = tmp_path_factory.mktemp("hostile")
    others = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "pydantic", "typer", "fastapi"}
    for name in (sys.stdlib_module_names | others) - {"sys"}:
        (folder / f"{name}.py").write_text(f"import os; os.write(2, b'{MARK}'); os._exit(97)")
    return folder


@pytest.mark.parametrize("module", sorted(child_modules()))
def test_a_child_imports_nothing_from_the_current_directory(module: str, hostile: Path) -> None:
    process = subprocess.run(
        module_command(module), cwd=hostile, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )
    assert MARK not in process.stderr


def test_all_child_modules_are_found() -> None:
    assert len(child_modules()) == 11


def test_describing_a_config_imports_nothing_from_the_current_directory(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests the child process of `POST /finetune/validate`."""
    monkeypatch.chdir(hostile)
    with pytest.raises(ModelError) as refused:
        describe_in_child_process({"model_type": "no such type", "marker": os.fspath(hostile)}, {}, "config.json")
    assert MARK not in str(refused.value)
    assert "no such type" in str(refused.value)


def test_a_reward_file_imports_its_neighbours_and_nothing_from_the_current_directory(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 0.5")
    file = tmp_path / "reward.py"
    file.write_text("import csv, neighbour\ndef reward(prompt, completion, row):\n    return neighbour.VALUE\n")
    monkeypatch.chdir(hostile)
    grader = FileGrader(file, PATIENCE)
    try:
        assert grader.rewards([RewardInput("1+1", "2", {}, "file:1")]) == [0.5]
    finally:
        grader.close()


@pytest.mark.parametrize("name", ["typer", "logging", "traceback", "torch"])
def test_the_package_as_a_program_leaves_the_current_directory(name: str, tmp_path: Path) -> None:
    """processes.py states which modules Python imports before it can."""
    (tmp_path / f"{name}.py").write_text(f"import os; os.write(2, b'{MARK}'); os._exit(97)")
    command = [sys.executable, "-m", "fp8serve", "--version"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (process.returncode, process.stderr) == (0, "")


def test_the_modules_of_this_process_are_found_without_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags: Any = type("flags", (), {"safe_path": False})
    monkeypatch.setattr(sys, "flags", flags)
    for first in ("", str(tmp_path)):
        monkeypatch.setattr(sys, "path", [first, "/a", "/b"])
        assert module_path() == "/a:/b"
    monkeypatch.setattr(flags, "safe_path", True)  # with safe_path, the user has added this directory
    assert module_path() == f"{tmp_path}:/a:/b"


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exit status 0"), (-signal.SIGKILL, "killed by SIGKILL"), (-40, "killed by signal 40"), (None, "unknown")],
)
def test_describe_exit_names_the_status_or_the_signal(status: int | None, words: str) -> None:
    assert words in describe_exit(status)


def test_a_class_that_is_not_built_in_time_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_TRIAL_TIMEOUT_SECONDS", 1e-3)
    with pytest.raises(ModelError, match=r"not built within 0\.001 seconds"):
        describe_in_child_process({"model_type": "never"}, {}, "config.json")


def test_phases_sum_the_seconds_of_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 12.25, 15.0])
    monkeypatch.setattr("fp8serve.processes.time.monotonic", lambda: next(clock))
    phases = Phases()
    for name in ("read", "check", "read"):
        phases.end(name)
    assert phases.seconds == {"read": 4.75, "check": 0.25}
    assert phases_text(phases.seconds) == "read 4.8, check 0.2"


def test_a_child_is_younger_than_this_process() -> None:
    code = "from fp8serve.processes import process_seconds; print(process_seconds())"
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0 < age < process_seconds()
