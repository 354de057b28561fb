"""`fp8serve chat` with a pipe and at a terminal."""

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fp8serve.chat.models import ChatOptions, LocalModel
from fp8serve.cli import main
from fp8serve.errors import ModelError, RequestError
from tests.client.fake import CHAT, FakeServer, delta, json_answer, stream_answer
from tests.patience import until
from tests.tiny import write_tiny_model

ROUTE = "POST /v1/chat/completions"


class Stdin(io.TextIOWrapper):
    """Standard input with these bytes."""

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command with this standard input; returns (status, stdout, stderr)."""

    def run(text: bytes, *args: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", Stdin(text))
        status = main(["chat", *args])
        return status, *capsys.readouterr()

    return run


def test_a_pipe_gets_the_answer_and_nothing_else(fake: FakeServer, chat: Any) -> None:
    fake.routes[ROUTE] = stream_answer(delta(reasoning="Hm."), *CHAT)
    options = ["--system", "Be brief.", "--seed", "3", "--temperature", "0", "--max-tokens", "9", "--model", "mine"]
    assert chat(b"Hello\nyou \xff\n", "--server", fake.url, *options) == (0, "Good day.\n", "")
    (body,) = fake.bodies(ROUTE)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello\nyou \ufffd"}]
    sampling = {"temperature": 0, "max_tokens": 9, "seed": 3}
    assert body == {"model": "mine", "messages": messages, "stream": True, **sampling}


@pytest.mark.parametrize("text", [b"", b" \n\n"])
def test_an_empty_input_is_refused(text: bytes, fake: FakeServer, chat: Any) -> None:
    status, out, err = chat(text, "--server", fake.url)
    assert (status, out, err) == (1, "", "fp8serve: There is no question on standard input.\n")


def test_an_error_of_the_server_is_status_1(fake: FakeServer, chat: Any) -> None:
    fake.routes[ROUTE] = json_answer({"error": {"message": "The model is not there."}}, 404)
    assert chat(b"Hi", "--server", fake.url) == (1, "", "fp8serve: The server answered 404: The model is not there.\n")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "give either a MODEL"),
        (["m", "--server", "http://a"], "give either a MODEL"),
        (["m", "--model", "x"], "--model is for --server"),
        (["m", "--api-key-file", "x"], "--api-key-file is for --server"),
        (["--server", "http://a", "--recipe", "bf16"], "--recipe is for a local MODEL"),
        (["--server", "http://a", "--no-cuda-graphs"], "--cuda-graphs is for a local MODEL"),
    ],
)
def test_wrong_usage(args: list[str], sentence: str, chat: Any) -> None:
    status, _, err = chat(b"Hi", *args)
    assert status == 2
    assert sentence in err


def test_a_local_model_gives_the_engines_answer(tiny: Path, chat: Any) -> None:
    args = (str(tiny), "--recipe", "current", "--temperature", "0", "--max-tokens", "8")
    status, out, err = chat(b"Once upon a time", *args)
    assert (status, err) == (0, "")
    from fp8serve.engine.engine import Engine

    engine = Engine(tiny, recipe="current")
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": "Once upon a time"}])
    (expected,) = engine.generate([ids], temperature=0.0, max_new_tokens=8)
    assert out == expected.text + "\n"


def test_a_local_model_answers_again_after_an_interrupt_or_an_error(tiny: Path) -> None:
    model = LocalModel(tiny, {"recipe": "bf16"})
    options, hello = ChatOptions(temperature=0, max_tokens=4), [{"role": "user", "content": "Hello"}]
    whole = [piece.text for piece in model.answer(hello, options)]
    interrupted = model.answer(hello, options)
    next(interrupted)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(interrupted)
    with pytest.raises(RequestError, match="tokens, and the context holds 256"):
        list(model.answer([{"role": "user", "content": "x y " * 500}], ChatOptions()))
    assert [piece.text for piece in model.answer(hello, options)] == whole


def test_a_model_without_a_chat_template_is_refused(tiny: Path, tmp_path: Path) -> None:
    without = shutil.copytree(tiny, tmp_path / "without", ignore=shutil.ignore_patterns("chat_template.jinja"))
    settings = json.loads((without / "tokenizer_config.json").read_text())
    (without / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    with pytest.raises(ModelError, match="has no chat template"):
        LocalModel(without, {"recipe": "bf16"})


class Terminal:
    """Runs `fp8serve chat ARGS` in a pseudo-terminal."""

    def __init__(self, *args: str) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "fp8serve.cli", "chat", *args]
        environment = os.environ | {"TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment
        )
        os.close(slave)
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 4096):
                self.text += data.decode(errors="replace")
        except OSError:  # the process has closed the terminal
            return

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        until(lambda: self.text.count(text) >= times, repr(text))


def test_ctrl_c_at_a_terminal_stops_the_answer_and_ctrl_d_quits(fake: FakeServer) -> None:
    resume = threading.Event()  # the server waits for it before the last part of its answer
    fake.routes[ROUTE] = [stream_answer(*CHAT[:2], CHAT[2], until=resume), stream_answer(*CHAT)]
    terminal = Terminal("--server", fake.url)
    terminal.wait_for("> ")
    terminal.type("Hello\r")
    terminal.wait_for("Good ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("(stopped)")
    resume.set()
    terminal.wait_for("> ", 2)
    terminal.type("Hello\r")
    terminal.wait_for("day.")
    terminal.wait_for("> ", 3)
    terminal.type("\x04")
    assert terminal.process.wait() == 0
    assert "Traceback" not in terminal.text


def test_sigterm_ends_the_command(fake: FakeServer) -> None:
    resume = threading.Event()  # the server waits for it before the last part of its answer
    fake.routes[ROUTE] = stream_answer(*CHAT[:2], CHAT[2], until=resume)
    command = [sys.executable, "-m", "fp8serve.cli", "chat", "--server", fake.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"Hello")
        process.stdin.close()
        assert process.stdout.read(5) == b"Good "
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
        assert process.stderr.read() == b""
    resume.set()
