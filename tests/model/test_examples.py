"""Data files are read as examples, and examples become token ids with a loss mask; bad lines are named by number."""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import DataError
from fp8serve.model.text.examples import (
    PASSAGE_CHARS,
    ChatExample,
    PromptExample,
    TextExample,
    parse_example,
    read_examples,
    tokenize,
    tokenize_chunks,
)
from fp8serve.model.text.tokenizer import Tokenizer
from tests.model.oracle import CHAT_TEMPLATE, write_tokenizer

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return Tokenizer.from_dir(tmp_path)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_json_lines_of_all_kinds_in_order(tmp_path: Path) -> None:
    rows = ({"text": "a", "id": 7}, "", {"prompt": "p", "completion": "c"}, {"messages": CHAT})
    path = lines(tmp_path / "d.jsonl", *rows)
    assert list(read_examples([path])) == [
        TextExample("a", f"{path}:1"),
        PromptExample("p", "c", f"{path}:3"),
        ChatExample(tuple(CHAT), f"{path}:4"),
    ]


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes('{"text": "a\u2028b\u0085c"}\r\n{"text": "d"}\r\n'.encode())
    assert [e.text for e in read_examples([tmp_path / "d.jsonl"]) if isinstance(e, TextExample)] == [
        "a\u2028b\u0085c",
        "d",
    ]


def test_text_becomes_passages_of_whole_paragraphs(tmp_path: Path) -> None:
    short, long = "word " * 100, "word " * (PASSAGE_CHARS // 4)
    (tmp_path / "t.txt").write_text(f"\ufeff{short}\r\n\r\n{short}\n\n\n\n{long}\n\n{short}", encoding="utf-8")
    texts = [e.text for e in read_examples([tmp_path / "t.txt"]) if isinstance(e, TextExample)]
    assert texts == [f"{short}\n\n{short}", long, short]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": ', "d.jsonl:2 is not valid JSON"),
        ("[1]", "d.jsonl:2 is a list where an object"),
        ('{"text": "a", "text": "b"}', "d.jsonl:2 is not valid JSON: the key 'text' appears twice"),
        (
            '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
            "d.jsonl:2 .*the key 'content' appears twice",
        ),
        ("null", "d.jsonl:2 is null where an object"),
        ({"text": "a", "messages": CHAT}, "d.jsonl:2 has both text and messages; give one of"),
        ({"text": "a", "completion": "b"}, "has both text and prompt"),
        ({"content": "a"}, r"has only \['content'\]; give one of"),
        ({"prompt": "a"}, "`completion` is missing"),
        ({"text": 3}, "`text` is a number, not text"),
        ({"text": ""}, "`text` is empty"),
        ({"text": None, "x": None}, "d.jsonl:2 has no value in `text`; give one of"),
        ({"prompt": "a", "completion": None}, "`completion` is missing"),
        ({"text": ["a"]}, "`text` is a list, not text"),
        (
            '{"text": "a",}',
            "is not valid JSON: there is a comma too many|a name in double quotes is missing at character",
        ),
        ("{'text': 'a'}", "is not valid JSON: a name in double quotes is missing at character 2"),
        ('{"text": "a"} {}', "is not valid JSON: there is more behind the value at character 15"),
        ('{"text": "a', "is not valid JSON: it is cut off inside the string that begins at character 10"),
        ('{"a":' * 100_000, "is not valid JSON: it is nested too deeply"),
        ({"text": "\ud800"}, "half of a surrogate pair"),
        ({"messages": []}, "not a list of messages"),
        ({"text": "a", "tools": [{"type": "function"}]}, "has `tools` without `messages`"),
        ({"messages": [{"content": "x"}]}, "message 0 has no `role`"),
        ({"messages": [{"role": "user"}]}, "message 0 has no text in `content`"),
        ({"messages": CHAT[:1]}, "no message is the assistant's"),
        ({"messages": [CHAT[1] | {"weight": 0.5}]}, "`weight` must be 0 or 1, not 0.5"),
    ],
)
def test_the_error_names_the_broken_line(row: Any, message: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"text": "fine"}, row)
    with pytest.raises(DataError, match=message) as caught:
        list(read_examples([path]))
    assert "d.jsonl:2" in str(caught.value)


