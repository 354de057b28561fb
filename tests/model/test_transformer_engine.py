"""Transformer Engine's `_extra_state`: valid payloads are read exactly, hostile ones are refused.

The payloads are made by Python's and torch's own writers from classes of Transformer Engine's names; there is no
Transformer Engine here. Every hostile payload would do its harm if it were unpickled, which one test shows.
"""

import builtins
import enum
import io
import pickle
import random
import re
import struct
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from fp8serve.errors import ScalesError
from fp8serve.fp8.recipe import DelayedScaling, Format
from fp8serve.inspection import inspect
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.formats import transformer_engine as te
from fp8serve.model.formats.restricted_pickle import read_pickle
from fp8serve.model.formats.scales import ScalingCheckpoint, TensorScale, load_scales, save_scales
from tests.tiny import write_tiny_model

N = 4


class FakeFormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class FakeFormat(enum.Enum):
    E4M3 = FakeFormatHelper(448, 448)
    E5M2 = FakeFormatHelper(57344, 57344)
    HYBRID = FakeFormatHelper(448, 57344)


class FakeOverride(NamedTuple):
    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False


@dataclass
class FakeDelayedScaling:
    margin: int = 0
    fp8_format: FakeFormat = FakeFormat.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Any = None
    _cached_repr: Any = None


@dataclass
class FakeFloat8CurrentScaling:
    margin: int = 0


FAKES = {
    "_FormatHelper": FakeFormatHelper, "Format": FakeFormat, "_OverrideLinearPrecision": FakeOverride,
    "DelayedScaling": FakeDelayedScaling, "Float8CurrentScaling": FakeFloat8CurrentScaling,
}  # fmt: skip


RECIPES = "transformer_engine.common.recipe"
for _alias, _fake in FAKES.items():  # pickle then writes Transformer Engine's names
    _fake.__module__, _fake.__qualname__, _fake.__name__ = RECIPES, _alias, _alias


