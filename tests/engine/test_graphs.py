"""CUDA graphs, with a stand-in that runs on a CPU: which steps are replayed, with which size, on which buffers, and
when graphs are captured again."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fp8serve.engine import graphs as graphs_module
from fp8serve.engine.defaults import prompt_sizes
from fp8serve.engine.engine import Engine
from fp8serve.fp8.change_tracking import CapturedModel
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling

from .tiny import write_scales

PROMPTS = [[256, *b"Once upon"], [5, 6, 7], list(range(40)), [9]]


class FakeGraphs:
    """A stand-in for CUDA graphs: a replay reads and writes the tensors of the capture, the layers' `live_rows`
    included."""

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


def engine(model_dir: Path, capture: Any = None, prompt_tokens: int = 0, **options: Any) -> Engine:
    instance = Engine(model_dir, **{"recipe": "rowwise", "max_num_seqs": 6, **options})
    if capture is not None:
        instance.pack_weights()  # which replaces weights, and is not done where there are graphs
        capture.layers = list(instance.loaded.frozen.values())
        instance.loaded.runner.use_graphs(capture, 6, instance.limits.max_model_len, prompt_tokens)
        for layer in instance.loaded.frozen.values():
            layer.reset_counters()
    return instance


@pytest.mark.parametrize("options", [{}, {"block_size": 4, "num_blocks": 24}, {"recipe": "bf16"}])
def test_answers_equal_those_of_an_engine_without_graphs(model_dir: Path, options: dict[str, Any]) -> None:
    """The second pool is so small that sequences are preempted and resumed with other blocks."""
    graphs = FakeGraphs()
    sampling: dict[str, Any] = {"max_new_tokens": 30, "seed": 3, "ignore_eos": True, "logprobs": 2}
    replayed = engine(model_dir, graphs, **options)
    completions = replayed.generate(PROMPTS, **sampling)
    assert completions == engine(model_dir, **options).generate(PROMPTS, **sampling)
    assert graphs.captured == [6, 4, 2, 1]
    assert set(graphs.replayed) >= ({1, 4} if "num_blocks" in options else {4})
    if "num_blocks" in options:
        assert replayed.stats()["preemptions_total"] > 0


def test_decoding_batches_are_padded_to_a_captured_size_and_prompts_run_without_graphs(model_dir: Path) -> None:
    graphs = FakeGraphs()
    replayed = engine(model_dir, graphs)
    replayed.generate([[1, 2, 3]], max_new_tokens=1)
    assert graphs.replayed == []
    replayed.generate(PROMPTS[:3], max_new_tokens=3, ignore_eos=True)
    assert graphs.replayed == [4, 4]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 4, "num_blocks": 24},
        {"recipe": "bf16", "max_batch_tokens": 24, "max_prefill_tokens": 9},
        {"max_num_seqs": 1},
    ],
)
def test_steps_with_prompts_are_replayed(model_dir: Path, options: dict[str, Any]) -> None:
    """Chunks of prompts whose end comes later, chunks beside sequences that decode, and prompts that are long."""
    graphs, tokens = FakeGraphs(), options.get("max_batch_tokens", 512)
    sampling: dict[str, Any] = {"max_new_tokens": 12, "seed": 3, "ignore_eos": True, "logprobs": 2, "temperature": 1.5}
    replayed = engine(model_dir, graphs, tokens, **options)
    eager = list[Any]()
    replayed.loaded.runner._hidden_states = eager.append  # type: ignore[method-assign,assignment]
    prompts = [*PROMPTS, list(range(80)), [7] * 70]
    assert replayed.generate(prompts, **sampling) == engine(model_dir, **options).generate(prompts, **sampling)
    assert not eager
    assert replayed.loaded.runner.graphed_prompts is not None
    assert replayed.loaded.runner.graphed_prompts.sizes == prompt_sizes(tokens, 6, replayed.limits.max_model_len)


def test_scored_prompts_drafts_and_large_steps_run_without_graphs(model_dir: Path) -> None:
    """Prompts that are scored, drafts, and steps of more tokens than were captured."""
    replayed, plain = (engine(model_dir, graphs, 32) for graphs in (FakeGraphs(), None))
    for options in ({"prompt_logprobs": 1}, {}):
        sampling: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0.0, **options}
        assert replayed.generate([[5] * 60, [9]], **sampling) == plain.generate([[5] * 60, [9]], **sampling)


def test_a_prompt_after_a_long_context_runs_without_a_graph(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the prompt beside a sequence that decodes, and without one."""
    monkeypatch.setattr(graphs_module, "MAX_REPLAYED_CONTEXT", 40)
    replayed, plain = (engine(model_dir, each, 64, max_batch_tokens=16) for each in (FakeGraphs(), None))
    prompts, sampling = [[5] * 70, [9]], dict[str, Any](max_new_tokens=9, temperature=0.0, ignore_eos=True)
    assert replayed.generate(prompts, **sampling) == plain.generate(prompts, **sampling)


