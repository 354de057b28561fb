"""Parquet files: rows equal those of JSON lines; values that Python cannot represent and files that expand too much are
refused."""

import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as writer

from fp8serve.errors import DataError
from fp8serve.model.text.data_files import DataLimits
from fp8serve.model.text.examples import ChatExample, PromptExample, read_examples
from fp8serve.train.methods.dpo.data import DpoReader
from fp8serve.train.methods.grpo.data import GrpoReader
from tests.model.test_tables import CHAT, write

FAR = 1 << 61  # microseconds since 1970: about the year 73,000
LATE = pa.array([0, FAR], pa.timestamp("us"))
ODD: dict[str, Any] = {
    "timestamp": LATE,
    "with a zone": pa.array([0, FAR], pa.timestamp("ms", "Nowhere/Town")),
    "nanoseconds": pa.array([0, 1], pa.timestamp("ns", "UTC")),
    "duration": pa.array([0, 1 << 62], pa.duration("s")),
    "date": pa.array([0, 1 << 30], pa.date32()),
    "bad text": pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xff\xfe")]
    ),
}
CELLS: dict[str, Any] = ODD | {
    "decimal": pa.array([Decimal("1.5"), None], pa.decimal128(38, 2)),
    "binary": pa.array([b"\xff", b""]),
    "nested": pa.array([[{"a": [1, None]}], []]),
    "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    "twice in a map": pa.array([[("a", 1), ("a", 2)], []], pa.map_(pa.string(), pa.int64())),
    "nan": pa.array([float("nan"), float("inf")]),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None], pa.binary(16))),
    "dictionary": pa.array(["a", "b"]).dictionary_encode(),
    "null": pa.nulls(2),
    "half": pa.array([1, 2], pa.float16()) if hasattr(pa, "float16") else pa.array([1.0, 2.0]),
    "time": pa.array([1, 2], pa.time64("ns")),
}


