"""A model larger than memory: which layers stay there, and that reading the others in every step changes no bit."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from benchmarks.large_model import write_model as write_large_model
from fp8serve.engine import streaming
from fp8serve.engine.engine import Engine
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.streaming import choose_kept
from fp8serve.errors import MachineError, RequestError
from fp8serve.fp8.lora import dora_factor, weight_of
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.storage.mapping import Span, span_of
from tests.model import checkpoints
from tests.model.test_mapped import exact_kib, resident_kib

from .adapters import write_random_adapter
from .tiny import write_model

MIB = 2**20
IDS = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 6, "logprobs": 3, "ignore_eos": True}
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 512}
EXPERTS = WIDE | {"num_experts": 6, "moe_intermediate_size": 256}
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def leave_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Leaves so much memory for weights, beside the cache and activations."""
    create_streamer = streaming.create_streamer
    monkeypatch.setattr(streaming, "free_memory", lambda: num_bytes)
    monkeypatch.setattr(streaming, "MAX_MEMORY_FRACTION", 1.0)
    monkeypatch.setattr(streaming, "CAN_READ_AHEAD", True)
    monkeypatch.setattr("fp8serve.engine.loading.create_streamer", lambda *args: create_streamer(*args[:2], 0))


def open_engine(path: Path, recipe: str = "stored", **options: Any) -> Engine:
    return Engine(path, recipe=recipe, **{"num_blocks": 8} | options)


def mapped_sizes(path: Path, recipe: Literal["stored", "bf16"]) -> list[int]:
    """Returns the bytes of large weights in each layer, with its experts, and in the head."""
    model = load_servable(path, recipe)
    return [sum(span.size for span in streaming._spans(module)) for module in (*model.parts, model.head)]


@pytest.mark.parametrize(
    ("sizes", "budget", "kept"),
    [
        ([10, 10, 10, 10, 4], 44, [True, True, True, True, True]),
        ([10, 10, 10, 10, 4], 43, [False, False, True, False, True]),  # 4 for the head, 20 for layers in use
        ([10, 10, 10, 10, 4], 24, [False, False, False, False, True]),
        ([10, 10, 10, 10, 4], 23, [False, False, False, False, False]),
        ([10, 10, 10, 10, 4], 19, None),
        ([10] * 8 + [0], 60, [False, True, False, True, False, True, False, True, True]),
        ([10] * 8 + [0], 40, [False, False, False, True, False, False, False, True, True]),
        ([10, 10, 30], 49, [False, False, False]),  # the head takes more than half: 40 for it and a layer in use
        ([10, 10, 30], 39, None),
        ([30, 10, 10, 2], 43, [False, False, False, True]),
        ([2, 50, 2, 50, 0], 102, [False, False, False, False, True]),
    ],
)
def test_layers_are_kept_evenly_beside_the_two_in_use(sizes: list[int], budget: int, kept: list[bool] | None) -> None:
    assert choose_kept(sizes, budget) == kept


def test_what_is_kept_and_in_use_fits() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes = torch.randint(1, 100, (8,), generator=generator).tolist()
        budget = int(torch.randint(1, 500, (), generator=generator))
        kept = choose_kept(sizes, budget)
        streamed = [size for size, stays in zip(sizes, kept or [], strict=kept is not None) if not stays]
        if kept is None:
            assert budget < sum(sorted(sizes)[-2:])
        else:
            assert sum(sizes) - sum(streamed) + sum(sorted(streamed)[-2:]) <= budget


