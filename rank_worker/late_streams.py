"""A CPU device that completes copies late and out of order under a seed.

Shows a missing fence that no real CPU copy would ever show. Knows nothing of what is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from torch import Tensor

from rank_worker.streams import Fence, Queue

Work = Callable[[], object]


@dataclass(eq=False)
class _Mark:
    """A fence; `done_at` is how many works had been done on the device by then."""

    queue: Queue
    done_at: int | None = None


@dataclass(frozen=True)
class _Wait:
    """Holds back what stands behind it in its queue."""

    mark: _Mark


class LateStreams:
    """Holds what ARCHIVE and RESTORE are asked for; each call of any method lets some of it happen.

    One queue keeps its order, queues among each other have none but fences. A copy reads its
    source in the moment it happens. How many copies a call lets happen is drawn from `seed`, and
    so is how fast the device and each of its queues are: one may lag far behind another. With
    `eagerness` 0 nothing happens but what a wait or `drain` completes.

    COMPUTE is the host itself: its copies happen at once, and its `wait` completes what the fence
    stands for. With `late_compute` it is a third late queue, as on an accelerator; then all that
    computes goes through `run`.
    """

    def __init__(self, seed: int, late_compute: bool = False) -> None:
        self._random = Random(seed)
        self.eagerness = self._random.uniform(0.0, 0.4)
        late = [Queue.ARCHIVE, Queue.RESTORE, *([Queue.COMPUTE] if late_compute else [])]
        self._speeds = {queue: 10 ** self._random.uniform(-2.0, 0.0) for queue in late}
        self._held: dict[Queue, deque[Work | _Mark | _Wait]] = {queue: deque() for queue in late}
        self._num_done = 0

    def run(self, queue: Queue, work: Work) -> None:
        """Puts any work into the queue."""
        self._let_some_happen()
        if queue in self._held:
            self._held[queue].append(work)
        else:
            self._do(work)

    def copy(self, queue: Queue, source: Tensor, target: Tensor) -> None:
        self.run(queue, partial(target.copy_, source))

    def record(self, queue: Queue) -> Fence:
        self._let_some_happen()
        mark = _Mark(queue)
        if queue in self._held:
            self._held[queue].append(mark)
            self._pass_fences()
        else:
            mark.done_at = self._num_done
        return mark

    def wait(self, queue: Queue, fence: Fence) -> None:
        self._let_some_happen()
        if queue in self._held:
            self._held[queue].append(_Wait(fence))
        else:
            self._complete(fence)

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._let_some_happen()
        return torch.empty(shape, dtype=dtype)

    def seconds(self, begin: Fence, end: Fence) -> float | None:
        """Simulated: each work that the device does takes a second."""
        self._let_some_happen()
        return None if end.done_at is None else float(end.done_at - begin.done_at)

    def drain(self) -> None:
        """Completes everything, in a drawn order."""
        while ready := self._pass_fences():
            self._advance_one_of(ready)
        assert not any(self._held.values()), "queues wait for each other"

    def _let_some_happen(self) -> None:
        while self._random.random() < self.eagerness and (ready := self._pass_fences()):
            self._advance_one_of(ready)

    def _complete(self, mark: _Mark) -> None:
        """Does what `mark` stands for, and what that waits for, and nothing else."""
        wanted = [mark]
        while wanted:
            self._pass_fences()
            if wanted[-1].done_at is not None:
                wanted.pop()
                continue
            queue = wanted[-1].queue
            head = self._held[queue][0]
            if isinstance(head, _Wait):
                wanted.append(head.mark)
            else:
                self._advance(queue)

    def _pass_fences(self) -> list[Queue]:
        """Takes due fences and waits from the heads of queues; queues whose next work is ready."""
        passed = True
        while passed:
            passed = False
            for held in self._held.values():
                while held and self._passes(held[0]):
                    held.popleft()
                    passed = True
        return [queue for queue, held in self._held.items() if held and callable(held[0])]

    def _passes(self, head: Work | _Mark | _Wait) -> bool:
        if isinstance(head, _Mark):
            head.done_at = self._num_done
            return True
        return isinstance(head, _Wait) and head.mark.done_at is not None

    def _advance_one_of(self, ready: list[Queue]) -> None:
        speeds = [self._speeds[queue] for queue in ready]
        self._advance(self._random.choices(ready, speeds)[0])

    def _advance(self, queue: Queue) -> None:
        work = self._held[queue].popleft()
        assert callable(work)
        self._do(work)

    def _do(self, work: Work) -> None:
        work()
        self._num_done += 1
