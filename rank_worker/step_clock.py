"""What a step spends its time on: marks between its parts, on one rank.

Owns the parts and their sums. A mark costs two reads of numbers and an addition; time inside
collectives is the communicator's to tell and belongs to no other part.
"""

from __future__ import annotations

import time
from enum import StrEnum

from rank_worker.comm import Comm


class StepPart(StrEnum):
    ATTENTION = "attention"  # a layer's half with it: residual mix, projections, pages
    RECURRENT = "recurrent"  # the same with a recurrent mixer; commits of drafts
    EXPERTS = "experts"  # a layer's other half: router, routed and shared experts
    SAMPLING = "sampling"  # output head, sampled and drafted ids, log-probabilities
    COLLECTIVE_WAIT = "collective_wait"  # for the last rank to arrive
    COLLECTIVE_TRANSFER = "collective_transfer"  # all else in collectives
    HOST = "host"  # the rest of a step: embeddings, batch, copies of states, what reads results


class StepClock:
    """Use, in one thread: begin() at the start of a step, mark(part) after each part, end().

    `seconds` are sums over all steps since the last reset. Where the communicator can't tell
    waiting from transfer, neither is there; the rest is right all the same.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.seconds: dict[StepPart, float] = {}
        self.reset()

    def reset(self) -> None:
        told = set(StepPart)
        if self._comm.wait_seconds is None:
            told -= {StepPart.COLLECTIVE_WAIT, StepPart.COLLECTIVE_TRANSFER}
        self.seconds = {part: 0.0 for part in StepPart if part in told}
        self.begin()

    def begin(self) -> None:
        self._began_comm_s = self._comm_s = self._comm.seconds
        self._began_wait_s = self._comm.wait_seconds
        self._last_s = time.perf_counter()

    def mark(self, part: StepPart) -> None:
        """All since the last mark was `part`, but for collectives."""
        now_s, comm_s = time.perf_counter(), self._comm.seconds
        self.seconds[part] += now_s - self._last_s - (comm_s - self._comm_s)
        self._last_s, self._comm_s = now_s, comm_s

    def end(self) -> None:
        """The rest was the host's; what the step spent in collectives is added."""
        self.mark(StepPart.HOST)
        wait_s = self._comm.wait_seconds
        if wait_s is None or self._began_wait_s is None:
            return
        waited_s = wait_s - self._began_wait_s
        self.seconds[StepPart.COLLECTIVE_WAIT] += waited_s
        in_comm_s = self._comm.seconds - self._began_comm_s
        self.seconds[StepPart.COLLECTIVE_TRANSFER] += in_comm_s - waited_s