@pytest.mark.parametrize("kind", ["fp8", "fp8 in shards", "bf16", "experts", "tied head"])
def test_streaming_changes_no_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    recipe: Literal["stored", "bf16"] = "stored" if kind.startswith("fp8") else "bf16"
    if recipe == "stored":
        draft = checkpoints.rows()
        draft.num_shards = 3 if "shards" in kind else 1
        draft.write(path)
    elif kind == "experts":
        write_model(path, "qwen3_moe", **EXPERTS)
    else:
        write_model(path, **WIDE, vocab_size=272 if kind == "bf16" else 2048, tie_word_embeddings=kind != "bf16")
    plain = open_engine(path, recipe)
    assert plain.info()["streamed_bytes"] == 0
    expected = plain.generate(IDS, **GREEDY)
    leave_memory(monkeypatch, sum(mapped_sizes(path, recipe)) * 3 // 4)
    engine = open_engine(path, recipe)
    assert 0 < engine.info()["streamed_bytes"] < engine.info()["weight_bytes"]
    assert not engine.pack_weights()
    assert engine.generate(IDS, **GREEDY) == expected
    assert engine.generate(IDS, **GREEDY, prompt_logprobs=1)[0].token_ids == expected[0].token_ids


@linux
def test_memory_holds_the_kept_layers_and_two_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, **WIDE | {"num_hidden_layers": 8})
    layer = mapped_sizes(tmp_path, "bf16")[0]
    leave_memory(monkeypatch, 5 * layer)
    engine = open_engine(tmp_path, "bf16")
    streamer = engine.loaded.streamer
    assert streamer is not None
    assert streamer.streamed_bytes > 4 * layer
    engine.generate(IDS, **GREEDY)
    streamer._reader.shutdown()  # waits until it has read the next layer
    assert resident_kib(tmp_path / "model.safetensors") * 1024 <= streamer.kept_bytes + 2 * layer + MIB / 2


@linux
def test_kept_layers_that_the_system_drops_are_not_read_page_by_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, **WIDE | {"num_hidden_layers": 8}, vocab_size=2048, tie_word_embeddings=False)
    leave_memory(monkeypatch, sum(mapped_sizes(tmp_path, "bf16")) * 3 // 4)
    streamer = open_engine(tmp_path, "bf16").loaded.streamer
    assert streamer is not None
    assert streamer.kept_bytes > 3 * MIB
    exact_bytes = streamer.streamed_bytes + MIB  # single rows of the embedding are used
    assert abs(exact_kib(tmp_path / "model.safetensors") * 1024 - exact_bytes) < MIB / 4


def test_weights_that_are_streamed_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.rows().write(tmp_path / "model")
    leave_memory(monkeypatch, 900 << 10)
    engine = open_engine(path)
    assert engine.info()["streamed_bytes"] > 0
    for replace in (engine.load_weights, engine.stage_weights):
        with pytest.raises(RequestError, match="read from their files in every step cannot be replaced; start another"):
            replace(path)


def test_a_prompt_is_not_divided_while_others_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.rows().write(tmp_path / "model")
    assert open_engine(path).options.prefill_tokens == 128
    leave_memory(monkeypatch, 900 << 10)
    assert open_engine(path).options.prefill_tokens == open_engine(path).options.step_tokens == 512
    assert open_engine(path, max_prefill_tokens=64).options.prefill_tokens == 64


def test_memory_for_less_than_two_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.rows().write(tmp_path / "model")
    leave_memory(monkeypatch, 100 << 10)
    with pytest.raises(MachineError, match=r"does not fit: 0\.00 GiB of memory are needed for its two largest layers"):
        open_engine(path)


def test_a_cache_larger_than_memory_does_not_refuse_a_model_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path)
    monkeypatch.setattr(streaming, "free_memory", lambda: 4 * MIB)
    engine = Engine(tmp_path, recipe="bf16", num_blocks=4000)
    assert engine.info()["kv_cache_bytes"] > 4 * MIB
    assert engine.info()["streamed_bytes"] == 0
    assert "lower num_blocks or kv_cache_bytes if memory runs short" in caplog.text


