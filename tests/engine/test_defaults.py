"""Defaults of options that the user does not set: the rules, on simulated GPUs and models, and how an engine applies
them."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.engine import defaults, loading, memory
from fp8serve.engine.engine import Engine
from fp8serve.engine.loading import open_device
from fp8serve.engine.memory import plan_gpu_cache
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import MachineError
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.formats.quantization_config import quantization_files

from .tiny import write_model, write_scales

GIB = 2**30
GPUS = {"24 GB": 22.5, "40 GB": 39.4, "80 GB": 79.1, "141 GB": 139.7}  # GiB, as the driver reports them
MODELS = {"135 M": (0.14, 23_040), "1.1 B": (1.1, 22_528), "8 B": (8.6, 131_072), "70 B": (71.0, 327_680)}
"""GB of weights in FP8, and bytes of keys and values of a token in BF16."""
RATES = {"135 M": 600_000, "1.1 B": 136_000, "8 B": 42_500, "70 B": 4_900}
"""Prompt tokens a second on an H100: the first is bound by the host, the others compute 0.3, 0.68 and 0.68 PFLOP/s."""
SEQUENCES = {
    "24 GB": {"135 M": 64, "1.1 B": 64, "8 B": 64},
    "40 GB": {"135 M": 128, "1.1 B": 128, "8 B": 128},
    "80 GB": {"135 M": 256, "1.1 B": 256, "8 B": 256, "70 B": 16},
    "141 GB": {"135 M": 256, "1.1 B": 256, "8 B": 256, "70 B": 256},
}


def on_gpu(**options: Any) -> EngineOptions:
    return EngineOptions(**{"device": "cuda", **options})


@pytest.mark.parametrize("gpu", GPUS)
def test_the_number_of_sequences_follows_memory(gpu: str) -> None:
    """Tests the number before a model is loaded, which `fp8serve doctor` shows."""
    num_seqs = {}
    for model in SEQUENCES[gpu]:
        weights, token_bytes = MODELS[model]
        options = defaults.estimated_options(on_gpu(), int(GPUS[gpu] * GIB), int(weights * 1e9), token_bytes, 8192)
        num_seqs[model] = options.num_seqs
        assert (options.gpu_memory, options.threads) == (0.92, 2)
    assert num_seqs == SEQUENCES[gpu]


def test_the_tokens_of_a_step_follow_memory() -> None:
    tokens = {gpu: defaults.step_limits(on_gpu(), int(gib * GIB)).step_tokens for gpu, gib in GPUS.items()}
    assert tokens == {"24 GB": 4096, "40 GB": 8192, "80 GB": 8192, "141 GB": 8192}
    assert defaults.step_limits(on_gpu(), 8 * GIB).step_tokens == 2048


def test_prompt_tokens_take_25_milliseconds() -> None:
    tokens = {model: defaults.prefill_tokens(8192, 8192 / rate) for model, rate in RATES.items()}
    assert tokens == {"135 M": 8192, "1.1 B": 3072, "8 B": 1024, "70 B": 128}
    assert defaults.prefill_tokens(64, 1.0) == 64
    assert defaults.prefill_tokens(1000, 0.001) == 768


def test_limits_set_by_the_user_win() -> None:
    limits = defaults.step_limits(on_gpu(max_num_seqs=300, max_batch_tokens=1000), 80 * GIB)
    assert (limits.max_num_seqs, limits.max_batch_tokens) == (300, 1000)
    assert defaults.step_limits(on_gpu(max_batch_tokens=100), 80 * GIB).max_num_seqs == 100
    assert defaults.step_limits(on_gpu(max_num_seqs=9000), 80 * GIB).max_batch_tokens == 9000


def test_the_cache_size_limits_the_number_of_sequences() -> None:
    assert defaults.fitting_num_seqs(256, 512 * 100, 8192) == 96
    assert defaults.fitting_num_seqs(256, 512 * 3, 8192) == 16
    assert defaults.fitting_num_seqs(256, 128 * 256, 128) == 256


def test_a_cpu_keeps_its_defaults() -> None:
    options = EngineOptions()
    assert (options.num_seqs, options.step_tokens, options.prefill_tokens) == (16, 512, 128)
    assert EngineOptions(max_num_seqs=600).step_tokens == 600
    assert EngineOptions(max_batch_tokens=8).num_seqs == 8
    assert defaults.worker_options(options, Path("m")).threads is None
    assert defaults.worker_options(on_gpu(), Path("m")).threads == 2
    assert defaults.worker_options(on_gpu(threads=5), Path("m")).threads == 5


def test_graph_sizes_are_few_and_close() -> None:
    assert defaults.graph_sizes(1) == [1]
    assert defaults.graph_sizes(6) == [1, 2, 4, 6]
    assert defaults.graph_sizes(20) == [1, 2, 4, 8, 12, 16, 20]
    assert defaults.graph_sizes(256) == list(defaults.GRAPH_SIZES)
    assert defaults.graph_sizes(400)[-3:] == [320, 384, 400]
    sizes = defaults.graph_sizes(1024)
    assert max(size / (previous + 1) for previous, size in pairwise(sizes[3:])) < 1.5


def test_the_share_of_memory_leaves_room_for_others() -> None:
    assert defaults.gpu_memory_fraction(79 * GIB, 80 * GIB) == 0.92
    assert defaults.gpu_memory_fraction(70 * GIB, 80 * GIB) == 0.9


@pytest.mark.parametrize("file_format", ["compressed-tensors", "modelopt"])
def test_an_fp8_cache_needs_a_declaration_and_calibrated_scales(
    file_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = write_model(tmp_path / "m")
    scales = str(write_scales(model_dir, tmp_path / "scales", kv=True))
    config = json.loads((model_dir / "config.json").read_text())

    def dtype(kv_cache: bool, has_stored_weights: bool = True, **options: Any) -> str:
        files = quantization_files(file_format, DelayedScaling(), kv_cache)
        (model_dir / "config.json").write_text(json.dumps(config | {k: v for k, v in files.items() if "." not in k}))
        return loading.derive_kv_cache_dtype(model_dir, EngineOptions(**options), has_stored_weights)

    assert dtype(True, device="cuda", scales=scales) == "fp8"
    assert dtype(False, device="cuda", scales=scales) == "bf16"
    assert dtype(True, device="cuda") == "bf16"
    assert dtype(True, device="cuda", scales=scales, recipe="bf16") == "bf16"
    assert dtype(True, False, device="cuda", scales=scales) == "bf16"
    assert dtype(True, device="cpu", scales=scales) == "bf16"
    one, other = torch.ones(()), torch.full((), 3.5)
    for pair, expected in (((one, other), "fp8"), ((one, one), "bf16")):
        monkeypatch.setattr(loading, "kv_scales", lambda *_, pair=pair: {0: pair})
        assert dtype(True, device="cuda", scales=scales) == expected


@pytest.fixture
def model(model_dir: Path) -> Engine:
    return Engine(model_dir, recipe="rowwise")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Stands for a GPU of `gib` GiB. A token of a step takes `token_bytes`, and `seconds` is the time of a step.
    Returns the list of the tokens of the measured steps."""

    def make(gib: float, token_bytes: float = 0, seconds: float = 0.1, out_of_memory_from: int = 1 << 60) -> list[int]:
        steps: list[int] = []

        def run_largest_step(model: object, options: EngineOptions) -> None:
            steps.append(options.step_tokens)
            if options.step_tokens >= out_of_memory_from:
                raise torch.cuda.OutOfMemoryError

        def peak(run: Callable[[], object], device: torch.device) -> int:
            run()
            return int(steps[-1] * token_bytes)

        monkeypatch.setattr(memory, "run_largest_step", run_largest_step)
        monkeypatch.setattr(memory, "gpu_memory_info", lambda device: (int(gib * GIB), int(gib * GIB)))
        monkeypatch.setattr(loading, "gpu_memory_info", lambda device: (int(gib * GIB), int(gib * GIB)))
        monkeypatch.setattr(memory, "gpu_peak_bytes", peak)
        monkeypatch.setattr(memory, "gpu_seconds", lambda run, device: run() is None and seconds)
        return steps

    return make