@pytest.fixture(autouse=True)
def fake_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Creates the modules in which pickle looks up these names."""
    module: Any = types.ModuleType(RECIPES)
    module.__dict__.update(FAKES)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, RECIPES, module)


def as_state(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def payload(gemms: int = 1, recipe: Any = None, **changes: Any) -> dict[str, Any]:
    """Returns the state of a module of `gemms` GEMMs; all numbers are different."""
    forward, backward = 3 * gemms, 2 * gemms
    value = {
        "recipe": recipe or FakeDelayedScaling(margin=1, amax_history_len=N),
        "scale_fwd": torch.arange(1, forward + 1).float() / 7,
        "amax_history_fwd": 1 + torch.arange(N * forward).float().view(N, forward),
        "scale_bwd": torch.arange(1, backward + 1).float() / 3,
        "amax_history_bwd": 100 + torch.arange(N * backward).float().view(N, backward),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": gemms, "fp8_max_fwd": 448.0, "async": (1, [2])},
    }
    return {k: v for k, v in {**value, **changes}.items() if v is not ...}


def pickled(**options: Any) -> torch.Tensor:
    return as_state(pickle.dumps(payload(**options)))


def state_of_version_1(**options: Any) -> torch.Tensor:
    """Returns a state as 1.x wrote it: a file of torch.save, without a recipe."""
    stream = io.BytesIO()
    torch.save(payload(**{"recipe": ..., **options}), stream)
    return as_state(stream.getvalue())


def read(state: torch.Tensor) -> te.ModuleState:
    module = te.read_module(state)
    assert module is not None
    return module


@pytest.mark.parametrize("protocol", range(3, 6))
def test_the_state_of_a_module_is_read_exactly(protocol: int) -> None:
    value = payload()
    module = read(as_state(pickle.dumps(value, protocol=protocol)))
    assert module.recipe == DelayedScaling(margin=1, amax_history_len=N)
    (tensors,) = module.tensors
    for role, part, column in (("input", "fwd", 0), ("weight", "fwd", 1), ("grad_output", "bwd", 0)):
        assert torch.equal(tensors[role].scale, value[f"scale_{part}"][column])
        history = tensors[role].amax_history
        assert history is not None
        assert torch.equal(history, value[f"amax_history_{part}"][:, column])


def test_the_format_of_version_1_is_read() -> None:
    scale = torch.tensor([2.0, 4.0, 8.0])
    module = read(state_of_version_1(scale_fwd=scale, scale_inv_fwd=1 / scale, scale_inv_bwd=torch.ones(2)))
    assert module.recipe == DelayedScaling(amax_history_len=N)
    assert [float(module.tensors[0][r].scale) for r in ("input", "weight")] == [2.0, 4.0]


def test_the_second_gemm_of_a_module() -> None:
    value = payload(gemms=2)
    second = read(as_state(pickle.dumps(value))).tensors[1]
    assert torch.equal(second["input"].scale, value["scale_fwd"][3])
    assert torch.equal(second["weight"].scale, value["scale_fwd"][4])
    assert torch.equal(second["grad_output"].scale, value["scale_bwd"][2])


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (FakeDelayedScaling(fp8_format=FakeFormat.E4M3), {"fp8_format": Format.E4M3}),
        (FakeDelayedScaling(amax_compute_algo="most_recent"), {"amax_compute_algo": "most_recent"}),
        (FakeDelayedScaling(reduce_amax=False, fp8_dpa=True), {"reduce_amax": False}),
    ],
)
def test_recipes(recipe: Any, expected: dict[str, Any]) -> None:
    assert read(pickled(recipe=recipe)).recipe == DelayedScaling(amax_history_len=N, **expected)


def test_an_override_of_an_older_version() -> None:
    recipe = FakeDelayedScaling()
    recipe.override_linear_precision = FakeOverride(False, True, True)  # type: ignore[attr-defined]
    assert read(pickled(recipe=recipe)).recipe.override_linear_precision == (False, True, True)


def test_a_format_pickled_by_name() -> None:
    """Some releases of Python 3.11 wrote enumerations so: getattr(Format, "E4M3"), which is never called here."""

    class ByName:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (FakeFormat, "E4M3")

    recipe: Any = FakeDelayedScaling()
    recipe.fp8_format = ByName()
    assert read(pickled(recipe=recipe)).recipe.fp8_format is Format.E4M3


def test_modules_without_state() -> None:
    stateless = {"recipe": FakeFloat8CurrentScaling(), "extra_fp8_variables": {}}
    for data in (b"", pickle.dumps(None), pickle.dumps(stateless)):
        assert te.read_module(as_state(data)) is None


# --- hostile payloads -------------------------------------------------------------------------------------------------


class Harm:
    """Unpickled, it calls `function(*args)`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def _opcodes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def _global(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93"


def _doubling(levels: int) -> bytes:
    """Returns a list of two lists of two lists ...: 2^levels leaves in a few bytes."""
    return b"]\x94" + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94" for i in range(levels))


def _bomb_zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(None, protocol=2))
        archive.writestr("archive/data/0", b"\0" * (20 << 20))
    return stream.getvalue()


def _liar_zip(count: int) -> bytes:
    """Returns a torch.save file whose pickle announces `count` elements; 16 are there."""
    stream, out = io.BytesIO(), io.BytesIO()
    torch.save(payload(recipe=...), stream)
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            if info.filename.endswith("data.pkl"):
                at = re.search(rb"cpuq?.?K\x03", content)
                assert at is not None
                content = content[: at.end() - 2] + b"\x8a\x08" + struct.pack("<q", count) + content[at.end() :]
            target.writestr(info.filename, content)
    return out.getvalue()


def _with_storage(storage: Any, size: Any = (3,), stride: Any = (1,), offset: Any = 0) -> bytes:
    class Rebuilt:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_tensor_v2, (storage, offset, size, stride, False, {})

    return pickle.dumps(payload(scale_fwd=Rebuilt()))


def _harmless_storage() -> Any:
    return torch.ones(3)._typed_storage()


