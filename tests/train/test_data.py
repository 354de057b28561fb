"""Which tokens carry loss, which rows are dropped, and how long text is cut."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fp8serve.errors import DataError, ModelError
from fp8serve.model.config.decoder import read_config
from fp8serve.model.text.examples import PromptExample, TextExample
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.data import check_length, fingerprint, load_items
from fp8serve.train.forward import collate
from fp8serve.train.methods.supervised import SftReader

from .conftest import TEXTS, write_lines


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


def test_only_the_completion_carries_loss(tokenizer: Tokenizer) -> None:
    example = PromptExample("red green", " blue one")
    (row,), report = SftReader().tokenize([example], tokenizer, 64)
    ids = [int(i) for i, loss in zip(row.ids, row.loss, strict=True) if loss]
    assert ids == [*tokenizer.encode(" blue one", add_special_tokens=False), tokenizer.eos_id]
    assert row.ids[: -len(ids)].tolist() == tokenizer.encode("red green")
    assert (report.tokens, report.trainable_tokens) == (len(row.ids) - 1, len(ids))


def test_only_the_assistant_carries_loss(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "red"}, {"role": "assistant", "content": "dog"},
        {"role": "user", "content": "blue"}, {"role": "assistant", "content": "fox"},
    ]  # fmt: skip
    path = write_lines(tmp_path / "chat.jsonl", [{"messages": messages}])
    (row,), _ = load_items(SftReader(), [str(path)], tokenizer, 64)
    text = tokenizer.decode(row.ids[row.loss].tolist(), skip_special_tokens=False)
    assert text.replace("<|end|>", "") == "dogfox"


def test_long_text_is_cut_into_windows_where_every_token_is_a_target_once(tokenizer: Tokenizer) -> None:
    text = " ".join(TEXTS[:3])
    whole = [*tokenizer.encode(text), tokenizer.eos_id]
    rows, report = SftReader().tokenize([TextExample(text)], tokenizer, 16)
    assert [i for row in rows for i in row.ids[1:].tolist()] == whole[1:]
    assert [i for row in rows for i in row.ids[:-1].tolist()] == whole[:-1]
    assert max(row.tokens for row in rows) == 16
    assert report.tokens == report.trainable_tokens == len(whole) - 1
    assert (report.examples, report.truncated_rows) == (1, 0)


def test_a_prompt_that_fills_the_context_is_dropped_and_counted(tokenizer: Tokenizer) -> None:
    long, short = PromptExample(TEXTS[0], " red"), PromptExample("red", " blue")
    rows, report = SftReader().tokenize([long, short], tokenizer, 8)
    assert len(rows) == 1
    assert (report.examples, report.rows, report.dropped_rows, report.truncated_rows) == (2, 1, 1, 1)


def test_data_without_a_token_to_learn_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": TEXTS[0], "completion": " red"}])
    with pytest.raises(DataError, match=r"None of the 1 examples in .*d\.jsonl has a token to learn from"):
        load_items(SftReader(), [str(path)], tokenizer, 8)


def test_fingerprint_sees_ids_masks_and_order(tokenizer: Tokenizer) -> None:
    a, b = PromptExample("red", " blue"), PromptExample("red blue", " one")
    rows, _ = SftReader().tokenize([a, b], tokenizer, 64)
    masked, _ = SftReader().tokenize([TextExample("red blue"), b], tokenizer, 64)
    assert rows[0].ids.tolist() == masked[0].ids.tolist()
    assert len({fingerprint(rows), fingerprint(rows[::-1]), fingerprint(masked)}) == 3


def test_rows_are_laid_end_to_end_without_padding(tokenizer: Tokenizer) -> None:
    rows, _ = SftReader().tokenize([PromptExample("red", " blue one"), PromptExample("cat dog", " fox")], tokenizer, 64)
    batch = collate(rows, "cpu")
    assert batch.lengths == [row.tokens for row in rows]
    assert batch.token_ids.tolist() == [i for row in rows for i in row.ids[:-1].tolist()]
    assert batch.positions.tolist() == [i for row in rows for i in range(row.tokens)]
    following = np.concatenate([row.ids[1:] for row in rows])
    assert batch.targets.tolist() == following[batch.predict.numpy()].tolist()
    assert len(batch.targets) == sum(row.trainable_tokens for row in rows)


def test_a_context_longer_than_the_models_is_refused(model_dir: Path) -> None:
    check_length(128, read_config(model_dir))
    with pytest.raises(ModelError, match="seq_len 129 is longer than the 128 tokens"):
        check_length(129, read_config(model_dir))
    check_length(128, replace(read_config(model_dir), layer_windows=(None, 32)))
