"""The option `invariant` without a GPU: it changes nothing on a CPU, and says so; what a GPU cannot do is refused."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8serve.engine.engine import Engine
from fp8serve.errors import MachineError, ModelError
from fp8serve.fp8 import ops
from fp8serve.fp8.batch_invariant import has_batch_invariant_products, use_invariant_kernels
from fp8serve.model.config.decoder import read_config
from fp8serve.model.parity import differences, unsupported_in_invariant_mode, use_invariant_mode
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer
from tests.engine.tiny import write_model
from tests.tiny import CHATS, write_tiny_model

no_cuda_kernels = pytest.mark.skipif(ops.LIBRARIES["cuda"] is not None, reason="the CUDA kernels are loaded")


@pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
def test_on_a_cpu_it_changes_nothing_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "model")
    with caplog.at_level(logging.INFO, "fp8serve.engine"):
        engines = [Engine(model, recipe="rowwise", device="cpu", invariant=invariant) for invariant in (True, False)]
    assert [engine.info()["invariant"] for engine in engines] == [True, False]
    assert [r.message for r in caplog.records if "invariant" in r.message] == [
        "invariant changes nothing on a CPU in one process, where no sum depends on the batch."
    ]
    actual, expected = (e.generate([[1, 2, 3]], max_new_tokens=4, seed=1, logprobs=1) for e in engines)
    assert actual == expected


@pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
def test_a_run_on_a_cpu_says_so(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(CHATS)
    model, events = write_tiny_model(tmp_path / "model"), list[dict[str, Any]]()
    values = {"model": str(model), "data": [str(tmp_path / "chats.jsonl")], "out": str(tmp_path / "run")}
    config = TrainConfig.from_dict(values | {"recipe": "rowwise", "max_steps": 1, "seq_len": 64, "invariant": True})
    Trainer(config).run(events.append)
    texts = [event["message"] for event in events if event.get("code") == "invariant"]
    assert texts == ["invariant changes nothing on a CPU in one process, where no sum depends on the batch."]


def test_the_invariant_mode_is_refused_without_fp8serve_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = {"cpu": dict.fromkeys(("scaled_mm", "scaled_mm_add", "mm"), "reference")}
    monkeypatch.setattr(ops, "backends", lambda device="cpu": reference[device])
    with pytest.raises(MachineError, match="invariant needs fp8serve's CPU kernels"):
        use_invariant_kernels("cpu")


@no_cuda_kernels
def test_without_cuda_kernels_a_gpu_is_refused() -> None:
    with pytest.raises(MachineError, match="invariant needs fp8serve's CUDA kernel of scaled_mm"):
        use_invariant_kernels("cuda")


def test_models_that_a_gpu_cannot_compute_so_are_refused(tmp_path: Path) -> None:
    plain = read_config(write_model(tmp_path / "plain"))
    mixture = read_config(write_model(tmp_path / "mixture", "mixtral"))
    assert unsupported_in_invariant_mode("cuda", plain, uses_mx=False) is None
    assert unsupported_in_invariant_mode("cpu", mixture, uses_mx=True) is None
    for config, uses_mx, words in (
        (mixture, False, "a mixture of experts, whose products are grouped by rows"),
        (plain, True, "MX blocks, which torch multiplies"),
        (replace(plain, computed_by="transformers"), False, "which transformers' class computes"),
    ):
        with pytest.raises(ModelError, match=f"On cuda, invariant does not support .*{words}; leave invariant out"):
            use_invariant_mode("cuda", config, uses_mx)


@no_cuda_kernels
def test_without_the_mode_a_gpu_differs_from_training(tmp_path: Path) -> None:
    config = read_config(write_model(tmp_path / "model"))
    assert any("depend on the number of rows" in reason for reason in differences(None, config, "cuda"))
