"""The device layer: what differs between backends below the operators.

One rank, one device. A device's own library is loaded when the device begins, never earlier.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ops.spec import Capability, OpInfo
from placement.errors import ConfigError
from rank_worker.streams import HostStreams, Streams
from rank_worker.weights import WeightSource


class CapturedGraph(Protocol):
    """Launches recorded once; `replay` runs them again on the same tensors.

    `result` is what the recorded function returned: tensors that each replay writes anew.
    """

    result: Any

    def replay(self) -> None: ...


class Device(Protocol):
    """Verbs that every backend has."""

    name: str
    has_queues: bool  # work is done later than it is asked for, so a read of a result waits

    def begin(self, rank: int, dtype: torch.dtype) -> None:
        """Takes the chip of this rank, for the calling thread; before anything else of a rank.

        ConfigError when there is none, or when it can't compute in `dtype`. Every thread that
        uses the device calls it.
        """

    def capability(self, dtype: torch.dtype) -> Capability:
        """What operators are chosen by."""

    def building(self) -> AbstractContextManager[Any]:
        """Inside, what makes a tensor without naming a device makes it on this one."""

    def weights(self, source: WeightSource) -> WeightSource:
        """Hands out the tensors of `source` on this device."""

    def place(self, value: Tensor) -> Tensor:
        """A tensor of the host on this device."""

    def prepare(self, chosen: Sequence[OpInfo]) -> None:
        """Learns which operators will read what is packed from now on."""

    def pack_linear(self, weight: Tensor) -> Tensor:
        """A weight [out, in] in the memory layout that this device multiplies fastest with."""

    def pack_bank(self, bank: Tensor) -> Tensor:
        """The same for every expert of a bank [experts, out, in], which keeps its shape."""

    def pack_taps(self, weight: Tensor) -> Tensor:
        """A weight [channels, taps] in the layout that is fastest column by column."""

    def upload(self, values: Sequence[int]) -> Tensor:
        """int64 on the device, without waiting for it where it has queues."""

    def open_streams(self) -> Streams:
        """Queues for copies beside the one that the model runs on."""

    def max_graphs(self, world_size: int) -> int | None:
        """Graphs that a rank of such a gang may hold; None: no limit, 0: there are none."""

    def capture(self, function: Callable[[], Any]) -> CapturedGraph:
        """Records what `function` launches. It ran before; it makes no state and reads nothing."""

    def release_freed(self) -> None:
        """Gives back memory that was freed and that the allocator keeps, after a load."""


def packed_bank(bank: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """`bank` [experts, out, in] with each expert in the layout that `pack` gives it.

    Rewritten in place, so that no more than one expert is in memory twice.
    """
    strides = bank.stride()
    for expert in bank:
        packed = pack(expert)
        expert.as_strided(packed.shape, packed.stride()).copy_(packed)
        strides = (bank.stride(0), *packed.stride())
    return bank.as_strided(bank.shape, strides)


class CpuDevice:
    """Host memory; one thread a rank."""

    name = "cpu"
    has_queues = False

    def begin(self, rank: int, dtype: torch.dtype) -> None:
        """Nothing to take."""

    def capability(self, dtype: torch.dtype) -> Capability:
        return Capability(self.name, dtype=dtype)

    def building(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def weights(self, source: WeightSource) -> WeightSource:
        return source

    def place(self, value: Tensor) -> Tensor:
        return value

    def prepare(self, chosen: Sequence[OpInfo]) -> None:
        """Every layout is one that the reference reads, too."""

    def pack_linear(self, weight: Tensor) -> Tensor:
        """Column-major: 1.1-1.6 times faster than row-major at 1-16 rows (MKL, fp32 and AVX2)."""
        return weight.t().contiguous().t()

    def pack_bank(self, bank: Tensor) -> Tensor:
        return packed_bank(bank, self.pack_linear)

    def pack_taps(self, weight: Tensor) -> Tensor:
        return self.pack_linear(weight)

    def upload(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def open_streams(self) -> Streams:
        return HostStreams()

    def max_graphs(self, world_size: int) -> int | None:
        return 0

    def capture(self, function: Callable[[], Any]) -> CapturedGraph:
        raise AssertionError("there is nothing to record launches of")

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
    if name == "cuda":
        from rank_worker.device_cuda import CudaDevice

        return CudaDevice()
    if name == "npu":
        from rank_worker.device_npu import NpuDevice

        return NpuDevice()
    raise ConfigError(f"device {name!r} is not built in: use --device cpu, cuda or npu")
