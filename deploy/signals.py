"""SIGINT and SIGTERM of a foreground command: an exception while it starts, a flag once it serves.

Owns the handlers of both signals for its life. Knows nothing of what it interrupts.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal came while nothing was serving yet, or for the second time."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class SignalFlag:
    """Context manager. Until `serving()` a signal raises Interrupted in the main thread."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._serving = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalFlag:
        self._before = {signum: signal.getsignal(signum) for signum in SIGNALS}
        self.take_over()
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def take_over(self) -> None:
        """Sets the handlers; again after a library has set its own."""
        for signum in SIGNALS:
            signal.signal(signum, self._handle)

    @property
    def is_serving(self) -> bool:
        return self._serving

    def serving(self) -> None:
        """From now on the first signal only sets the flag."""
        self._serving = True

    def shield(self) -> None:
        """Ignores both signals: what is under way now must be finished."""
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)

    def wait(self, timeout_s: float) -> bool:
        """True once a signal came."""
        return self._came.wait(timeout_s)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        signal.alarm(0)  # Ray's own handler, if it came first, aborts the process after 3 s
        if not self._serving or self._came.is_set():
            raise Interrupted(signum)
        self._came.set()
