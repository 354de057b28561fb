"""The device that `device="auto"` chooses, on simulated GPUs."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8serve.calibration.options import CalibrationOptions
from fp8serve.errors import ModelError
from fp8serve.fp8.cuda_support import Gpu
from fp8serve.model import device
from fp8serve.model.device import DeviceChoice, choose_device, find_device, resolve_device, torch_cuda_version
from fp8serve.terminal import on_device
from fp8serve.train.scratch import write_random_model

GIB = 2**30
H100 = Gpu("NVIDIA H100", 90, int(79.1 * GIB))
L4 = Gpu("NVIDIA L4", 89, int(22.5 * GIB))


@pytest.mark.parametrize(
    ("gpu", "weights", "chosen"),
    [(H100, 0.14, "cuda"), (H100, 8, "cuda"), (H100, 65, "cuda"), (H100, 66, "cpu"), (L4, 16, "cuda"), (L4, 18, "cpu")],
)
def test_weights_that_fit_run_on_the_gpu(gpu: Gpu, weights: float, chosen: str) -> None:
    choice = choose_device([gpu], None, int(weights * GIB))
    needed = f"the model needs about {1.2 * weights + 1:.1f} GiB"
    assert choice == DeviceChoice(chosen, f"{gpu.name} has {gpu.memory / GIB:.1f} GiB and {needed}")


def test_without_a_usable_gpu_the_cpu_is_chosen() -> None:
    assert choose_device([], None, 0) == DeviceChoice("cpu", "the CUDA driver finds no GPU", has_gpu=False)
    assert choose_device([H100], "it is too old", 0).text == "device auto: cpu, because it is too old"


def test_every_process_needs_a_gpu() -> None:
    assert choose_device([H100], None, 0, processes=2).text == (
        "device auto: cpu, because 2 processes need a GPU each, and there are 1"
    )
    assert choose_device([H100, L4], None, 8 * GIB, processes=2).device == "cuda"
    assert choose_device([H100, L4], None, 40 * GIB, processes=2).device == "cpu"
    assert choose_device([H100, L4], None, 40 * GIB).device == "cuda"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Stands for a machine with GPUs, with a library of kernels and a PyTorch for them."""

    def make(*gpus: Gpu, architectures: str | None = "sm_89+sm_90a", torch_cuda: str | None = "13.0") -> None:
        library = tmp_path / "libfp8serve_cuda.so"
        library.write_bytes(f"fp8serve-cuda-architectures={architectures};fp8serve-cuda-runtime=13.0.88;".encode())
        monkeypatch.setattr(device, "visible_gpus", lambda: list(gpus))
        monkeypatch.setattr(device, "driver_version", lambda: (13, 0))
        monkeypatch.setattr(device, "library_path", lambda stem: None if architectures is None else library)
        monkeypatch.setattr(device, "torch_cuda_version", lambda: torch_cuda)

    return make


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model", ["some text"])


def test_the_reason_names_what_the_gpu_lacks(machine: Callable[..., None], model_dir: Path) -> None:
    machine(H100)
    assert find_device(model_dir).device == "cuda"
    machine(H100, torch_cuda=None)
    assert find_device(model_dir).reason == "this PyTorch is built without CUDA"
    machine(H100, architectures=None)
    assert find_device(model_dir).reason == "fp8serve is built without CUDA kernels (fp8serve doctor says why)"
    machine(Gpu("NVIDIA T4", 75, 15 * GIB))
    reason = "the CUDA kernels were built for sm_89 sm_90a and not for NVIDIA T4 (sm_75)"
    assert find_device(model_dir) == DeviceChoice("cpu", reason)
    machine()
    assert find_device(model_dir).has_gpu is False


def test_the_choice_is_logged_and_an_explicit_device_is_used(
    machine: Callable[..., None], model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fp8serve.device")
    machine(H100)
    assert resolve_device("cpu", model_dir) == "cpu"
    assert caplog.messages == []
    assert resolve_device("auto", model_dir) == "cuda"
    assert caplog.messages == ["device auto: cuda, because NVIDIA H100 has 79.1 GiB and the model needs about 1.0 GiB"]


def test_commands_print_a_choice_between_devices(
    machine: Callable[..., None],
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"device": "auto", "recipe": "rowwise", "seed": 3}
    machine()
    assert on_device(values, model_dir) == values | {"device": "cpu"}
    assert on_device({"device": "cuda:1"}, model_dir) == {"device": "cuda:1"}
    assert capsys.readouterr().err == ""
    machine(H100)
    assert on_device(values, model_dir) == values | {"device": "cuda"}
    assert capsys.readouterr().err.startswith("device auto: cuda, because NVIDIA H100 has 79.1 GiB")
    assert on_device(values, model_dir, processes=2)["device"] == "cpu"
    assert "2 processes need a GPU each" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    on_device(values, model_dir)
    assert capsys.readouterr().err == ""


def test_several_processes_calibrate_on_the_cpu(machine: Callable[..., None], model_dir: Path) -> None:
    machine(H100, L4)
    assert CalibrationOptions().on_device(model_dir).device == "cuda"
    assert CalibrationOptions().on_device(model_dir, processes=2).device == "cpu"
    assert CalibrationOptions(device="cuda:1").on_device(model_dir, processes=2).device == "cuda:1"


def test_memory_is_compared_with_the_weights_of_the_recipe(
    machine: Callable[..., None], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This GPU has room for the weights in FP8, but not in BF16."""
    sizes = {r: device.estimate_weight_memory(model_dir, r).served for r in ("rowwise", "bf16")}
    monkeypatch.setattr(device, "EXTRA_BYTES", 0)
    machine(Gpu("small", 90, int(1.2 * sum(sizes.values()) / 2)))
    assert {recipe: find_device(model_dir, recipe).device for recipe in sizes} == {"rowwise": "cuda", "bf16": "cpu"}


def test_a_directory_without_a_model_is_an_error(machine: Callable[..., None], tmp_path: Path) -> None:
    machine(H100)
    with pytest.raises(ModelError, match=r"config\.json"):
        find_device(tmp_path)


def test_the_version_of_cuda_is_read_without_importing_torch() -> None:
    assert torch_cuda_version() == torch.version.cuda
