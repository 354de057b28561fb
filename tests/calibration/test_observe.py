from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fp8serve.calibration.data import Batch, Sample, make_batches
from fp8serve.calibration.observe import Observer, check_records, final_states, make_observer, observe, scales_of
from fp8serve.calibration.passes import attention_names, backward, forward, with_activation_gradients
from fp8serve.errors import ScalesError
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.config.decoder import read_config
from fp8serve.model.network.decoder import Decoder

from .conftest import VOCAB

RECIPE = DelayedScaling(amax_history_len=16)


def plain(model_dir: Path) -> Decoder:
    decoder = Decoder(read_config(model_dir))
    decoder.load_state_dict(load_file(model_dir / "model.safetensors"))
    return decoder.requires_grad_(False)


def converted(decoder: Decoder) -> dict[str, Linear]:
    convert(decoder)
    modules = dict(decoder.named_modules())
    return {name: modules[name] for name in decoder.linear_names()}  # type: ignore[misc]


def random_batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(2 * count):
        length = int(torch.randint(2, 30, (), generator=generator))
        ids = torch.randint(VOCAB, (length,), generator=generator).tolist()
        samples.append(Sample(tuple(ids), (True,) * length))
    return make_batches(samples, 2)


@pytest.fixture
def decoder(model_dir: Path) -> Decoder:
    return plain(model_dir)


def scales(observer: Observer) -> dict[str, float]:
    return {name: float(state.scale) for name, state in final_states(observer).items()}


def test_scales_do_not_depend_on_the_order_of_batches(model_dir: Path) -> None:
    batches = random_batches(6)
    results = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        decoder = plain(model_dir)
        linears = converted(decoder)
        observer = observe(
            decoder, make_observer(decoder, linears, RECIPE, kv_cache=True, gradients=True), [batches[i] for i in order]
        )
        states = final_states(observer)
        results.append({n: (s.scale, s.amax_history.sort().values) for n, s in states.items()})
    assert results[0].keys() == results[1].keys()
    assert len(results[0]) == 14 * 3 + 4
    for name, (scale, history) in results[0].items():
        assert torch.equal(scale, results[1][name][0]), name
        assert torch.equal(history, results[1][name][1]), name


def test_every_batch_counts_even_if_the_history_is_shorter(model_dir: Path) -> None:
    batches = random_batches(7)
    alone = []
    for batch in batches:
        decoder = plain(model_dir)
        alone.append(observe(decoder, make_observer(decoder, converted(decoder), RECIPE), [batch]))
    decoder = plain(model_dir)
    short = observe(decoder, make_observer(decoder, converted(decoder), replace(RECIPE, amax_history_len=3)), batches)
    for name, seen in short.records.items():
        assert seen.batches == 7
        assert seen.amax == max(one.records[name].amax for one in alone)
    reversed_decoder = plain(model_dir)
    backwards = observe(
        reversed_decoder,
        make_observer(reversed_decoder, converted(reversed_decoder), replace(RECIPE, amax_history_len=3)),
        batches[::-1],
    )
    assert scales(short) == scales(backwards)


def test_recorded_amaxes_are_those_of_the_untouched_model(decoder: Decoder, model_dir: Path) -> None:
    batches = random_batches(3)
    largest: dict[str, float] = {}
    reference = plain(model_dir)
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:

            def note(module: nn.Module, args: tuple[Tensor], name: str = name) -> None:
                largest[f"{name}.input"] = max(largest.get(f"{name}.input", 0), float(args[0].abs().max()))

            module.register_forward_pre_hook(note)
            largest[f"{name}.weight"] = float(module.weight.abs().max())
    for batch in batches:
        forward(reference, batch)
    observer = observe(decoder, make_observer(decoder, converted(decoder), RECIPE), batches)
    assert {name: seen.amax for name, seen in observer.records.items()} == largest
    assert scales(observer) == {n: float(torch.tensor(448.0) / torch.tensor(a)) for n, a in largest.items()}


def test_observing_computes_in_high_precision(decoder: Decoder, model_dir: Path) -> None:
    (batch,) = random_batches(1)
    expected = forward(plain(model_dir), batch)
    linears = converted(decoder)
    observe(decoder, make_observer(decoder, linears, RECIPE), [batch])
    assert torch.equal(forward(decoder, batch), expected)


