"""Calibration synchronizes with the device a constant number of times, whatever the number of linears.

Reading a tensor's value synchronizes with a GPU. On a CPU it costs nothing, so these tests count the reads.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fp8serve.calibration.compare import compare, freeze_function, kl_shares, read_scales
from fp8serve.calibration.data import calibration_batches
from fp8serve.calibration.measure import LayerTally, count_codes, read_tallies, scatter_counts
from fp8serve.calibration.observe import Observer, final_states, make_observer, observe
from fp8serve.calibration.pipeline import load_for_calibration
from fp8serve.fp8.ops import quantize
from fp8serve.fp8.ops.arithmetic import amax
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.text.tokenizer import Tokenizer

from .conftest import VOCAB, write_model

RECIPE = DelayedScaling(amax_history_len=8)
TRANSFERS = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy}


class OnHost(torch.Tensor):
    """A tensor that was copied from the device, and all tensors computed from it on the host."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = super().to(*args, **kwargs)
        return result.as_subclass(torch.Tensor) if isinstance(args[0], torch.device) else result


class _Transfers(TorchFunctionMode):
    """Counts calls that copy a whole tensor from the device."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TRANSFERS:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class _Scalars(TorchDispatchMode):
    """Counts ops that need a value on the host: `float(x)`, `bool(x)`, and ops with outputs of unknown size."""

    OPS = ("aten::_local_scalar_dense", "aten::nonzero")

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket._qualified_op_name) in self.OPS and not isinstance(args[0], OnHost):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def reads(run: Callable[[], Any]) -> Counter[str]:
    counts: Counter[str] = Counter()
    with _Transfers(counts), _Scalars(counts):
        run()
    return counts


@pytest.fixture(scope="module", params=[2, 5], ids=["2 layers", "5 layers"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "deep", num_hidden_layers=request.param)


@pytest.fixture
def gpu_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes amaxes as on a GPU: on a CPU, `fast_amax` looks at its result."""
    monkeypatch.setattr("fp8serve.fp8.ops.arithmetic.fast_amax", amax)


@pytest.fixture
def scales_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks the scales that `freeze_function` has read, so that their checks do not count."""

    def read(states: Mapping[str, ScalingState]) -> dict[str, torch.Tensor]:
        return {name: scale.as_subclass(OnHost) for name, scale in read_scales(states).items()}

    monkeypatch.setattr("fp8serve.calibration.compare.read_scales", read)


@pytest.mark.usefixtures("gpu_amax", "scales_on_host")
@pytest.mark.parametrize("samples", [32, 64])
def test_the_number_of_reads_does_not_depend_on_the_number_of_linears(model: Path, samples: int) -> None:
    decoder, linears = load_for_calibration(model, "cpu")
    batches = calibration_batches(
        None, Tokenizer.from_dir(model), VOCAB, samples=samples, seq_len=32, batch_size=4, seed=0
    )
    observers: list[Observer] = []
    observed = reads(
        lambda: observers.append(
            observe(decoder, make_observer(decoder, linears, RECIPE, kv_cache=True), batches.calibration)
        )
    )
    assert observed == {
        "tolist": 1,
        "aten::_local_scalar_dense": len(batches.calibration),
    }  # one check per batch that its amaxes are finite

    states = final_states(observers[0])
    compared = reads(lambda: compare(decoder, linears, batches.held_out, RECIPE, states))
    figures = 4  # two perplexities, KL divergence and agreement
    assert compared == {"cpu": 2, "aten::_local_scalar_dense": figures, "aten::nonzero": len(batches.held_out)}

    freeze = freeze_function(RECIPE, states)
    frozen = {name: freeze(name, linear) for name, linear in linears.items()}
    ranked = reads(lambda: kl_shares(decoder, linears, batches.held_out, lambda name, linear, x: frozen[name](x)))
    assert ranked == {"tolist": 1, "aten::nonzero": sum(len(batch.lengths) for batch in batches.held_out)}


@pytest.mark.parametrize("codes", [[], [0], [127, 0, 127, 5]])
def test_codes_are_counted_alike_on_a_cpu_and_on_a_gpu(codes: list[int]) -> None:
    tensor = torch.tensor(codes, dtype=torch.uint8)
    assert torch.equal(scatter_counts(tensor), count_codes(tensor))
    assert scatter_counts(tensor).tolist() == [codes.count(code) for code in range(128)]


def test_tallies_are_read_exactly() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    whole, other = LayerTally(), LayerTally()
    for tally in (whole, other):
        tally.add_input(x, *quantize(x, scale=100.0))
        tally.add_output(x, x * 1.01)
    read_tallies([whole])
    assert whole.report("layer") == other.report("layer")
    read_tallies([])