def test_invalid_values_of_ignored_columns_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(f"""{{"text": "a", "id": {"9" * 5000}, "score": NaN, "low": -Infinity}}\n""")
    assert [e.text for e in read_examples([tmp_path / "d.jsonl"]) if isinstance(e, TextExample)] == ["a"]


def test_a_prompt_beside_messages_is_a_note(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"prompt": "hi", "prompt_id": "7", "messages": CHAT})
    assert list(read_examples([path])) == [ChatExample(tuple(CHAT), f"{path}:1")]
    path = lines(tmp_path / "d.jsonl", {"prompt": "hi", "completion": "yes", "messages": CHAT})
    with pytest.raises(DataError, match="has both prompt and messages"):
        list(read_examples([path]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no examples; it is empty"),
        ("a.txt", b" \n\n \n", "holds no examples"),
        ("a.jsonl", b"\n\n", "holds no examples"),
        ("a.xlsx", b"text\nx", r"neither text .* nor Parquet"),
        ("a.txt", b"ab\xff", "not UTF-8 text: byte 2"),
    ],
)
def test_unusable_files_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_examples([tmp_path / name]))


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list(read_examples([tmp_path / "none.txt"]))
    with pytest.raises(DataError, match="is not a regular file"):
        list(read_examples([tmp_path]))


def trained_text(tokenizer: Tokenizer, example: Any) -> str:
    tokenized = tokenize(example, tokenizer)
    ids = [i for i, learn in zip(tokenized.ids, tokenized.loss_mask, strict=True) if learn]
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_a_text_is_trained_entirely_with_an_end_token(tokenizer: Tokenizer) -> None:
    tokenized = tokenize(TextExample("the inn"), tokenizer)
    assert tokenized.ids == [*tokenizer.encode("the inn"), tokenizer.eos_id]
    assert all(tokenized.loss_mask)


def test_only_the_completion_is_learnt_after_the_prompt_as_served(tokenizer: Tokenizer) -> None:
    example = PromptExample("2+2=", "4 the")
    assert trained_text(tokenizer, example) == "4 the</s>"
    prompt = tokenizer.encode("2+2=")
    assert tokenize(example, tokenizer).ids[: len(prompt)] == prompt


def test_prompt_and_completion_that_would_fuse_stay_apart(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("th") + tokenizer.encode("e", False) != tokenizer.encode("the")
    example = PromptExample("th", "e")
    assert trained_text(tokenizer, example) == "e</s>"
    assert tokenize(example, tokenizer).ids[:2] == tokenizer.encode("th")


def test_only_the_assistants_turns_are_trained(tokenizer: Tokenizer) -> None:
    assert trained_text(tokenizer, ChatExample(tuple(CHAT))) == "yes</s>no</s>"
    weighted: tuple[dict[str, Any], ...] = (CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:])
    assert trained_text(tokenizer, ChatExample(weighted)) == "no</s>"


def test_chat_ids_are_those_of_serving(tokenizer: Tokenizer) -> None:
    tokenized = tokenize(ChatExample(tuple(CHAT)), tokenizer)
    assert tokenized.ids == tokenizer.encode_chat(CHAT, add_generation_prompt=False)
    prompt = tokenizer.encode_chat(CHAT[:3])
    assert tokenized.ids[: len(prompt)] == prompt


def test_generation_blocks_decide_which_tokens_are_trained(tmp_path: Path) -> None:
    block = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
    write_tokenizer(tmp_path, template="{% for m in messages %}<{{ m.role }}>" + block + "{% endfor %}")
    assert trained_text(Tokenizer.from_dir(tmp_path), ChatExample(tuple(CHAT))) == "yesno"


