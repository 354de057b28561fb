import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fp8serve.calibration.data import (
    IGNORE_INDEX,
    PASSAGES,
    Batch,
    Sample,
    _key,
    as_text,
    calibration_batches,
    load_samples,
    make_batches,
)
from fp8serve.calibration.options import CalibrationOptions, SampleOptions
from fp8serve.errors import DataError, ModelError
from fp8serve.model.text.examples import ChatExample, read_examples
from fp8serve.model.text.tokenizer import Tokenizer
from tests.model.oracle import CHAT_TEMPLATE

from .conftest import VOCAB


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_shipped_passages_are_enough_for_the_defaults(tokenizer: Tokenizer) -> None:
    batches = calibration_batches(None, tokenizer, VOCAB, samples=128, seq_len=512, batch_size=4, seed=0)
    assert sum(len(b.lengths) for b in batches.calibration) == 128
    assert sum(len(b.lengths) for b in batches.held_out) == 16
    assert batches.excluded == 0


def passages() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PASSAGES.read_text(encoding="utf-8").splitlines()]


def words(text: str) -> int:
    """Returns the number of words; in scripts without spaces, two characters count as one word."""
    return max(len(text.split()), len(re.findall(r"[\u3040-\u30ff\u3400-\u9fff]", text)) // 2)


def test_shipped_passages_are_long_and_each_is_there_once() -> None:
    texts = [as_text(e).text if isinstance(e, ChatExample) else e.text for e in read_examples([PASSAGES])]  # type: ignore[union-attr]
    assert len({text[:60] for text in texts}) == len(texts) >= 128
    assert min(map(words, texts)) >= 200


def test_shipped_passages_are_of_many_kinds() -> None:
    kinds = Counter(row["kind"] for row in passages())
    least = {"prose": 30, "code": 15, "mathematics": 12, "table": 8, "dialogue": 12}
    assert all(kinds[kind] >= count for kind, count in least.items()), kinds
    languages = {kind for kind in kinds if kind[0].isupper()}
    assert len(languages) >= 18
    assert {"German", "French", "Spanish", "Russian", "Chinese", "Japanese", "Arabic", "Hindi", "Korean"} <= languages
    assert sum("messages" in row for row in passages()) >= 8
    code = "\n".join(row["text"] for row in passages() if row["kind"] == "code")
    assert all(part in code for part in ("def ", "#include", "fn ", "func ", "class ", "SELECT", "#!/usr/bin/env bash"))


def test_shipped_conversations_go_through_the_models_template(model_dir: Path, tmp_path: Path) -> None:
    """For a model without a template, or with one that refuses them, they are plain text."""
    chats = [e for e in read_examples([PASSAGES]) if isinstance(e, ChatExample)]
    asks, plain = chats[0].messages[0]["content"][:20], f"User: {chats[0].messages[0]['content'][:20]}"
    refusing = "{{ raise_exception('no roles') }}"
    for template, expected in ((None, plain), (refusing, plain), (CHAT_TEMPLATE, asks)):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(model_dir, folder)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        tokenizer = Tokenizer.from_dir(folder)
        samples = load_samples(None, tokenizer, VOCAB, count=10**6, seq_len=4096, seed=0)
        assert len(samples) == len(passages())
        texts = [tokenizer.decode(list(s.ids)) for s in samples]
        assert any(expected in text for text in texts)
        assert any(not all(s.scored) for s in samples) == (template == CHAT_TEMPLATE)
        assert any(plain in text for text in texts) == (template != CHAT_TEMPLATE)


def test_chats_of_the_user_need_a_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    with pytest.raises(DataError, match=r"chat\.jsonl:1 cannot be tokenized: .*template"):
        load_samples([path], tokenizer, VOCAB, count=4, seq_len=64, seed=0)


def test_a_seed_gives_the_same_samples_and_another_seed_others(tokenizer: Tokenizer) -> None:
    first, again, other = (load_samples(None, tokenizer, VOCAB, count=20, seq_len=64, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_order_of_chats_is_that_of_earlier_versions_and_depends_on_tools() -> None:
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"})
    plain, tools = ChatExample(messages, "a:1"), ({"type": "function", "function": {"name": "f"}},)
    assert _key(plain, 0).hex().startswith("bdb2c9e0b35fa88e")
    assert _key(plain, 0) == _key(ChatExample(messages, "b:2"), 0) != _key(ChatExample(messages, "a:1", tools), 0)


def test_short_examples_are_kept_and_long_texts_become_windows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", ["short one", "a rather longer text " * 30])
    samples = load_samples([data], tokenizer, VOCAB, count=1000, seq_len=32, seed=0)
    short = [s for s in samples if s.ids == (*tokenizer.encode("short one"), tokenizer.eos_id)]
    long = (*tokenizer.encode("a rather longer text " * 30), tokenizer.eos_id)
    assert len(short) == 1
    assert sum(len(s.ids) for s in samples) >= len(short[0].ids) + len(long) - 1  # a remainder of one token is dropped
    assert max(len(s.ids) for s in samples) == 32


def test_samples_come_from_as_many_documents_as_there_are(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", [f"text {i} " + "and so on and on " * 30 for i in range(6)])
    for count, most in ((4, 1), (6, 1), (9, 2)):
        samples = load_samples([data], tokenizer, VOCAB, count=count, seq_len=16, seed=0)
        of_each = Counter(s.document for s in samples)
        assert (len(samples), len(of_each), max(of_each.values())) == (count, min(count, 6), most)


def test_targets_are_the_next_tokens_and_prompts_are_not_scored() -> None:
    scored = (False, False, True, True)
    (batch,) = make_batches([Sample((5, 6, 7, 8), scored), Sample((9, 10), (True, True))], 2)
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.targets.tolist() == [IGNORE_INDEX, 7, 8, IGNORE_INDEX, 10, IGNORE_INDEX]
    assert batch.lengths == [4, 2]


def test_prompt_tokens_of_a_file_are_not_scored(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "Name a river: ", "completion": "Elbe"}) + "\n")
    (sample,) = load_samples([path], tokenizer, VOCAB, count=4, seq_len=64, seed=0)
    (batch,) = make_batches([sample], 1)
    prompt = len(tokenizer.encode("Name a river: "))
    assert (batch.targets[: prompt - 1] == IGNORE_INDEX).all()
    assert (batch.targets[prompt - 1 : -1] == batch.ids[prompt:]).all()


def ids(batches: list[Batch]) -> set[tuple[int, ...]]:
    return {tuple(b.ids.tolist()) for b in batches}


def test_all_data_of_the_user_are_used(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", [f"this is text number {i}" for i in range(10)])
    batches = calibration_batches([data], tokenizer, VOCAB, samples=64, seq_len=64, batch_size=1, seed=3)
    assert len(batches.calibration) == len(ids(batches.calibration)) == 10
    assert len(batches.held_out) == 8  # held-out samples are shipped passages


def test_no_document_is_both_calibrated_on_and_held_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """This includes windows and duplicates of a document."""
    data = write_lines(tmp_path / "d.jsonl", [f"text {i} {[100 * i + j for j in range(9 * i)]}" for i in range(10)] * 2)
    for holdout in (None, [data]):
        sources = None if holdout is None else [data]
        batches = calibration_batches(
            sources, tokenizer, VOCAB, samples=40, seq_len=16, batch_size=1, seed=3, holdout=holdout
        )
        texts = [{tokenizer.decode(list(i))[:9] for i in ids(b)} for b in (batches.held_out, batches.calibration)]
        assert not ids(batches.held_out) & ids(batches.calibration)
        assert holdout is None or not {t for t in texts[0] if t.startswith("text")} & texts[1]


def test_data_that_are_all_held_out_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", ["the only text"])
    twice = write_lines(tmp_path / "t.jsonl", ["the only text", "and another"])
    for holdout in (data, twice):
        with pytest.raises(DataError, match=r"d\.jsonl.* are held out"):
            calibration_batches(
                [data], tokenizer, VOCAB, samples=4, seq_len=64, batch_size=4, seed=0, holdout=[holdout]
            )


def test_unusable_data_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for data in (tmp_path / "missing.txt", empty):
        with pytest.raises(DataError, match=data.name):
            load_samples([data], tokenizer, VOCAB, count=4, seq_len=64, seed=0)


@pytest.mark.parametrize(("name", "least"), [("seq_len", 2), ("samples", 1), ("batch_size", 1)])
def test_settings_that_read_nothing_are_refused(name: str, least: int) -> None:
    with pytest.raises(DataError, match=f"{name} must be at least {least}, not {least - 1}"):
        SampleOptions.of({name: least - 1})


def test_standard_input_is_read_once(tmp_path: Path) -> None:
    assert SampleOptions.of({"data": "-"}).data == ("-",)
    for options in ({"data": ["-", "-"]}, {"data": "-", "holdout": ["a.txt", "-"]}):
        with pytest.raises(DataError, match="can be read only once; use it for data or for holdout"):
            CalibrationOptions.of(options)


def test_documents_are_counted_and_not_windows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", ["short one", "a rather longer text " * 30, "short one"])
    holdout = write_lines(tmp_path / "h.jsonl", ["something else"])
    batches = calibration_batches(
        [data], tokenizer, VOCAB, samples=64, seq_len=16, batch_size=4, seed=0, holdout=[holdout]
    )
    assert (batches.documents, batches.held_out_documents) == (2, 1)
    assert sum(len(b.lengths) for b in batches.calibration) > 2


def test_the_error_names_the_broken_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(DataError, match=r"broken\.jsonl:2"):
        load_samples([path], tokenizer, VOCAB, count=4, seq_len=64, seed=0)


def test_a_tokenizer_of_another_model_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelError, match="the model has only 100 tokens"):
        load_samples(None, tokenizer, 100, count=4, seq_len=64, seed=0)
