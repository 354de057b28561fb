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
from fp8serve.server.access.keys import KeyFile, format_key_line, read_keys
from fp8serve.server.settings import Settings
from tests.patience import until
from tests.server.access.files import bearer, key_of, one_for_each_scope, write
from tests.server.conftest import Start
from tests.server.fakes import model_dir
from tests.server.process import serving


def later(path: Path) -> None:
    """Gives a file a later date, because clocks of file systems are coarse and two writes may have the same."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 10**9))


def test_keys_come_and_go_with_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "keys.toml", format_key_line("a", "lab", ["read"], "one"))
    keys = KeyFile(path, "single")
    assert keys.is_required
    assert [bool(keys.current_keys().caller(key)) for key in (b"one", b"two", b"single")] == [True, False, True]
    later(write(path, format_key_line("b", "lab", ["read"], "two")))
    assert [bool(keys.current_keys().caller(key)) for key in (b"one", b"two", b"single")] == [False, True, True]
    assert f"read 1 API keys from {path}" in caplog.text
    later(write(path, "nonsense"))
    for _ in range(3):
        assert keys.current_keys().caller(b"two")
    assert caplog.text.count("The previous keys stay valid.") == 1
    path.unlink()
    assert keys.current_keys().caller(b"two")
    assert caplog.text.count("stay valid") == 2


def test_a_server_does_not_start_with_a_file_that_is_wrong(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="is invalid"):
        KeyFile(write(tmp_path / "keys.toml", "nonsense"), None)
    assert not KeyFile(None, None).is_required
    values: dict[str, Any] = {"model": settings.model, "host": "0.0.0.0", "data_dir": settings.data_dir}
    assert Settings(**values, api_keys=tmp_path / "keys.toml").requires_keys


async def test_a_key_that_is_taken_out_is_refused_at_once(start: Start, tmp_path: Path) -> None:
    path = one_for_each_scope(tmp_path / "keys.toml")
    async with start(api_keys=path, api_key="k") as server:
        given = [bearer(key_of("read")), bearer("k"), {}]
        assert [(await server.client.get("/info", headers=h)).status_code for h in given] == [200, 200, 401]
        later(write(path, ""))
        assert [(await server.client.get("/info", headers=h)).status_code for h in given] == [401, 200, 401]


def test_hangup_has_the_file_read_and_ends_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", format_key_line("a", "lab", ["read"], "one"))
    options = {"model": str(model_dir(tmp_path / "tiny")), "data_dir": str(tmp_path / "data"), "fake": True}
    with serving(tmp_path / "log", **options, api_keys=str(path)) as server:
        server.popen.send_signal(signal.SIGHUP)
        until(lambda: "read 1 API keys" in server.log.read_text(), "the file to be read")
        assert server.client.get("/version", headers=bearer("one")).status_code == 200
        assert server.stop() == 0


def test_a_key_is_made_shown_once_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    made = ["key", "new", "--tenant", "lab", "--scope", "generate"]
    assert main([*made, "--name", "ci", "--file", str(path)]) == 0
    key = capsys.readouterr().out.strip()
    assert path.stat().st_mode & 0o777 == 0o600
    caller = read_keys(path).caller(key.encode())
    assert caller is not None
    assert (caller.name, caller.tenant, caller.scopes) == ("ci", "lab", ("generate",))
    assert key not in path.read_text()
    assert main([*made, "--name", "other", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    write(path, path.read_text().rstrip(), shown["line"], "tenants.lab = { tokens_per_minute = 7 }")
    assert read_keys(path).caller(shown["key"].encode())
    assert main(["key", "list", str(path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in table] == ["name", "ci", "other"]
    assert table[1].split() == ["ci", "lab", "generate", "-", "7", "-"]
    assert main(["key", "list", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["tokens_per_minute"] == 7


def test_a_key_that_cannot_be_added_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "keys.toml", format_key_line("ci", "lab", ["read"], "k"), "[tenants.x]")
    before = path.read_text()
    made = ["key", "new", "--tenant", "lab", "--file", str(path)]
    for more, sentence in (
        (["--name", "ci", "--scope", "read"], "already has a key named ci"),
        (["--name", "cd", "--scope", "read"], "cannot be added"),
        (["--name", "cd", "--scope", "all"], "scopes[0] must be"),
        (["--name", "a.b", "--scope", "read"], "unlike 'a.b'"),
    ):
        assert main([*made, *more]) == 1
        shown = capsys.readouterr()
        assert (shown.out, sentence in shown.err) == ("", True), shown.err
    assert path.read_text() == before
