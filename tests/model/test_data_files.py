"""Sources of data: a file, a gzip file, standard input, a file on the Hugging Face hub; and refused ones."""

import gzip
import io
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import DataError
from fp8serve.model.text.data_files import DataLimits
from fp8serve.model.text.examples import TextExample, read_examples

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def texts(*sources: Path | str) -> list[str]:
    return [e.text for e in read_examples(sources) if isinstance(e, TextExample)]


def pipe(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson"])
def test_a_gzip_file_gives_the_rows_of_its_content(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"d{suffix}.gz").write_bytes(gzip.compress(LINES, mtime=0))
    (tmp_path / "t.txt.GZ").write_bytes(gzip.compress("\ufeffprose\r\n\r\nmore".encode(), mtime=0))
    assert texts(tmp_path / f"d{suffix}.gz", tmp_path / "t.txt.GZ") == ["one", "two", "prose\n\nmore"]


ZIPPED = gzip.compress(LINES, mtime=0)


@pytest.mark.parametrize("content", [LINES, ZIPPED[:-12], ZIPPED[:20] + b"xx" + ZIPPED[22:], b"\x1f"])
def test_a_damaged_gzip_file_is_refused_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"d\.jsonl\.gz is not a complete gzip file: "):
        list(read_examples([tmp_path / "d.jsonl.gz"]))


LIMITS = DataLimits(rows=1000, row_bytes=1 << 16, bytes=1 << 20)
ROW = b'{"text": "a"}\n'


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".txt"])
@pytest.mark.parametrize(
    ("unpacked", "message"),
    [
        pytest.param(ROW, "has more than 1,000 (rows|paragraphs), the limit for one file", id="rows"),
        pytest.param(
            b"\n" * (2 << 20),
            "is larger than 1 MiB|a row of more than 65536 bytes|more than 1,000 blank lines",
            id="bytes",
        ),
        pytest.param(b" " * (1 << 20), ":1 is a row of more than 65536 bytes|larger than 1 MiB", id="one line"),
    ],
)
def test_limits_apply_to_the_unpacked_size(suffix: str, unpacked: bytes, message: str, tmp_path: Path) -> None:
    """This includes files of several concatenated gzip members."""
    if unpacked == ROW:
        many = {".csv": b"text\n" + b"a\n" * 1001, ".tsv": b"text\n" + b"a\n" * 1001, ".txt": b"a\n\n" * 1001}
        unpacked = many.get(suffix, ROW * 1001)
    for members in (1, 7):
        bomb = tmp_path / f"bomb{members}{suffix}.gz"
        size = len(unpacked) // members + 1
        bomb.write_bytes(b"".join(gzip.compress(unpacked[i * size : (i + 1) * size]) for i in range(members)))
        assert bomb.stat().st_size < 1 << 14
        for path in (bomb, tmp_path / f"plain{suffix}"):
            path.write_bytes(bomb.read_bytes() if path == bomb else unpacked)
            with pytest.raises(DataError, match=message):
                list(read_examples([path], LIMITS))