def table(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    writer.write_table(pa.table(columns), path)
    return path


def test_chats_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    writer.write_table(pa.Table.from_pylist([{"messages": CHAT, "image": b"x", "source": "s"}]), path)
    (example,) = read_examples([path])
    assert isinstance(example, ChatExample)
    assert list(example.messages) == CHAT  # Arrow adds null for missing calls; these nulls are dropped


@pytest.mark.parametrize("kind", CELLS)
def test_a_column_that_is_not_read_may_hold_anything(kind: str, tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", text=["a", "b"], id=CELLS[kind], input=CELLS[kind])
    assert [example.text for example in read_examples([path])] == ["a", "b"]  # type: ignore[union-attr]
    path = table(tmp_path / "b.parquet", chosen=["a b", "b"], rejected=["a c", "c"], text=CELLS[kind])
    assert len(list(DpoReader().read_examples(path))) == 2


@pytest.mark.parametrize("kind", sorted(CELLS.keys() - {"dictionary"}))
def test_a_text_column_of_another_type_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", text=CELLS[kind])
    with pytest.raises(DataError, match=r"a\.parquet:[12](: `text`| has only \[\]| has no value in)"):
        list(read_examples([path]))
    path = table(tmp_path / "b.parquet", prompt=["a", "b"], completion=CELLS[kind])
    with pytest.raises(DataError, match=r"b\.parquet:[12]: `completion`"):
        list(read_examples([path]))


@pytest.mark.parametrize("kind", ODD)
def test_a_value_that_python_cannot_represent_is_refused_by_row_and_column(kind: str, tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", prompt=["a", "b"], answer=CELLS[kind])
    with pytest.raises(DataError, match=r"a\.parquet:[12]: `answer` cannot be read \(\w+.*\): .*\w"):
        list(GrpoReader(8).read_examples(path))


def test_the_grader_gets_all_values_that_python_can_represent(tmp_path: Path) -> None:
    cells = {kind: CELLS[kind] for kind in ("decimal", "map", "nested")} | {"day": pa.array([0, 1], pa.timestamp("us"))}
    first, second = GrpoReader(8).read_examples(table(tmp_path / "a.parquet", prompt=["a", "b"], **cells))
    assert first.row["decimal"] == Decimal("1.5")
    assert first.row["map"] == {"a": 1}
    assert first.row["nested"] == [{"a": [1, None]}]
    assert first.row["day"] == datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None)
    assert "decimal" not in second.row


def test_a_file_without_known_columns_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", question=["a"], day=LATE[1:])
    with pytest.raises(DataError, match=r"a\.parquet:1 has only \['day', 'question'\]; give one of"):
        list(read_examples([path]))


def test_a_text_of_an_extension_type_or_a_dictionary_is_read(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", prompt=pa.array(["a", "a"]).dictionary_encode(), completion=["b", "c"])
    assert list(read_examples([path])) == [PromptExample("a", "b", f"{path}:1"), PromptExample("a", "c", f"{path}:2")]


MANY = 200_000
TOO_LONG = "a.parquet:1 is a row of more than 65536 bytes|a.parquet is larger than 1 MiB"
BOMBS = {
    "rows": (pa.array(["a"] * MANY), "has more than 1,000 rows"),
    "one value again and again": (pa.DictionaryArray.from_arrays([0] * 900, ["b" * 30_000]), "is larger than 1 MiB"),
    "one row": (pa.array(["c" * MANY]), TOO_LONG),
    "a list": (pa.array([["d"] * MANY]), TOO_LONG),
    "a list of numbers": (pa.array([[0] * MANY]), TOO_LONG),
    "a list of nulls": (pa.array([[None] * MANY]), TOO_LONG),
    "a list of objects": (pa.array([[{"a": None}] * MANY]), TOO_LONG),
    "a map": (pa.array([[("e", "f")] * MANY], pa.map_(pa.string(), pa.string())), TOO_LONG),
    "the last of many": (pa.array(["g"] * 700 + ["g" * MANY]), "a.parquet:701 is a row of more than 65536 bytes"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_file_that_expands_is_refused_before_its_values_are_made(kind: str, tmp_path: Path) -> None:
    cells, message = BOMBS[kind]
    path = table(tmp_path / "a.parquet", text=cells)
    assert path.stat().st_size < 1 << 16
    limits = DataLimits(rows=1000, row_bytes=1 << 16, bytes=1 << 20)
    prompts = table(tmp_path / "b" / "a.parquet", prompt=["a"] * len(cells), beside=cells)
    for examples in (read_examples([path], limits), GrpoReader(8).read_examples(prompts, limits)):
        tracemalloc.start()
        with pytest.raises(DataError, match=message):
            for _ in examples:
                pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2 << 20


READ = """
from fp8serve.errors import DataError
from fp8serve.model.text import tables
from fp8serve.model.text.examples import read_examples
tables.MEMORY_BYTES = 256 << 20
try:
    print(len(list(read_examples(["a.parquet"]))))
except DataError as error:
    print(error)
"""


def test_decoding_takes_a_bounded_part_of_memory(tmp_path: Path) -> None:
    """A page of a few bytes may unpack to much more."""
    for size, message in ((260 << 20, "takes more than 256 MiB of memory to read 64 rows"), (1 << 20, "1\n")):
        path, content = tmp_path / "a.parquet", pa.table({"text": ["a" * size]})
        writer.write_table(content, path, compression="zstd", use_dictionary=False, write_statistics=False)
        assert path.stat().st_size < 64 << 20
        command = [sys.executable, "-P", "-c", READ]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert message in result.stdout


def test_an_invalid_parquet_file_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", "PAR1")
    with pytest.raises(DataError, match=r"a\.parquet is not a Parquet file that can be read"):
        list(read_examples([path]))
    content = table(path, text=["a" * 99, "b"]).read_bytes()
    for cut in range(0, len(content), 7):
        path.write_bytes(content[:cut] + bytes(4) + content[cut + 4 :])
        try:
            list(read_examples([path]))
        except DataError:
            continue
    gone: Any = None  # None makes the import fail
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", gone)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'fp8serve\[parquet\]'"):
        list(read_examples([path]))


def test_a_column_name_that_is_not_utf8_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", text=["a"], other=["b"])
    path.write_bytes(path.read_bytes().replace(b"other", b"\xee\xeeher"))
    with pytest.raises(DataError, match="is not a Parquet file that can be read"):
        list(read_examples([path]))
