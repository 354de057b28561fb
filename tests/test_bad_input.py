"""Bad input to a command: one sentence that names the input, status 1, and no partial output."""

import io
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from fp8serve.cli import main
from tests.model.hostile_tokenizers import CASES
from tests.model.test_limited_template import HOSTILE
from tests.tiny import CHATS, write_tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bad") / "model")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text(CHATS)
    return path


def failure(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """Runs a command that must fail, and returns its only error message."""
    assert main([str(a) for a in args]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("fp8serve: ")]
    assert len(lines) == 1
    assert "internal error" not in lines[0]
    assert "Traceback" not in captured.err
    return lines[0]


def truncate(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def without_config(model: Path) -> None:
    (model / "config.json").unlink()


def another_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    )


def without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


SPOILERS: dict[Callable[[Path], None], str] = {
    truncate: "model.safetensors",
    without_config: "config.json",
    another_architecture: "GPT2LMHeadModel",
    without_tokenizer: "tokenizer",
}


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("command", ["calibrate", "finetune", "eval", "generate"])
def test_a_damaged_model(
    spoil: Callable[[Path], None], command: str, model: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(model)
    out = model.parent / "out"
    rest: dict[str, tuple[str | Path, ...]] = {
        "calibrate": ("--out", out),
        "finetune": ("--data", chats, "--out", out),
        "eval": ("--recipe", "bf16"),
        "generate": ("Hello", "--recipe", "bf16"),
    }
    assert SPOILERS[spoil] in failure(capsys, command, model, *rest[command])
    cache = out / "tokenized"  # the data are valid, so their tokenized cache is kept for the next run
    assert not [p for p in model.parent.rglob("*.safetensors") if p.parent not in (model, cache)]
    assert not (out / "model").exists()


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no example"),
        ('{"text": "good"}\n{"text": \n', "line 2"),
        ('{"text": "good"}\n[1]\n', "line 2"),
        ('{"words": "unknown column"}\n', "line 1"),
    ],
    ids=["empty", "broken JSON", "not an object", "unknown columns"],
)
@pytest.mark.parametrize("command", ["calibrate", "finetune"])
def test_bad_data(
    text: str, expected: str, command: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    message = failure(capsys, command, original, "--data", data, "--out", tmp_path / "out")
    assert "data.jsonl" in message
    assert expected in message.replace(":2", " line 2").replace(":1", " line 1")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_data_that_does_not_exist(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, "calibrate", original, "--data", tmp_path / "none.jsonl", "--out", tmp_path / "out")
    assert "none.jsonl" in message


def test_an_output_directory_that_is_not_empty(original: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(chats.parent.iterdir())
    message = failure(capsys, "calibrate", original, "--out", chats.parent, "--data", chats)
    assert "not empty" in message
    assert sorted(chats.parent.iterdir()) == before


def test_scales_of_another_model(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fp8serve.train.scratch import write_random_model

    other = write_random_model(
        tmp_path / "other", ["some text"], vocab_size=320, hidden_size=64, layers=1, heads=4, intermediate_size=128
    )
    few = ("--samples", "2", "--seq-len", "16")
    assert main(["calibrate", str(other), "--out", str(tmp_path / "scales"), "--scales-only", *few]) == 0
    capsys.readouterr()
    scales = tmp_path / "scales" / "scales.safetensors"
    assert "another model" in failure(capsys, "generate", original, "Hello", "--recipe", "delayed", "--scales", scales)


def test_a_prompt_longer_than_the_context(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, "generate", original, "word " * 1000, "--recipe", "bf16")
    assert "256" in message


@pytest.mark.parametrize(
    ("option", "expected"),
    [("margin", "NAME=VALUE"), ("margins=1", "no parameter 'margins'"), ("margin=x", "margin must be a whole number")],
)
def test_an_invalid_recipe_option(
    original: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, expected: str
) -> None:
    args = ("finetune", original, "--data", chats, "--out", tmp_path / "run", "--recipe-option", option)
    assert expected in failure(capsys, *args)
    assert not (tmp_path / "run").exists()


def test_generate_without_scales_and_recipe_suggests_both(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, "generate", original, "Hello")
    assert "calibrate" in message
    assert "recipe" in message


def test_a_port_in_use(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert port in failure(capsys, "serve", original, "--port", port, "--data-dir", tmp_path / "data")


def test_an_open_port_without_a_key(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, "serve", original, "--host", "0.0.0.0", "--port", "0", "--data-dir", tmp_path / "data")
    assert "--api-key" in message


def test_inspect_refuses_files_that_are_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "config.json" in failure(capsys, "inspect", tmp_path)
    (tmp_path / "scales.safetensors").write_bytes(b"nonsense")
    assert "scales.safetensors" in failure(capsys, "inspect", tmp_path / "scales.safetensors")


def test_a_demonstration_does_not_overwrite_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert "not empty" in failure(capsys, "demo", "--keep", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


TOKENIZERS = ["precompiled map short", "template names an unknown token", "unknown token missing in WordLevel"]
"""Two panic in Rust (one while the file is read, one while a text is tokenized); one raises an Exception."""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_fails_in_its_library_is_reported_in_one_sentence(
    model: Path, chats: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """Rust may print its own report of the panic above our message."""
    CASES[name].write(model)
    out = tmp_path / "out"
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "zz top"}\n' * 4)
    for command in (
        ("generate", model, "zz", "--recipe", "bf16"),
        ("calibrate", model, "--data", texts, "--out", out),
        ("finetune", model, "--data", texts, "--out", out),
    ):
        assert main([str(argument) for argument in command]) == 1, command
        message = capfd.readouterr().err
        lines = [line for line in message.splitlines() if line.startswith("fp8serve: ")]
        assert len(lines) == 1, message
        assert "tokenize" in lines[0]
        assert not [word for word in ("internal error", "panicked", "Traceback") if word in lines[0]]


@pytest.mark.parametrize(
    ("source", "count"),  # the endless template costs every command five seconds of CPU time
    [pytest.param(HOSTILE[0], 1, id="endless", marks=pytest.mark.slow), pytest.param(HOSTILE[2], 4, id="huge")],
)
def test_a_template_that_does_not_end_is_reported_in_one_sentence(
    model: Path, chats: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], source: str, count: int
) -> None:
    (model / "chat_template.jinja").write_text(source)
    out = tmp_path / "out"
    for command in (
        ("calibrate", model, "--data", chats, "--out", out),
        ("finetune", model, "--data", chats, "--out", out, "--max-steps", "1"),
        ("finetune", model, "--data", chats, "--out", out, "--method", "dpo", "--max-steps", "1"),
        ("chat", model, "--recipe", "bf16"),
    )[:count]:
        if "dpo" in command:
            message = [{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]
            prompt = [{"role": "user", "content": "?"}]
            chats.write_text(json.dumps({"prompt": prompt, "chosen": message[0], "rejected": message[1]}) + "\n")
        with patch("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n"))):
            assert main([str(argument) for argument in command]) == 1, command
        output = capfd.readouterr().err
        lines = [line for line in output.splitlines() if line.startswith("fp8serve: ")]
        assert len(lines) == 1, output
        assert "The model's chat template exceeds its" in lines[0]
        assert "Traceback" not in output
