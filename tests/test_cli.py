"""The command line from a shell's view: exit statuses, sentences, JSON, and the cost of an answer."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fp8serve import __version__, cli, terminal
from fp8serve.cli import main
from fp8serve.errors import ModelError
from fp8serve.hub import find_model


def all_commands(group: Any, prefix: str = "") -> dict[str, Any]:
    """Returns every command by its words: groups, such as `jobs`, and their commands, such as `jobs list`."""
    commands: dict[str, Any] = {}
    for name, command in group.commands.items():
        commands[prefix + name] = command
        commands |= all_commands(command, f"{prefix}{name} ") if hasattr(command, "commands") else {}
    return commands


COMMANDS = all_commands(typer.main.get_command(cli.app))
HEAVY = {"torch", "numpy", "fastapi", "starlette", "uvicorn", "safetensors", "tokenizers", "jinja2", "rich"}


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the error message: the only line on standard error, with nothing on standard output."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("fp8serve: ")
    return captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_explains_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    output = capsys.readouterr().out
    assert f"  fp8serve {command}" in output.partition("Examples:")[2]
    for parameter in COMMANDS[command].params:
        assert parameter.help, parameter.name


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"\n  {command} " in output for command in COMMANDS if " " not in command)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fp8serve.cli import main\n"
        f"for c in {list(COMMANDS)!r}: assert main([*c.split(), '--help']) == 0\n"
        f"loaded = {HEAVY!r} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fp8serve {__version__}\n"


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["calibrate", "model"],
        ["calibrate", "model", "--out", "x", "--recipe", "nonsense"],
        ["calibrate", "model", "--out", "x", "--samples", "0"],
        ["serve", "model", "--port", "70000"],
        ["generate"],
        ["doctor", "--nonsense"],
    ],
)
def test_wrong_usage_is_status_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert "Usage: fp8serve" in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", ["calibrate", "serve", "generate", "finetune", "eval", "inspect"])
def test_a_missing_directory_is_reported_in_one_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"calibrate": ["--out", "x"], "finetune": ["--data", "d", "--out", "x"], "generate": ["Hello"]}
    assert main([command, str(tmp_path / "nowhere"), *extra.get(command, [])]) == 1
    assert "nowhere" in sentence(capsys)


def test_options_of_another_recipe_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["calibrate", str(tmp_path), "--out", str(tmp_path / "x"), "--recipe", "current", "--margin", "1"]
    assert main(args) == 1
    assert "is not an option of the recipe" in sentence(capsys)
    assert not (tmp_path / "x").exists()


class Failing:
    """Replaces a function such as `doctor.examine` and raises `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *args: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ModelError("It is broken; mend it."), 1, "fp8serve: It is broken; mend it.\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.json"),
            1,
            "fp8serve: No such file or directory: a.json\n",
        ),
        (ValueError("oops"), 1, "fp8serve: internal error, ValueError: oops;"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_becomes_a_status_and_a_message(
    error: BaseException, status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fp8serve.doctor.examine", Failing(error))
    assert main(["doctor"]) == status
    captured = capsys.readouterr()
    assert captured.err.startswith(text)
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("args", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_the_traceback(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fp8serve.doctor.examine", Failing(ModelError("It is broken.")))
    assert main(args) == 1
    assert "Traceback" in capsys.readouterr().err


def test_no_progress_bar_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("Working") as advance:
        advance(1, 2)
    assert capsys.readouterr() == ("", "")


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.progress("Working") as advance:
        advance(1, 2)
    captured = capsys.readouterr()
    assert "Working" in captured.err
    assert "1/2" in captured.err
    assert captured.out == ""


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": "x"}


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 41, "2.0 TiB")]
)
def test_size(num_bytes: int, text: str) -> None:
    assert terminal.format_bytes(num_bytes) == text


def test_a_directory_is_found_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fp8serve.hub._download", Failing(AssertionError("asked the hub")))
    assert find_model("org/name") == Path("org/name")


def test_a_hub_name_is_downloaded_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    arguments: dict[str, Any] = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        arguments.update(name=name, allow_patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("org/name") == tmp_path
    assert arguments["name"] == "org/name"
    assert not any(p.endswith((".bin", ".pt", ".py", "*")) for p in arguments["allow_patterns"])


def test_a_hub_name_without_a_network_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = (
        "from fp8serve.hub import find_model\nfrom fp8serve.errors import ModelError\n"
        "try: find_model('org/no-such-model')\nexcept ModelError as e: print(e)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.startswith(
        "org/no-such-model is not a directory, and it could not be downloaded from the hub ("
    )
    assert process.stdout.count("\n") == 1


@pytest.mark.parametrize("name", ["/no/such/dir", "a/b/c", "name", "../x/y", "org/name/"])
def test_the_hub_is_not_asked_for_a_name_that_it_cannot_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8serve.hub._download", Failing(AssertionError("asked the hub")))
    with pytest.raises(ModelError, match="is not a directory"):
        find_model(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file"):
        find_model(str(tmp_path / "model.safetensors"))


def test_a_mistyped_model_gets_a_suggestion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-fp8").mkdir()
    (tmp_path / "llama-fp8" / "config.json").touch()
    (tmp_path / "lama-fp8-notes").mkdir()
    (tmp_path / "tiny-Q8_0.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fp8serve.hub._download", Failing(AssertionError("asked the hub")))
    for name, expected in {
        "lama-fp8": "llama-fp8",
        "./llama-fp9": "llama-fp8",
        str(tmp_path / "LLAMA-fp8"): str(tmp_path / "llama-fp8"),
        "tiny-q8_0.gguf": "tiny-Q8_0.gguf",
        "smolm2": "smollm2",
    }.items():
        with pytest.raises(ModelError, match=rf"Did you mean {re.escape(expected)}\?$"):
            find_model(name)
    for name in ("something-else", str(tmp_path / "no" / "llama-fp8")):
        with pytest.raises(ModelError) as refused:
            find_model(name)
        assert "Did you mean" not in str(refused.value)


def test_several_values_after_one_option_are_refused_with_the_right_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", "--served-model-name", "a", "b"]) == 2
    assert "'b' belongs to no option; repeat an option for each of its values: --served" in capsys.readouterr().err
