"""`visible_gpus` and `driver_version`, with a fake driver library."""

from typing import Any

import pytest

from fp8serve.fp8 import cuda_support
from fp8serve.fp8.cuda_support import Gpu, driver_version, visible_gpus

H100 = ("NVIDIA H100 80GB HBM3", 9, 0, 84_929_347_584)
L4 = ("NVIDIA L4", 8, 9, 23_609_475_072)


class FakeDriver:
    """Behaves like libcuda: writes results through pointers; a status other than 0 is an error."""

    def __init__(self, *gpus: tuple[str, int, int, int], status: int = 0, broken: int | None = None) -> None:
        self.gpus, self.status, self.broken = gpus, status, broken

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.status

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 13_020
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = 7 + index  # a handle differs from its index
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:  # noqa: N802
        name.value = self.gpus[device.value - 7][0].encode()[: length - 1]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = self.gpus[device.value - 7][{75: 1, 76: 2}[attribute]]
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:  # noqa: N802
        memory._obj.value = self.gpus[device.value - 7][3]
        return 999 if self.broken == device.value - 7 else 0


def test_the_driver_describes_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_support, "_load_driver", lambda: FakeDriver(H100, L4))
    assert visible_gpus() == [Gpu(H100[0], 90, H100[3]), Gpu(L4[0], 89, L4[3])]
    assert driver_version() == (13, 2)


def test_a_gpu_that_cannot_be_described_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_support, "_load_driver", lambda: FakeDriver(H100, L4, broken=0))
    assert [gpu.name for gpu in visible_gpus()] == ["NVIDIA L4"]


def test_a_driver_that_fails_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_support, "_load_driver", lambda: FakeDriver(H100, status=100))
    assert visible_gpus() == []
    assert driver_version() is None


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_support, "DRIVER", "libdoes-not-exist.so.9")
    assert visible_gpus() == []
    assert driver_version() is None


@pytest.mark.gpu
def test_the_driver_and_torch_agree() -> None:
    import torch

    gpus = visible_gpus()
    assert len(gpus) == torch.cuda.device_count()
    for index, gpu in enumerate(gpus):
        properties = torch.cuda.get_device_properties(index)
        assert (gpu.name, gpu.capability) == (properties.name, 10 * properties.major + properties.minor)
        assert abs(gpu.memory - properties.total_memory) <= 2**20
