"""Documents in one batch do not see each other; masked tokens carry no loss; packing changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.recipe import DelayedScaling, Recipe, from_name
from fp8serve.model.checkpoint import load_trainable
from fp8serve.model.network.decoder import Decoder
from fp8serve.train.data import Row
from fp8serve.train.forward import Forward, collate, mean_loss, summed_loss
from fp8serve.train.state import scaling_states, scaling_tensors


def row(seed: int, tokens: int, masked: int = 0) -> Row:
    ids = np.random.default_rng(seed).integers(4, 300, tokens + 1).astype(np.int32)
    return Row(ids, np.arange(tokens + 1) > masked)


def make(model_dir: Path, recipe: Recipe | None) -> tuple[Decoder, Forward]:
    decoder = load_trainable(model_dir)
    if recipe is not None:
        convert(decoder)
    return decoder, Forward(decoder, recipe)


SHORT = DelayedScaling(amax_history_len=4)
WITH_ATTENTION = [replace(SHORT, fp8_dpa=True), replace(SHORT, fp8_mha=True)]


@pytest.fixture(
    params=[SHORT, *WITH_ATTENTION, from_name("rowwise"), from_name("block"), None],
    ids=["delayed", "dpa", "mha", "rowwise", "block", "bf16"],
)
def forward(request: pytest.FixtureRequest, model_dir: Path) -> Forward:
    """A model under each recipe after one step, so that delayed scales are not 1. `current` is left out: its scale
    depends on all documents of a batch."""
    forward = make(model_dir, request.param)[1]
    forward.logits(collate([row(9, 20)], "cpu")).sum().backward()  # type: ignore[no-untyped-call]
    return forward


@torch.no_grad()
def test_one_document_does_not_change_anothers_logits(forward: Forward) -> None:
    a, b, other = row(1, 17), row(2, 23), row(3, 17)
    before, after = forward.logits(collate([a, b], "cpu")), forward.logits(collate([other, b], "cpu"))
    assert not torch.equal(before[:17], after[:17])
    assert torch.equal(before[17:], after[17:])


def test_one_document_does_not_change_anothers_gradient_path(forward: Forward) -> None:
    """The gradient of B's loss with respect to A's embeddings is zero: nothing flows between them."""
    a, b = row(1, 7), row(2, 5)
    embedded: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    handle = forward.network.decoder.model.embed_tokens.register_forward_hook(keep)
    logits = forward.logits(collate([a, b], "cpu"))
    handle.remove()
    logits[7:].sum().backward()  # type: ignore[no-untyped-call]
    grad = embedded[0].grad
    assert grad is not None
    assert not grad[:7].any()
    assert grad[7:].any()


@torch.no_grad()
def test_packed_loss_is_the_unpacked_loss(forward: Forward) -> None:
    rows = [row(i, n, masked=n // 3) for i, n in enumerate((5, 12, 12, 30, 1))]
    packed = collate(rows, "cpu")
    together, hits = summed_loss(forward.logits(packed), packed.targets)
    alone = [summed_loss(forward.logits(batch), batch.targets) for r in rows for batch in [collate([r], "cpu")]]
    torch.testing.assert_close(together, torch.stack([loss for loss, _ in alone]).sum(), rtol=1e-4, atol=0)
    assert hits == sum(h for _, h in alone)


def test_masked_tokens_are_no_targets(forward: Forward) -> None:
    """A masked token counts as context and never as target."""
    whole = row(4, 20, masked=12)
    short = Row(whole.ids[:13], whole.loss[:13])  # the prompt alone: nothing to predict
    assert len(collate([whole], "cpu").targets) == 8
    assert whole.trainable_tokens == 8
    assert short.trainable_tokens == 0


def test_loss_is_the_mean_negative_log_likelihood(model_dir: Path) -> None:
    _, forward = make(model_dir, None)
    batch = collate([row(5, 9, masked=3)], "cpu")
    logits = forward.logits(batch)
    loss, _ = summed_loss(logits, batch.targets)
    by_hand = -torch.log_softmax(logits.double(), -1)[torch.arange(6), batch.targets].sum()
    torch.testing.assert_close(loss.double(), by_hand, rtol=1e-6, atol=0)


def test_gradients_reach_the_fp32_masters(model_dir: Path) -> None:
    decoder, forward = make(model_dir, DelayedScaling(amax_history_len=4))
    batch = collate([row(6, 20)], "cpu")
    summed_loss(forward.logits(batch), batch.targets)[0].backward()  # type: ignore[no-untyped-call]
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype == torch.float32
        assert parameter.grad.any(), name


@pytest.mark.parametrize("recipe", WITH_ATTENTION, ids=["dpa", "mha"])
def test_fp8_attention_changes_logits_by_less_than_five_percent_and_updates_its_scales(
    model_dir: Path, recipe: DelayedScaling
) -> None:
    plain, forward = make(model_dir, SHORT)[1], make(model_dir, recipe)[1]
    batch = collate([row(6, 20), row(7, 9)], "cpu")
    for runner in (plain, forward):
        runner.observe(mean_loss(batch))
        summed_loss(runner.logits(batch), batch.targets)[0].backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        exact, actual = plain.logits(batch), forward.logits(batch)
    assert 0 < (actual - exact).norm() < 0.05 * exact.norm()
    steps = {
        name.rpartition(".")[2]: int(s.steps) for name, s in scaling_states(forward) if "layers.1.self_attn." in name
    }
    expected = dict.fromkeys(("q", "k", "v", "p", "grad_output", "grad_scores"), 2)  # one observation, then one step
    assert {name: steps[name] for name in expected} == expected
    assert actual.dtype == torch.bfloat16


def test_without_gradients_the_scaling_state_is_frozen(model_dir: Path) -> None:
    forward = make(model_dir, WITH_ATTENTION[0])[1]
    forward.logits(collate([row(7, 9)], "cpu"))
    before = snapshot(forward)
    with torch.no_grad():
        one, two = (forward.logits(collate([row(8, 30)], "cpu")) for _ in range(2))
    assert torch.equal(one, two)
    after = snapshot(forward)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(t.any() for n, t in before.items() if n.endswith("amax_history"))


def snapshot(forward: Forward) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in scaling_tensors(forward).items()}


def test_a_weight_is_quantized_once_while_gradients_accumulate(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    decoder, forward = make(model_dir, recipe)
    weight = decoder.get_submodule("model.layers.0.mlp.up_proj").weight
    casts = count_quantizations(monkeypatch, lambda x: x is weight)
    for seed in (1, 2, 3):
        batch = collate([row(seed, 9)], "cpu")
        loss, _ = summed_loss(forward.logits(batch, is_first_microbatch=seed == 1), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
    assert len(casts) == 1


def count_quantizations(monkeypatch: pytest.MonkeyPatch, is_counted: Callable[[Tensor], bool]) -> list[Tensor]:
    from fp8serve.fp8 import casting, linear

    real, casts = casting.cast_recording, []

    def counting(x: Tensor, *args: Any, **options: Any) -> object:
        if is_counted(x):
            casts.append(x)
        return real(x, *args, **options)

    monkeypatch.setattr(linear, "cast_recording", counting)
    return casts


def test_a_forward_without_recipe_ignores_an_outer_autocast(model_dir: Path) -> None:
    _, forward = make(model_dir, None)
    batch = collate([row(1, 9)], "cpu")
    with torch.no_grad():
        plain = forward.logits(batch)
        with autocast(recipe=DelayedScaling()):
            inside = forward.logits(batch)
    assert torch.equal(plain, inside)


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", [SHORT, *map(from_name, ("current", "rowwise", "block", "mxfp8", "nvfp4"))], ids=str)
def test_sharing_casts_changes_no_bit(model_dir: Path, recipe: Recipe, recompute: bool) -> None:
    """Layers with hooks do not share casts. Losses, gradients, scales and histories are the same with and without
    hooks."""
    runs = []
    for separately in (False, True):
        torch.manual_seed(0)  # of stochastic rounding
        decoder = load_trainable(model_dir)
        convert(decoder)
        forward = Forward(decoder, recipe, recompute=recompute)
        hooks = [m.register_forward_hook(lambda *_: None) for m in forward.linears.values() if separately]
        batches = [collate([row(i, 20), row(i + 9, 7)], "cpu") for i in range(3)]
        forward.observe(mean_loss(batches[0])) if recipe is SHORT else None
        results: list[Tensor] = []
        for _ in range(3):
            with forward.accumulated_update():
                for i, batch in enumerate(batches):
                    loss = summed_loss(forward.logits(batch, is_first_microbatch=i == 0), batch.targets)[0]
                    loss.backward()  # type: ignore[no-untyped-call]
                    results.append(loss.detach())
        results += [p.grad for p in decoder.parameters() if p.grad is not None]
        results += scaling_tensors(forward).values()
        shared = [m for m in forward.linears.values() if m.shared_states]
        assert bool(shared) == (recipe is SHORT and not hooks)
        runs.append(results)
    assert len(runs[0]) > 9
    assert all(map(torch.equal, *runs))
