"""Only the server's own user can read the files in its data directory, whatever modes they had before."""

import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from fp8serve.server.data_directory import JOB_DATABASE
from tests.server.fakes import model_dir
from tests.server.process import serving

ROWS = {"data": [{"text": "a secret row"}], "seq_len": 64}


def modes(folder: Path) -> dict[str, str]:
    """Returns the modes of all files and folders below `folder`, by path."""
    return {
        str(path.relative_to(folder)): oct(stat.S_IMODE(path.lstat().st_mode)) for path in sorted(folder.rglob("*"))
    }


def used(path: Path, data: Path, **more: Any) -> dict[str, str]:
    """Returns the modes in the data directory of a server that has a job and a file, while it runs."""
    options = {"model": str(model_dir(path / "tiny")), "data_dir": str(data), "fake": True, "train_on": "share"}
    with serving(path / "log", **options | more) as process:
        assert process.client.post("/finetune", json=ROWS).status_code == 202
        upload = {"file": ("rows.jsonl", b'{"text": "another secret"}\n')}
        assert process.client.post("/v1/files", files=upload, data={"purpose": "fine-tune"}).status_code == 200
        return modes(data)


def assert_private(file_modes: dict[str, str]) -> None:
    """Checks only the entries at the top: nobody else can enter a directory of mode 0700."""
    tops = {name: mode for name, mode in file_modes.items() if "/" not in name}
    assert {JOB_DATABASE, f"{JOB_DATABASE}-wal", f"{JOB_DATABASE}-shm", "jobs", "files", "server.lock"} <= tops.keys()
    assert {name: mode for name, mode in tops.items() if mode not in ("0o600", "0o700")} == {}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_private_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    (data / "of somebody").write_text("else")
    (data / "of somebody").chmod(0o644)
    file_modes = used(tmp_path, data, umask=umask)
    assert file_modes.pop("of somebody") == "0o644"
    assert_private(file_modes)
    assert stat.S_IMODE(data.stat().st_mode) == 0o755  # it was made for more than this server


def test_the_files_of_an_earlier_server_become_private(tmp_path: Path) -> None:
    data = tmp_path / "data"
    used(tmp_path, data)
    writer = sqlite3.connect(data / JOB_DATABASE)  # leaves its log there when it is killed
    pid = os.fork()
    if pid == 0:
        writer.execute("UPDATE jobs SET suffix = suffix")
        os._exit(0)
    os.waitpid(pid, 0)
    for path in (data, *data.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert_private(used(tmp_path, data))
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
