"""A time limit that stands still while work is slowed down on purpose: by the heat guard, by hand.

Whoever waits asks it again and again; knows no event loop and no thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.5  # a waiter asks at this interval at least, or a short hold goes unnoticed


class TimeLimit:
    """`seconds` that count only while `is_slowed` says no, from now on."""

    def __init__(self, seconds: float, is_slowed: Callable[[], bool]) -> None:
        self._left_s, self._is_slowed = seconds, is_slowed
        self._asked_s = time.monotonic()

    def left_s(self) -> float:
        """Not above `seconds`; 0 or less when it is over. The time since the last call counts
        as a whole, or not at all.
        """
        now_s = time.monotonic()
        if not self._is_slowed():
            self._left_s -= now_s - self._asked_s
        self._asked_s = now_s
        return self._left_s

    def next_look_s(self) -> float:
        """How long to wait before the next call."""
        return min(LOOK_S, max(0.0, self._left_s))
