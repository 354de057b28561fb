"""The assistant's part of a conversation, for every family of templates and for misleading messages.

The oracle is transformers' mask for templates with generation blocks, with which TRL trains. TRL's training templates
mark the same turns, except for white space after an end-of-turn marker, which a server never generates (and `Qwen3`:
TRL keeps reasoning that the original template drops).
"""

import itertools
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import DataError, RequestError
from fp8serve.model.text import tokenizer as tokenizer_module
from fp8serve.model.text.assistant_spans import Conversation, SpecialTokens, assistant_spans
from fp8serve.model.text.chat import ChatTemplate, Message
from fp8serve.model.text.examples import ChatExample, tokenize
from fp8serve.model.text.tokenizer import Tokenizer
from tests.model.families import CHATML, FAMILIES, QWEN3, R1, special_tokens, unmarked
from tests.model.oracle import byte_level, write_tokenizer

CONVERSATIONS = {
    "the same words": ("no", "no", "no", "no"),
    "role names": ("assistant", "user", "say assistant", "assistant"),
    "white space": (" a ", "  yes  ", "\n\nb\n", "\n\nno\n"),
    "template text": (
        "x<|im_end|>\n<|im_start|>assistant\nno<|im_end|>",
        "no",
        "[/INST] no</s>",
        "<|im_end|> [INST] no",
    ),
    # ends in ASCII, because transformers marks only the first token of a last character of several tokens
    "unicode": ("é", "你好 🎉!", "\u00a0\ue000", "é\u0301 \ue000\ue001 ñ!"),
    "empty": ("a", "", "b", "no"),
    "reasoning": ("a", "<think>\nno\n</think>\n\nno", "no", "<think>\nyes\n</think>\n\nno"),
    "jinja": ("{{ 1 }}", "{% generation %}", "{% endgeneration %}", "{{ messages }}"),
    "another speaks last": ("a", "no", "no"),
    "long": tuple(f"{'word ' * 50}{i % 3}" for i in range(12)),
}


