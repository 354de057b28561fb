"""Child processes whose sockets are watched (tests/watched/sitecustomize.py)."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("watched")


def watch_sockets(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    """Processes started from now on, and theirs, write what they ask of other machines to `log`."""
    log.touch()
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv("WATCHED_SOCKETS", str(log))
