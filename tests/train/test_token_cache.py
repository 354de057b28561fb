"""The cache of tokenized data in a run's directory: it is used only if data, tokenizer and options are unchanged, and
it changes no byte of the run."""

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
    """Returns the items and the events of loading them."""
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


def same(first: list[Any], second: list[Any]) -> bool:
    rows = [[row for item in items for row in item.rows] for items in (first, second)]
    return len(first) == len(second) and all(
        np.array_equal(a.ids, b.ids) and np.array_equal(a.loss, b.loss) and (a.ids.dtype, a.loss.dtype) ==
        (b.ids.dtype, b.loss.dtype) for a, b in zip(*rows, strict=True)
    )  # fmt: skip


def test_a_resumed_run_reads_the_cache_and_has_the_same_bytes(
    configure: Configure, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_steps": 4, "save_every": 2, "template_date": "2026-01-31", "eval_data": [str(data)]}
    config = configure(**options)

    def stop_and_resume(name: str, forget: bool) -> dict[str, str]:
        """Stops a run at step 2 and resumes it, without its cache if `forget`. Returns the hashes of all its files."""
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
    assert stop_and_resume("without", forget=True) == whole
    monkeypatch.setattr(token_cache, "load_items", once(token_cache.load_items, "data", "eval_data"))
    assert stop_and_resume("with", forget=False) == whole


def once(real: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Returns `real`, which now may be called only as often as there are names."""
    remaining = list(names)

    def call(*args: Any) -> Any:
        remaining.pop()
        return real(*args)

    return call


def pairs(path: Path) -> Path:
    rows = [{"prompt": t[:20], "chosen": t[20:50], "rejected": t[50:70]} for t in TEXTS[:6]]
    return write_lines(path, rows)


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_the_cache_returns_the_same_items_for_every_method(
    method: str, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [{"messages": [{"role": "user", "content": "red"}], "sum": 1.5, "names": ["é", None]}]
    prompts = write_lines(tmp_path / "p.jsonl", [*chat, {"prompt": "one two", "sum": float("inf")}])
    more: dict[str, Any] = {
        "sft": {}, "dpo": {"data": [str(pairs(tmp_path / "pairs.jsonl"))]},
        "grpo": {"data": [str(prompts)], "reward": "reward.py", "max_completion_length": 8},
    }[method]  # fmt: skip
    config = configure(method=method, **more)
    items, events = load(config)
    assert codes(events) == []
    monkeypatch.setattr(token_cache, "load_items", refuse)
    cached, events = load(config)
    assert codes(events) == ["tokenized"]
    assert same(items, cached)
    if isinstance(items[0], Prompt):
        assert [item.example for item in items] == [item.example for item in cached]


@pytest.mark.parametrize("value", [date(2026, 1, 31), (1, 2), b"x", {"a": (1,)}])
def test_rows_that_json_would_change_are_not_cached(
    value: Any, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": "red", "told": value}
    prompt = Prompt(Row(np.arange(3, dtype=np.int32), np.zeros(3, np.bool_)), PromptExample(row, "a.parquet:1", "red"))
    monkeypatch.setattr(token_cache, "load_items", lambda *args: ([prompt], RowCounts(1, 1, 2, 0, 0, 0)))
    config = configure(method="grpo", reward="reward.py", max_completion_length=8)
    items, events = load(config)
    assert (items, events) == ([prompt], [])
    assert not (Path(config.out) / "tokenized").exists()


def test_reward_columns_of_parquet_files_are_cached(configure: Configure, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["one two", "red"], "sum": [3, 4]}), tmp_path / "p.parquet")
    options = {"method": "grpo", "reward": "r.py", "max_completion_length": 8}
    config = configure(**options, data=[str(tmp_path / "p.parquet")])
    for expected_codes in ([], ["tokenized"]):
        items, events = load(config)
        assert ([item.example.row["sum"] for item in items], codes(events)) == ([3, 4], expected_codes)


def other_template(config: TrainConfig) -> TrainConfig:
    copy = Path(shutil.copytree(config.model, Path(config.out).parent / "copy"))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    template = settings["chat_template"].replace("<|end|>", "<|end|> ")
    (copy / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return TrainConfig.from_dict({**json.loads(config.to_json()), "model": str(copy)})


def with_option(**options: Any) -> Callable[[TrainConfig], TrainConfig]:
    return lambda config: TrainConfig.from_dict({**json.loads(config.to_json()), **options})


def other_data(config: TrainConfig) -> TrainConfig:
    with Path(config.data[0]).open("a") as file:
        file.write('{"text": "red"}\n')
    return config


def other_eos_token(config: TrainConfig) -> TrainConfig:
    copy = Path(shutil.copytree(config.model, Path(config.out).parent / "copy"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    return TrainConfig.from_dict({**json.loads(config.to_json()), "model": str(copy)})


def damaged(config: TrainConfig) -> TrainConfig:
    """Changes one byte of an id in the cache file, which keeps its length."""
    file = Path(config.out) / "tokenized" / "data.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    return config


def truncated(config: TrainConfig) -> TrainConfig:
    file = Path(config.out) / "tokenized" / "data.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return config


def another_version(config: TrainConfig) -> TrainConfig:
    token_cache._versions.cache_clear()
    return config


@pytest.mark.parametrize(
    "change",
    [
        *(other_template, other_data, other_eos_token, damaged, truncated, another_version),
        *(with_option(seq_len=32), with_option(template_date="2026-02-01")),
    ],
)
def test_any_change_of_data_model_options_or_cache_tokenizes_again(
    change: Callable[[TrainConfig], TrainConfig], configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(template_date="2026-01-31")
    load(config)
    if change is another_version:
        monkeypatch.setattr(token_cache, "version", lambda name: "another")
    try:
        changed = change(config)
        items, events = load(changed)
        fresh, _ = load(TrainConfig.from_dict({**json.loads(changed.to_json()), "out": changed.out + "-fresh"}))
        assert codes(events) == []
        assert same(items, fresh)
        assert codes(load(changed)[1]) == ["tokenized"]  # it has replaced the old one
    finally:
        monkeypatch.undo()
        token_cache._versions.cache_clear()


def test_data_that_change_while_they_are_read_are_not_cached(
    configure: Configure, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SftReader.tokenize

    def tokenize(*args: Any) -> Any:
        with data.open("a") as file:
            file.write('{"text": "red"}\n')
        return real(*args)

    monkeypatch.setattr(SftReader, "tokenize", tokenize)
    config = configure()
    load(config)
    assert not (Path(config.out) / "tokenized" / "data.safetensors").exists()


def disk_full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("module", "name"), [(token_cache, "save_file"), (files, "fsync")])
def test_a_full_disk_is_reported_and_does_not_end_the_run(
    module: ModuleType, name: str, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, disk_full)
    config = configure()
    items, events = load(config)
    assert (len(items), codes(events)) == (16, ["tokenized_lost"])
    assert "No space left on device" in events[0]["message"]
    assert list((Path(config.out) / "tokenized").iterdir()) == []


def test_temporary_files_of_a_killed_write_are_removed(configure: Configure) -> None:
    config = configure()
    folder = Path(config.out) / "tokenized"
    folder.mkdir(parents=True)
    (folder / ".data.safetensors.tmp").write_bytes(b"half")
    load(config)
    assert [path.name for path in folder.iterdir()] == ["data.safetensors"]


def test_only_one_of_several_processes_writes_the_cache(configure: Configure) -> None:
    config = configure()
    load(config, keeps=False)
    assert not (Path(config.out) / "tokenized").exists()
    items, _ = load(config)
    cached, events = load(config, keeps=False)
    assert same(items, cached)
    assert codes(events) == ["tokenized"]


def test_a_pipe_as_data_is_refused_without_waiting_for_it(configure: Configure, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl is not a regular file"):
        load(configure(data=[str(tmp_path / "pipe.jsonl")]))


def test_without_a_fixed_template_date_nothing_is_cached(configure: Configure) -> None:
    config = configure()
    data = TokenCache(config, Path(config.model), Tokenizer.from_dir(config.model), [].append)
    assert data.load("data")[1].rows == 16
    assert not (Path(config.out) / "tokenized").exists()
