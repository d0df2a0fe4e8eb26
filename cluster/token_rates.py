"""Tokens a second of a gang, from the counters of its rank 0 at two moments.

Owns when such a rate is known. Reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from rank_worker.messages import RankSnapshot

STALE_S = 10.0  # rank 0 tells its counters about once a second
SPAN_S = 30.0  # a mean over a longer time says nothing of now


@dataclass(frozen=True)
class Rates:
    """Tokens a second; None where unknown."""

    prompt: float | None = None
    generation: float | None = None


class TokenRates:
    """`observe` whenever somebody looks: the rates are those between the last two snapshots."""

    def __init__(self) -> None:
        self._before: RankSnapshot | None = None
        self._last: RankSnapshot | None = None
        self._seen_s = 0.0

    def observe(self, snapshot: RankSnapshot | None, now_s: float) -> Rates:
        """`now_s` is a clock that only grows. The same snapshot may come again."""
        if snapshot is not None and snapshot != self._last:
            self._before, self._last, self._seen_s = self._last, snapshot, now_s
        before, last = self._before, self._last
        if snapshot is None or before is None or last is None or before.epoch != last.epoch:
            return Rates()
        span_s = last.time_s - before.time_s
        if not 0 < span_s <= SPAN_S or now_s - self._seen_s > STALE_S:
            return Rates()
        return Rates(
            (last.prompt_tokens - before.prompt_tokens) / span_s,
            (last.generation_tokens - before.generation_tokens) / span_s,
        )