def _stored(replace: Callable[[bytes], bytes]) -> bytes:
    """Returns a payload whose inner storage bytes were changed."""
    inner = _harmless_storage().__reduce__()[1][0]
    return _with_storage(Harm(torch.storage._load_from_bytes, replace(inner)))


WITNESS = Harm(builtins.exec, "import sys; sys.harmed = True")


def code() -> dict[str, bytes]:
    """Payloads that run code wherever they are unpickled."""
    return {
        "exec in place of everything": pickle.dumps(WITNESS),
        "exec in place of a tensor": pickle.dumps(payload(scale_fwd=WITNESS)),
        "exec in place of a recipe": pickle.dumps(payload(recipe=WITNESS)),
        "exec among the extra variables": pickle.dumps(payload(extra_fp8_variables=WITNESS)),
    }


def hostile() -> dict[str, bytes]:
    witness = WITNESS
    good = payload()
    return {
        **code(),
        "exec as a recipe's algorithm": pickle.dumps(payload(recipe=FakeDelayedScaling(amax_compute_algo=witness))),
        "exec inside a format": pickle.dumps(payload(recipe=FakeDelayedScaling(fp8_format=witness))),  # type: ignore[arg-type]
        "os.system": _opcodes(_global("os", "system"), b"\x8c\x04true\x85R"),
        "eval by protocol 0": b"c__builtin__\neval\n(S'1'\ntR.",
        "getattr of a getattr": pickle.dumps(payload(scale_fwd=Harm(getattr, Harm(getattr, "", "__class__"), "mro"))),
        "dotted name": _opcodes(_global("transformer_engine.common.recipe", "Format.__class__.mro"), b")R"),
        "a recipe of another module": _opcodes(b"}\x8c\x06recipe", _global("evil", "DelayedScaling"), b")\x81s"),
        "a function as algorithm": pickle.dumps(payload(recipe=FakeDelayedScaling(amax_compute_algo=print))),
        "attributes set on a function": _opcodes(_global("torch._utils", "_rebuild_tensor_v2"), b"N}\x86b"),
        "attributes set on a class": _opcodes(_global("collections", "OrderedDict"), b"N}\x8c\x01a\x8c\x01bs\x86b"),
        "an extension code": _opcodes(b"\x82\x01"),
        "an instance of protocol 0": b"(ios\nsystem\n.",
        "a persistent id of protocol 0": b"Pos.system\n.",
        "a memo slot of four billion": _opcodes(b"Nr\xff\xff\xff\xffN"),
        "a memo slot never filled": _opcodes(b"j\xff\xff\xff\xff"),
        "text longer than the file": _opcodes(b"\x8d" + struct.pack("<Q", 1 << 40) + b"x"),
        "bytes longer than the file": _opcodes(b"\x8e" + struct.pack("<Q", 1 << 60) + b"x"),
        "a frame longer than the file": _opcodes(b"\x95" + struct.pack("<Q", 1 << 62) + b"x"),
        "a number of 100,000 digits": b"I" + b"9" * 100_000 + b"\n.",
        "no end": b"\x80\x04}",
        "two values": _opcodes(b"NN"),
        "nothing on the stack": _opcodes(b"0"),
        "a mark that never ends": _opcodes(b"N(") ,
        "a list as a key": _opcodes(b"}]Ns"),
        "a tree of 2^60 leaves as recipe": _opcodes(b"}\x8c\x06recipe", _doubling(60), b"s"),
        "a tree of 2^60 leaves as margin": pickle.dumps(payload()).replace(b"K\x01\x8c", _doubling(60) + b"\x8c", 1),
        "nested very deeply": _opcodes(b"N" + b"\x85" * 200_000),
        "called very deeply": _opcodes(_global("os", "system") + b")R" * 200_000),
        "not a dictionary": pickle.dumps([1, 2]),
        "truncated": pickle.dumps(good)[:-40],
        "noise": bytes(range(256)) * 4,
        "a zip that unpacks to 20 MiB": _bomb_zip(),
        "a zip without a pickle": _zip({"archive/other": b"x"}),
        "a zip that is damaged": _bomb_zip()[:60],
        "a zip that announces too many elements": _liar_zip(1 << 38),
        "a view of a terabyte": _with_storage(_harmless_storage(), (1 << 38,), (0,)),
        "a view beyond its storage": _with_storage(_harmless_storage(), (3,), (2,)),
        "a view before its storage": _with_storage(_harmless_storage(), offset=-1),
        "a view of 2^80 elements": _with_storage(_harmless_storage(), (1 << 40, 1 << 40), (0, 0)),
        "an empty view of huge extent": _with_storage(_harmless_storage(), (0, 1 << 70), (1, 1)),
        "sizes that are no numbers": _with_storage(_harmless_storage(), ("3",), (1,)),
        "a storage of doubles": pickle.dumps(payload(scale_fwd=torch.ones(3, dtype=torch.float64))),
        "integers": pickle.dumps(payload(scale_fwd=torch.ones(3, dtype=torch.int64))),
        "a storage that runs code": _stored(lambda b: pickle.dumps(witness)),
        "a storage that runs code later": _stored(lambda b: b[: b.index(b"\x80", 20)] + pickle.dumps(witness)),
        "a storage that announces a terabyte": _stored(lambda b: b.replace(b"K\x03", b"\x8a\x05\0\0\0\0\x40", 1)),
        "a storage that is cut": _stored(lambda b: b[:-1]),
        "a storage of a big-endian machine": _stored(_big_endian),
        "a storage by name": _with_storage(Harm(open, "/etc/passwd")),
    }  # fmt: skip


