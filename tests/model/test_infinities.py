"""Infinity in config.json is read as a number, both as the object that transformers 5 writes and as the non-standard
word `Infinity`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import ModelError
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.export import write_hf_directory
from fp8serve.model.storage.files import encode_nonfinite, read_json
from fp8serve.model.stored_checkpoint import open_checkpoint
from tests.model import checkpoints as drafts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"__float__": "Infinity"}', math.inf),
        ('{"__float__": "-Infinity"}', -math.inf),
        ('[0.0, {"__float__": "Infinity"}]', [0.0, math.inf]),
        ('{"inner": {"__float__": "Infinity"}}', {"inner": math.inf}),
        ("Infinity", math.inf),
        ('{"__float__": "1.0"}', {"__float__": "1.0"}),
        ('{"__float__": 1}', {"__float__": 1}),
        ('{"__float__": "Infinity", "more": 1}', {"__float__": "Infinity", "more": 1}),
    ],
)
def test_infinity_is_read_as_a_number(text: str, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"key": {text}}}')
    assert read_json(tmp_path / "config.json")["key"] == expected


def test_nan_is_read_and_written() -> None:
    text = json.dumps(encode_nonfinite({"key": [math.nan, 1.0, "NaN"]}), allow_nan=False)
    assert text == '{"key": [{"__float__": "NaN"}, 1.0, "NaN"]}'


def test_infinity_is_written_as_transformers_does(tmp_path: Path) -> None:
    draft = drafts.plain()
    draft.config["_limit"] = [0.0, {"__float__": "Infinity"}]
    source = draft.write(tmp_path / "source")
    write_hf_directory(tmp_path / "out", read_text_config(source), open_checkpoint(source))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["_limit"] == [0.0, {"__float__": "Infinity"}]
    assert read_json(tmp_path / "out" / "config.json")["_limit"] == [0.0, math.inf]


def test_an_embedding_model_without_modules_json_is_not_only_called_incomplete(tmp_path: Path) -> None:
    draft = drafts.plain()
    draft.config["architectures"] = ["LlamaModel"]
    del draft.tensors["lm_head.weight"]
    folder = draft.write(tmp_path / "m")
    with pytest.raises(ModelError, match=r"lacks the output layer lm_head.weight: .* lacks the modules.json"):
        open_checkpoint(folder)