def test_gradient_scales_are_those_of_the_exact_gradients(decoder: Decoder, model_dir: Path) -> None:
    batches = random_batches(3)
    largest: dict[str, float] = {}
    reference = plain(model_dir)
    for name in reference.linear_names():

        def note(module: nn.Module, grad_in: object, grad_out: tuple[Tensor], name: str = name) -> None:
            largest[name] = max(largest.get(name, 0), float(grad_out[0].abs().max()))

        reference.get_submodule(name).register_full_backward_hook(note)
    with with_activation_gradients(reference):
        for batch in batches:
            backward(reference, forward(reference, batch), batch.targets)
    observer = observe(decoder, make_observer(decoder, converted(decoder), RECIPE, gradients=True), batches)
    states = final_states(observer)
    for name, amax in largest.items():
        assert observer.records[f"{name}.grad_output"].amax == pytest.approx(amax, rel=1e-2)
        scale = states[f"{name}.grad_output"].scale
        assert float(scale) == pytest.approx(57344.0 / observer.records[f"{name}.grad_output"].amax, rel=1e-6)
    assert all(p.grad is None for p in decoder.parameters())


def test_keys_and_values_are_observed_after_rotation(decoder: Decoder) -> None:
    (batch,) = random_batches(1)
    seen: dict[str, float] = {}

    def tap(name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seen.update({f"{name}.k": float(k.abs().max()), f"{name}.v": float(v.abs().max())})
        return k, v

    forward(decoder, batch, tap)
    observer = observe(decoder, make_observer(decoder, converted(decoder), RECIPE, kv_cache=True), [batch])
    assert {name: observer.records[name].amax for name in observer.kv} == seen
    assert list(observer.kv) == [f"{a}.{p}" for a in attention_names(decoder) for p in "kv"]


def test_margin_and_most_recent_are_honoured(model_dir: Path) -> None:
    batches = random_batches(4)
    last, margin = plain(model_dir), plain(model_dir)
    recent = observe(
        last, make_observer(last, converted(last), replace(RECIPE, amax_compute_algo="most_recent")), batches
    )
    for name, scale in scales(recent).items():
        assert scale == float(torch.tensor(448.0) / torch.tensor(recent.records[name].recent_amaxes[-1]))
    halved = observe(margin, make_observer(margin, converted(margin), replace(RECIPE, margin=1)), batches)
    for name, scale in scales(halved).items():
        assert scale == float(torch.tensor(224.0) / torch.tensor(halved.records[name].amax))


@pytest.mark.parametrize("length", [1, 2, 1024])
def test_histories_have_the_requested_length(decoder: Decoder, length: int) -> None:
    recipe = DelayedScaling(amax_history_len=length, interval=3)
    observer = observe(decoder, make_observer(decoder, converted(decoder), recipe), random_batches(2))
    for name, state in final_states(observer).items():
        assert state.amax_history.shape == (length,)
        assert float(state.scale) == float(torch.tensor(448.0) / torch.tensor(observer.records[name].amax))
        assert list(observer.records[name].recent_amaxes)[-max(0, min(2, length - 1)) :] == (
            state.amax_history[1:][-2:].tolist() or list(observer.records[name].recent_amaxes)
        )


@pytest.mark.parametrize(("value", "named"), [(float("inf"), "up_proj.weight"), (float("nan"), "up_proj.weight")])
def test_the_error_names_weights_that_are_not_finite(decoder: Decoder, value: float, named: str) -> None:
    decoder.get_submodule("model.layers.1.mlp.up_proj").weight[3, 5] = value
    with pytest.raises(ScalesError, match=f"model.layers.1.mlp.{named}"):
        observe(decoder, make_observer(decoder, converted(decoder), RECIPE), random_batches(1))


def test_the_error_names_a_tensor_that_is_always_zero(decoder: Decoder) -> None:
    decoder.get_submodule("model.layers.0.mlp.gate_proj").weight.zero_()
    with pytest.raises(ScalesError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight was zero or never observed"):
        observe(decoder, make_observer(decoder, converted(decoder), RECIPE), random_batches(1))


def test_the_error_names_a_linear_that_never_ran(decoder: Decoder) -> None:
    linears = converted(decoder)
    extra = nn.ModuleDict({"unused": nn.Linear(4, 4)})
    convert(extra)
    with pytest.raises(ScalesError, match=r"unused\.input was zero or never observed in 1 batches"):
        observe(decoder, make_observer(decoder, linears | {"unused": extra["unused"]}, RECIPE), random_batches(1))  # type: ignore[dict-item]


def test_an_amax_that_overflowed_is_refused_even_if_the_result_is_finite(decoder: Decoder) -> None:
    observer = Observer(converted(decoder), RECIPE)
    observer.records["model.layers.0.mlp.up_proj.input"].nonfinite = 2
    with pytest.raises(ScalesError, match=r"up_proj\.input was not finite in 2 of 5 batches"):
        check_records(observer.records, (), 5)


def test_a_tiny_amax_gives_the_largest_finite_scale() -> None:
    scales = scales_of({"x.input": 1e-38, "y.weight": 448.0}, RECIPE, torch.device("cpu"))
    assert {name: float(scale) for name, scale in scales.items()} == {
        "x.input": torch.finfo(torch.float32).max,
        "y.weight": 1.0,
    }
