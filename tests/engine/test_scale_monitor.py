"""The scale monitor: amaxes and saturation in windows of traffic, warnings about drift, and scales that follow the
traffic (`roll_history`)."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8serve.engine.engine import Engine
from fp8serve.errors import RequestError
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.config.decoder import read_config
from fp8serve.model.formats.scales import ScalingCheckpoint, TensorScale, fingerprint, save_scales
from fp8serve.model.network.decoder import Decoder

from .tiny import write_model

PROMPTS = [list(range(40, 60)), list(range(100, 140)), list(range(7))]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 272}
KINDS = {"llama": SIZES, "qwen3_moe": SIZES | {"moe_intermediate_size": 48}}


def write_scales_for_amax(path: Path, rules: DelayedScaling, histories: dict[str, float] | float) -> Path:
    """Writes scales whose amax history has one value for each linear's input, from `histories`. Returns the file."""
    names = Decoder(read_config(path), device="meta").linear_names()
    tensors = {}
    for name in names:
        amax = histories if isinstance(histories, float) else histories[name]
        history = torch.zeros(rules.amax_history_len)
        history[-1] = amax
        tensors[f"{name}.input"] = TensorScale(torch.tensor(448 / 2.0**rules.margin) / torch.tensor(amax), history)
        tensors[f"{name}.weight"] = TensorScale(torch.tensor(400.0))
    out = path / "made-up"
    save_scales(out, ScalingCheckpoint(rules, tensors, fingerprint(path)))
    return out


def make_engine(path: Path, kind: str = "llama", amax: dict[str, float] | float = 4.0, **options: Any) -> Engine:
    if not path.exists():
        write_model(path, kind, **KINDS[kind])
    rules = options.pop("rules", DelayedScaling(amax_history_len=4))
    return Engine(path, recipe=rules, scales=write_scales_for_amax(path, rules, amax), **options)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("nvfp4", "per row"), ("mxfp8", "per block1x32"), ("rowwise", "per row"), ("nvfp4-w4a16", "unquantized")],
)
def test_the_kind_of_an_input_scale_is_named(recipe: str, kind: str, tmp_path: Path) -> None:
    write_model(tmp_path / "m", "llama", **SIZES)
    assert Engine(tmp_path / "m", recipe=recipe).info()["input_scales"] == kind


