"""Keys while a server runs: added, removed, a file that becomes invalid, and the single key beside them."""

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fp8serve.cli import main
from fp8serve.errors import MachineError
from fp8serve.server.access.keys import ServerKeys, format_key_line, read_keys
from fp8serve.server.settings import Settings
from tests.patience import until
from tests.server.access.files import bearer, key_of, one_for_each_scope, write
from tests.server.conftest import Start
from tests.server.fakes import model_dir
from tests.server.process import serving


def set_later_mtime(path: Path) -> None:
    """Sets a file's modification time one second later: two writes may get the same time from a coarse clock."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_a_changed_key_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "keys.toml", format_key_line("a", "lab", ["read"], "one"))
    keys = ServerKeys(path, "single", is_required=True)
    assert [bool(keys.current_keys().caller(key)) for key in (b"one", b"two", b"single")] == [True, False, True]
    set_later_mtime(write(path, format_key_line("b", "lab", ["read"], "two")))
    assert [bool(keys.current_keys().caller(key)) for key in (b"one", b"two", b"single")] == [False, True, True]
    assert f"read 1 API keys from {path}" in caplog.text
    set_later_mtime(write(path, "nonsense"))
    for _ in range(3):
        assert keys.current_keys().caller(b"two")
    assert caplog.text.count("The previous keys stay valid.") == 1
    path.unlink()
    assert keys.current_keys().caller(b"two")
    assert caplog.text.count("stay valid") == 2


def test_a_server_does_not_start_with_an_invalid_key_file(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="is invalid"):
        ServerKeys(write(tmp_path / "keys.toml", "nonsense"), None, is_required=True)
    values: dict[str, Any] = {"model": settings.model, "host": "0.0.0.0", "data_dir": settings.data_dir}
    assert Settings(**values, api_keys=tmp_path / "keys.toml").requires_keys


async def test_a_removed_key_is_refused_at_once(start: Start, tmp_path: Path) -> None:
    path = one_for_each_scope(tmp_path / "keys.toml")
    async with start(api_keys=path, api_key="k") as server:
        headers = [bearer(key_of("read")), bearer("k"), {}]
        assert [(await server.client.get("/info", headers=h)).status_code for h in headers] == [200, 200, 401]
        set_later_mtime(write(path, ""))
        assert [(await server.client.get("/info", headers=h)).status_code for h in headers] == [401, 200, 401]


def test_sighup_reloads_the_key_file_and_keeps_the_server_running(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", format_key_line("a", "lab", ["read"], "one"))
    options = {"model": str(model_dir(tmp_path / "tiny")), "data_dir": str(tmp_path / "data"), "fake": True}
    with serving(tmp_path / "log", **options, api_keys=str(path)) as server:
        server.popen.send_signal(signal.SIGHUP)
        until(lambda: "read 1 API keys" in server.log.read_text(), "the file to be read")
        assert server.client.get("/version", headers=bearer("one")).status_code == 200
        assert server.stop() == 0


def test_a_new_key_is_stored_as_a_hash_printed_once_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    command = ["key", "new", "--tenant", "lab", "--scope", "generate"]
    assert main([*command, "--name", "ci", "--file", str(path)]) == 0
    key = capsys.readouterr().out.strip()
    assert path.stat().st_mode & 0o777 == 0o600
    caller = read_keys(path).caller(key.encode())
    assert caller is not None
    assert (caller.name, caller.tenant, caller.scopes) == ("ci", "lab", ("generate",))
    assert key not in path.read_text()
    assert main([*command, "--name", "other", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    write(path, path.read_text().rstrip(), entry["line"], "tenants.lab = { tokens_per_minute = 7 }")
    assert read_keys(path).caller(entry["key"].encode())
    assert main(["key", "list", str(path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in table] == ["name", "ci", "other"]
    assert table[1].split() == ["ci", "lab", "generate", "-", "7", "-"]
    assert main(["key", "list", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["tokens_per_minute"] == 7


def test_a_key_that_cannot_be_added_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "keys.toml", format_key_line("ci", "lab", ["read"], "k"), "[tenants.x]")
    before = path.read_text()
    command = ["key", "new", "--tenant", "lab", "--file", str(path)]
    for more, sentence in (
        (["--name", "ci", "--scope", "read"], "already has a key named ci"),
        (["--name", "cd", "--scope", "read"], "cannot be added"),
        (["--name", "cd", "--scope", "all"], "scopes[0] must be"),
        (["--name", "a.b", "--scope", "read"], "unlike 'a.b'"),
    ):
        assert main([*command, *more]) == 1
        captured = capsys.readouterr()
        assert (captured.out, sentence in captured.err) == ("", True), captured.err
    assert path.read_text() == before
