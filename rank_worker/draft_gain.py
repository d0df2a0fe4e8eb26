"""Whether drafting pays: what a draft round costs beside a plain step, and what it brings.

Rank 0's own figures; the other ranks only see which rows carry drafts. Knows no tensors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

ROUNDS = 16  # of a sequence that its mean is taken over, and that it has to lose to stop
RECOVERED = 1.05  # a gain above it forgets the rounds that lost
GUESS_PER_DRAFT = 0.25  # cost of a draft in plain steps, until both have been measured
ROUND_WEIGHT, PLAIN_WEIGHT = 0.1, 0.5  # of a new time in the averages; plain steps are few
PLAIN_INTERVAL = 256  # draft rounds between two plain steps that are made to be measured


@dataclass
class DraftCost:
    """Mean times of steps without prefill, by their number of rows."""

    num_drafts: int
    _plain_s: dict[int, float] = field(default_factory=dict)
    _round_s: dict[int, float] = field(default_factory=dict)
    _rounds_since: dict[int, int] = field(default_factory=dict)  # the last plain step

    def ratio(self, rows: int) -> float:
        """Time of a draft round over that of a plain step."""
        plain, drafted = self._plain_s.get(rows), self._round_s.get(rows)
        if not plain or drafted is None:
            return 1 + GUESS_PER_DRAFT * self.num_drafts
        return drafted / plain

    def wants_plain(self, rows: int) -> bool:
        """True when a plain step should be made now, because none was measured for long."""
        return rows not in self._plain_s or self._rounds_since.get(rows, 0) >= PLAIN_INTERVAL

    def saw_plain(self, rows: int, seconds: float) -> None:
        self._rounds_since[rows] = 0
        _average(self._plain_s, rows, seconds, PLAIN_WEIGHT)

    def saw_round(self, rows: int, seconds: float) -> None:
        self._rounds_since[rows] = self._rounds_since.get(rows, 0) + 1
        _average(self._round_s, rows, seconds, ROUND_WEIGHT)


def _average(means: dict[int, float], key: int, value: float, weight: float) -> None:
    before = means.get(key, value)
    means[key] = before + weight * (value - before)


@dataclass
class DraftGain:
    """One sequence's last rounds. `is_lost` says, once and for all, that drafting slows it down."""

    accepted: deque[int] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    losing_rounds: int = 0

    def note(self, accepted: int, cost_ratio: float) -> None:
        """A round that kept `accepted` drafts; gain = tokens a round over its cost."""
        self.accepted.append(accepted)
        gain = (1 + sum(self.accepted) / len(self.accepted)) / cost_ratio
        if gain < 1:
            self.losing_rounds += 1
        elif gain > RECOVERED:
            self.losing_rounds = 0

    @property
    def is_lost(self) -> bool:
        return self.losing_rounds >= ROUNDS
