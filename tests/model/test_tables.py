"""Rows from JSON arrays, CSV and Parquet are the rows that JSON lines would give."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from fp8serve.errors import DataError
from fp8serve.model.text import tables
from fp8serve.model.text.examples import ChatExample, PromptExample, TextExample, read_examples

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = [
    {"role": "user", "content": "one and one?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "Two."},
]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_json_array_and_json_lines_that_are_called_json(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"prompt": "p", "completion": "c"}]
    for name, content in {"a": json.dumps(rows, indent=1), "b": "\n".join(map(json.dumps, rows))}.items():
        path = write(tmp_path / f"{name}.json", content)
        assert [type(e) for e in read_examples([path])] == [TextExample, PromptExample]


def test_csv_cells_hold_lines_quotes_and_chats(tmp_path: Path) -> None:
    long = "word " * 100_000  # more than csv's own limit
    rows = f'prompt,completion,note\n"say ""hi""\nplease",{long},7\n'
    path = write(tmp_path / "a.csv.gz", gzip.compress(rows.encode(), mtime=0))
    assert read_examples([path]) == [PromptExample('say "hi"\nplease', long, f"{path}:3")]
    chat = json.dumps(CHAT).replace('"', '""')
    path = write(tmp_path / "b.tsv", f'text\tmessages\none\t\n\t"{chat}"\n')
    assert read_examples([path]) == [TextExample("one", f"{path}:2"), ChatExample(tuple(CHAT), f"{path}:3")]


def test_parquet_gives_the_chats_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([{"messages": CHAT, "image": b"x", "source": "s"}]), path)
    (found,) = read_examples([path])
    assert isinstance(found, ChatExample)
    assert list(found.messages) == CHAT  # without the nulls that Arrow adds to messages without calls


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"text": "a"}, 3]', r"a\.json:2 is a JSON int where an object"),
        ("a.json", '[{"text": "a"}', r"a\.json is not valid JSON"),
        ("a.json", '[{"text": "a"}, {"text": 1}]', r"a\.json:2: `text` is a int"),
        ("a.json", "[" * 100_000, r"a\.json is not valid JSON"),
        ("a.csv", "text\na,b\n", r"a\.csv:2 has more cells than the header \['text'\]"),
        ("a.csv", 'text\n"a\n', r"a\.csv:2 is not valid CSV: unexpected end of data"),
        ("a.csv", "text,prompt\n,\n", r"a\.csv:2 has only \[\]; give one of"),
        ("a.csv", "messages\nhello\n", r"a\.csv:2: `messages` is text that is not valid JSON"),
        ("a.csv", b"text\nvoil\xe0\n", "not UTF-8 text"),
        ("a.parquet", "PAR1", r"a\.parquet is not a Parquet file that can be read"),
    ],
)
def test_what_is_wrong_is_named(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_examples([write(tmp_path / name, content)])


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ARRAY_BYTES", 100)
    monkeypatch.setattr("fp8serve.model.text.data_files.MAX_DATA_BYTES", 1 << 16)
    with pytest.raises(DataError, match=r"a JSON array of more than 0 MiB; write it as JSON lines"):
        read_examples([write(tmp_path / "a.json", "[\n" + '{"text": "a"},\n' * 20)])
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a" * (1 << 20)]}), path)
    assert path.stat().st_size < 1 << 16
    with pytest.raises(DataError, match="larger than 0 MiB"):
        read_examples([path])


def test_without_pyarrow_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: Any = None  # what makes an import fail
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", gone)
    with pytest.raises(DataError, match=r"takes pyarrow: pip install 'fp8serve\[parquet\]'"):
        read_examples([write(tmp_path / "a.parquet", "PAR1")])
