"""Decoding by replay, with a stand-in for the GPU's graphs: which steps, in which size, on which buffers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.engine.engine import Engine
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling

from .tiny import write_scales

PROMPTS = [[256, *b"Once upon"], [5, 6, 7], list(range(40)), [9]]


class FakeGraphs:
    """Captures like a GPU: what `run` read and wrote at capture, the layers' `live_rows` included, a replay does."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replayed: list[int] = []
        self.layers: list[FrozenLinear] = []

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        logits = run().clone()
        self.captured.append(len(logits))
        baked_in = [layer.live_rows for layer in self.layers]

        def replay() -> Tensor:
            self.replayed.append(len(logits))
            self._set(baked_in)
            logits.copy_(run())
            self._set([None] * len(baked_in))
            return logits

        return replay

    def _set(self, live_rows: list[Tensor | None]) -> None:
        for layer, rows in zip(self.layers, live_rows, strict=True):
            layer.live_rows = rows


def engine(model_dir: Path, graphs: Any = None, **options: Any) -> Engine:
    made = Engine(model_dir, **{"recipe": "rowwise", "max_num_seqs": 6, **options})
    if graphs is not None:
        made.pack_weights()  # which replaces weights, and is not done where there are graphs
        graphs.layers = list(made.loaded.frozen.values())
        made.loaded.runner.use_graphs(graphs, 6, made.limits.max_model_len)
        for layer in made.loaded.frozen.values():
            layer.reset_counters()
    return made


@pytest.mark.parametrize("options", [{}, {"block_size": 4, "num_blocks": 24}, {"recipe": "bf16"}])
def test_answers_are_those_of_an_engine_without_graphs(model_dir: Path, options: dict[str, Any]) -> None:
    """The second pool is so small that sequences lose their blocks and come back with others."""
    graphs = FakeGraphs()
    sampling: dict[str, Any] = {"max_new_tokens": 30, "seed": 3, "ignore_eos": True, "logprobs": 2}
    replayed = engine(model_dir, graphs, **options)
    found = replayed.generate(PROMPTS, **sampling)
    assert found == engine(model_dir, **options).generate(PROMPTS, **sampling)
    assert graphs.captured == [6, 4, 2, 1]
    assert set(graphs.replayed) >= ({1, 4} if "num_blocks" in options else {4})
    if "num_blocks" in options:
        assert replayed.stats()["preemptions_total"] > 0


def test_prompts_are_not_replayed_and_batches_are_filled_up(model_dir: Path) -> None:
    graphs = FakeGraphs()
    made = engine(model_dir, graphs)
    made.generate([[1, 2, 3]], max_new_tokens=1)
    assert graphs.replayed == []
    made.generate(PROMPTS[:3], max_new_tokens=3, ignore_eos=True)
    assert graphs.replayed == [4, 4]


def test_what_fills_a_batch_up_writes_no_keys(model_dir: Path) -> None:
    made = engine(model_dir, FakeGraphs(), num_blocks=20)
    plain = engine(model_dir, num_blocks=20)
    for one in (made, plain):
        one.generate(PROMPTS[:3], max_new_tokens=9, seed=1, ignore_eos=True)
    assert torch.equal(made.loaded.runner.k_cache, plain.loaded.runner.k_cache)
    assert torch.equal(made.loaded.runner.v_cache, plain.loaded.runner.v_cache)


def test_what_fills_a_batch_up_is_not_counted(model_dir: Path, tmp_path: Path) -> None:
    """On scales so large that inputs of these weights are cut off, too."""
    scales = {"recipe": DelayedScaling(), "scales": write_scales(model_dir, tmp_path / "scales")}
    made, plain = engine(model_dir, FakeGraphs(), **scales), engine(model_dir, **scales)
    for one in (made, plain):
        for scale in {id(layer.input_scale): layer.input_scale for layer in one.loaded.frozen.values()}.values():
            scale.mul_(50)  # type: ignore[union-attr]
        one.generate(PROMPTS[:3], max_new_tokens=9, seed=1, ignore_eos=True)
    assert made.scales() == plain.scales()
    assert sum(record["saturated"] for record in made.scales()) > 0
    assert all(layer.live_rows is None for layer in made.loaded.frozen.values())


def test_replaced_weights_are_captured_anew(model_dir: Path) -> None:
    """What is written to lies where the capture read it."""
    graphs = FakeGraphs()
    made, plain = engine(model_dir, graphs), engine(model_dir)
    once = list(graphs.captured)
    sampling: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}

    def answers(prompt: list[int]) -> list[list[int]]:
        return [list(one.generate([prompt], **sampling)[0].token_ids) for one in (made, plain)]

    def layers() -> list[FrozenLinear]:
        return [one.loaded.frozen["model.layers.0.self_attn.q_proj"] for one in (made, plain)]

    before = answers([1, 2, 3])
    for layer in layers():
        layer.weight_q.view(torch.uint8).bitwise_xor_(0x80)
    written = answers([1, 2, 3, 4])
    assert graphs.captured == once
    for layer in layers():
        layer.weight_q = layer.weight_q.view(torch.uint8).flip(0).view(layer.weight_q.dtype)
    replaced = answers([1, 2, 3, 4, 5])
    assert graphs.captured == once * 2
    for layer in layers():
        layer.weight_scale_inv.data = layer.weight_scale_inv * 2
    moved = answers([1, 2, 3, 4, 5, 6])
    assert graphs.captured == once * 3
    assert all(ours == theirs for ours, theirs in (before, written, replaced, moved))
