"""A device that records and replays, played on the CPU, and a rank on it that pickles."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

from ops.spec import Capability
from rank_worker.device import CpuDevice
from rank_worker.rank import Rank


class Replay:
    """Runs what was recorded again, into the tensors that it made first."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.result = function()

    def replay(self) -> None:
        for held, made in zip(self.result, self._function(), strict=True):
            held.copy_(made)


class StaleReplay(Replay):
    """A graph that misses an input."""

    def replay(self) -> None:
        pass


class ReplayingDevice(CpuDevice):
    """Work is queued as on a chip: shapes don't follow positions, and steps can be recorded."""

    has_queues = True

    def __init__(
        self, replay: type[Replay] = Replay, graphs: int | None = None, backend: str = "played"
    ) -> None:
        """Operators are those of `backend`; one without variants runs the reference."""
        self._replay, self._graphs, self._backend = replay, graphs, backend
        self.recorded = 0

    def capability(self, dtype: torch.dtype) -> Capability:
        return Capability(self._backend, dtype=dtype)

    def max_graphs(self, world_size: int) -> int | None:
        return self._graphs

    def capture(self, function: Callable[[], Any]) -> Replay:
        self.recorded += 1
        return self._replay(function)


class Fault(StrEnum):
    """What goes wrong on one rank; the value is part of the reason that it tells."""

    RECORDING = "recording 2 rows failed: event resources are insufficient"
    REPLAY = "differs"


class ReplayingRank(Rank):
    """A rank on a device of its own, with `fault` where its number is `broken`."""

    def __init__(self, *arguments: Any, fault: Fault, broken: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        is_stale = self.rank == broken and fault is Fault.REPLAY
        device = self._device = ReplayingDevice(LoudReplay if is_stale else Replay)
        if self.rank == broken and fault is Fault.RECORDING:
            device.capture = refuse  # type: ignore[method-assign]


class LoudReplay(Replay):
    """Takes part in every collective and gets another result."""

    def replay(self) -> None:
        super().replay()
        self.result[0].add_(1.0)


def refuse(function: Callable[[], Any]) -> Replay:
    """Fails at the end of what it records."""
    function()
    raise RuntimeError("event resources are insufficient")
