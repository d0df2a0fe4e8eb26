"""Paces a load by the heat guard's word: reading weights heats a card most.

Called by the threads of a loader before each read; blocks them. Knows no temperature.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from placement.errors import RankError
from rank_worker.guard_word import GuardWord, Order

LOOK_S = 0.05  # a load that stands still looks at the word at this interval


class CoolReads:
    """`before_read(nbytes)`, for `Loader.pace`.

    `is_over` ends the load with a RankError: a rank that stops must neither hang nor read on.
    """

    def __init__(self, word: GuardWord, is_over: Callable[[], bool]) -> None:
        self._word, self._is_over = word, is_over
        self._last = threading.local()  # .end_s: when this thread was last let through

    def before_read(self, nbytes: int) -> None:
        """Waits while the word says HOLD or CUT; under PACE as long as the last read took.

        RankError once the rank is told to stop.
        """
        now_s = time.monotonic()
        if self._word.order is Order.PACE:
            rest_s = now_s - getattr(self._last, "end_s", now_s)
            self._wait(lambda: time.monotonic() - now_s >= rest_s)
        self._wait(lambda: not self._word.order.is_still)
        if self._is_over():
            raise RankError("told to stop while it loaded", phase="load")
        self._last.end_s = time.monotonic()

    def _wait(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough() and not self._is_over():
            time.sleep(LOOK_S)