def _big_endian(storage: bytes) -> bytes:
    return storage.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89")


def _zip(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def refusal(data: bytes) -> str:
    try:
        te.read_module(as_state(data), "P._extra_state")
    except ScalesError as error:
        return str(error)
    return "accepted"


def test_hostile_payloads_are_refused_and_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "harmed", raising=False)
    cases = hostile()
    assert len(cases) > 50
    for name, data in cases.items():
        message = refusal(data)
        assert re.fullmatch(r"P\._extra_state cannot be imported: .{10,300}\.", message), f"{name}: {message}"
    assert not hasattr(sys, "harmed")


def test_pickle_runs_the_hostile_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """This proves that the payloads of the test above are harmful."""
    for name, data in code().items():
        monkeypatch.delattr(sys, "harmed", raising=False)
        pickle.loads(data)
        assert sys.harmed, name  # type: ignore[attr-defined]
    monkeypatch.delattr(sys, "harmed", raising=False)


def test_unknown_callables_are_not_run() -> None:
    """A callable that the reader does not know is only recorded by its name."""
    module = read(pickled(unknown=Harm(builtins.exec, "raise SystemExit")))
    assert len(module.tensors) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scale_fwd": torch.tensor([1.0, float("nan"), 1.0])}, "NaN"),
        ({"scale_fwd": torch.tensor([1.0, float("inf"), 1.0])}, "infinite"),
        ({"scale_bwd": torch.tensor([-1.0, 1.0])}, "negative"),
        ({"amax_history_fwd": torch.full((N, 3), float("inf"))}, "infinite"),
        ({"amax_history_fwd": torch.ones(N, 4)}, "shape"),
        ({"amax_history_bwd": torch.ones(N + 1, 2)}, "shape"),
        ({"amax_history_fwd": torch.ones(0, 3)}, "shape"),
        ({"scale_fwd": torch.ones(9), "amax_history_fwd": torch.ones(N, 9)}, "3 GEMMs"),
        ({"extra_fp8_variables": {"num_gemms": 2}}, "announces another number"),
        ({"scale_fwd": ...}, "no scale_fwd"),
        ({"recipe": FakeDelayedScaling(fp8_format=FakeFormat.E5M2)}, "neither E4M3 nor HYBRID"),
        ({"recipe": FakeDelayedScaling(margin=99)}, "margin"),
        ({"recipe": FakeDelayedScaling(backward_override="dequantized")}, "backward_override"),
        ({"forward": {}}, "operation fuser"),
    ],
)
def test_invalid_states_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ScalesError, match=sentence):
        te.read_module(pickled(**changes))


