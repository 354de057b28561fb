"""Scales that follow the traffic are saved: the saved directory answers like the server, bit for bit."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8serve.engine.engine import Engine
from fp8serve.errors import MachineError, RequestError, TakenError
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.config.decoder import read_config
from fp8serve.model.export import write_calibrated
from fp8serve.model.format_conversion import write_updated_scales
from fp8serve.model.formats import FORMATS
from fp8serve.model.formats.scales import ScalingCheckpoint, TensorScale, fingerprint, read_scales, save_scales
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.verify import verify
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving import served_scales
from fp8serve.server.serving.served_scales import ScaleSaver
from tests.engine.tiny import write_model
from tests.server.conftest import Start
from tests.server.process import serving

RULES = DelayedScaling(amax_history_len=4)
TRAFFIC = [[1, *range(40, 70)], [1, *range(100, 140)]]
PROMPTS = [[2, *range(10, 30)], [2, *range(200, 240)]]  # shares no cached prefix with the traffic


def calibrated(model: Path, amax: float = 64.0) -> ScalingCheckpoint:
    """Scales for inputs up to `amax`; 64 is far above the amaxes of the traffic."""
    tensors: dict[str, TensorScale] = {}
    for name in Decoder(read_config(model), device="meta").linear_names():
        history = torch.tensor([0.0, 0.0, amax / 2, amax])
        tensors[f"{name}.input"] = TensorScale(torch.tensor(448 / amax), history)
        tensors[f"{name}.weight"] = TensorScale(torch.tensor(400.0))
    return ScalingCheckpoint(RULES, tensors, fingerprint(model))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rolled") / "plain")


def answers(engine: Engine) -> list[Any]:
    return engine.generate(PROMPTS, temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=2)


def rolled(source: Path, **options: Any) -> Engine:
    """Returns an engine whose scales have followed some traffic and do not change any more."""
    engine = Engine(source, roll_history=True, drift_window=8, **options)
    before = [record["scale"] for record in engine.scales()]
    engine.generate(TRAFFIC * 2, temperature=0.0, max_new_tokens=16, ignore_eos=True)
    assert all(new != old for new, old in zip([r["scale"] for r in engine.scales()], before, strict=True))
    engine.loaded.scale_monitor._window_tokens = -(10**9)
    return engine


def check_same(engine: Engine, out: Path, tmp_path: Path) -> None:
    """Asserts that `out` has the scales and answers of `engine`, and the histories to continue from."""
    again = Engine(out)
    assert [r["scale"] for r in again.scales()] == [r["scale"] for r in engine.scales()]
    assert answers(again) == answers(engine)
    going_on = Engine(out, roll_history=True).loaded.scale_monitor.current_scales()
    for key, entry in engine.loaded.scale_monitor.current_scales().tensors.items():
        assert torch.equal(going_on.tensors[key].scale, entry.scale), key
        assert entry.amax_history is not None
        assert torch.equal(going_on.tensors[key].amax_history, entry.amax_history), key  # type: ignore[arg-type]


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("with_histories", [True, False])
def test_an_fp8_directory_is_saved_as_it_is_served(
    format: str, with_histories: bool, plain: Path, tmp_path: Path
) -> None:
    source, moved, out = tmp_path / "source", tmp_path / "moved", tmp_path / "out"
    write_calibrated(source, plain, calibrated(plain, 64.0 if with_histories else 2.0**-8), format=format)
    if not with_histories:
        (source / "scales.safetensors").unlink()
    engine = rolled(source)
    assert engine.save_scales(moved) == 14
    write_updated_scales(source, out, read_scales(moved))
    check_same(engine, out, tmp_path)
    assert {path.name for path in out.iterdir()} >= {path.name for path in source.iterdir()}
    assert read_config(out) == read_config(source)
    assert not [finding for finding in verify(out) if finding.severity == "error"]


def test_weights_in_high_precision_are_rounded_as_they_were_served(plain: Path, tmp_path: Path) -> None:
    scales, moved, out = tmp_path / "scales", tmp_path / "moved", tmp_path / "out"
    save_scales(scales, calibrated(plain))
    engine = rolled(plain, recipe=RULES, scales=scales)
    engine.save_scales(moved)
    write_updated_scales(plain, out, read_scales(moved), scales)
    check_same(engine, out, tmp_path)


def test_saving_scales_needs_roll_history(plain: Path, tmp_path: Path) -> None:
    engine = Engine(plain, recipe="bf16")
    with pytest.raises(RequestError, match="start it with --roll-history"):
        engine.save_scales(tmp_path / "moved")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_or_unwritable_directory_is_refused_with_one_sentence(plain: Path, tmp_path: Path) -> None:
    source, moved = tmp_path / "source", tmp_path / "moved"
    write_calibrated(source, plain, calibrated(plain))
    rolled(source).save_scales(moved)
    with pytest.raises(TakenError, match="exists and is not empty"):
        write_updated_scales(source, source, read_scales(moved))
    with pytest.raises(MachineError, match="cannot be written"):
        write_updated_scales(source, Path("/proc/nowhere/out"), read_scales(moved))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_server_saves_beside_the_model_and_serves_what_it_saved(plain: Path, tmp_path: Path) -> None:
    source = tmp_path / "mine"
    write_calibrated(source, plain, calibrated(plain))
    body = {"inputs": "a text that nobody has sent before", "parameters": {"max_new_tokens": 12, "ignore_eos": True}}
    options = {"model": str(source), "data_dir": str(tmp_path / "data"), "roll_history": True, "drift_window": 200}
    with serving(tmp_path / "log", **options) as server:
        for _ in range(3):
            server.client.post("/generate", json={"inputs": "x" * 90, "parameters": {"max_new_tokens": 4}})
        assert server.client.post("/scales/save", json={"name": "mine-as-of-today"}).json() == {
            "name": "mine-as-of-today", "scales": 14,
        }  # fmt: skip
        layers = server.client.get("/scales").json()["layers"]
        conflict = server.client.post("/scales/save", json={"name": "mine-as-of-today"})
        assert (conflict.status_code, conflict.json()["code"]) == (409, "name_taken")
        unnamed = server.client.post("/scales/save")
        assert (unnamed.status_code, unnamed.json()["name"][:5]) == (200, "mine-")
        for name in ("", "..", ".hidden", "a/b", "a\x00b", "é", "a" * 129, 1):
            assert server.client.post("/scales/save", json={"name": name}).status_code == 422, name
        assert server.client.post("/scales/save", json={"path": "/tmp/x"}).status_code == 422
        assert not list((tmp_path / "data").glob("rolled-*"))
    log = (tmp_path / "log").read_text()
    assert "saved the model with 14 current scales" in log
    assert {path.name for path in tmp_path.iterdir()} == {
        "mine", "mine-as-of-today", unnamed.json()["name"], "data", "log"
    }  # fmt: skip
    again = {"model": str(tmp_path / "mine-as-of-today"), "data_dir": str(tmp_path / "data-2")}
    with serving(tmp_path / "log-2", **again) as server:
        saved_layers = server.client.get("/scales").json()["layers"]
        assert [layer["scale"] for layer in saved_layers] == [layer["scale"] for layer in layers]
        assert server.client.post("/generate", json=body).status_code == 200


async def test_a_server_without_roll_history_refuses_to_save_scales(start: Start) -> None:
    async with start() as server:
        refused = await server.client.post("/scales/save")
        assert (refused.status_code, refused.json()["code"]) == (409, "scales_not_rolling")
        assert "--roll-history" in refused.json()["error"]
        assert refused.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"error": "MachineError", "message": "/a/b/c cannot be written: Permission denied."}, Code.DISK_FULL),
        ({"error": "TakenError", "message": "/a/b is somebody's."}, Code.NAME_TAKEN),
        ({"error": "ModelError", "message": "No format here says so."}, Code.NOT_ROLLING),
        (None, Code.INTERNAL),
    ],
)
async def test_the_error_of_the_process_becomes_the_answers_code(
    error: dict[str, str] | None, code: Code, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "" if error is None else json.dumps(error)
    monkeypatch.setattr(served_scales, "COMMAND", (sys.executable, "-c", f"print({text!r}); raise SystemExit(1)"))

    class Handle:
        async def save_scales(self, path: Path) -> int:
            return 1

    options = SimpleNamespace(scales=None)
    served: Any = SimpleNamespace(engine=Handle(), source=SimpleNamespace(directory=plain, options=options))
    with pytest.raises(Fault) as caught:
        await ScaleSaver(tmp_path).save(served, tmp_path / "model", "out")
    assert caught.value.code is code
    assert list(tmp_path.iterdir()) == []
