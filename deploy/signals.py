"""Signals of a foreground command: counted by the handlers, looked at between short waits.

Owns the handlers of SIGINT, SIGTERM and SIGHUP for its life. Knows nothing of what it interrupts.
A handler that raises would do so inside Ray's C code, which turns it into a SystemError.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK_S = 0.1
SETTLE_S = 10.0
OUTPUTS = (1, 2)


class Interrupted(BaseException):
    """A signal came while nothing was serving yet, or for the second time."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class SignalFlag:
    """Context manager. One signal ends a start, or a watch; a second one ends a drain."""

    def __init__(self) -> None:
        self._came: list[int] = []  # no Event: a handler must not take a lock
        self._serving = False
        self._before: dict[int, Any] = {}
        self._apart: threading.Thread | None = None
        self._terminals = [fd for fd in OUTPUTS if os.isatty(fd)]

    def __enter__(self) -> SignalFlag:
        self._before = {signum: signal.getsignal(signum) for signum in SIGNALS}
        self.take_over()
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            is_over = signum == signal.SIGHUP and signum in self._came  # the terminal is gone
            signal.signal(signum, signal.SIG_IGN if is_over else handler)

    def take_over(self) -> None:
        """Sets the handlers; again after a library has set its own. nohup stays nohup."""
        for signum in SIGNALS:
            if signum != signal.SIGHUP or self._before[signum] != signal.SIG_IGN:
                signal.signal(signum, self._handle)

    @property
    def is_serving(self) -> bool:
        return self._serving

    def serving(self) -> None:
        """From now on the first signal asks for a drain, which `wait` tells."""
        self.check()
        self._serving = True

    def check(self) -> None:
        """Raises Interrupted for a signal before `serving()`, and for the second one after it."""
        if len(self._came) > int(self._serving):
            raise Interrupted(self._came[-1])

    def shield(self) -> None:
        """Ignores all of them: what is under way now must be finished."""
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)

    def wait(self, timeout_s: float) -> bool:
        """True once a signal came; Interrupted as `check` says."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.check()
            left_s = deadline_s - time.monotonic()
            if self._came or left_s <= 0:
                return bool(self._came)
            time.sleep(min(TICK_S, left_s))

    def apart(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, from a thread of its own: this one looks for signals.

        After Interrupted the work goes on; `settle` waits for its end.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:  # raised again below
                errors.append(error)

        self._apart = threading.Thread(target=run, name="apart", daemon=True)
        self._apart.start()
        while self._apart.is_alive():
            self.check()
            self._apart.join(TICK_S)
        if errors:
            raise errors[0]
        return results[0]

    def settle(self) -> None:
        """Waits, not for ever, until work that was interrupted has ended."""
        if self._apart is not None:
            self._apart.join(SETTLE_S)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        signal.alarm(0)  # Ray's own handler, if it came first, aborts the process after 3 s
        if signum == signal.SIGHUP:
            self._leave_lost_terminals()
            if signum in self._came:  # kernel and shell both tell of a terminal that was closed
                return
        self._came.append(signum)

    def _leave_lost_terminals(self) -> None:
        """A write to a terminal that was closed is an error: what is under way goes on unseen."""
        for fd in self._terminals:
            if not os.isatty(fd):
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