def planned_limits(model: Engine, **options: Any) -> tuple[int, int, int]:
    _, limits = plan_gpu_cache(model.loaded.runner.model, model.loaded.config, on_gpu(**options), torch.bfloat16)
    assert None not in (limits.max_num_seqs, limits.max_batch_tokens, limits.max_prefill_tokens)
    return limits.num_seqs, limits.step_tokens, limits.prefill_tokens


def test_a_plan_derives_the_limits_of_a_step(model: Engine, fake_gpu: Callable[..., list[int]]) -> None:
    """The plan runs the largest step to measure its memory and its time, and the largest captured step to measure the
    memory of graphs."""
    steps = fake_gpu(80, token_bytes=100_000)
    assert planned_limits(model) == (256, 8192, 2048)
    assert steps == [8192, 4096, 8192]
    assert planned_limits(model, max_num_seqs=10, max_batch_tokens=100, max_prefill_tokens=50) == (10, 100, 50)


def test_a_step_that_takes_too_much_memory_is_halved(model: Engine, fake_gpu: Callable[..., list[int]]) -> None:
    steps = fake_gpu(40, token_bytes=2**20)
    assert planned_limits(model)[1] == 2048  # a step may take 8 %, which is 3.2 GiB
    assert steps[:4] == [8192, 4096, 2048, 2048]
    fake_gpu(40, token_bytes=2**20)
    assert planned_limits(model, max_batch_tokens=8192)[1] == 8192
    fake_gpu(40, out_of_memory_from=5000)
    assert planned_limits(model)[1] == 4096
    for options in ({}, {"max_batch_tokens": 5000}):
        fake_gpu(40, out_of_memory_from=1)
        tokens = options.get("max_batch_tokens", 512)
        with pytest.raises(MachineError, match=f"A step of {tokens} tokens does not fit in the memory of cpu beside"):
            planned_limits(model, **options)


