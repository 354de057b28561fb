"""Atomic writing: a directory appears completely or not at all, whatever fails in between."""

import errno
import fcntl
import tracemalloc
from pathlib import Path

import pytest

from fp8serve.errors import DataError, MachineError, ModelError
from fp8serve.model.storage.files import (
    MAX_COPIED_FILE_BYTES,
    acquire_lock,
    atomic_directory,
    read_file,
    read_json,
    write_json,
)


def test_directory_appears_complete(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with atomic_directory(out) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("1")
        assert not out.exists()
    assert (out / "sub" / "a").read_text() == "1"
    assert [p.name for p in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [ValueError("x"), KeyboardInterrupt()])
def test_a_failure_leaves_no_files(failure: BaseException, tmp_path: Path) -> None:
    def write() -> None:
        with atomic_directory(tmp_path / "out") as folder:
            (folder / "a").write_text("1")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert list(tmp_path.iterdir()) == []


def test_empty_directory_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_directory(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "out" / "a").exists()


def test_a_directory_filled_in_the_meantime_is_left_unchanged(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_directory(tmp_path / "out"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").write_text("x")

    with pytest.raises(ModelError, match="could not be created"):
        write()
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "theirs"]


def test_a_file_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(ModelError, match="exists and is not a directory"), atomic_directory(tmp_path / "out"):
        pass
    with pytest.raises(MachineError, match="cannot be written"), atomic_directory(tmp_path / "out" / "below"):
        pass


def test_disk_errors_are_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="No space left"), atomic_directory(tmp_path / "out"):
        raise OSError(28, "No space left on device")


def test_json_round_trip_and_errors_of_the_callers_kind(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"é": [1, None]})
    assert read_json(tmp_path / "a.json") == {"é": [1, None]}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "b.json", {"x": float("nan")})
    with pytest.raises(DataError, match="does not exist"):
        read_json(tmp_path / "none.json", DataError)


def test_huge_json_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(ModelError, match="larger than 64 MiB"):
        read_json(tmp_path / "a.json")


def test_memory_is_allocated_for_the_file_and_not_for_the_limit(tmp_path: Path) -> None:
    """Tokenizer files are read in processes with limited memory."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content := b"0123456789" * 300_000)
    tracemalloc.start()
    try:
        assert read_file(file, MAX_COPIED_FILE_BYTES) == content
        assert tracemalloc.get_traced_memory()[1] < 4 * len(content)
    finally:
        tracemalloc.stop()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_file(file, len(content) - 1, ModelError)


def test_a_lock_names_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be opened is not a file system without locks."""
    (tmp_path / "lock").mkdir()
    with pytest.raises(MachineError, match=r"lock cannot be written: Is a directory\.$"):
        acquire_lock(tmp_path / "lock", "held")
    with acquire_lock(tmp_path / "file", "held"), pytest.raises(DataError, match="held"):
        acquire_lock(tmp_path / "file", "held", DataError)

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(MachineError, match="cannot be locked: No locks available; choose a directory on a local disk"):
        acquire_lock(tmp_path / "file", "held")
