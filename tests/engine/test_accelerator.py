"""Decisions of an engine on a GPU (cache size, graph capture), tested on a CPU with stand-ins for calls to the GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.engine import memory
from fp8serve.engine.engine import Engine
from fp8serve.engine.loading import check_device
from fp8serve.engine.memory import gpu_cache_budget, plan_gpu_cache, run_largest_step
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import MachineError, RequestError

GIB = 2**30
GPU = torch.device("cuda")


def on_gpu(**options: Any) -> EngineOptions:
    return EngineOptions(**{"device": "cuda", **options})


@pytest.fixture
def gpu_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that simulates a GPU with `free` of `total` bytes, on which a step takes `step` bytes."""

    def make(free: int, total: int, step: int = 0) -> None:
        monkeypatch.setattr(memory, "gpu_memory_info", lambda device: (free, total))
        monkeypatch.setattr(memory, "gpu_peak_bytes", lambda run, device: run() is None or step)
        monkeypatch.setattr(memory, "gpu_seconds", lambda run, device: run() is None or 0.1)

    return make


def test_the_cache_gets_the_remaining_memory(gpu_with: Callable[..., None]) -> None:
    gpu_with(60 * GIB, 80 * GIB)
    parts = memory.ATTENTION_WORKSPACE_BYTES
    assert gpu_cache_budget(GPU, on_gpu(), 2 * GIB, GIB) == 60 * GIB - 8 * GIB + 1 - 3 * GIB - parts  # rounded down
    assert gpu_cache_budget(GPU, on_gpu(gpu_memory=1), 0, 0) == 60 * GIB - parts
    assert gpu_cache_budget(GPU, on_gpu(gpu_memory=0.5), 0, 0) == 20 * GIB - parts


def test_no_memory_for_a_cache_is_an_error(gpu_with: Callable[..., None]) -> None:
    gpu_with(9 * GIB, 80 * GIB)
    with pytest.raises(
        MachineError, match=r"No memory is left for the KV cache on cuda: .* of its 85,899,345,920 bytes"
    ):
        gpu_cache_budget(GPU, on_gpu(), GIB, 0)


@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_the_cache_size_is_planned_around_the_largest_step(
    model_dir: Path, gpu_with: Callable[..., None], recipe: str
) -> None:
    """The step itself runs on the CPU, by fused ops under rowwise and by plain ones under bf16."""
    gpu_with(GIB, GIB, step=1000)
    engine = Engine(model_dir, recipe=recipe)
    runner, options = engine.loaded.runner, on_gpu(gpu_memory=1, max_num_seqs=4)
    sizes, _ = plan_gpu_cache(runner.model, engine.loaded.config, options, torch.bfloat16)
    assert (sizes.num_blocks, sizes.max_model_len) == (4 * 8, 128)
    graph_logits = 4 * 260 * (1 + 2 + 4)
    for graphs, allocated in ((None, 2000 + memory.ATTENTION_WORKSPACE_BYTES + graph_logits), (False, 1000)):
        gpu_with(memory.ATTENTION_WORKSPACE_BYTES + allocated + 5 * sizes.block_bytes + 1, GIB, step=1000)
        options = on_gpu(gpu_memory=1, max_num_seqs=4, cuda_graphs=graphs)
        fitting, _ = plan_gpu_cache(runner.model, engine.loaded.config, options, torch.bfloat16)
        assert (fitting.num_blocks, fitting.max_model_len) == (5, 80)
    with pytest.raises(RequestError, match="4096 is beyond the 128 tokens"):
        plan_gpu_cache(runner.model, engine.loaded.config, on_gpu(max_model_len=4096), torch.bfloat16)


def test_the_largest_step_has_all_tokens_and_sequences(model_dir: Path) -> None:
    runner = Engine(model_dir, recipe="rowwise").loaded.runner
    sizes: list[int] = []
    handle = runner.model.model.embed_tokens.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    logits = run_largest_step(runner.model, EngineOptions(max_num_seqs=3, max_batch_tokens=70))
    handle.remove()
    assert (sizes, tuple(logits.shape)) == ([70], (3, 260))


def fails(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing\nand a trace")


def test_a_failed_capture_is_reported_and_decoding_runs_without_graphs(model_dir: Path) -> None:
    engine = Engine(model_dir, recipe="rowwise")
    report = engine.loaded.runner.capture_steps(on_gpu(), 128, fails)
    assert report.text() == "off: operation not permitted when stream is capturing"
    assert engine.loaded.runner.graphs is None
    assert len(engine.generate([[1, 2]], max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3
    with pytest.raises(MachineError, match="cannot be captured as CUDA graphs: operation not permitted"):
        engine.loaded.runner.capture_steps(on_gpu(cuda_graphs=True), 128, fails)


def test_decoding_is_captured_if_capturing_prompts_fails(model_dir: Path) -> None:
    """Prompts are captured first; they need the most memory."""
    engine = Engine(model_dir, recipe="rowwise")
    problems = ["out of memory\nand a trace"]

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if problems:
            raise RuntimeError(problems.pop())
        return run

    report = engine.loaded.runner.capture_steps(on_gpu(max_num_seqs=4), 128, capture)
    assert report.text() == "batches of 1, 2, 4; no prompts: out of memory"
    assert engine.loaded.runner.graphed_prompts is None
    assert len(engine.generate([[1, 2]], max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3


def test_info_says_which_steps_are_captured(model_dir: Path) -> None:
    engine = Engine(model_dir, recipe="rowwise")
    assert engine.info()["cuda_graphs"] == "off: the device is no GPU"
    assert engine.loaded.runner.capture_steps(on_gpu(cuda_graphs=False), 128).text() == "off: switched off"
    report = engine.loaded.runner.capture_steps(on_gpu(max_num_seqs=4), 128, lambda run: run)
    assert report.text() == "batches of 1, 2, 4; prompts of up to 512 tokens"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "cuda", "gpu_memory": 0.0}, "must be greater than 0, not 0.0"),
        ({"device": "cuda", "gpu_memory": "all"}, "gpu_memory must be a number, not 'all'"),
        ({"device": "cuda", "cuda_graphs": "yes"}, "cuda_graphs must be true or false"),
        ({"device": "cpu", "gpu_memory": 0.5}, "gpu_memory is for a GPU, and the device is 'cpu'"),
        ({"device": "cpu", "cuda_graphs": True}, "cuda_graphs is for a GPU, and the device is 'cpu'"),
    ],
)
def test_invalid_gpu_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        EngineOptions(**options)


def test_a_missing_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MachineError, match=r"cuda:3 was requested, but PyTorch finds 1 GPU here"):
        check_device("cuda:3")
    assert check_device("cuda:0") == torch.device("cuda:0")