def test_a_step_never_has_as_many_sequences_as_tokens(model_dir: Path) -> None:
    """Attention would take such a step for decoding."""
    replayed = engine(model_dir, None)
    replayed.loaded.runner.use_graphs(FakeGraphs(), 15, 96, 64)
    buffers = replayed.loaded.runner._buffers
    assert buffers is not None
    for size in prompt_sizes(64, 15, 96):
        step = buffers.prompt_step(size)
        assert len(step.token_ids) == size != len(step.queries.context_lens)


@pytest.mark.parametrize("prompt_tokens", [0, 64])
def test_padding_writes_no_keys(model_dir: Path, prompt_tokens: int) -> None:
    padded = engine(model_dir, FakeGraphs(), prompt_tokens, num_blocks=20)
    plain = engine(model_dir, num_blocks=20)
    for one in (padded, plain):
        one.generate(PROMPTS[:3], max_new_tokens=9, seed=1, ignore_eos=True)
    assert torch.equal(padded.loaded.runner.k_cache, plain.loaded.runner.k_cache)
    assert torch.equal(padded.loaded.runner.v_cache, plain.loaded.runner.v_cache)


@pytest.mark.parametrize("prompt_tokens", [0, 64])
def test_padding_rows_are_not_counted_by_the_scale_statistics(
    model_dir: Path, tmp_path: Path, prompt_tokens: int
) -> None:
    """The scales are so large that inputs of these weights are cut off, too."""
    scales = {"recipe": DelayedScaling(), "scales": write_scales(model_dir, tmp_path / "scales")}
    padded, plain = engine(model_dir, FakeGraphs(), prompt_tokens, **scales), engine(model_dir, **scales)
    for one in (padded, plain):
        for scale in {id(layer.input_scale): layer.input_scale for layer in one.loaded.frozen.values()}.values():
            scale.mul_(50)  # type: ignore[union-attr]
        one.generate(PROMPTS[:3], max_new_tokens=9, seed=1, ignore_eos=True)
    assert padded.scales() == plain.scales()
    assert sum(record["saturated"] for record in padded.scales()) > 0
    assert all(layer.live_rows is None for layer in padded.loaded.frozen.values())


def test_graphs_are_captured_again_after_weights_are_replaced(model_dir: Path) -> None:
    """A weight that is written in place stays at the address that the capture read."""
    graphs = FakeGraphs()
    replayed, plain = engine(model_dir, graphs), engine(model_dir)
    once = list(graphs.captured)
    sampling: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}

    def answers(prompt: list[int]) -> list[list[int]]:
        return [list(one.generate([prompt], **sampling)[0].token_ids) for one in (replayed, plain)]

    def layers() -> list[FrozenLinear]:
        return [one.loaded.frozen["model.layers.0.self_attn.q_proj"] for one in (replayed, plain)]

    before = answers([1, 2, 3])
    for layer in layers():
        layer.weight_q.view(torch.uint8).bitwise_xor_(0x80)
    in_place = answers([1, 2, 3, 4])
    assert graphs.captured == once
    for layer in layers():
        layer.weight_q = layer.weight_q.view(torch.uint8).flip(0).view(layer.weight_q.dtype)
    replaced = answers([1, 2, 3, 4, 5])
    assert graphs.captured == once * 2
    for layer in layers():
        layer.weight_scale_inv.data = layer.weight_scale_inv * 2
    moved = answers([1, 2, 3, 4, 5, 6])
    assert graphs.captured == once * 3
    assert all(ours == theirs for ours, theirs in (before, in_place, replaced, moved))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def small_model() -> Any:
    """Modules with parameters and buffers, some of them shared; a hook that was there before."""
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[3].weight = model[2].weight
    model.old_hook = model[1].register_forward_hook(lambda *_: None)
    return model


def loaded_by_assignment(model: Any) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def swapped(model: Any) -> None:
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(4, 3)))


def removed_by_handle(model: Any) -> None:
    model.old_hook.remove()


