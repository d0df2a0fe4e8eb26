"""Whether drafting pays: what a draft round costs beside a plain step, and what it brings.

Rank 0's own figures; the other ranks only see which rows carry drafts. Knows no tensors. The unit
is the plain step: a round that makes n tokens in the time of r plain steps gains n - r of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_high

GUESS_PER_DRAFT = 0.4  # cost of a draft in plain steps, until it has been measured
PAIRS, STEPS = 5, 5  # medians of so many take no notice of a disturbed step
# Draft rounds until the next plain step that is made to be measured: few while little is known.
INTERVALS = (4, 16, 64, 256)
ALLOWANCE = 1.25  # plain steps a draft that a sequence may fall behind its best before it stops
STAKE = 0.2  # and this part of what it had gained
LEVEL = 2.5  # a draft: what all sequences together may, before a new one has to gain at once
LEAST = 0.5  # left to every sequence, or nobody would notice that drafts pay again


@dataclass
class _Pair:
    """Times of plain steps and of the first rounds after them: of one context length, or nearly."""

    plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    rounds_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return median(self.rounds_s) / max(median(self.plain_s), 1e-9)

    @property
    def is_sound(self) -> bool:
        """A round can't be faster than a plain step: where it was, that step was disturbed."""
        return bool(self.rounds_s) and self.ratio > 1


@dataclass
class DraftCost:
    """Time of a draft round over that of a plain step, by the number of rows of a step.

    `entering` is the time of a step that enters its tokens into the draft head and makes no drafts,
    over that of a plain one: where sequences draft, other plain steps can't be had.
    """

    num_drafts: int
    entering: float = 1.0
    trust: DraftTrust = field(init=False)
    _pairs: dict[int, deque[_Pair]] = field(default_factory=dict)
    _rounds_since: dict[int, int] = field(default_factory=dict)  # the last plain step

    def __post_init__(self) -> None:
        self.trust = DraftTrust(self.num_drafts)

    def gain(self) -> DraftGain:
        """For a new sequence."""
        return DraftGain(self.trust)

    def ratio(self, rows: int) -> float:
        """Of `rows`, or of the nearest number that was measured, or a guess."""
        measured, most = self._measured(rows), 1 + self.num_drafts
        if measured is None:
            return 1 + GUESS_PER_DRAFT * self.num_drafts
        return min(max(1.0, measured), most)  # beyond, a step was disturbed or drafts never pay

    def speedup(self, tokens_per_round: float, rows: int = 1) -> float | None:
        """Rate of decoding with drafts over that without; None until both were measured."""
        measured = self._measured(rows)
        return tokens_per_round / measured if measured else None

    def wants_plain(self, rows: int) -> bool:
        """True when a plain step should be made now, because none was measured for long."""
        pairs = self._pairs.get(rows, ())
        known = sum(not pair.rounds_s or pair.is_sound for pair in pairs)
        if not known and self._measured(rows) is None:
            return True
        return self._rounds_since.get(rows, 0) >= INTERVALS[min(known, len(INTERVALS) - 1)]

    def saw_plain(self, rows: int, seconds: float, entered: bool = False) -> None:
        self._rounds_since[rows] = 0
        pairs = self._pairs.setdefault(rows, deque(maxlen=PAIRS))
        if not pairs or pairs[-1].rounds_s:
            pairs.append(_Pair())
        pairs[-1].plain_s.append(seconds / self.entering if entered else seconds)

    def saw_round(self, rows: int, seconds: float) -> None:
        self._rounds_since[rows] = self._rounds_since.get(rows, 0) + 1
        pairs = self._pairs.get(rows)
        if pairs and len(pairs[-1].rounds_s) < STEPS:
            pairs[-1].rounds_s.append(seconds)

    def _measured(self, rows: int) -> float | None:
        known = {
            count: ratios
            for count, pairs in self._pairs.items()
            if (ratios := [pair.ratio for pair in pairs if pair.is_sound])
        }
        if not known:
            return None
        # A disturbed step took too long; the ratio is too low where that was the plain one.
        return median_high(known[min(known, key=lambda count: (abs(count - rows), count))])


@dataclass
class DraftTrust:
    """What the rounds of all sequences have left of the most that they may lose, in plain steps.

    Gains fill it up again.
    """

    num_drafts: int = 0
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.most

    @property
    def most(self) -> float:
        return LEVEL * self.num_drafts

    def note(self, gain: float) -> None:
        self.level = min(self.most, max(0.0, self.level + gain))


@dataclass
class DraftGain:
    """Plain steps that one sequence has gained by drafting, now and at best."""

    trust: DraftTrust = field(default_factory=DraftTrust)
    steps: float = 0.0
    best: float = 0.0

    def note(self, accepted: int, cost_ratio: float) -> None:
        """A round that kept `accepted` drafts and took as long as `cost_ratio` plain steps."""
        gain = 1 + accepted - cost_ratio
        self.steps += gain
        self.best = max(self.best, self.steps)
        self.trust.note(gain)

    @property
    def is_lost(self) -> bool:
        """True after a round that says: drafting slows this sequence down.

        A sequence falls back by chance, too, so it may to some extent; the less, the more all
        others have lost.
        """
        allowed = min(ALLOWANCE * self.trust.num_drafts, max(LEAST, self.trust.level))
        allowed += STAKE * self.best
        return self.best - self.steps > allowed
