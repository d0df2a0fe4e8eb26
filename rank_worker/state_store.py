"""Checkpoints of state slots: numbered cells on the device and on the host, and copies among them.

Executes copies in the order of the step plan and makes their asynchrony invisible. Decides
nothing: which cell holds what, and when it is used again, is the scheduler's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from placement.errors import RankError
from rank_worker.streams import Fence, Queue, Streams


class Verb(StrEnum):
    """The copies that a plan asks for."""

    SAVE = "save"  # slot -> cell
    SPILL = "spill"  # cell -> host cell
    RESTORE = "restore"  # cell -> slot
    FETCH = "fetch"  # host cell -> slot


@dataclass(frozen=True)
class CopyLedger:
    """What one verb was asked to copy.

    `seconds` is the time on the device of all but the last `untimed` copies, which may be on the
    way still; a spill or fetch is timed from where it may begin.
    """

    count: int
    bytes: int
    seconds: float
    untimed: int


@dataclass
class _Fences:
    """Of one cell: its last write and its last read that another queue has not yet waited for.

    One queue writes the cells of a tier (COMPUTE on the device, ARCHIVE on the host) and one
    other reads them (ARCHIVE, RESTORE), so each fence has one queue that it can hold back, and is
    dropped once that queue has waited. A restore reads in the queue that writes.
    """

    written: Fence | None = None
    read: Fence | None = None


@dataclass
class _Tally:
    """Copies of one verb; their times are taken once the device is done with them."""

    count: int = 0
    seconds: float = 0.0
    untimed: deque[tuple[Fence, Fence]] = field(default_factory=deque)

    def settle(self, streams: Streams) -> None:
        while self.untimed and (seconds := streams.seconds(*self.untimed[0])) is not None:
            self.untimed.popleft()
            self.seconds += seconds


class StateStore:
    """Cells for the slots of `slot_tensors`: one or more, contiguous, [slots, ...] of any dtype.

    The tensors stay those of the model: a slot is row `slot` of every one of them; a tensor may
    have no elements (a rank without heads). A cell holds one slot: for each dtype one row, with
    the tensors' parts behind each other, so that a spill is one long copy a dtype.

    No verb blocks the host, where the streams don't. RankError when one names a slot or a cell
    that is not there.
    """

    def __init__(
        self, slot_tensors: Sequence[Tensor], num_cells: int, num_host_cells: int, streams: Streams
    ) -> None:
        self._streams = streams
        self.num_slots = slot_tensors[0].shape[0]
        self.num_cells, self.num_host_cells = num_cells, num_host_cells
        assert all(tensor.shape[0] == self.num_slots for tensor in slot_tensors)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in slot_tensors:
            if tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor.view(self.num_slots, -1))
        parts = [flat.unbind() for group in by_dtype.values() for flat in group]
        self._slots = [[part[slot] for part in parts] for slot in range(self.num_slots)]
        self._widths = [[flat.shape[1] for flat in group] for group in by_dtype.values()]
        widths = {dtype: sum(flat.shape[1] for flat in by_dtype[dtype]) for dtype in by_dtype}
        self._cell_bytes = sum(dtype.itemsize * width for dtype, width in widths.items())
        self._cells = [by_dtype[d][0].new_empty(num_cells, width) for d, width in widths.items()]
        self._host_cells = [
            streams.empty_host((num_host_cells, width), dtype) for dtype, width in widths.items()
        ]
        self._fences = [_Fences() for _ in range(num_cells)]
        self._host_fences = [_Fences() for _ in range(num_host_cells)]
        self._tallies = {verb: _Tally() for verb in Verb}

    def save(self, slot: int, cell: int) -> None:
        """Slot -> cell, in COMPUTE."""
        self._check_slot(Verb.SAVE, slot)
        self._check_cell(Verb.SAVE, cell)
        fences = self._fences[cell]
        self._wait(Queue.COMPUTE, Queue.ARCHIVE, fences.read)
        targets = self._pieces(self._cells, cell)
        fences.written = self._copy(Verb.SAVE, Queue.COMPUTE, self._slots[slot], targets)
        fences.read = None

    def restore(self, cell: int, slot: int) -> None:
        """Cell -> slot, in COMPUTE."""
        self._check_cell(Verb.RESTORE, cell)
        self._check_slot(Verb.RESTORE, slot)
        sources = self._pieces(self._cells, cell)
        self._copy(Verb.RESTORE, Queue.COMPUTE, sources, self._slots[slot])

    def spill(self, cell: int, host_cell: int) -> None:
        """Cell -> host cell, in ARCHIVE."""
        self._check_cell(Verb.SPILL, cell)
        self._check_host_cell(Verb.SPILL, host_cell)
        fences, host = self._fences[cell], self._host_fences[host_cell]
        self._wait(Queue.ARCHIVE, Queue.COMPUTE, fences.written)
        self._wait(Queue.ARCHIVE, Queue.RESTORE, host.read)
        sources = [rows[cell] for rows in self._cells]
        targets = [rows[host_cell] for rows in self._host_cells]
        done = self._copy(Verb.SPILL, Queue.ARCHIVE, sources, targets)
        fences.written, fences.read = None, done
        host.written, host.read = done, None

    def fetch(self, host_cell: int, slot: int) -> None:
        """Host cell -> slot, in RESTORE; COMPUTE goes on when it is there."""
        self._check_host_cell(Verb.FETCH, host_cell)
        self._check_slot(Verb.FETCH, slot)
        host = self._host_fences[host_cell]
        self._wait(Queue.RESTORE, Queue.ARCHIVE, host.written)
        # The slot's last reads and writes are somewhere in COMPUTE.
        self._wait(Queue.RESTORE, Queue.COMPUTE, self._streams.record(Queue.COMPUTE))
        sources = self._pieces(self._host_cells, host_cell)
        done = self._copy(Verb.FETCH, Queue.RESTORE, sources, self._slots[slot])
        self._wait(Queue.COMPUTE, Queue.RESTORE, done)
        host.written, host.read = None, done

    def ledger(self, verb: Verb) -> CopyLedger:
        """Counts of a verb so far; doesn't wait for copies on the way."""
        tally = self._tallies[verb]
        tally.settle(self._streams)
        copied = tally.count * self._cell_bytes
        return CopyLedger(tally.count, copied, tally.seconds, len(tally.untimed))

    def cell_bytes(self) -> int:
        """Bytes of one cell, on either tier."""
        return self._cell_bytes

    def nbytes(self) -> int:
        """Device bytes of all cells."""
        return sum(rows.nbytes for rows in self._cells)

    def host_nbytes(self) -> int:
        """Host bytes of all host cells."""
        return sum(rows.nbytes for rows in self._host_cells)

    def _wait(self, queue: Queue, after: Queue, fence: Fence | None) -> None:
        """`queue` goes on after `fence`, which stands in queue `after`. All ordering is here."""
        if fence is not None:
            self._streams.wait(queue, fence)

    def _copy(
        self, verb: Verb, queue: Queue, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> Fence:
        """Puts the copies of one verb into the queue; the fence behind them."""
        streams, tally = self._streams, self._tallies[verb]
        tally.settle(streams)
        begin = streams.record(queue)
        for source, target in zip(sources, targets, strict=True):
            streams.copy(queue, source, target)
        end = streams.record(queue)
        tally.count += 1
        tally.untimed.append((begin, end))
        return end

    def _pieces(self, rows: Sequence[Tensor], cell: int) -> list[Tensor]:
        """One cell as parts in the order of a slot's."""
        return [
            piece
            for of_dtype, widths in zip(rows, self._widths, strict=True)
            for piece in of_dtype[cell].split_with_sizes(widths)
        ]

    def _check_slot(self, verb: Verb, slot: int) -> None:
        _check(verb, "slot", slot, self.num_slots)

    def _check_cell(self, verb: Verb, cell: int) -> None:
        _check(verb, "cell", cell, self.num_cells)

    def _check_host_cell(self, verb: Verb, host_cell: int) -> None:
        _check(verb, "host cell", host_cell, self.num_host_cells)


def _check(verb: Verb, what: str, number: int, limit: int) -> None:
    if not 0 <= number < limit:
        raise RankError(
            f"{verb} names {what} {number}, and there are {limit}: the step plan is of a gang with "
            "other limits",
            phase=verb,
        )