def test_chat_without_template_names_the_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    with pytest.raises(DataError, match=r"d.jsonl:3 cannot be tokenized: The model has no chat template"):
        tokenize(ChatExample(tuple(CHAT), "d.jsonl:3"), Tokenizer.from_dir(tmp_path))


def test_template_refusal_names_the_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template="{{ raise_exception('roles must alternate') }}" + CHAT_TEMPLATE)
    with pytest.raises(DataError, match=r"d.jsonl:3 cannot be tokenized: .*roles must alternate"):
        tokenize(ChatExample(tuple(CHAT), "d.jsonl:3"), Tokenizer.from_dir(tmp_path))


def test_cutting(tokenizer: Tokenizer) -> None:
    example = TextExample("abcdefghij")
    whole = tokenize(example, tokenizer)
    assert tokenize(example, tokenizer, 4).ids == whole.ids[:4]
    pieces = tokenize_chunks(example, tokenizer, 5, 9)
    assert [len(p.ids) for p in pieces] == [5, 5, 2]
    assert [i for p in pieces for i in p.ids] == whole.ids
    assert len(tokenize_chunks(PromptExample("abc", "def"), tokenizer, 3, 9)) == 1


class Counting(Tokenizer):
    """A tokenizer that records how many characters it tokenizes in calls without a limit."""

    characters = 0

    def encode_truncated(self, text: str, tokens: int | None, add_special_tokens: bool = True) -> Any:
        self.characters += len(text) if tokens is None else 0
        return super().encode_truncated(text, tokens, add_special_tokens)


WORDS = "the inning  " * 40_000


@pytest.mark.parametrize(
    "example",
    [
        TextExample(WORDS),
        TextExample("\n" * 400_000),
        PromptExample(WORDS, "yes"),
        PromptExample("Say it again.", WORDS),
        ChatExample(({"role": "user", "content": WORDS}, {"role": "assistant", "content": "yes"})),
        ChatExample(({"role": "user", "content": "Again."}, {"role": "assistant", "content": WORDS})),
    ],
)
def test_only_the_beginning_of_a_long_text_is_tokenized(example: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    counting, plain = Counting.from_dir(tmp_path), Tokenizer.from_dir(tmp_path)
    assert isinstance(counting, Counting)
    prefix, whole = tokenize(example, counting, 500), tokenize(example, plain)
    assert (prefix.ids, prefix.loss_mask) == (whole.ids[:500], whole.loss_mask[:500])
    assert counting.characters < 20_000


def test_pieces_are_as_many_as_were_asked_for(tokenizer: Tokenizer) -> None:
    whole = tokenize(TextExample(WORDS), tokenizer)
    pieces = tokenize_chunks(TextExample(WORDS), tokenizer, 100, 3)
    assert [i for p in pieces for i in p.ids] == whole.ids[:300]


NULLS = {"text": None, "prompt": None, "completion": None, "messages": None, "tools": None}


@pytest.mark.parametrize(
    "row",
    [{"text": "a"}, {"prompt": "a", "completion": "b"}, {"messages": [{"role": "assistant", "content": "a"}]}],
)
def test_a_null_column_counts_as_absent(row: dict[str, Any]) -> None:
    assert parse_example({**NULLS, **row}) == parse_example(row)


def test_a_null_weight_counts_as_absent() -> None:
    reply = {"role": "assistant", "content": "a", "weight": None}
    example = parse_example({"messages": [{"role": "user", "content": "b", "weight": None}, reply]})
    assert isinstance(example, ChatExample)
    assert [message.get("weight") for message in example.messages] == [None, None]
    with pytest.raises(DataError, match="every message of the assistant has weight 0"):
        parse_example({"messages": [reply | {"weight": 0}]})