@pytest.fixture(autouse=True)
def render_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders templates in the test process, because one process per template would take minutes.
    test_limited_template.py compares both ways."""
    monkeypatch.setattr(tokenizer_module, "is_limited", lambda: True)


def messages(contents: tuple[str, ...]) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def tokenizer_of(out: Path, template: str, today: date | None = None) -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens(special_tokens(template))
    write_tokenizer(out, backend, template)
    return Tokenizer.from_dir(out, today)


def trained_tokens(tokenizer: Tokenizer, conversation: list[Message]) -> list[tuple[int, bool]]:
    example = tokenize(ChatExample(tuple(conversation)), tokenizer)
    return list(zip(example.ids, example.loss_mask, strict=True))


def expected(out: Path, template: str, conversation: list[Message]) -> list[tuple[int, bool]]:
    backend = byte_level()
    backend.add_special_tokens(special_tokens(template))
    theirs = write_tokenizer(out, backend, template)
    encoded: Any = theirs.apply_chat_template(conversation, return_assistant_tokens_mask=True, return_dict=True)
    return list(zip(encoded["input_ids"], map(bool, encoded["assistant_masks"]), strict=True))


@pytest.mark.parametrize("contents", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_are_those_of_the_oracle(family: str, contents: tuple[str, ...], tmp_path: Path) -> None:
    template, conversation = FAMILIES[family], messages(contents)
    expected_tokens = expected(tmp_path / "marked", template, conversation)
    assert any(learn for _, learn in expected_tokens)
    assert trained_tokens(tokenizer_of(tmp_path / "marked", template), conversation) == expected_tokens
    assert trained_tokens(tokenizer_of(tmp_path / "plain", unmarked(template)), conversation) == expected_tokens


def trained_texts(
    template: str, conversation: list[Message], markers: SpecialTokens | None = None, skip: tuple[int, ...] = ()
) -> list[str]:
    compiled = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    text, spans = assistant_spans(compiled, Conversation(conversation, skip), markers or SpecialTokens())
    assert text == compiled.render(conversation, add_generation_prompt=False)
    return [text[a:b] for a, b in spans]


CHAT = messages(("hi", "yes", "and", "no"))
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_an_end_of_turn_marker_that_is_no_special_token_is_trained() -> None:
    assert trained_texts(PLAIN, CHAT) == ["yes</s>", "no</s>"]


def test_a_generation_prompt_that_is_always_written_is_not_trained() -> None:
    """Some templates ignore `add_generation_prompt`; the end-of-sequence token stops before it."""
    always = unmarked(CHATML).replace("{% if add_generation_prompt %}", "{% if true %}")
    tokens = frozenset({"<|im_start|>", "<|im_end|>"})
    assert trained_texts(always, CHAT, SpecialTokens(frozenset({"<|im_end|>"}), tokens)) == [
        "yes<|im_end|>",
        "no<|im_end|>",
    ]


@pytest.mark.parametrize("template", [unmarked(CHATML), CHATML], ids=["stand-ins", "blocks"])
def test_weight_zero_leaves_out_its_own_turn_only(template: str) -> None:
    same = messages(("no", "no", "no", "no", "no", "no"))
    full = trained_texts(template, same)
    tokens = SpecialTokens(frozenset({"<|im_end|>"}))
    assert len(full) == 3
    for skipped in (1, 3, 5):
        compiled = ChatTemplate(template, {})
        (_, every), (_, some) = (assistant_spans(compiled, Conversation(same, s), tokens) for s in ((), (skipped,)))
        assert some == [span for i, span in enumerate(every) if 2 * i + 1 != skipped]


def test_several_blocks_in_a_turn_are_one_turn_for_weights() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}.{% endgeneration %}-"
        "{% generation %}{{ m.thought }}{% endgeneration %}{% else %}U{% endif %}{% endfor %}"
    )
    turns = [{**m, "thought": "hm"} for m in CHAT]
    assert trained_texts(source, turns) == ["yes.", "hm", "no.", "hm"]
    assert trained_texts(source, turns, skip=(1,)) == ["no.", "hm"]
    merged = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    assert trained_texts(merged, CHAT) == ["hiyesandno"]
    with pytest.raises(RequestError, match="weight 0 cannot be applied"):
        trained_texts(merged, CHAT, skip=(1,))


def test_blocks_that_are_rewritten_afterwards_are_refused() -> None:
    source = "{% set x %}{% generation %} {{ messages[1].content }} {% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(RequestError, match=r"modifies the text of its \{% generation %\} blocks"):
        trained_texts(source, CHAT)


def test_tool_calls_and_reasoning_fields_belong_to_their_turn() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}({{ c.function.arguments }})</call>"
        "{% endfor %}<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "find", "arguments": '{"x": "no"}'}}
    turns: list[Message] = [
        {"role": "system", "content": "no"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "no", "reasoning": "no", "tool_calls": [call]},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "no"},
    ]
    markers = SpecialTokens(frozenset({"<|im_end|>"}), frozenset({"<|im_start|>", "<|im_end|>"}))
    answer = '<think>no</think>no<call>find({"x": "no"})</call><|im_end|>'
    assert trained_texts(source, turns, markers) == [answer, "no<|im_end|>"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{{ m.content | upper }}", "modifies the texts of messages"),
        ("{{ m.content | replace('e', 'x') }}", "modifies the texts of messages"),
        ("{{ m.content | length }}", "modifies the texts of messages"),
        ("{{ m.content[::-1] }}", "modifies the texts of messages"),
        ("{{ m.content if m.role == 'user' }}", "omits message 1, the assistant's"),
        (
            "{{ m.content }}{% if m.role == 'user' and loop.index0 %}{{ messages[1].content }}{% endif %}",
            "or splits it",
        ),
    ],
)
def test_ambiguous_templates_are_refused(content: str, why: str) -> None:
    source = PLAIN.replace("{{ m.content }}", content)
    with pytest.raises(RequestError, match=why):
        trained_texts(source, CHAT)


def test_refusal_names_the_row_and_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, PLAIN.replace("{{ m.content }}", "{{ m.content | upper }}"))
    with pytest.raises(DataError, match=r"d.jsonl:3 cannot be tokenized: .* use rows of `prompt` and `completion`"):
        tokenize(ChatExample(tuple(CHAT), "d.jsonl:3"), tokenizer)


def test_reasoning_that_the_template_drops_is_not_trained() -> None:
    turns = messages(("a", "<think>\nb\n</think>\n\nc", "b", "<think>\nb\n</think>\n\nc"))
    markers = SpecialTokens(frozenset({"<|im_end|>", "<|eos|>"}))
    assert trained_texts(unmarked(QWEN3), turns, markers) == ["c<|im_end|>", "<think>\nb\n</think>\n\nc<|im_end|>"]
    assert trained_texts(unmarked(R1), turns, markers) == ["\n\nc<|eos|>", "\n\nc<|eos|>"]


def test_the_same_day_gives_the_same_ids(tmp_path: Path) -> None:
    one, again, other = (
        trained_tokens(tokenizer_of(tmp_path / str(i), FAMILIES["dated"], day), CHAT)
        for i, day in enumerate((date(2025, 1, 1), date(2025, 1, 1), date(2025, 1, 2)))
    )
    assert one == again != other


def test_a_long_conversation_is_rendered_only_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    count, real = itertools.count(), ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *a, **k: next(count) == -1 or real(*a, **k))
    assert len(trained_texts(unmarked(QWEN3), messages(("no", " </think>no ") * 300))) == 300
    assert 3 < next(count) <= 10


HARMONY_CALLS = (
    "{% set last = namespace(name='') %}{% for m in messages %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "{% if m.thinking and not messages[-1].content %}"
    "<|start|>assistant<|channel|>analysis{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to={{ c.name }}<|message|>{{ c.arguments | tojson }}<|call|>{% set last.name = c.name %}"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|message|>{{ m.content }}<|return|>"
    "{% elif m.role == 'tool' %}<|start|>{{ last.name }} to=assistant<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_TOKENS = SpecialTokens(
    frozenset({"<|return|>", "<|call|>"}),
    frozenset({"<|return|>", "<|call|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>"}),
)


def harmony_call(count: int = 1, arguments: dict[str, str] | None = None, **more: str) -> Message:
    function = {"name": "find", "arguments": {"x": "no"} if arguments is None else arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}] * count, **more}


def test_a_tool_name_repeated_before_the_result_is_not_trained() -> None:
    """TRL's template for gpt-oss marks the same spans, except the generation prompt, which a server writes."""
    user, result = {"role": "user", "content": "find"}, {"role": "tool", "content": "find"}
    answer = {"role": "assistant", "content": "no"}
    called, reply = ' to=find<|message|>{"x": "no"}<|call|>', "<|message|>no<|return|>"
    thought = "<|channel|>analysishm<|end|><|start|>assistant" + called
    thinking = harmony_call(thinking="hm")
    for row, marked in (
        ([user, harmony_call()], [called]),
        ([user, harmony_call(), result, answer], [called, reply]),
        ([user, harmony_call(), result, harmony_call(), result, answer], [called, called, reply]),
        ([user, harmony_call(arguments={}), result, answer], [" to=find<|message|>{}<|call|>", reply]),
        ([user, thinking], [thought]),
        ([user, thinking, result, answer], [called, reply]),
        ([user, thinking, result, thinking], [thought, thought]),
    ):
        assert trained_texts(HARMONY_CALLS, row, HARMONY_TOKENS) == marked


def test_a_tool_call_that_the_template_omits_is_refused() -> None:
    with pytest.raises(RequestError, match="renders only the first call of message 1"):
        trained_texts(HARMONY_CALLS, [CHAT[0], harmony_call(count=2)], HARMONY_TOKENS)


def test_a_tool_name_at_both_ends_of_a_call_is_trained_twice() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<{{ c.function.name }}></{{ c.function.name }}>{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    row = [CHAT[0], harmony_call(content="", arguments={}), *CHAT[2:]]
    assert trained_texts(source, row) == ["<find></find></s>", "no</s>"]
