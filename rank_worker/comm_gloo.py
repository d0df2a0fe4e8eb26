"""Collectives over sockets: the control group that carries plans, and the data group.

The control group is always gloo on the CPU. The data group's backend is a name, so that a device's
own library can be added to `DATA_GROUPS`. Process groups are built directly on the gang's store:
torch's default group stays unset.

A gloo process whose peer sends more than it expects ends itself, so no data is sent before the
ranks have compared what they are about to exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Work

from placement.errors import PeerError, RankError
from rank_worker.comm import (
    BARRIER,
    GATHER,
    REDUCE,
    accumulation_dtype,
    collective_word,
    out_of_order,
)
from rank_worker.comm_store import Meeting
from rank_worker.time_limit import TimeLimit

FRAME_WORDS = 512  # length word, then payload; a longer plan's rest follows in a second broadcast
MAX_PLAN_WORDS = 1 << 24
# How long receive_plan waits: longer than any load before the first plan. A dead rank 0 closes its
# socket and ends the wait at once; an idle one sends heartbeats.
PLAN_TIMEOUT = timedelta(minutes=30)
CHUNK_BYTES = 1 << 20  # of one rank's part in a reduction
HEAD_BYTES = 8  # of a frame: what the collective is
FRAME_BYTES = 4096  # of one rank; a decode step's collectives fit, larger ones take a second round


class Group(Protocol):
    """What a torch process group of any backend offers (its type stubs leave this out)."""

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work: ...

    def barrier(self) -> Work: ...

    def shutdown(self) -> None: ...


def _gloo_group(meeting: Meeting, name: str, timeout_s: float) -> Group:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By address: the host's own name need not resolve inside a container.
    options._devices = [ProcessGroupGloo.create_device(hostname=meeting.host)]
    options._timeout = meeting.remaining
    store = PrefixStore(name, meeting.store)
    group = ProcessGroupGloo(store, meeting.rank, meeting.world_size, options)
    group._set_default_timeout(timedelta(seconds=timeout_s))
    return cast(Group, group)


DATA_GROUPS: dict[str, Callable[[Meeting, str, float], Group]] = {"gloo": _gloo_group}


class ControlGroup:
    """Broadcasts of small int32 plans from rank 0."""

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        self.rank = meeting.rank
        self.entered = 0  # see Comm
        self._group = open_group("gloo", meeting, "control", timeout_s)
        self._frame = torch.zeros(FRAME_WORDS, dtype=torch.int32)
        self._words = self._frame.numpy()
        self._options = BroadcastOptions()
        self._options.rootRank = 0
        self._options.timeout = PLAN_TIMEOUT if meeting.rank else timedelta(seconds=timeout_s)

    def send(self, words: np.ndarray) -> None:
        if words.dtype != np.int32 or words.ndim != 1 or words.size > MAX_PLAN_WORDS:
            raise RankError(
                f"rank {self.rank}: a plan is at most {MAX_PLAN_WORDS} int32 words in one "
                f"dimension, got {words.dtype} {words.shape}",
                rank=self.rank,
                phase="plan",
            )
        head = min(words.size, FRAME_WORDS - 1)
        self._words[0] = words.size
        self._words[1 : 1 + head] = words[:head]
        self._broadcast(self._frame)
        if words.size > head:
            self._broadcast(torch.from_numpy(words[head:].copy()))

    def receive(self) -> np.ndarray:
        self._broadcast(self._frame)
        size = int(self._words[0])
        head = min(size, FRAME_WORDS - 1)
        words = np.empty(size, dtype=np.int32)
        words[:head] = self._words[1 : 1 + head]
        if size > head:
            rest = torch.from_numpy(words[head:])
            self._broadcast(rest)
        return words

    def barrier(self) -> None:
        self.entered += 1
        try:
            self._group.barrier().wait()
        except RuntimeError as error:
            raise broken(self.rank, "barrier", error) from error

    def close(self) -> None:
        self._group.shutdown()
        # Joins its threads: one that still held a tensor would abort the exit of the process.
        del self._group

    def _broadcast(self, x: Tensor) -> None:
        self.entered += 1
        try:
            self._group.broadcast([x], self._options).wait()
        except RuntimeError as error:
            raise broken(self.rank, "plan", error) from error


class GlooComm:
    """Gathers the ranks' parts and adds them in rank order, so that all ranks get equal bits."""

    def __init__(
        self, meeting: Meeting, timeout_s: float, backend: str = "gloo",
        make_data: Callable[[], Group] | None = None,
    ) -> None:  # fmt: skip
        """`make_data` makes the data group of another library."""
        self.rank = meeting.rank
        self.world_size = meeting.world_size
        self.seconds = 0.0
        self.wait_seconds: float | None = None
        self._meeting = meeting
        self._control = ControlGroup(meeting, timeout_s)
        self._data = open_group(backend, meeting, "data", timeout_s, make_data)
        self._parts: dict[torch.dtype, Tensor] = {}
        self._collectives = 0
        self._frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        self._frames = torch.zeros(self.world_size, FRAME_BYTES, dtype=torch.uint8)

    @property
    def entered(self) -> int:
        return self._control.entered + self._collectives

    def all_reduce_(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        flat = x.reshape(-1)
        chunk = CHUNK_BYTES // x.element_size()
        for first in range(0, flat.numel(), chunk):
            self._reduce(flat[first : first + chunk])
        if flat.data_ptr() != x.data_ptr():
            x.copy_(flat.view(x.shape))
        self.seconds += time.perf_counter() - start
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        out = x.new_empty((self.world_size, *x.shape))
        if x.numel():
            self._gather(x.contiguous().view(-1), out.view(self.world_size, -1), GATHER)
        self.seconds += time.perf_counter() - start
        return out

    def send_plan(self, words: np.ndarray) -> None:
        self._control.send(words)

    def receive_plan(self) -> np.ndarray:
        return self._control.receive()

    def barrier(self) -> None:
        start = time.perf_counter()
        self._exchange(self._frame[:0], BARRIER)
        self.seconds += time.perf_counter() - start

    def check_order(self, epoch: int, step: int) -> None:
        """Each collective was compared before its data was sent."""

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def roll_call(self, phase: str, limit: TimeLimit) -> None:
        self._meeting.roll_call(phase, limit)

    def close(self) -> None:
        self._data.shutdown()
        self._control.close()

    def _reduce(self, flat: Tensor) -> None:
        parts = self._buffer(flat)
        self._gather(flat, parts, REDUCE)
        total = parts[0].to(accumulation_dtype(flat.dtype))
        for part in parts[1:]:
            total = total.add_(part)
        flat.copy_(total)

    def _buffer(self, flat: Tensor) -> Tensor:
        """Parts of all ranks [world_size, numel], in memory kept from call to call."""
        if flat.dtype not in self._parts:
            chunk = CHUNK_BYTES // flat.element_size()
            self._parts[flat.dtype] = flat.new_empty(self.world_size * chunk)
        return self._parts[flat.dtype][: self.world_size * flat.numel()].view(self.world_size, -1)

    def _gather(self, flat: Tensor, out: Tensor, kind: int) -> None:
        """Every rank's `flat` [n] into `out` [world_size, n]."""
        data = flat.view(torch.uint8)
        bodies = self._exchange(data, kind)
        if bodies is not None:
            out.view(torch.uint8).copy_(bodies)
        else:
            self._allgather(list(out), flat, kind)

    def _exchange(self, data: Tensor, kind: int) -> Tensor | None:
        """Compares the collective; all ranks' data where a frame has room for it, else None."""
        self._collectives += 1
        size, word = data.numel(), collective_word(kind, data.numel())
        fits = size <= FRAME_BYTES - HEAD_BYTES
        self._frame[:HEAD_BYTES].view(torch.int64).fill_(word)
        if fits:
            self._frame[HEAD_BYTES : HEAD_BYTES + size] = data
        self._allgather(list(self._frames), self._frame, kind)
        words = self._frames[:, :HEAD_BYTES].contiguous().view(torch.int64).flatten().tolist()
        for peer, theirs in enumerate(words):
            if theirs != word:
                raise out_of_order(self.rank, self._collectives, word, peer, theirs)
        return self._frames[:, HEAD_BYTES : HEAD_BYTES + size] if fits else None

    def _allgather(self, outputs: list[Tensor], part: Tensor, kind: int) -> None:
        try:
            self._data.allgather([outputs], [part]).wait()
        except RuntimeError as error:
            phase = "barrier" if kind == BARRIER else "collective"
            raise broken(self.rank, phase, error) from error


def open_group(
    backend: str, meeting: Meeting, name: str, timeout_s: float,
    make: Callable[[], Group] | None = None,
) -> Group:  # fmt: skip
    """A process group of the gang on `backend`; RankError when a rank does not connect in time."""
    try:
        return make() if make is not None else DATA_GROUPS[backend](meeting, name, timeout_s)
    except RuntimeError as error:
        raise broken(meeting.rank, f"opening the {name} group", error) from error


def open_gloo(meeting: Meeting, timeout_s: float) -> GlooComm:
    comm = GlooComm(meeting, timeout_s)
    meeting.roll_call("groups")
    return comm


def broken(rank: int, phase: str, error: RuntimeError) -> PeerError:
    """A torch error with its stack of C++ frames cut off, as a line of ours."""
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return PeerError(
        f"rank {rank}: a peer is gone or did not answer in phase {phase!r}: {cause}; see the "
        f"other ranks' logs",
        rank=rank,
        phase=phase,
    )
