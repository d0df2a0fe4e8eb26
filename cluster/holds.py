"""Who holds a gang back, and for how long: a hand, the heat guard. Neither undoes the other's.

Owns which of the two wins and the count of held seconds. Tells nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.thermal_guard import Verdict
from rank_worker.guard_word import Order

HAND = "hand"


@dataclass
class Holds:
    """`clock` gives seconds that only grow."""

    clock: Callable[[], float]
    seconds: Counter[str] = field(default_factory=Counter)  # cause -> held so far
    _hand: str = ""
    _verdict: Verdict = field(default_factory=Verdict)
    _counted_s: float = 0.0

    @property
    def order(self) -> Order:
        return max(self._verdict.order, Order.HOLD if self._hand else Order.RUN)

    @property
    def cause(self) -> str:
        """ "heat", "silence" or "hand"; empty while nothing is held."""
        return self._verdict.cause or (HAND if self._hand else "")

    @property
    def reason(self) -> str:
        return self._verdict.reason or self._hand

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        return self._verdict.silent_ranks

    @property
    def is_by_hand(self) -> bool:
        return bool(self._hand)

    def by_hand(self, reason: str) -> None:
        """`reason` is empty for a release."""
        self.count()
        self._hand = reason

    def by_guard(self, verdict: Verdict) -> None:
        self.count()
        self._verdict = verdict

    def count(self) -> None:
        """Adds the time since the last change to the cause that held."""
        now_s = self.clock()
        if self.cause:
            self.seconds[self.cause] += now_s - self._counted_s  # type: ignore[assignment]
        self._counted_s = now_s