def test_no_more_of_a_bomb_is_unpacked_than_the_limits_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data are unpacked row by row, so that files beyond a limit take no more memory than a few rows."""
    bombs = {"rows.jsonl.gz": ROW * (1 << 20), "rows.json.gz": b"[" + b'{"text": "a"},' * (1 << 20)}
    for name, content in bombs.items():
        (tmp_path / name).write_bytes(gzip.compress(content))
        tracemalloc.start()
        with pytest.raises(DataError, match="has more than 1,000 rows"):
            for _ in read_examples([tmp_path / name], DataLimits(rows=1000)):
                pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


def test_a_file_within_the_limits_is_read(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(ROW * 1000))
    assert len(list(read_examples([tmp_path / "d.jsonl.gz"], LIMITS))) == 1000


def test_standard_input_that_begins_with_a_json_object_is_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(b"\r\n \n" + LINES, monkeypatch)
    assert texts("-") == ["one", "two"]
    pipe("Grüße\n\n{not JSON}\n".encode(), monkeypatch)
    assert texts("-") == ["Grüße\n\n{not JSON}"]
    pipe(LINES + b"{", monkeypatch)
    with pytest.raises(DataError, match="standard input:3 is not valid JSON"):
        list(read_examples(["-"]))
    pipe(b"", monkeypatch)
    with pytest.raises(DataError, match="standard input holds no examples; it is empty"):
        list(read_examples(["-"]))


def test_a_terminal_and_a_closed_standard_input_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(LINES))
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(DataError, match="Standard input is a terminal; give a file"):
        list(read_examples(["-"]))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="Standard input is closed; give a file"):
        list(read_examples(["-"]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "voilà".encode("latin-1"), "not UTF-8 text: byte 4 cannot"),
        ("a.jsonl", LINES + b'{"text": "\xe0"}', "not UTF-8 text: byte 42 cannot"),
        ("a.txt", b"one\ntw\0o", "is not text: byte 6 is zero"),
        ("a.jsonl", b"\0" * 20, "is not text: byte 0 is zero"),
        ("a.gz", gzip.compress(b"text", mtime=0), "neither text .* nor Parquet"),
        ("a.parquet.gz", gzip.compress(b"text", mtime=0), "neither text .* nor Parquet"),
    ],
)
def test_bytes_that_are_no_utf8_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_examples([tmp_path / name]))


def test_a_text_of_one_line_of_ten_megabytes_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"word " * (2 << 20))
    assert texts(tmp_path / "a.txt") == ["word " * (2 << 20)]


class Hub:
    """A stand-in for huggingface_hub with one data set, whose files are those of a directory."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.downloads = folder, []  # type: tuple[Path, list[Any]]
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self.download)
        monkeypatch.setattr("huggingface_hub.list_repo_files", self.names)

    def download(self, repo: str, file: str, **options: Any) -> str:
        self.downloads.append((repo, file, options["repo_type"], options["revision"]))
        if not (self.folder / file).exists():
            raise OSError(f"404 Client Error.\n\nEntry Not Found: {file}.")
        return str(self.folder / file)

    def names(self, repo: str, **options: Any) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_bytes(LINES)
    (tmp_path / "hub" / "README.md").write_text("A card.")
    return Hub(tmp_path / "hub", monkeypatch)


def test_a_file_of_a_data_set_on_the_hub_is_read(hub: Hub) -> None:
    assert texts("hf://datasets/org/my.set@v1/train.jsonl") == ["one", "two"]
    assert texts("hf://datasets/org/my.set") == ["one", "two"]  # the only file of the data set
    assert hub.downloads == [
        ("org/my.set", "train.jsonl", "dataset", "v1"),
        ("org/my.set", "train.jsonl", "dataset", None),
    ]


def test_a_data_set_with_several_files_needs_a_file_name(hub: Hub) -> None:
    (hub.folder / "test.jsonl.gz").write_bytes(gzip.compress(LINES, mtime=0))
    with pytest.raises(DataError, match=r"has 2 files, such as test\.jsonl\.gz; add /FILE"):
        list(read_examples(["hf://datasets/org/set"]))
    for name in ("train.jsonl", "test.jsonl.gz"):
        (hub.folder / name).rename(hub.folder / f"{name}.zst")
    with pytest.raises(DataError, match="has no file in a supported format"):
        list(read_examples(["hf://datasets/org/set"]))


def test_an_error_of_the_hub_is_reported_in_one_sentence(hub: Hub) -> None:
    with pytest.raises(DataError) as refused:
        list(read_examples(["hf://datasets/org/set/none.txt"]))
    message = "hf://datasets/org/set/none.txt could not be downloaded from the hub: 404 Client Error."
    assert str(refused.value) == message
    for name in ("hf://org/set/a.txt", "hf://datasets/set", "hf://models/org/set/a.txt"):
        with pytest.raises(DataError, match="is not a data set on the hub; write hf://datasets/OWNER/NAME/FILE"):
            list(read_examples([name]))


def test_a_path_is_never_a_name_on_the_hub_or_standard_input(hub: Hub) -> None:
    for name in ("hf://datasets/org/set/train.jsonl", "-"):
        with pytest.raises(DataError):
            list(read_examples([Path(name)]))
    assert not hub.downloads


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".txt"])
@pytest.mark.parametrize("blank", [b"\n", b"\r\n"])
def test_blank_lines_count_towards_the_row_limit(suffix: str, blank: bytes, tmp_path: Path) -> None:
    """If they did not, hundreds of millions of blank lines would be read."""
    path = tmp_path / f"d{suffix}"
    row = {".csv": b"text\n", ".tsv": b"text\n"}.get(suffix, ROW)
    path.write_bytes(row + blank * 1001 + row)
    assert list(read_examples([path], LIMITS))
    path.write_bytes(row + blank * 1002 + row)
    with pytest.raises(DataError, match=r"has more than 1,000 blank lines, the limit for one file"):
        list(read_examples([path], LIMITS))
