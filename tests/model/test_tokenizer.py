"""The tokenizer: ids of texts and chats equal those of transformers, and streamed pieces add up to the decoded text for
any ids."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8serve.errors import ModelError, RequestError
from fp8serve.model.text.token_streams import ByteStream, WindowStream
from fp8serve.model.text.tokenizer import Tokenizer
from tests.model.oracle import CHAT_TEMPLATE, byte_fallback, byte_level, write_tokenizer

KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback}
TEXTS = ["", "the inning", " leading and  double ", "日本語 naïve 😀", "a\n\nb\t", "<s>x</s>"]

# Constructs that published templates use: loops, loop controls, namespaces, whitespace control, filters, tojson,
# string methods and slices, tests, macros, strftime_now, and generation blocks.
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "llama-2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% else %}"
    "{% set loop_messages = messages %}{% set system = '' %}{% endif %}{% for m in loop_messages %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') }}"
    "{{ m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "namespace": "{%- set ns = namespace(found=false, last=0) -%}\n{%- for m in messages -%}\n"
    "  {%- if m.role == 'user' and not ns.found -%}{%- set ns.found = true -%}\n"
    "  {%- set ns.last = loop.index0 -%}{%- endif -%}\n"
    "{%- endfor -%}{{ bos_token }}first user {{ ns.last }}: {{ messages[ns.last].content | trim | upper }}",
    "tojson": "{{ bos_token }}{% for m in messages %}{{ m | tojson }}"
    "{{ {'b': 1, 'a': '<é>'} | tojson(indent=2) }}{% endfor %}",
    "loop-controls": "{% for m in messages %}{% if m['role'] == 'system' %}{% continue %}{% endif %}{{ m['content'] }}|"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "macro": "{% macro turn(m) %}<{{ m.role }}>{{ m.get('content', '') }}</{{ m.role }}>{% endmacro %}"
    "{% for m in messages if m.content is string %}{{ turn(m) }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "arithmetic": "{% for m in messages %}{{ loop.index0 % 2 }}{{ 2 * loop.index }}{{ '-' * 3 ~ 1 ~ none }}"
    "{{ m.content[:5] + 'x' }}{{ '%s-%d' % (m.role, 3) }}{% endfor %}"
    "{{ tools is none }}{{ documents }}{{ strftime_now('%Y') | length }}",
}  # fmt: skip
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi the inn"}],
    [
        {"role": "system", "content": "Be brief. 日本"},
        {"role": "user", "content": " two "},
        {"role": "assistant", "content": "4 </s> <b>&"},
        {"role": "user", "content": "more 😀", "name": None},
    ],
]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_equal_transformers(kind: str, tmp_path: Path) -> None:
    theirs: Any = write_tokenizer(tmp_path, KINDS[kind]())
    ours = Tokenizer.from_dir(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs: Any = write_tokenizer(tmp_path, template=TEMPLATES[name])
    ours = Tokenizer.from_dir(tmp_path)
    for messages in CHATS:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours.chat(messages, add_generation_prompt=prompt) == expected
            ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
            assert ours.encode_chat(messages, add_generation_prompt=prompt) == ids


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("text", ["Well", "Well, ", " Well,\n", "a"])
@pytest.mark.parametrize("name", ["plain", "llama-2", "loop-controls", "macro", "generation"])
def test_continuing_the_last_message_equals_transformers(name: str, text: str, tmp_path: Path) -> None:
    theirs: Any = write_tokenizer(tmp_path, template=TEMPLATES[name])
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert Tokenizer.from_dir(tmp_path).chat_to_continue(messages) == expected


def test_a_template_without_the_last_message_cannot_continue_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template="{{ messages[0].content }}")
    with pytest.raises(RequestError, match="does not render the message that the model would"):
        Tokenizer.from_dir(tmp_path).chat_to_continue([{"role": "user", "content": "Hi"}, {"role": "assistant"}])


def test_chat_has_one_bos(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    ours = Tokenizer.from_dir(tmp_path)
    assert ours.encode("x")[0] == ours.bos_id
    assert ours.encode_chat(CHATS[1]).count(ours.bos_id or 0) == 1


def test_template_in_tokenizer_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for value in (
        "{{ messages[0].content }}!",
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}],
    ):
        path.write_text(json.dumps(config | {"chat_template": value}))
        assert Tokenizer.from_dir(tmp_path).chat(CHATS[0]) == "Hi the inn!"
    path.write_text(json.dumps(config | {"chat_template": [{"name": "rag", "template": "x"}]}))
    with pytest.raises(ModelError, match=r"several chat templates \(\['rag'\]\) and no default"):
        Tokenizer.from_dir(tmp_path)


def test_no_template_is_a_clear_error(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.chat(CHATS[0])


def test_eos_of_generation_config_comes_first(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer.from_dir(tmp_path).eos_ids == (5, 1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert Tokenizer.from_dir(tmp_path).eos_ids == (7, 8, 1)


def test_missing_and_damaged_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="not a tokenizer that can be read"):
        Tokenizer.from_dir(tmp_path)


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="not valid Unicode"):
        Tokenizer.from_dir(tmp_path).encode("\ud800")


def test_stored_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    write_tokenizer(tmp_path, backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_dir(tmp_path).encode("abcdefghij")) == 11


def tokenizer(kind: str) -> Tokenizer:
    backend: tokenizers.Tokenizer = KINDS[kind]()
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, None)


STREAMED = {kind: tokenizer(kind) for kind in KINDS}


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300)
@given(data=st.data())
def test_stream_adds_up_to_decode_on_any_ids(kind: str, skip: bool, data: st.DataObject) -> None:
    subject = STREAMED[kind]
    ids = data.draw(st.lists(st.integers(0, subject.vocab_size - 1), max_size=40))
    stream = subject.stream(skip_special_tokens=skip)
    pieces = [stream.push(i) for i in ids] + [stream.flush()]
    assert "".join(pieces) == subject.decode(ids, skip_special_tokens=skip)


def test_a_surrogate_is_invalid_at_its_second_byte() -> None:
    """The library decodes it so; Python's incremental decoder waits for the third byte."""
    subject = STREAMED["byte-level"]
    bytes_of = {subject.token_bytes(i): i for i in range(subject.vocab_size)}
    ids = [bytes_of[byte] for byte in (b"\xed", b"\xa1", b"\x80", b"a")]
    for stream in (subject.stream(), WindowStream(subject, True)):
        assert [stream.push(i) for i in ids] == ["", "\ufffd", "\ufffd", "\ufffda"]


