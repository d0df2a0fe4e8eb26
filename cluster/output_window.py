"""When the outputs of rank 0 leave its process: at once, or gathered where steps are fast.

A message costs milliseconds of each process on its way to the client, more than a fast step does.
Runs beside the step loop, in one thread; knows no Ray and no streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from rank_worker.messages import TokenBatch

FAST_S = 0.025  # a token later than this after the one before it is worth a message of its own
LEAST_S = 0.01
MOST_S = 0.08  # text that comes at this interval still flows to a reader's eye

Poll = Callable[[float], tuple[TokenBatch, ...]]


class Submitted(Protocol):
    """What the window has to know of a request."""

    @property
    def request_id(self) -> str: ...


class OutputWindow:
    """The first and the last tokens of a request leave at once, and so do those of slow steps.

    Others wait for more: LEAST_S, then twice as long each time, MOST_S at most, and never longer
    than FAST_S after the last token. `announce` and `forget` may be called from any thread.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._new: set[str] = set()  # requests without a token
        self._window_s = LEAST_S
        self._last_s = 0.0  # time of the last step that was sent

    def announce(self, requests: Iterable[Submitted]) -> None:
        self._new.update(request.request_id for request in requests)

    def forget(self, request_ids: Iterable[str]) -> None:
        self._new.difference_update(request_ids)

    def collect(self, poll: Poll, timeout_s: float) -> tuple[TokenBatch, ...]:
        """What `poll` gives, waiting up to `timeout_s` for a first batch and then for more."""
        batches = poll(timeout_s)
        if not batches:
            return ()
        if batches[0].time_s - self._last_s > FAST_S:
            self._window_s = LEAST_S
        elif not self._is_urgent(batches):
            batches = self._more(poll, batches)
        self._new.difference_update(batch.request_id for batch in batches)
        self._last_s = batches[-1].time_s
        return batches

    def _more(self, poll: Poll, batches: tuple[TokenBatch, ...]) -> tuple[TokenBatch, ...]:
        end_s = self._now_s() + self._window_s
        self._window_s = min(MOST_S, 2 * self._window_s)
        while (left_s := end_s - self._now_s()) > 0:
            found = poll(min(left_s, FAST_S))
            batches += found
            if not found or self._is_urgent(found):
                break
        return batches

    def _is_urgent(self, batches: tuple[TokenBatch, ...]) -> bool:
        return any(b.finish_reason is not None or b.request_id in self._new for b in batches)
