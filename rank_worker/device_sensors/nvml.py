"""Readings of CUDA devices through nvidia-ml-py, which is there with the `cuda` extra.

A GPU is a card with one chip 0; its number is NVML's, which is the PCI bus's order. CUDA numbers
alike where all GPUs are of one kind, else with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

from rank_worker.device_sensors.reading import CardReading, ChipReading, NodeReading
from rank_worker.device_sensors.source import taken_now

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Device:
    """What a device says once: NVML's handle, its name, bus id and limit."""

    handle: object
    name: str | None
    bus_id: str | None
    shutdown_celsius: float | None


def open_nvml() -> NvmlSource | None:
    """None without nvidia-ml-py or without an NVIDIA driver."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    library.nvmlShutdown()
    return NvmlSource(library)


class NvmlSource:
    """In this process: NVML is made for it. A field that a device does not support is absent."""

    name = "nvml"

    def __init__(self, library: ModuleType) -> None:
        self._nvml = library
        self._devices: list[_Device] | None = None  # None: not initialised

    def read(self) -> NodeReading:
        """After an error, such as a driver that was reloaded, the library starts anew."""
        try:
            if self._devices is None:
                self._nvml.nvmlInit()
                self._devices = []
                count = self._nvml.nvmlDeviceGetCount()
                self._devices = [self._open(index) for index in range(count)]
            chips = tuple(self._chip(index, d) for index, d in enumerate(self._devices))
            cards = tuple(
                CardReading(index, self._power_watts(device), device.name)
                for index, device in enumerate(self._devices)
            )
        except self._nvml.NVMLError as error:
            self.close()
            return taken_now(self.name, error=f"NVML: {error}; run nvidia-smi, look at `dmesg`")
        return taken_now(self.name, chips, cards)

    def close(self) -> None:
        if self._devices is not None:
            self._devices = None
            self._ask(self._nvml.nvmlShutdown)

    def _open(self, index: int) -> _Device:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        limit = nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN
        return _Device(
            handle,
            self._ask(lambda: _text(nvml.nvmlDeviceGetName(handle))),
            self._ask(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
            self._ask(lambda: float(nvml.nvmlDeviceGetTemperatureThreshold(handle, limit))),
        )

    def _chip(self, index: int, device: _Device) -> ChipReading:
        """Temperature tells whether the device is there: without it all is an error."""
        nvml, handle = self._nvml, device.handle
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        ecc = self._ask(lambda: nvml.nvmlDeviceGetEccMode(handle))
        return ChipReading(
            npu_id=index,
            chip_id=0,
            device_index=index,
            bus_id=device.bus_id,
            temperature_celsius=float(
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            core_utilisation_ratio=None if rates is None else rates.gpu / 100,
            bandwidth_utilisation_ratio=None if rates is None else rates.memory / 100,
            ecc_enabled=None if ecc is None else bool(ecc[0]),
            ecc_single_bit=self._ecc_errors(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_double_bit=self._ecc_errors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            shutdown_celsius=device.shutdown_celsius,
            processes=self._processes(handle),
        )

    def _ecc_errors(self, handle: object, kind: int) -> int | None:
        nvml = self._nvml
        return self._ask(
            lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))
        )

    def _processes(self, handle: object) -> tuple[tuple[int, int], ...] | None:
        """Those whose memory is known."""
        found = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if found is None:
            return None
        return tuple(
            (int(p.pid), int(p.usedGpuMemory)) for p in found if p.usedGpuMemory is not None
        )

    def _power_watts(self, device: _Device) -> float | None:
        return self._ask(lambda: self._nvml.nvmlDeviceGetPowerUsage(device.handle) / 1000)

    def _ask(self, query: Callable[[], T]) -> T | None:
        try:
            return query()
        except self._nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