@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=500)
@given(data=st.data())
def test_bytes_are_decoded_as_the_library_decodes_windows(skip: bool, data: st.DataObject) -> None:
    """Every piece is equal, so that the same bytes are held back."""
    subject = STREAMED["byte-level"]
    lead = [i for i in range(subject.vocab_size) if subject.token_bytes(i)[-1:] >= b"\xc0"]  # an incomplete character
    ids = data.draw(st.lists(st.integers(0, subject.vocab_size + 1) | st.sampled_from(lead), max_size=40))
    fast, slow = subject.stream(skip), WindowStream(subject, skip)
    assert isinstance(fast, ByteStream)
    assert [fast.push(i) for i in ids] == [slow.push(i) for i in ids]
    assert fast.flush() == slow.flush()
    assert fast.push(ids[0] if ids else 0) == slow.push(ids[0] if ids else 0)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(text=st.text(max_size=30))
def test_stream_of_valid_text_never_shows_a_broken_character(kind: str, text: str) -> None:
    subject = STREAMED[kind]
    text = text.replace("\ufffd", "")
    ids = subject.encode(text, add_special_tokens=False)
    stream = subject.stream()
    pieces = [stream.push(i) for i in ids] + [stream.flush()]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == subject.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(text=st.text(max_size=30))
def test_the_bytes_of_all_tokens_are_those_of_the_text(kind: str, text: str) -> None:
    subject = STREAMED[kind]
    ids = subject.encode(text, add_special_tokens=False)
    pieces = [subject.token_bytes(token, first=i == 0) for i, token in enumerate(ids)]
    assert b"".join(pieces) == subject.decode(ids, skip_special_tokens=False).encode()


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, STREAMED["byte-level"].vocab_size - 1), max_size=20))
def test_the_bytes_of_any_ids_decode_to_their_text(ids: list[int]) -> None:
    subject = STREAMED["byte-level"]
    joined = b"".join(subject.token_bytes(token) for token in ids)
    assert joined.decode("utf-8", "replace") == subject.decode(ids, skip_special_tokens=False)


def test_a_token_outside_the_vocabulary_has_no_bytes() -> None:
    assert STREAMED["byte-level"].token_bytes(10**6) == b""


def test_plain_tokens_are_not_held_back() -> None:
    subject = STREAMED["byte-level"]
    stream = subject.stream()
    assert [stream.push(i) for i in subject.encode("the inning")] == ["", "the", " ", "in", "n", "ing"]


def test_a_character_is_returned_with_its_last_byte() -> None:
    subject = STREAMED["byte-level"]
    stream = subject.stream()
    assert [stream.push(i) for i in subject.encode("😀", add_special_tokens=False)] == ["", "", "", "😀"]


def test_flush_returns_the_held_bytes_and_resets_the_stream() -> None:
    subject = STREAMED["byte-level"]
    stream = subject.stream()
    assert stream.push(subject.encode("😀", add_special_tokens=False)[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(subject.encode("a", add_special_tokens=False)[0]) == "a"


def test_a_front_process_tokenizes_without_torch() -> None:
    modules = "fp8serve.model.config.decoder, fp8serve.model.text.examples, fp8serve.model.text.tokenizer"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_error_names_a_tokenizer_file_that_is_not_supported(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no tokenizer\.json, and tekken\.json is not supported; save"):
        Tokenizer.from_dir(tmp_path)