def child_set(model: Any) -> None:
    model[2] = nn.Linear(4, 4)


def parameter_set(model: Any) -> None:
    model[0].bias = nn.Parameter(torch.ones(4))


def buffer_set(model: Any) -> None:
    model[1].running_mean = torch.ones(4)


def data_set(model: Any) -> None:
    model[3].weight.data = torch.ones(4, 4)


def buffer_data_set(model: Any) -> None:
    model[1].running_var.data = torch.ones(4)


def storage_set(model: Any) -> None:
    model[0].bias.data.set_(torch.ones(4))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict with assign": loaded_by_assignment,
    "a child": child_set,
    "a child deleted": lambda model: delattr(model, "2"),
    "a child added": lambda model: model.add_module("more", nn.Identity()),
    "a parameter": parameter_set,
    "a parameter set to None": lambda model: model[0].register_parameter("bias", None),
    "a buffer": buffer_set,
    "a buffer added": lambda model: model[1].register_buffer("more", torch.ones(1)),
    "to another dtype": lambda model: model.to(torch.float64),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "data": data_set,
    "data of a buffer": buffer_data_set,
    "set_": lambda model: model[1].running_var.set_(torch.ones(4)),
    "resize_": lambda model: model[1].running_var.resize_(1 << 16),
    "swap_tensors": swapped,
    "a parametrization": lambda model: parametrize.register_parametrization(model[0], "weight", Doubled()),
    "weight norm": lambda model: nn.utils.parametrizations.weight_norm(model[0]),
    "a forward hook": lambda model: model[0].register_forward_hook(lambda *_: None),
    "a forward hook beside another": lambda model: model[1].register_forward_hook(lambda *_: None),
    "a forward pre-hook": lambda model: model[2].register_forward_pre_hook(lambda *_: None),
    "a hook removed by its handle": removed_by_handle,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_a_captured_model_is_detected(change: Callable[[Any], Any]) -> None:
    model = small_model()
    captured, other = CapturedModel(model), CapturedModel(model)
    assert captured.is_current()
    change(model)
    assert [captured.is_current() for captured in (captured, other, captured)] == [False] * 3
    again = CapturedModel(model)
    assert again.is_current()
    assert not captured.is_current()


def test_in_place_updates_and_undone_changes_do_not_invalidate_a_capture() -> None:
    model = small_model()
    captured = CapturedModel(model)
    model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()})
    model.to(torch.float32)
    model[1](torch.ones(2, 4))
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert captured.is_current()
    hook = model[0].register_forward_hook(lambda *_: None)
    weight, model[0].bias = model[0].bias, None
    model[0].bias = weight
    hook.remove()
    assert captured.is_current()


def test_a_captured_model_compares_only_parameters_until_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    model.old_hook.remove()
    captured, tensors, data_ptr = CapturedModel(model), list[Tensor](), Tensor.data_ptr
    monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: tensors.append(tensor) or data_ptr(tensor))
    assert captured.is_current()
    assert {id(tensor) for tensor in tensors} == {id(tensor) for tensor in model.parameters()}
    tensors.clear()
    model[1].running_mean = model[1].running_mean
    assert captured.is_current()
    assert {id(tensor) for tensor in model.buffers()} < {id(tensor) for tensor in tensors}
    tensors.clear()
    assert captured.is_current()
    assert len(tensors) == len(list(model.parameters()))


class Wrapped(Tensor):
    """A tensor subclass that does not report changes of its data."""


def test_tensors_of_other_subclasses_are_compared_at_every_step() -> None:
    model = small_model()
    model[1].running_mean = model[1].running_mean.as_subclass(Wrapped)
    captured = CapturedModel(model)
    assert captured.is_current()
    assert type(model[1].running_mean) is Wrapped
    model[1].running_mean.data = torch.ones(4)
    assert not captured.is_current()


def test_a_captured_model_computes_and_copies_as_before() -> None:
    """Changes of a copy do not invalidate the capture."""
    model, x = small_model(), torch.ones(2, 3)
    expected, names = model(x), list(model.state_dict())
    captured = CapturedModel(model)
    assert torch.equal(model(x), expected)
    assert type(model(x)) is Tensor
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    copied = deepcopy(model)
    copied[0].weight.data = torch.ones(4, 3)
    copied.double()
    assert captured.is_current()
    assert list(model.state_dict()) == names
    model(x).sum().backward()
    assert type(model[0].weight.grad) is Tensor
