"""A server whose model never loaded removes the files that it created, and no others."""

import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from fp8serve.errors import MachineError
from fp8serve.server.app import create_app
from fp8serve.server.data_directory import DataDirectory
from fp8serve.server.settings import Settings
from tests.patience import eventually
from tests.server.conftest import Start
from tests.server.fakes import Launcher


def failing() -> Launcher:
    launcher = Launcher()
    launcher.problem = "The model is damaged."
    return launcher


def everything(path: Path) -> set[str]:
    return {str(Path(folder, name)) for folder, *names in os.walk(path) for group in names for name in group}


async def fail(start: Start, data_dir: Path) -> None:
    async with start(failing(), wait=False, data_dir=data_dir) as server:
        await eventually(server.state.failed.is_set)
        assert (data_dir / "jobs.sqlite3").exists()


async def test_a_failed_start_removes_what_it_made(start: Start, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    before = everything(tmp_path)
    await fail(start, tmp_path / "home" / "share" / "deep" / "data")
    assert (
        everything(tmp_path) - before
        == {str(tmp_path / "tiny" / name) for name in os.listdir(tmp_path / "tiny")} - before
    )


async def test_an_unexpected_error_while_the_model_loads_ends_the_start(start: Start) -> None:
    def raise_an_error() -> NoReturn:
        raise AttributeError("a defect")

    async with start(Launcher(raise_an_error), wait=False) as server:
        await eventually(server.state.failed.is_set)
        problem = server.state.models.default.problem
    assert isinstance(problem, MachineError)
    assert str(problem) == "Loading failed unexpectedly (AttributeError); the log has the traceback."


async def test_a_failed_start_leaves_what_was_there(start: Start, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "notes.txt").write_text("mine")
    await fail(start, data)
    assert os.listdir(data) == ["notes.txt"]
    (data / "notes.txt").unlink()
    await fail(start, data)
    assert os.listdir(data) == []  # the directory was there


async def test_a_server_that_served_keeps_its_directory_and_a_failed_start_after_it_does_so_too(
    start: Start, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    async with start():
        pass
    there = everything(data)
    assert str(data / "jobs.sqlite3") in there
    await fail(start, data)
    assert everything(data) == there


async def test_what_a_client_stored_while_the_model_loaded_stays(start: Start, tmp_path: Path) -> None:
    launcher = failing()
    launcher.paused = True
    async with start(launcher, wait=False) as server:
        row = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        files = {"file": ("rows.jsonl", row)}
        answer = await server.client.post("/v1/files", files=files, data={"purpose": "fine-tune"})
        launcher.paused = False
        await eventually(server.state.failed.is_set)
    assert answer.status_code == 200
    assert [path.read_bytes() for path in (tmp_path / "data" / "files").iterdir()] == [row]


def test_a_start_that_is_refused_leaves_nothing(settings: Settings, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("damaged = [")
    with pytest.raises(MachineError):
        create_app(replace(settings, api_keys=keys))
    assert not (tmp_path / "data").exists()


def test_a_second_server_takes_nothing_from_the_first(settings: Settings, tmp_path: Path) -> None:
    first = DataDirectory(settings)
    with pytest.raises(MachineError, match="Another server uses"):
        DataDirectory(settings)
    assert (tmp_path / "data" / "server.lock").exists()
    first.discard()
    assert not (tmp_path / "data").exists()