def test_a_small_cache_limits_the_sequences_of_a_plan(model: Engine, fake_gpu: Callable[..., list[int]]) -> None:
    """This model's context is 128 tokens, 8 blocks."""
    fake_gpu(80)
    assert planned_limits(model, num_blocks=8 * 40)[0] == 32
    assert planned_limits(model, num_blocks=8)[0] == 16
    assert planned_limits(model, num_blocks=8, max_num_seqs=100)[0] == 100


def test_the_share_of_memory_is_chosen_before_loading(
    fake_gpu: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(80)
    monkeypatch.setattr(loading, "check_device", torch.device)
    assert open_device(Path("m"), on_gpu()).gpu_memory == 0.92
    assert open_device(Path("m"), on_gpu(gpu_memory=0.5)).gpu_memory == 0.5
    assert open_device(Path("m"), EngineOptions()).gpu_memory is None


def test_info_shows_the_effective_options(model_dir: Path) -> None:
    info = Engine(model_dir, recipe="rowwise", max_num_seqs=3).info()
    names = ("max_num_seqs", "max_batch_tokens", "max_prefill_tokens", "gpu_memory", "kv_cache_dtype")
    assert [info[name] for name in names] == [3, 512, 128, None, "bf16"]


@pytest.mark.gpu
def test_an_engine_derives_its_options_on_this_gpu(model_dir: Path) -> None:
    """More requests than sequences are served, and the memory stays below the share of this process."""
    engine = Engine(model_dir, recipe="rowwise")
    info = engine.info()
    assert info["device"] == "cuda"
    assert info["max_num_seqs"] in defaults.GRAPH_SIZES[5:]
    assert info["max_batch_tokens"] >= defaults.MIN_BATCH_TOKENS
    assert info["max_prefill_tokens"] in defaults.PREFILL_TOKENS
    assert info["gpu_memory"] in (defaults.GPU_MEMORY_FRACTION, defaults.SHARED_GPU_MEMORY_FRACTION)
    sizes = defaults.graph_sizes(info["max_num_seqs"])
    assert info["cuda_graphs"].startswith(f"batches of {', '.join(map(str, sizes))}; prompts of up to ")
    prompts = [[1 + i % 250, *range(i % 40)] for i in range(info["max_num_seqs"] + 40)]
    assert all(len(c.token_ids) == 5 for c in engine.generate(prompts, max_new_tokens=5, ignore_eos=True))
    free, total = torch.cuda.mem_get_info()
    assert total - free <= info["gpu_memory"] * total
