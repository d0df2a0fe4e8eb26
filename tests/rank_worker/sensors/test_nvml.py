"""Readings through a stand-in for nvidia-ml-py that refuses what the real one refuses."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rank_worker.device_sensors.nvml import NvmlSource, open_nvml
from rank_worker.device_sensors.reading import CardReading, ChipReading

GIB = 1 << 30


class NVMLError(Exception):
    """As in pynvml: carries a code."""


class FakeNvml(ModuleType):
    """Two devices. Queries need nvmlInit, which is counted against nvmlShutdown, and a handle."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.initialised = 0
        self.driver = True
        self.lost = False
        self.unsupported: set[str] = set()

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self._check()
        self.initialised -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[str, int]:
        self._check()
        if index not in (0, 1):
            raise NVMLError("Invalid Argument")
        return "handle", index

    def nvmlDeviceGetName(self, handle: Any) -> bytes:
        self._device(handle, "name")
        return b"GPU"

    def nvmlDeviceGetPciInfo(self, handle: Any) -> SimpleNamespace:
        index = self._device(handle, "pci")
        return SimpleNamespace(busId=f"00000000:{index + 1:02X}:00.0")

    def nvmlDeviceGetTemperatureThreshold(self, handle: Any, kind: int) -> int:
        assert kind == 0
        self._device(handle, "threshold")
        return 92

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        assert sensor == 0
        return 60 + self._device(handle, "temperature")

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> SimpleNamespace:
        self._device(handle, "memory")
        return SimpleNamespace(total=16 * GIB, free=13 * GIB, used=3 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> SimpleNamespace:
        self._device(handle, "utilisation")
        return SimpleNamespace(gpu=50, memory=25)

    def nvmlDeviceGetEccMode(self, handle: Any) -> list[int]:
        self._device(handle, "ecc")
        return [1, 0]

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:
        assert kind in (0, 1)
        assert counter == 0
        self._device(handle, "ecc")
        return 5 - 5 * kind

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[SimpleNamespace]:
        self._device(handle, "processes")
        return [
            SimpleNamespace(pid=7, usedGpuMemory=GIB),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ]

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        self._device(handle, "power")
        return 71_500

    def _check(self) -> None:
        if not self.initialised:
            raise NVMLError("Uninitialized")

    def _device(self, handle: Any, what: str) -> int:
        self._check()
        assert handle in (("handle", 0), ("handle", 1))
        if self.lost:
            raise NVMLError("GPU is lost")
        if what in self.unsupported:
            raise NVMLError("Not Supported")
        return int(handle[1])


def opened(library: FakeNvml) -> NvmlSource:
    return NvmlSource(library)


def test_all_fields() -> None:
    library = FakeNvml()
    source = opened(library)
    reading = source.read()
    assert reading.error is None
    assert reading.chips[1] == ChipReading(
        npu_id=1,
        chip_id=0,
        device_index=1,
        bus_id="00000000:02:00.0",
        temperature_celsius=61,
        memory_used_bytes=3 * GIB,
        memory_total_bytes=16 * GIB,
        core_utilisation_ratio=0.5,
        bandwidth_utilisation_ratio=0.25,
        ecc_enabled=True,
        ecc_single_bit=5,
        ecc_double_bit=0,
        shutdown_celsius=92,
        processes=((7, GIB),),
    )
    assert reading.cards == (CardReading(0, 71.5, "GPU"), CardReading(1, 71.5, "GPU"))
    source.read()
    assert library.initialised == 1
    source.close()
    source.close()
    assert library.initialised == 0


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("threshold", ["shutdown_celsius"]),
        ("memory", ["memory_used_bytes", "memory_total_bytes"]),
        ("utilisation", ["core_utilisation_ratio", "bandwidth_utilisation_ratio"]),
        ("ecc", ["ecc_enabled", "ecc_single_bit", "ecc_double_bit"]),
        ("processes", ["processes"]),
        ("pci", ["bus_id"]),
    ],
)
def test_what_a_device_does_not_support_is_absent(what: str, fields: list[str]) -> None:
    library = FakeNvml()
    library.unsupported.add(what)
    (chip, _) = opened(library).read().chips
    absent = [name for name in chip.__slots__ if getattr(chip, name) is None]
    assert sorted(absent) == sorted([*fields, "health", "error_codes"])


def test_a_lost_device_is_an_error_and_comes_back() -> None:
    library = FakeNvml()
    source = opened(library)
    library.lost = True
    reading = source.read()
    assert reading.chips == ()
    assert reading.error == "NVML: GPU is lost; run nvidia-smi, look at `dmesg`"
    assert library.initialised == 0
    library.lost = False
    assert source.read().error is None
    assert library.initialised == 1


def test_without_a_driver_or_the_package_there_is_no_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    found = open_nvml()
    assert found is not None
    assert library.initialised == 0
    library.driver = False
    assert open_nvml() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_nvml() is None
