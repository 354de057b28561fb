"""Child processes whose sockets are watched (tests/watched/sitecustomize.py)."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("watched")


def watch_sockets(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    """Makes processes started from now on, and their children, log their requests to other machines in `log`."""
    log.touch()
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv("WATCHED_SOCKETS", str(log))