@pytest.mark.parametrize("state", [torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8)])
def test_only_bytes_are_read(state: torch.Tensor) -> None:
    with pytest.raises(ScalesError, match="uint8"):
        te.read_module(state)


@pytest.mark.parametrize(
    "value", [None, True, -5, 1 << 70, 0.5, "é" * 300, b"\x00\xff", (1, (2,), ()), [1, [2]], {"a": {"b": [1]}}]
)
@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_what_python_reads(value: Any, protocol: int) -> None:
    data = pickle.dumps({"v": [value, value]}, protocol=protocol)
    if isinstance(value, bytes) and protocol < 3:
        pytest.skip("before protocol 3 bytes are a call")
    assert read_pickle(data) == pickle.loads(data)


# --- names, whole models, the way back --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "linears"),
    [
        ("model.layers.3.self_attn.q_proj", (("model.layers.3.self_attn.q_proj",),)),
        ("module.model.layers.3.mlp.down_proj", (("model.layers.3.mlp.down_proj",),)),
        ("decoder.layers.0.mlp.linear_fc2", (("model.layers.0.mlp.down_proj",),)),
        (
            "transformer.layers.10.layernorm_mlp",
            (("model.layers.10.mlp.gate_proj", "model.layers.10.mlp.up_proj"), ("model.layers.10.mlp.down_proj",)),
        ),
    ],
)
def test_modules_are_matched_by_name(module: str, linears: Any) -> None:
    assert te.linears_of(module) == linears


def test_fused_projections_share_their_scales() -> None:
    states = {
        "decoder.layers.0.self_attention.linear_qkv._extra_state": pickled(),
        "decoder.layers.0.core._extra_state": as_state(b""),
    }
    result = te.import_states(states)
    assert set(result.tensors) == {
        f"model.layers.0.self_attn.{p}_proj.{r}" for p in "qkv" for r in ("input", "weight", "grad_output")
    }
    assert len({float(e.scale) for k, e in result.tensors.items() if k.endswith("weight")}) == 1


def test_unknown_modules_need_a_name_or_a_pattern() -> None:
    states = {"a.b._extra_state": pickled(), "c._extra_state": pickled()}
    with pytest.raises(ScalesError, match=r"a\.b is not a module"):
        te.import_states(states)
    result = te.import_states(states, names={"a.b": [["x"]]}, skip=["c*"])
    assert set(result.tensors) == {"x.input", "x.weight", "x.grad_output"}
    with pytest.raises(ScalesError, match="has 1 GEMMs where its name stands for 2"):
        te.import_states(states, names={"a.b": [["x"], ["y"]]}, skip=["c*"])
    with pytest.raises(ScalesError, match="holds no _extra_state"):
        te.import_states(states, skip=["*"])


def test_a_tensor_never_observed_and_different_recipes_are_refused() -> None:
    never = {"a._extra_state": pickled(amax_history_fwd=torch.zeros(N, 3))}
    with pytest.raises(ScalesError, match=r"x\.input was never observed"):
        te.import_states(never, names={"a": [["x"]]})
    two = {"a._extra_state": pickled(), "b._extra_state": pickled(recipe=FakeDelayedScaling(margin=2))}
    with pytest.raises(ScalesError, match="recipes of a and b differ"):
        te.import_states(two, names={"a": [["x"]], "b": [["y"]]})


def checkpoint(linears: list[str], length: int = N) -> ScalingCheckpoint:
    generator = torch.Generator().manual_seed(0)

    def entry() -> TensorScale:
        values = torch.rand(length + 1, generator=generator) + 0.1
        return TensorScale(values[0].clone(), values[1:].clone())

    roles = ("input", "weight", "grad_output")
    return ScalingCheckpoint(
        DelayedScaling(amax_history_len=length), {f"{n}.{r}": entry() for n in linears for r in roles}
    )


