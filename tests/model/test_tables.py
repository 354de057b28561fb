"""Rows from JSON arrays and CSV are the rows that JSON lines would give."""

import gzip
import json
from pathlib import Path

import pytest

from fp8serve.errors import DataError
from fp8serve.model.text.data_files import DataLimits
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


def test_a_json_file_may_hold_an_array_or_json_lines(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"prompt": "p", "completion": "c"}]
    for name, content in {"a": json.dumps(rows, indent=1), "b": "\n".join(map(json.dumps, rows))}.items():
        path = write(tmp_path / f"{name}.json", content)
        assert [type(e) for e in read_examples([path])] == [TextExample, PromptExample]


def test_csv_cells_hold_lines_quotes_and_chats(tmp_path: Path) -> None:
    long = "word " * 100_000  # more than csv's own limit
    rows = f'prompt,completion,note\n"say ""hi""\nplease",{long},7\n'
    path = write(tmp_path / "a.csv.gz", gzip.compress(rows.encode(), mtime=0))
    assert list(read_examples([path])) == [PromptExample('say "hi"\nplease', long, f"{path}:3")]
    chat = json.dumps(CHAT).replace('"', '""')
    path = write(tmp_path / "b.tsv", f'text\tmessages\none\t\n\t"{chat}"\n')
    assert list(read_examples([path])) == [TextExample("one", f"{path}:2"), ChatExample(tuple(CHAT), f"{path}:3")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"text": "a"}, 3]', r"a\.json:2 is a number where an object"),
        ("a.json", '[{"text": "a"}', r"a\.json is not valid JSON"),
        ("a.json", '[{"text": "a"}, {"text": 1}]', r"a\.json:2: `text` is a number"),
        ("a.json", "[" * 100_000, r"a\.json:1 is not valid JSON"),
        ("a.json", '[{"text": "a"} {"text": "b"}]', r"a\.json is not valid JSON: expected '\]', found '{'"),
        ("a.json", '[{"text": "a"}] 3', r"a\.json is not valid JSON: there is text after the array"),
        ("a.json", '[{"text": "a"},]', r"a\.json:2 is not valid JSON"),
        (
            "a.json",
            '[{"text": "a"},\n{"text" "b"}' + " " * 99_999,
            r"a\.json:2 is not valid JSON: a colon is missing",
        ),
        (
            "a.json",
            '[{"text": "a"}, {"text": "b", "text": "c"}]',
            r"a\.json:2 is not valid JSON: the key 'text' appears twice",
        ),
        ("a.json", '[{"text": "\\x"}]', r"a\.json:1 is not valid JSON: there is an invalid escape"),
        ("a.json", b'[{"text": "' + b"a" * 99_999 + b'\xc3"}]', r"a\.json is not UTF-8 text: byte 100010 cannot"),
        ("a.json", "[]", "holds no examples"),
        ("a.csv", "text\na,b\n", r"a\.csv:2 has more cells than the header \['text'\]"),
        ("a.csv", 'text\n"a\n', r"a\.csv:2 is not valid CSV: a quoted cell has no closing quote"),
        ("a.csv", "text,prompt\n,\n", r"a\.csv:2 has only \[\]; give one of"),
        ("a.csv", "messages\nhello\n", r"a\.csv:2: `messages` is text that is not valid JSON"),
        ("a.csv", 'text\n"a"b\n', r"a\.csv:2 is not valid CSV: there is text after the closing quote"),
        ("a.csv", "text,x,text\na,b,c\n", r"a\.csv has 2 columns called 'text'; rename all but one of them"),
        ("a.tsv", "messages\tmessages\tmessages\n", r"a\.tsv has 3 columns called 'messages'; rename all"),
        ("a.csv", b"text\nvoil\xe0\n", "not UTF-8 text"),
    ],
)
def test_the_error_says_what_is_wrong_and_where(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        list(read_examples([write(tmp_path / name, content)]))


def test_an_array_is_read_element_by_element(tmp_path: Path) -> None:
    """Line breaks may be anywhere, and elements longer or shorter than a read buffer."""
    rows = [{"text": f"{i} \u00e9\U0001f600" * (50_000 if i % 5 == 2 else 3)} for i in range(12)]
    for indent in (None, 2):
        path = write(tmp_path / "a.json", " \n" * 70_000 + json.dumps(rows, indent=indent, ensure_ascii=False))
        assert [example.text for example in read_examples([path])] == [row["text"] for row in rows]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '[{"text": "a"}, {"text": "' + "b" * 5000 + '"}]'),
        ("a.json", '[{"text": "a"}, {"text": "' + "b" * 500_000),
        ("a.csv", 'text\na\n"' + "b" * 5000 + '"\n'),
        ("a.csv", 'text\na\n"b' + '\n","' * 5000 + '"\n'),
        ("a.jsonl", '{"text": "a"}\n{"text": "' + "b" * 5000 + '"}'),
        ("a.txt", "a\n\n" + "b\n" * 5000),
    ],
)
def test_a_row_is_bounded(name: str, content: str, tmp_path: Path) -> None:
    examples = read_examples([write(tmp_path / name, content)], DataLimits(row_bytes=1000))
    with pytest.raises(DataError, match=r":\d+ is a row of more than 1000 bytes, the limit for one row"):
        list(examples)


def test_many_columns_cost_short_rows_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text" + ",x" * 1000 + "\n" + "a\n" * 1000)
    assert [example.text for example in read_examples([path])] == ["a"] * 1000  # type: ignore[union-attr]
