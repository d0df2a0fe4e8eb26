"""Queues of copies on a device, and the fences that order one queue after another.

Knows tensors, not what they hold: who has to wait for whom is the caller's business.
"""

from __future__ import annotations

from enum import Enum, auto
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor


class Queue(Enum):
    """Work of one queue is done in the order it was put there; queues run beside each other."""

    COMPUTE = auto()  # where the model runs
    ARCHIVE = auto()  # device -> host
    RESTORE = auto()  # host -> device


Fence: TypeAlias = Any
"""A point in a queue. Opaque: only the streams that made it read it."""


class Streams(Protocol):
    """The copy queues of one device. No verb blocks the host where the backend has streams.

    Tensors have to live until their copies are done.
    """

    def copy(self, queue: Queue, source: Tensor, target: Tensor) -> None:
        """Puts a copy of `source` into `target`, of one shape and dtype, into the queue."""

    def record(self, queue: Queue) -> Fence:
        """A fence that is done when all that was put into the queue before is done."""

    def wait(self, queue: Queue, fence: Fence) -> None:
        """What is put into the queue from now on starts only after the fence is done."""

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that copies read and write without blocking; its content is undefined."""

    def seconds(self, begin: Fence, end: Fence) -> float | None:
        """Time on the device between two fences of one queue; None while `end` is not done."""


class HostStreams:
    """A device without queues: a copy is done when the call returns."""

    def copy(self, queue: Queue, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def record(self, queue: Queue) -> Fence:
        return perf_counter()

    def wait(self, queue: Queue, fence: Fence) -> None:
        """Nothing to wait for: a fence is done when it is made."""

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def seconds(self, begin: Fence, end: Fence) -> float | None:
        return float(end - begin)


class AcceleratorStreams:
    """Streams and events of a torch backend module, `torch.cuda` or one with the same calls.

    Works on the backend's current device. COMPUTE is the stream that is current at each call.
    """

    def __init__(self, backend: Any, host: torch.device | None = None) -> None:
        """`host` is the device of host memory, where new tensors lie elsewhere by default."""
        self._backend, self._host = backend, host
        self._side = {queue: backend.Stream() for queue in (Queue.ARCHIVE, Queue.RESTORE)}

    def copy(self, queue: Queue, source: Tensor, target: Tensor) -> None:
        if queue is Queue.COMPUTE:
            target.copy_(source, non_blocking=True)
            return
        with self._backend.stream(self._side[queue]):
            target.copy_(source, non_blocking=True)

    def record(self, queue: Queue) -> Fence:
        event = self._backend.Event(enable_timing=True)
        event.record(self._stream(queue))
        return event

    def wait(self, queue: Queue, fence: Fence) -> None:
        self._stream(queue).wait_event(fence)

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Page-locked. torch's allocator may round a block up to a power of two bytes."""
        return torch.empty(shape, dtype=dtype, pin_memory=True, device=self._host)

    def seconds(self, begin: Fence, end: Fence) -> float | None:
        return begin.elapsed_time(end) / 1e3 if end.query() else None

    def _stream(self, queue: Queue) -> Any:
        return self._backend.current_stream() if queue is Queue.COMPUTE else self._side[queue]