def answer(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return engine.generate(prompts, temperature=0.0, max_new_tokens=12, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_change_no_answer_and_no_total(kind: str, tmp_path: Path) -> None:
    without, windowed = (make_engine(tmp_path / kind, kind, 0.5, drift_window=size) for size in (10**9, 5))
    assert answer(without) == answer(windowed)
    totals = ("name", "amax", "scale", "headroom", "saturated", "saturation")
    assert [[r[key] for key in totals] for r in windowed.scales()] == [
        [r[key] for key in totals] for r in without.scales()
    ]
    assert sum(record["saturated"] for record in windowed.scales()) > 0
    assert (without.stats()["scale_windows_total"], without.scales()[0]["drift"]) == (0, None)
    assert windowed.stats()["scale_windows_total"] > 5


class Operations(TorchDispatchMode):
    """Records the names of all tensor operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class FakeEvent:
    """A CUDA event that completes when the test sets `passed`, or in `synchronize`."""

    def __init__(self) -> None:
        self.recorded, self.passed = 0, False

    def record(self) -> None:
        self.recorded, self.passed = self.recorded + 1, False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


@pytest.mark.parametrize("kind", KINDS)
def test_closing_a_window_takes_two_copies_and_two_memsets(kind: str, tmp_path: Path) -> None:
    """All layers, stacked experts included, share one tensor of amaxes and one of saturation counts."""
    engine = make_engine(tmp_path / kind, kind, 0.5, drift_window=10**9)
    answer(engine)
    monitor = engine.loaded.scale_monitor
    layers = engine.loaded.frozen.values()
    assert len({layer.amax.untyped_storage().data_ptr() for layer in layers}) == 1
    assert len({layer.saturated.untyped_storage().data_ptr() for layer in layers}) == 1
    assert len({layer.amax.data_ptr() for layer in layers}) == len(monitor.counters._amax)
    rows, before = engine._rows_by_layer(), [float(layer.amax) for layer in layers]
    with Operations() as operations:
        monitor.close_window(rows)
    assert operations.names == ["copy_", "copy_", "zero_", "zero_"]
    assert [record["window_amax"] for record in engine.scales()] == before
    assert not any(float(layer.amax) or int(layer.saturated) for layer in layers)


def test_a_window_is_read_once_its_event_has_completed(tmp_path: Path) -> None:
    """As on a GPU, no step waits for the event, and the records of all windows equal those of a CPU."""
    options = {"drift_window": 10, "drift_alarm": 1e-6}
    plain, late = (make_engine(tmp_path / "model", amax=0.5, **options) for _ in range(2))
    monitor = late.loaded.scale_monitor
    monitor.counters._event = event = FakeEvent()
    assert answer(plain) == answer(late)
    closed = plain.stats()["scale_windows_total"]
    assert event.recorded == closed > 2
    assert late.stats()["scale_windows_total"] == closed - 1  # closing a window waits for the previous one only
    assert late.scales() == plain.scales()
    assert late.stats() == plain.stats()
    for engine in (plain, late):
        monitor = engine.loaded.scale_monitor
        monitor.close_window(engine._rows_by_layer())
    assert late.stats()["scale_windows_total"] == closed
    event.passed = True
    assert not monitor.count_tokens(1)
    assert late.stats()["scale_windows_total"] == closed + 1
    assert late.scales() == plain.scales()


def test_drift_is_the_amax_of_the_last_window_over_the_calibrated_amax(tmp_path: Path) -> None:
    engine = make_engine(
        tmp_path / "model", amax=0.5, rules=DelayedScaling(margin=2, amax_history_len=4), drift_window=1
    )
    answer(engine)
    for record in engine.scales():
        assert record["calibrated_amax"] == 0.5
        assert record["drift"] == record["window_amax"] / 0.5
        assert record["window_amax"] <= record["amax"]
    assert engine.stats()["input_drift_max"] == max(record["drift"] for record in engine.scales())


def test_the_log_reports_when_layers_begin_and_stop_drifting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(tmp_path / "model", amax=2.0, drift_window=1, drift_alarm=1e-6)
    with caplog.at_level(logging.INFO, "fp8serve.engine"):
        answer(engine)
        assert len([r for r in caplog.records if "exceed 1e-06 times the calibrated maximum" in r.message]) == 1
        assert (engine.stats()["layers_drifting"], all(r["drifts"] for r in engine.scales())) == (14, True)
        for monitor in engine.loaded.scale_monitor._inputs.values():
            monitor.calibrated_amax = 1e9
        answer(engine)
    assert "The inputs of 14 FP8 layers are in the calibrated range again" in caplog.messages[-1]
    assert (engine.stats()["layers_drifting"], any(r["drifts"] for r in engine.scales())) == (0, False)


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("margin", [0, 1])
def test_rolled_scales_equal_those_of_delayed_scaling(kind: str, margin: int, tmp_path: Path) -> None:
    """After one window, layers use the scale of the larger of the calibrated and the observed amax."""
    rules = DelayedScaling(margin=margin, amax_history_len=4)
    fixed = make_engine(tmp_path / kind, kind, 1.0, rules=rules, drift_window=10**9)
    engine = make_engine(tmp_path / kind, kind, 1.0, rules=rules, drift_window=90, roll_history=True)
    answer(engine)
    assert engine.stats()["scale_windows_total"] == 1
    answer(fixed)
    observed = {record["name"]: record["window_amax"] for record in engine.scales()}
    assert any(amax > 1 for amax in observed.values())
    for record in engine.scales():
        expected = torch.tensor(448 / 2.0**margin) / torch.tensor(max(1.0, observed[record["name"]]))
        assert record["scale"] == float(expected)
    largest = {name: max(1.0, amax) for name, amax in observed.items()}
    recalibrated = make_engine(tmp_path / kind, kind, largest, rules=rules)
    prompts = [list(range(200, 230))]  # shares no cached prefix
    assert answer(engine, prompts) == answer(recalibrated, prompts)
    assert answer(engine, prompts) != answer(fixed, prompts)


def test_calibrated_amaxes_leave_the_history_after_its_length(tmp_path: Path) -> None:
    rules = DelayedScaling(amax_history_len=3)  # the staging slot and two entries
    engine = make_engine(tmp_path / "model", amax=100.0, rules=rules, drift_window=1, roll_history=True)
    scale = engine.scales()[0]["scale"]
    answer(engine)
    assert all(record["scale"] > scale for record in engine.scales())


def test_roll_history_needs_stored_scales(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    with pytest.raises(RequestError, match="roll_history needs stored scales of inputs, and this model has none"):
        Engine(path, recipe="rowwise", roll_history=True)
    engine = Engine(path, recipe="rowwise", drift_window=1)
    answer(engine)
    assert (engine.scales()[0]["drift"], engine.scales()[0]["drifts"]) == (None, False)
    assert engine.stats()["scale_windows_total"] == 0


def test_without_histories_the_calibrated_amax_is_the_range_of_the_scale(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "llama", **SIZES)
    names = Decoder(read_config(path), device="meta").linear_names()
    tensors = {f"{name}.{role}": TensorScale(torch.tensor(28.0)) for name in names for role in ("input", "weight")}
    save_scales(path / "bare", ScalingCheckpoint(DelayedScaling(), tensors, fingerprint(path)))
    engine = Engine(path, recipe=DelayedScaling(), scales=path / "bare", drift_window=1, roll_history=True)
    answer(engine)
    for record in engine.scales():
        assert record["calibrated_amax"] == 16.0
        assert record["scale"] == float(torch.tensor(448.0) / torch.tensor(max(16.0, record["amax"])))