@linux
def test_the_cache_and_the_draft_model_leave_less_memory_for_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model", **WIDE | {"num_hidden_layers": 8})
    draft = write_model(tmp_path / "draft", **WIDE | {"num_hidden_layers": 2}, seed=1)
    adapter = write_random_adapter(tmp_path / "adapter", path, dora=True)
    sizes = mapped_sizes(path, "bf16")

    def answers(engine: Engine) -> list[Any]:
        return engine.generate(IDS, **GREEDY) + engine.generate(IDS, adapter="adapter", **GREEDY)

    def open_with_adapter(**options: Any) -> Engine:
        engine = open_engine(path, "bf16", **options)
        engine.load_adapter("adapter", adapter)
        return engine

    expected = answers(open_with_adapter())
    monkeypatch.setattr(streaming, "free_memory", lambda: sum(sizes))
    kept = []
    for options in ({}, {"draft_model": str(draft)}, {"draft_model": str(draft), "num_blocks": 40}):
        engine = open_with_adapter(**options)
        info, streamer = engine.info(), engine.loaded.streamer
        assert streamer is not None
        reserved = info["kv_cache_bytes"] + (info["draft_model"]["weight_bytes"] if options else 0)
        is_kept = choose_kept(sizes, int(0.85 * sum(sizes)) - reserved)
        assert streamer.kept_bytes == sum(size for size, stays in zip(sizes, is_kept or [], strict=True) if stays)
        kept.append(streamer.kept_bytes)
        assert answers(engine) == expected
    assert kept == sorted(set(kept), reverse=True)


def test_norms_for_dora_are_computed_from_weights_that_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model", **WIDE)
    adapter = write_random_adapter(tmp_path / "adapter", path, dora=True)
    leave_memory(monkeypatch, sum(mapped_sizes(path, "bf16")) * 3 // 4)
    engine = open_engine(path, "bf16")
    reads: list[Span] = []
    are_read: list[bool] = []
    streamer, read = engine.loaded.streamer, Span.read

    def record_read(span: Span) -> None:
        reads.append(span)
        read(span)

    def compute_factor(base: nn.Module, *args: Any) -> torch.Tensor | None:
        span = span_of(weight_of(base))
        are_read.append(span is not None and any(map(span.is_inside, reads)))
        return dora_factor(base, *args)

    monkeypatch.setattr(Span, "read", record_read)
    monkeypatch.setattr("fp8serve.engine.adapters.dora_factor", compute_factor)
    engine.load_adapter("adapter", adapter)
    assert len(are_read) > 20
    assert all(are_read)
    assert streamer is not None
    assert len(streamer._reads) <= sum(streamer._is_kept) + 2


def test_nothing_is_streamed_where_the_system_cannot_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, **WIDE)
    leave_memory(monkeypatch, sum(mapped_sizes(tmp_path, "bf16")) * 3 // 4)
    monkeypatch.setattr(streaming, "CAN_READ_AHEAD", False)
    assert open_engine(tmp_path, "bf16").info()["streamed_bytes"] == 0
    assert "read by page faults, which is slow" in caplog.text


def test_casts_larger_than_memory_are_refused_before_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, **WIDE)
    monkeypatch.setattr(streaming, "free_memory", lambda: MIB)
    monkeypatch.setattr("fp8serve.engine.loading.load_servable", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(MachineError, match=r"are converted when they are loaded, and .* calibrate the model first"):
        open_engine(tmp_path, "rowwise")
    streaming.check_copies(tmp_path, EngineOptions(recipe="bf16"))


CHILD = """
import re, sys
from pathlib import Path
from fp8serve.engine import streaming
from fp8serve.engine.engine import Engine

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def run(path):
    engine = Engine(path, device="cpu", num_blocks=8)
    engine.pack_weights()
    engine.generate([list(range(40))], temperature=0.0, max_new_tokens=3, ignore_eos=True)
    return engine

run(sys.argv[1])  # what the libraries take on their first use
streaming.free_memory = lambda: int(sys.argv[3])
before = anonymous()
engine = run(sys.argv[2])
print(engine.info()["streamed_bytes"], anonymous() - before)
"""


@linux
@pytest.mark.slow
def test_no_memory_without_a_file_grows_with_the_model(tmp_path: Path) -> None:
    models = [write_large_model(tmp_path / name, gib, 1024) for name, gib in (("small", 0.02), ("model", 0.3))]
    command = [sys.executable, "-c", CHILD, *map(str, models), str(100 * MIB)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    streamed, grown = map(int, process.stdout.split())
    assert streamed > 200 * MIB
    assert grown < 60 * MIB, grown / MIB  # q, k and v alone are 42 MiB, but 30 are those of the cache and of casts
