"""The device layer: what differs between backends below the operators.

One rank, one device. Only `cpu` is built in so far; the seam is where `cuda` and `npu` join.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from torch import Tensor

from placement.errors import ConfigError
from rank_worker.streams import HostStreams, Streams


class Device(Protocol):
    """Verbs that every backend has."""

    name: str

    def pack_linear(self, weight: Tensor) -> Tensor:
        """A weight [out, in] in the memory layout that this device multiplies fastest with."""

    def open_streams(self) -> Streams:
        """Queues for copies beside the one that the model runs on."""

    def release_freed(self) -> None:
        """Gives back memory that was freed and that the allocator keeps, after a load."""


class CpuDevice:
    """Host memory; one thread a rank."""

    name = "cpu"

    def pack_linear(self, weight: Tensor) -> Tensor:
        """Column-major: 1.1-1.6 times faster than row-major at 1-16 rows (MKL, fp32 and AVX2)."""
        return weight.t().contiguous().t()

    def open_streams(self) -> Streams:
        return HostStreams()

    def release_freed(self) -> None:
        """glibc keeps freed blocks below 32 MiB: 50-70 MiB of a rank after a load of 1 GiB.

        Other C libraries have no such call and give freed memory back by themselves.
        """
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def open_device(name: str) -> Device:
    """The device of this rank; ConfigError when the backend is not built in."""
    if name == CpuDevice.name:
        return CpuDevice()
    raise ConfigError(f"device {name!r} is not built in yet: use --device cpu")
