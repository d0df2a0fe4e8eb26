"""Collectives of ranks on one host through shared memory: copy, raise a flag, wait, add.

Thirty times cheaper than sockets where ranks outnumber cores. The memory is an anonymous file
(memfd) that has no name anywhere, so a rank that is killed at any moment leaves nothing behind.

Every collective has a number, the same on all ranks. For number n a rank copies its part to its
half n % 2 of the segment, then sets its flag to n; a rank whose peers' flags all reached n may
read their halves. Half n % 2 is free again at n + 2: a peer's flag n + 1 says that it is done
reading n. Data before flag and flag before data hold only under total store order (x86-64).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from placement.errors import RankError
from rank_worker.comm import (
    BARRIER,
    GATHER,
    REDUCE,
    accumulation_dtype,
    collective_word,
    out_of_order,
)
from rank_worker.comm_gloo import ControlGroup
from rank_worker.comm_store import Meeting
from rank_worker.time_limit import TimeLimit

HALF_BYTES = 1 << 20  # a rank's part of one collective; larger ones go in chunks
LINE_WORDS = 16  # int64 words between two ranks' flags: two cache lines, for the prefetcher
SPIN_S = 0.002  # give the core away but stay runnable; then sleep
SLEEP_S = 0.0001
MAX_VIEWS = 512  # cached shapes before the cache starts over


class Segment:
    """The mapped memory: two flag words a rank (number, what it is), then [2, world, half]."""

    def __init__(self, descriptor: int, world_size: int, half_bytes: int) -> None:
        self.half_bytes = half_bytes
        self._map = mmap.mmap(descriptor, self.size(world_size, half_bytes))
        words = world_size * LINE_WORDS
        self.flags = memoryview(self._map)[: words * 8].cast("q")
        self.data = torch.frombuffer(self._map, dtype=torch.uint8, offset=words * 8).view(
            2, world_size, half_bytes
        )

    @staticmethod
    def size(world_size: int, half_bytes: int) -> int:
        return world_size * (LINE_WORDS * 8 + 2 * half_bytes)


class ShmComm:
    """Reduces in rank order, so that all ranks get equal bits; plans go over the control group."""

    def __init__(
        self, meeting: Meeting, segment: Segment, control: ControlGroup, timeout_s: float
    ) -> None:
        self.rank = meeting.rank
        self.world_size = meeting.world_size
        self.seconds = 0.0
        self._wait_s = 0.0
        self._meeting = meeting
        self._segment = segment
        self._control = control
        self._timeout_s = timeout_s
        self._number = 0
        self._views: dict[tuple[torch.dtype, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._totals: dict[int, Tensor] = {}

    @property
    def wait_seconds(self) -> float | None:
        return self._wait_s

    @property
    def entered(self) -> int:
        return self._control.entered + self._number

    def all_reduce_(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        flat = x.reshape(-1)
        chunk = self._segment.half_bytes // x.element_size()
        if flat.numel() <= chunk:
            self._reduce(flat)
        else:
            for first in range(0, flat.numel(), chunk):
                self._reduce(flat[first : first + chunk])
        if flat.data_ptr() != x.data_ptr():
            x.copy_(flat.view(x.shape))
        self.seconds += time.perf_counter() - start
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        out = x.new_empty((self.world_size, *x.shape))
        flat, rows = x.reshape(-1), out.view(self.world_size, -1)
        chunk = self._segment.half_bytes // x.element_size()
        for first in range(0, flat.numel(), chunk):
            part = flat[first : first + chunk]
            views = self._exchange(part, GATHER)
            for row, view in zip(rows, views, strict=True):
                row[first : first + chunk].copy_(view)
        self.seconds += time.perf_counter() - start
        return out

    def send_plan(self, words: np.ndarray) -> None:
        self._control.send(words)

    def receive_plan(self) -> np.ndarray:
        return self._control.receive()

    def barrier(self) -> None:
        start = time.perf_counter()
        self._meet(BARRIER)
        self.seconds += time.perf_counter() - start

    def check_order(self, epoch: int, step: int) -> None:
        """Each collective was compared as it was met in."""

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def roll_call(self, phase: str, limit: TimeLimit) -> None:
        self._meeting.roll_call(phase, limit)

    def close(self) -> None:
        self._views.clear()
        self._control.close()

    def _reduce(self, flat: Tensor) -> None:
        views = self._exchange(flat, REDUCE)
        if accumulation_dtype(flat.dtype) is flat.dtype:
            torch.add(views[0], views[1], out=flat)
            for view in views[2:]:
                flat.add_(view)
            return
        total = self._total(flat.numel()).copy_(views[0])
        for view in views[1:]:
            total.add_(view)
        flat.copy_(total)

    def _exchange(self, part: Tensor, kind: int) -> list[Tensor]:
        """Publish this rank's part; the parts of all ranks, to be read before the next call."""
        views = self._halves(part)[(self._number + 1) & 1]
        views[self.rank].copy_(part)
        self._meet(collective_word(kind, part.numel() * part.element_size()))
        return views

    def _meet(self, what: int) -> None:
        """Announce the next collective and wait until every rank has announced the same one."""
        self._number = number = self._number + 1
        flags = self._segment.flags
        base = self.rank * LINE_WORDS
        # One slot for each half: a peer may announce the next collective before we looked.
        slot = 1 + (number & 1)
        flags[base + slot] = what
        flags[base] = number
        for peer in range(self.world_size):
            if flags[peer * LINE_WORDS] < number:
                self._wait_for(peer, number)
            if flags[peer * LINE_WORDS + slot] != what:
                theirs = flags[peer * LINE_WORDS + slot]
                raise out_of_order(self.rank, number, what, peer, theirs)

    def _wait_for(self, peer: int, number: int) -> None:
        flags, index = self._segment.flags, peer * LINE_WORDS
        began_s = time.perf_counter()
        for _ in _pauses(self._timeout_s):
            if flags[index] >= number:
                self._wait_s += time.perf_counter() - began_s
                return
        missing = [r for r in range(self.world_size) if flags[r * LINE_WORDS] < number]
        raise RankError(
            f"rank {self.rank}: ranks {missing} did not reach collective {number} within "
            f"{self._timeout_s:g} s; see their logs",
            rank=missing[0] if missing else peer,
            phase="collective",
        )

    def _halves(self, part: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of every rank's part in both halves, made once for each type and size."""
        key = (part.dtype, part.numel())
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            num_bytes = part.numel() * part.element_size()
            both = [
                [row[:num_bytes].view(part.dtype) for row in half] for half in self._segment.data
            ]
            found = self._views[key] = (both[0], both[1])
        return found

    def _total(self, numel: int) -> Tensor:
        found = self._totals.get(numel)
        if found is None:
            if len(self._totals) >= MAX_VIEWS:
                self._totals.clear()
            found = self._totals[numel] = torch.empty(numel, dtype=torch.float32)
        return found


def open_shm(meeting: Meeting, timeout_s: float, half_bytes: int = HALF_BYTES) -> ShmComm:
    """Map one segment in all ranks of a host; RankError names ranks that could not."""
    control = ControlGroup(meeting, timeout_s)
    store = meeting.store
    if meeting.rank == 0:
        descriptor = os.memfd_create("nrank-collectives", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, Segment.size(meeting.world_size, half_bytes))
        store.set("segment", f"/proc/{os.getpid()}/fd/{descriptor}")
    meeting.roll_call("segment")
    if meeting.rank:
        descriptor = _open_peer_segment(store.get("segment").decode(), meeting.rank)
    try:
        segment = Segment(descriptor, meeting.world_size, half_bytes)
        meeting.roll_call("groups")  # rank 0 keeps its descriptor until all have mapped it
    finally:
        os.close(descriptor)
    return ShmComm(meeting, segment, control, timeout_s)


def _open_peer_segment(path: str, rank: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RankError(
            f"rank {rank}: can't open rank 0's shared memory {path}: {error.strerror}; ranks of "
            f"one gang must see each other's processes, else set comm to gloo",
            rank=rank,
            phase="segment",
        ) from error


def _pauses(timeout_s: float) -> Iterator[None]:
    """Yield between looks at a flag: first only giving the core away, then asleep."""
    now = time.monotonic()
    spin_until, deadline = now + SPIN_S, now + timeout_s
    while time.monotonic() < spin_until:
        os.sched_yield()
        yield
    while time.monotonic() < deadline:
        time.sleep(SLEEP_S)
        yield
