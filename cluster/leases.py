"""Who answers for the requests that run: a caller that dies without a word loses them.

Ray ends no streaming call when its caller's process dies; it would run to its last token. So a
caller renews a lease while it has requests, and the tasks of a caller whose lease has run out are
cancelled. Knows no Ray and no streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("nrank.leases")

LEASE_S = 30.0  # a caller that is alive may be busy for long, a dead one holds slots for so long
RENEW_S = 5.0


class Leases:
    """By caller: when it was last heard, and the tasks that serve it."""

    def __init__(
        self, lease_s: float = LEASE_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._lease_s = lease_s
        self._now_s = now_s
        self._heard_s: dict[str, float] = {}
        self._tasks: dict[str, set[asyncio.Task[object]]] = {}

    def renew(self, caller: str) -> None:
        if caller in self._tasks:
            self._heard_s[caller] = self._now_s()

    @contextmanager
    def hold(self, caller: str) -> Iterator[None]:
        """While inside, the current task is cancelled should the caller's lease run out."""
        task = asyncio.current_task()
        assert task is not None
        tasks = self._tasks.setdefault(caller, set())
        tasks.add(task)
        self.renew(caller)
        try:
            yield
        finally:
            tasks.discard(task)
            if not tasks and self._tasks.get(caller) is tasks:
                del self._tasks[caller], self._heard_s[caller]

    def end_lapsed(self) -> None:
        """Cancels what is served to callers that have been silent for too long."""
        now_s = self._now_s()
        for caller, heard_s in self._heard_s.items():
            if now_s - heard_s > self._lease_s:
                tasks = self._tasks[caller]
                logger.warning(
                    "ingress %s has been silent for %.0f s: its %d requests are taken back",
                    caller, now_s - heard_s, len(tasks),
                )  # fmt: skip
                for task in tasks:
                    task.cancel()
