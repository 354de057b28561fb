"""What `python -m benchmarks.studies parity` counts and prints; tests/server/test_log_probs.py asks a real server."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.studies import parity
from benchmarks.studies.__main__ import main
from benchmarks.studies.parity import Returned
from fp8serve.train.log_probs import log_probs
from tests.engine.tiny import write_model, write_scales


def test_equal_values_are_counted_and_the_largest_difference_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, started = write_model(tmp_path / "model", max_position_embeddings=1024), []
    assert main(["parity", str(model)]) == 1
    assert "calibrate it with --kv-cache" in capsys.readouterr().err
    write_scales(model, model / "scales.safetensors", kv=True)

    def running(model: Path, options: Any, log: Path) -> AbstractContextManager[Any]:
        started.append(dict(zip(options[::2], options[1::2], strict=True)))
        return nullcontext(SimpleNamespace(post=None))

    def ask(post: Any, name: Any, prompts: Any) -> dict[str, list[Returned]]:
        """Returns the last five log-probabilities of a prompt, one of them wrong."""
        how = {"recipe": started[-1]["--recipe"], "kv_cache_dtype": started[-1]["--kv-cache-dtype"]}
        values = log_probs(model, prompts[:1], **how)[0][-5:].tolist()
        return {"prompt": [Returned(prompts[0], [*values[:-1], values[-1] - 0.5])]}

    monkeypatch.setattr(parity, "RunningServer", running)
    monkeypatch.setattr(parity, "ask", ask)
    monkeypatch.setattr(parity, "RECIPES", ("delayed", "w8a16"))
    assert main(["parity", str(model), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["recipe"], row["cache"]) for row in rows] == [
        (recipe, cache) for recipe in ("delayed", "w8a16") for cache in ("bf16", "fp8")
    ]
    assert {(row["way"], row["equal"], row["tokens"]) for row in rows} == {("prompt", 4, 5)}
    assert all(row["worst"] == pytest.approx(0.5) for row in rows)
    assert main(["parity", str(model)]) == 0
    assert capsys.readouterr().out.count("4 of 5") == 4
