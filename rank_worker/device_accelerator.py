"""What devices with queues and memory of their own share: chips, weights, uploads, graphs.

Works on a torch backend module, `torch.cuda` or one with the same calls. Knows no library: who
loads it and what is special about it is the subclass's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ops.spec import OpInfo
from placement.errors import ConfigError
from rank_worker.device import CapturedGraph
from rank_worker.streams import AcceleratorStreams, Streams
from rank_worker.weights import WeightSource

HOST = torch.device("cpu")
UPLOAD_WORDS = 1 << 14  # of one staging buffer
UPLOAD_BUFFERS = 4  # steps that may be on their way to the device


class PlacedWeights(WeightSource):
    """A source whose tensors go to a device as they are taken: a layer is on the host at a time."""

    def __init__(self, source: WeightSource, device: torch.device) -> None:
        self._source, self._device = source, device
        self.row_bytes = source.row_bytes

    def take(self, *prefixes: str) -> dict[str, Any]:
        with HOST:
            held = self._source.take(*prefixes)
        return {role: held.pop(role).to(self._device) for role in tuple(held)}

    def check_taken(self) -> None:
        self._source.check_taken()


class Uploads:
    """Integers of the step plan on their way to the device, through page-locked buffers.

    A buffer is written again only after an event says that its copies are done; the host waits for
    it when the device is UPLOAD_BUFFERS buffers behind, and `waits` counts that.
    """

    def __init__(self, backend: Any, device: torch.device) -> None:
        self._backend, self._device = backend, device
        shape = (UPLOAD_BUFFERS, UPLOAD_WORDS)
        self._words = torch.empty(shape, dtype=torch.int64, pin_memory=True, device=HOST)
        self._array = self._words.numpy()
        self._events: list[Any] = [None] * UPLOAD_BUFFERS
        self._buffer = self._at = 0
        self.waits = 0

    def __call__(self, values: Sequence[int]) -> Tensor:
        count = len(values)
        if count > UPLOAD_WORDS:
            parts = [values[at : at + UPLOAD_WORDS] for at in range(0, count, UPLOAD_WORDS)]
            return torch.cat([self(part) for part in parts])
        out = torch.empty(count, dtype=torch.int64, device=self._device)
        if not count:
            return out
        if self._at + count > UPLOAD_WORDS:
            self._turn()
        place = slice(self._at, self._at + count)
        self._array[self._buffer, place] = values
        out.copy_(self._words[self._buffer, place], non_blocking=True)
        self._at += count
        return out

    def _turn(self) -> None:
        """The next buffer, once the device has read what was in it."""
        event = self._events[self._buffer] or self._backend.Event()
        event.record()
        self._events[self._buffer] = event
        self._buffer, self._at = (self._buffer + 1) % UPLOAD_BUFFERS, 0
        held = self._events[self._buffer]
        if held is not None and not held.query():
            self.waits += 1
            held.synchronize()


class Recorded:
    """A captured graph of either library."""

    def __init__(self, graph: Any, result: Any) -> None:
        self._graph, self.result = graph, result

    def replay(self) -> None:
        self._graph.replay()


class AcceleratorDevice:
    """One chip. `begin` loads the library and takes the chip."""

    name = ""
    has_queues = True

    def __init__(self) -> None:
        self.backend: Any = None
        self.device = HOST
        self._uploads: Uploads | None = None
        self._pool: Any = None

    def begin(self, rank: int, dtype: torch.dtype) -> None:
        if self.backend is None:
            self.backend = self._load()
        index = self._index(rank, self.backend.device_count())
        self.backend.set_device(index)
        self.device = torch.device(self.name, index)

    def _load(self) -> Any:
        """The backend module; ConfigError when the library or its driver is missing."""
        raise NotImplementedError

    def _graph(self) -> Any:
        """An empty graph of the library."""
        raise NotImplementedError

    def _index(self, rank: int, count: int) -> int:
        """One visible chip is this rank's own (Ray sets which); of several each rank has one."""
        if not count:
            raise ConfigError(f"--device {self.name}: no chip is visible; see nrank doctor")
        if count > 1 and rank >= count:
            raise ConfigError(
                f"--device {self.name}: rank {rank} has no chip, {count} are visible; use fewer "
                "ranks"
            )
        return rank if count > 1 else 0

    def building(self) -> AbstractContextManager[Any]:
        return self.device

    def weights(self, source: WeightSource) -> WeightSource:
        return PlacedWeights(source, self.device)

    def place(self, value: Tensor) -> Tensor:
        return value.to(self.device)

    def prepare(self, chosen: Sequence[OpInfo]) -> None:
        """Every layout is one that the reference reads, too."""

    def pack_linear(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def pack_bank(self, bank: Tensor) -> Tensor:
        return bank.contiguous()

    def pack_taps(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def upload(self, values: Sequence[int]) -> Tensor:
        if self._uploads is None:
            self._uploads = Uploads(self.backend, self.device)
        return self._uploads(values)

    def open_streams(self) -> Streams:
        return AcceleratorStreams(self.backend, HOST)

    def max_graphs(self, world_size: int) -> int | None:
        return None

    def capture(self, function: Callable[[], Any]) -> CapturedGraph:
        """All graphs of a rank share one pool: they run one after the other."""
        if self._pool is None:
            self._pool = self.backend.graph_pool_handle()
        graph = self._graph()
        with self.backend.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return Recorded(graph, result)

    def release_freed(self) -> None:
        self.backend.empty_cache()
