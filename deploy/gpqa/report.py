"""A run's figures: a pure function of its ledger, at any time and while it is written.

Owns what counts as what. A question without a complete answer is wrong, never left out; truncated
and failed ones are told apart from wrong ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from deploy.gpqa.ledger import Contents
from deploy.gpqa.records import Answer, Counters, Failure, Header, Record, Session
from deploy.gpqa.significance import wilson

Rule = Callable[[Answer], bool]
RULES: dict[str, Rule] = {
    "robust": lambda answer: answer.robust == answer.key,
    "strict": lambda answer: answer.strict == answer.key,
    "final": lambda answer: answer.robust == answer.key and not answer.is_truncated,
}
STATES = ("correct", "wrong", "no_answer", "truncated", "failed")
ZERO_DRAFTS = 16  # an interval with fewer drafts may have none accepted by chance


@dataclass(frozen=True)
class Score:
    """`correct` of `count`, with Wilson's 95 % interval; shares 0..1, None of nothing."""

    correct: int
    count: int

    @property
    def ratio(self) -> float | None:
        return self.correct / self.count if self.count else None

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.correct, self.count)


@dataclass(frozen=True)
class Speed:
    """Tokens are completion tokens. None: nothing to tell it from."""

    active_s: float  # of all sessions, from start to the last answer
    tokens_per_s: float | None  # of all requests together
    request_tokens_per_s: float | None  # median of single answers, from request to their end
    ttft_s: float | None  # median


@dataclass(frozen=True)
class Drafts:
    """Acceptance 0..1; intervals between two looks at the server's counters."""

    acceptance: float | None
    intervals: int  # with ZERO_DRAFTS drafts or more
    zero_intervals: int  # of them without any accepted
    eager_fallbacks: int | None  # None: the server counts none
    held_s: float | None  # the server's own count


@dataclass(frozen=True)
class Report:
    """`settled` are the questions answered or failed; the other counts are parts of them."""

    header: Header
    settled: int
    scores: dict[str, Score]
    domains: dict[str, Score]
    states: dict[str, int]  # correct, wrong, no_answer, truncated, failed: each in one
    differing: int  # strict and robust name different letters
    keys: dict[str, int]  # right letters: what always saying one of them would get
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    retried: int
    sessions: int
    waited_s: float
    speed: Speed
    drafts: Drafts
    failures: dict[str, str] = field(default_factory=dict)  # id -> reason

    @property
    def answered(self) -> int:
        return self.settled - self.states["failed"]

    @property
    def is_complete(self) -> bool:
        return self.settled == self.header.questions


def make_report(contents: Contents, now: float | None = None) -> Report:
    """`now`, in Unix seconds, is the end of a session that still runs."""
    answers, failures = settle(contents.records)
    states = Counter(map(_state, answers))
    states["failed"] = len(failures)
    settled = len(answers) + len(failures)
    return Report(
        header=contents.header,
        settled=settled,
        scores={name: Score(sum(map(rule, answers)), settled) for name, rule in RULES.items()},
        domains=_domains(answers, failures),
        states={name: states[name] for name in STATES},
        differing=sum((answer.strict or "").upper() != (answer.robust or "") for answer in answers),
        keys=dict(sorted(Counter(answer.key for answer in answers).items())),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        completion_tokens=sum(answer.completion_tokens for answer in answers),
        reasoning_tokens=sum(answer.reasoning_tokens for answer in answers),
        retried=sum(answer.attempts > 1 for answer in answers),
        sessions=sum(isinstance(record, Session) for record in contents.records),
        waited_s=sum(answer.waited_s for answer in answers),
        speed=_speed(answers, contents.records, now),
        drafts=_drafts(answers, contents.records),
        failures={failure.id: failure.reason for failure in failures},
    )


def settle(records: Iterable[Record]) -> tuple[list[Answer], list[Failure]]:
    """One of either for each question that has any: its answer, else its last failure."""
    answers: dict[str, Answer] = {}
    failures: dict[str, Failure] = {}
    for record in records:
        if isinstance(record, Answer):
            answers.setdefault(record.id, record)
        elif isinstance(record, Failure):
            failures[record.id] = record
    return list(answers.values()), [f for f in failures.values() if f.id not in answers]


def _state(answer: Answer) -> str:
    if answer.is_truncated:
        return "truncated"
    if answer.robust is None:
        return "no_answer"
    return "correct" if answer.robust == answer.key else "wrong"


def _domains(answers: Sequence[Answer], failures: Sequence[Failure]) -> dict[str, Score]:
    counts = Counter([*(one.domain for one in answers), *(one.domain for one in failures)])
    correct = Counter(answer.domain for answer in answers if RULES["robust"](answer))
    return {name: Score(correct[name], counts[name]) for name in sorted(counts) if name}


def _speed(answers: Sequence[Answer], records: Iterable[Record], now: float | None) -> Speed:
    active_s = started_at = ended_at = 0.0
    for record in records:
        if isinstance(record, Session):
            active_s += ended_at - started_at
            started_at = ended_at = record.started_at
        elif isinstance(record, Answer | Failure):
            ended_at = max(ended_at, record.ended_at)
    active_s += (ended_at if now is None else now) - started_at
    tokens = sum(answer.completion_tokens for answer in answers)
    rates = [
        answer.completion_tokens / (answer.ended_at - answer.started_at)
        for answer in answers
        if answer.ended_at > answer.started_at
    ]
    return Speed(
        active_s=active_s,
        tokens_per_s=tokens / active_s if active_s > 0 and tokens else None,
        request_tokens_per_s=median(rates) if rates else None,
        ttft_s=median(answer.ttft_s for answer in answers) if answers else None,
    )


def _drafts(answers: Sequence[Answer], records: Sequence[Record]) -> Drafts:
    accepted = sum(answer.accepted_tokens for answer in answers)
    drafted = accepted + sum(answer.rejected_tokens for answer in answers)
    intervals = list(_intervals(records))
    drafting = [(of, kept) for of, kept in map(_drafted, intervals) if of >= ZERO_DRAFTS]
    eager = _grown(intervals, lambda counters: counters.eager_fallbacks)
    return Drafts(
        acceptance=accepted / drafted if drafted else None,
        intervals=len(drafting),
        zero_intervals=sum(kept == 0 for _, kept in drafting),
        eager_fallbacks=None if eager is None else round(eager),
        held_s=_grown(intervals, lambda counters: counters.held_s),
    )


def _intervals(records: Sequence[Record]) -> Iterable[tuple[Counters, Counters]]:
    """Neighbouring looks within one session."""
    marks = [record for record in records if isinstance(record, Counters | Session)]
    for before, after in pairwise(marks):
        if isinstance(before, Counters) and isinstance(after, Counters):
            yield before, after


def _drafted(interval: tuple[Counters, Counters]) -> tuple[float, float]:
    """Drafts checked and accepted in it."""
    before, after = interval
    of = _growth(before.draft_tokens, after.draft_tokens)
    return of or 0.0, _growth(before.accepted_tokens, after.accepted_tokens) or 0.0


def _grown(
    intervals: Sequence[tuple[Counters, Counters]], read: Callable[[Counters], float | None]
) -> float | None:
    grown = [_growth(read(before), read(after)) for before, after in intervals]
    known = [value for value in grown if value is not None]
    return sum(known) if known else None


def _growth(before: float | None, after: float | None) -> float | None:
    """Of a counter; one that went back began again at 0."""
    if before is None or after is None:
        return None
    return after - before if after >= before else after
