"""Tokenized data are kept beside a run, are used only when they are certainly the same, and change no byte."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fp8serve.errors import DataError
from fp8serve.model.storage import files
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train import token_cache
from fp8serve.train.checkpointing import with_template_date
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Row, RowCounts
from fp8serve.train.methods.grpo.data import Prompt, PromptExample
from fp8serve.train.methods.supervised import SftReader
from fp8serve.train.token_cache import TokenCache
from fp8serve.train.trainer import Trainer

from .conftest import TEXTS, Configure, write_lines
from .test_resume import every_file
from .test_trainer import after

Events = list[dict[str, Any]]


def load(config: TrainConfig, keeps: bool = True, name: str = "data") -> tuple[list[Any], Events]:
    """The items, and what was told."""
    Path(config.out).mkdir(exist_ok=True)
    config = with_template_date(config, None)
    events: Events = []
    tokenizer = Tokenizer.from_dir(config.model, config.today)
    data = TokenCache(config, Path(config.model), tokenizer, events.append, keeps)
    return data.load(name)[0], events


def codes(events: Events) -> list[str]:
    return [event["code"] for event in events if event["type"] == "message"]


def refuse(*args: Any) -> Any:
    raise AssertionError("the data were tokenized again")


def same(one: list[Any], two: list[Any]) -> bool:
    rows = [[row for item in items for row in item.rows] for items in (one, two)]
    return len(one) == len(two) and all(
        np.array_equal(a.ids, b.ids) and np.array_equal(a.loss, b.loss) and (a.ids.dtype, a.loss.dtype) ==
        (b.ids.dtype, b.loss.dtype) for a, b in zip(*rows, strict=True)
    )  # fmt: skip


def test_a_run_that_goes_on_does_not_tokenize_again_and_has_the_same_bytes(
    configure: Configure, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_steps": 4, "save_every": 2, "template_date": "2026-01-31", "eval_data": [str(data)]}
    config = configure(**options)

    def stop_and_go_on(name: str, forget: bool) -> dict[str, str]:
        """All files of a run in the same place that was resumed at step 2, with its tokenized data or without."""
        assert Trainer(config).run(stop=after(2)).status == "stopped"
        if forget:
            shutil.rmtree(Path(config.out) / "tokenized")
        events: Events = []
        Trainer(config).run(events.append)
        assert ("tokenized" in codes(events)) != forget
        return every_file(Path(config.out).rename(tmp_path / name))

    Trainer(config).run()
    whole = every_file(Path(config.out).rename(tmp_path / "whole"))
    assert {"tokenized/data.safetensors", "tokenized/eval_data.safetensors", "model/model.safetensors"} <= whole.keys()
    assert stop_and_go_on("without", forget=True) == whole
    monkeypatch.setattr(token_cache, "load_items", once(token_cache.load_items, "data", "eval_data"))
    assert stop_and_go_on("parted", forget=False) == whole


def once(real: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """`real`, which may be called once for each name."""
    left = list(names)

    def call(*given: Any) -> Any:
        left.pop()
        return real(*given)

    return call


def pairs(path: Path) -> Path:
    rows = [{"prompt": t[:20], "chosen": t[20:50], "rejected": t[50:70]} for t in TEXTS[:6]]
    return write_lines(path, rows)


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_every_method_gets_back_what_it_made(
    method: str, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [{"messages": [{"role": "user", "content": "red"}], "sum": 1.5, "names": ["é", None]}]
    prompts = write_lines(tmp_path / "p.jsonl", [*chat, {"prompt": "one two", "sum": float("inf")}])
    more: dict[str, Any] = {
        "sft": {}, "dpo": {"data": [str(pairs(tmp_path / "pairs.jsonl"))]},
        "grpo": {"data": [str(prompts)], "reward": "reward.py", "max_completion_length": 8},
    }[method]  # fmt: skip
    config = configure(method=method, **more)
    made, told = load(config)
    assert codes(told) == []
    monkeypatch.setattr(token_cache, "load_items", refuse)
    again, told = load(config)
    assert codes(told) == ["tokenized"]
    assert same(made, again)
    if isinstance(made[0], Prompt):
        assert [item.example for item in made] == [item.example for item in again]


@pytest.mark.parametrize("value", [date(2026, 1, 31), (1, 2), b"x", {"a": (1,)}])
def test_a_row_that_is_not_the_same_as_json_is_not_kept(
    value: Any, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": "red", "told": value}
    prompt = Prompt(Row(np.arange(3, dtype=np.int32), np.zeros(3, np.bool_)), PromptExample(row, "a.parquet:1", "red"))
    monkeypatch.setattr(token_cache, "load_items", lambda *given: ([prompt], RowCounts(1, 1, 2, 0, 0, 0)))
    config = configure(method="grpo", reward="reward.py", max_completion_length=8)
    found, told = load(config)
    assert (found, told) == ([prompt], [])
    assert not (Path(config.out) / "tokenized").exists()


def test_the_columns_for_a_reward_are_read_of_parquet_too(configure: Configure, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["one two", "red"], "sum": [3, 4]}), tmp_path / "p.parquet")
    options = {"method": "grpo", "reward": "r.py", "max_completion_length": 8}
    config = configure(**options, data=[str(tmp_path / "p.parquet")])
    for codes_told in ([], ["tokenized"]):
        found, told = load(config)
        assert ([item.example.row["sum"] for item in found], codes(told)) == ([3, 4], codes_told)


def other_template(config: TrainConfig) -> TrainConfig:
    copy = Path(shutil.copytree(config.model, Path(config.out).parent / "copy"))
    found = json.loads((copy / "tokenizer_config.json").read_text())
    template = found["chat_template"].replace("<|end|>", "<|end|> ")
    (copy / "tokenizer_config.json").write_text(json.dumps({**found, "chat_template": template}))
    return TrainConfig.from_dict({**json.loads(config.to_json()), "model": str(copy)})


def with_option(**options: Any) -> Callable[[TrainConfig], TrainConfig]:
    return lambda config: TrainConfig.from_dict({**json.loads(config.to_json()), **options})


def other_data(config: TrainConfig) -> TrainConfig:
    with Path(config.data[0]).open("a") as file:
        file.write('{"text": "red"}\n')
    return config


def other_end(config: TrainConfig) -> TrainConfig:
    copy = Path(shutil.copytree(config.model, Path(config.out).parent / "copy"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    return TrainConfig.from_dict({**json.loads(config.to_json()), "model": str(copy)})


def damaged(config: TrainConfig) -> TrainConfig:
    """The same length, another id."""
    file = Path(config.out) / "tokenized" / "data.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    return config


def cut(config: TrainConfig) -> TrainConfig:
    file = Path(config.out) / "tokenized" / "data.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return config


def another_version(config: TrainConfig) -> TrainConfig:
    token_cache._versions.cache_clear()
    return config


@pytest.mark.parametrize(
    "change",
    [
        *(other_template, other_data, other_end, damaged, cut, another_version),
        *(with_option(seq_len=32), with_option(template_date="2026-02-01")),
    ],
)
def test_whatever_is_not_the_same_is_tokenized_anew(
    change: Callable[[TrainConfig], TrainConfig], configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(template_date="2026-01-31")
    load(config)
    if change is another_version:
        monkeypatch.setattr(token_cache, "version", lambda name: "another")
    try:
        changed = change(config)
        found, told = load(changed)
        fresh, _ = load(TrainConfig.from_dict({**json.loads(changed.to_json()), "out": changed.out + "-fresh"}))
        assert codes(told) == []
        assert same(found, fresh)
        assert codes(load(changed)[1]) == ["tokenized"]  # and kept in place of the other
    finally:
        monkeypatch.undo()
        token_cache._versions.cache_clear()


def test_data_that_change_while_they_are_read_are_not_kept(
    configure: Configure, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SftReader.tokenize

    def tokenize(*given: Any) -> Any:
        with data.open("a") as file:
            file.write('{"text": "red"}\n')
        return real(*given)

    monkeypatch.setattr(SftReader, "tokenize", tokenize)
    config = configure()
    load(config)
    assert not (Path(config.out) / "tokenized" / "data.safetensors").exists()


def full(*given: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("module", "name"), [(token_cache, "save_file"), (files, "fsync")])
def test_a_full_disk_is_a_remark(
    module: ModuleType, name: str, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, full)
    config = configure()
    found, told = load(config)
    assert (len(found), codes(told)) == (16, ["tokenized_lost"])
    assert "No space left on device" in told[0]["message"]
    assert list((Path(config.out) / "tokenized").iterdir()) == []


def test_what_a_killed_write_left_is_removed(configure: Configure) -> None:
    config = configure()
    folder = Path(config.out) / "tokenized"
    folder.mkdir(parents=True)
    (folder / ".data.safetensors.tmp").write_bytes(b"half")
    load(config)
    assert [path.name for path in folder.iterdir()] == ["data.safetensors"]


def test_only_one_of_several_processes_writes(configure: Configure) -> None:
    config = configure()
    load(config, keeps=False)
    assert not (Path(config.out) / "tokenized").exists()
    made, _ = load(config)
    again, told = load(config, keeps=False)
    assert same(made, again)
    assert codes(told) == ["tokenized"]


def test_a_pipe_in_the_place_of_data_is_refused_and_not_waited_for(configure: Configure, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl is not a regular file"):
        load(configure(data=[str(tmp_path / "pipe.jsonl")]))


def test_what_a_template_was_told_of_the_time_is_not_kept(configure: Configure) -> None:
    config = configure()
    data = TokenCache(config, Path(config.model), Tokenizer.from_dir(config.model), [].append)
    assert data.load("data")[1].rows == 16
    assert not (Path(config.out) / "tokenized").exists()