@pytest.mark.parametrize("gemms", [1, 2])
def test_an_exported_state_is_read_back_exactly(gemms: int) -> None:
    linears = ["fc1", "fc2"][:gemms]
    ours = checkpoint(linears)
    back = te.import_states({"m._extra_state": te.export_module(ours, linears)}, names={"m": [[n] for n in linears]})
    assert back.recipe == ours.recipe
    assert set(back.tensors) == set(ours.tensors)
    for key, entry in ours.tensors.items():
        assert torch.equal(back.tensors[key].scale, entry.scale)
        assert torch.equal(back.tensors[key].amax_history, entry.amax_history)  # type: ignore[arg-type]


def test_an_export_can_be_unpickled_like_transformer_engine_does() -> None:
    """Its set_extra_state: pickle.loads, then these keys; without a recipe it assumes DelayedScaling()."""
    ours = checkpoint(["P"])
    state = pickle.loads(te.export_states(ours)["P._extra_state"].numpy().tobytes())
    assert {k: tuple(v.shape) for k, v in state.items() if k != "extra_fp8_variables"} == {
        "scale_fwd": (3,), "scale_inv_fwd": (3,), "amax_history_fwd": (N, 3),
        "scale_bwd": (2,), "scale_inv_bwd": (2,), "amax_history_bwd": (N, 2),
    }  # fmt: skip
    assert state["extra_fp8_variables"]["num_gemms"] == 1
    assert torch.equal(state["scale_fwd"][1], ours.tensors["P.weight"].scale)
    assert float(state["scale_fwd"][2]) == 1.0  # the output, which neither project quantizes


def test_scales_that_cannot_be_exported_are_refused() -> None:
    with pytest.raises(ScalesError, match="no delayed state"):
        te.export_module(checkpoint(["P"]), ["Q"])
    with pytest.raises(ScalesError, match="one or two"):
        te.export_module(checkpoint(["P", "Q", "R"]), ["P", "Q", "R"])
    mixed = ScalingCheckpoint(None, {**checkpoint(["P"]).tensors, **checkpoint(["Q"], N + 1).tensors})
    with pytest.raises(ScalesError, match="one length"):
        te.export_module(mixed, ["P", "Q"])


def test_a_file_becomes_scales_of_a_model_and_is_shown(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    linears = [f"model.layers.{i}.{p}" for i in range(2) for p in _PROJECTIONS]
    file = tmp_path / "te.safetensors"
    save_file({**te.export_states(checkpoint(linears)), "other.weight": torch.ones(2)}, file)
    save_scales(tmp_path / "scales.safetensors", te.read_file(file, model))
    scale = load_scales(tmp_path / "scales.safetensors", model).input_scale(linears[0])
    served = load_servable(model, DelayedScaling(), scales=tmp_path / "scales.safetensors")
    assert torch.equal(served.get_submodule(linears[0]).input_scale, scale)  # type: ignore[arg-type]
    report = inspect(file)
    assert report["holds"] == "delayed scaling state of Transformer Engine"
    assert {s["tensor"] for s in report["scales"]} == {
        f"{n}.{r}" for n in linears for r in ("input", "weight", "grad_output")
    }
    assert all(s["direction"] == "quantizes" and len(s["history"]) == N for s in report["scales"])


_PROJECTIONS = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]


def _mutated(data: bytes, chance: random.Random) -> bytes:
    """Returns a few bytes changed, removed or repeated."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed))
        match chance.randrange(3):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                del changed[at : at + chance.randint(1, 8)]
            case _:
                changed[at:at] = changed[at : at + chance.randint(1, 32)]
    return bytes(changed)


@pytest.mark.parametrize("seed", range(4))
def test_randomly_damaged_payloads_are_refused_or_harmless(seed: int) -> None:
    """The result is a state with usable scales, None, or one sentence, and never another exception."""
    chance = random.Random(seed)
    originals = [bytes(state.numpy()) for state in (pickled(), state_of_version_1(), pickled(gemms=2))]
    for _ in range(150):
        data = _mutated(chance.choice(originals), chance)
        try:
            module = te.read_module(as_state(data))
        except ScalesError:
            continue
        for tensors in module.tensors if module else []:
            assert all(bool(entry.scale.isfinite()) for entry in tensors.values())
