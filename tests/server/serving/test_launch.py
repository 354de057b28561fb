"""What a server refuses before it starts an engine process."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from fp8serve.engine.client import EngineClient
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RequestError
from fp8serve.server.serving.served_weights import WeightSource, launch
from tests.engine.tiny import write_model


async def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineClient, "start", Mock(side_effect=AssertionError("a process was started")))
    source = WeightSource("base", "model", write_model(tmp_path / "model"), EngineOptions(tensor_parallel=3))
    with pytest.raises(RequestError, match="tensor_parallel 3 does not divide the 2 attention heads of this model"):
        await launch(source)
