"""Two configurations of the engine side by side: `nrank bench --against`.

Both are up at once. A round runs a workload once on each, next to each other; which goes first is
drawn and then turned round (ABBA), so that neither gains by its place. What is said of them are
ratios within rounds. A prompt is new to both engines in every round: a run that finds some of it
kept is no cold one, and cold and warm runs never share a row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from deploy.bench.heat import Celsius, no_sensor
from deploy.bench.measure import require_length, require_same_ids, with_progress
from deploy.bench.steps import StepSplit
from deploy.bench.workloads import Run, Spread, System, Workload

ORDERS = ("AB", "BA")
AGAIN = "-again"  # ends the id of the row with warm runs


@dataclass(frozen=True)
class Pair:
    """Both sides. `has_same_ids`: their greedy ids have to be equal."""

    a: System
    b: System
    has_same_ids: bool = True


@dataclass(frozen=True)
class Rounds:
    """One workload a round, alike but for random ids; the first warms up. `has_again`: each is run
    twice in a row on a side, first cold and then warm, and makes two rows.
    """

    workloads: Sequence[Workload]
    has_again: bool = False

    @property
    def id(self) -> str:
        return self.workloads[0].id


@dataclass(frozen=True)
class SideRow:
    """Figures of one side. Tokens and drafts are those of all its runs."""

    decode_tokens_per_s: Spread | None
    ttft_s: Spread
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    acceptance: float | None  # None where nothing was drafted
    step_split: StepSplit | None

    @classmethod
    def of(cls, runs: Sequence[Run]) -> SideRow:
        drafts, accepted = (
            sum(run.draft_tokens for run in runs),
            sum(run.accepted_tokens for run in runs),
        )
        return cls(
            _decode_rate(runs),
            Spread.of([run.ttft_s for run in runs]),
            sum(run.cached_tokens for run in runs),
            drafts,
            accepted,
            accepted / drafts if drafts else None,
            StepSplit.of([run.steps for run in runs]),
        )


@dataclass(frozen=True)
class PairRow:
    """One workload on both sides. A gain above 1 says that B is faster, as many times as it says.

    Prompts and their tokens are those of one round; `orders` are those of the counted rounds.
    """

    id: str
    concurrency: int
    prompts: int
    prompt_tokens: int
    orders: tuple[str, ...]
    a: SideRow
    b: SideRow
    decode_gain: Spread | None
    ttft_gain: Spread
    max_celsius: float | None = None

    @classmethod
    def of(
        cls, row_id: str, workload: Workload, orders: Sequence[str], a: Sequence[Run],
        b: Sequence[Run], max_celsius: float | None,
    ) -> PairRow:  # fmt: skip
        rates = [
            y.decode_tokens_per_s() / x.decode_tokens_per_s()
            for x, y in zip(a, b, strict=True)
            if x.decoded_tokens and y.decoded_tokens
        ]
        return cls(
            row_id,
            workload.concurrency,
            len(workload.prompts),
            sum(map(len, workload.prompts)),
            tuple(orders),
            SideRow.of(a),
            SideRow.of(b),
            Spread.of(rates) if rates else None,
            Spread.of([x.ttft_s / y.ttft_s for x, y in zip(a, b, strict=True)]),
            max_celsius,
        )


@dataclass(frozen=True)
class PairRows:
    rows: list[PairRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # a line each


def measure_pairs(
    pair: Pair,
    workloads: Sequence[Rounds],
    left_out: Sequence[str] = (),
    celsius: Celsius = no_sensor,
) -> PairRows:
    """NrankError when ids differ where they have to be equal."""
    found = PairRows(left_out=list(left_out))
    for rounds in with_progress(workloads, "A against B"):
        celsius()  # what was before is not this workload's
        orders = abba(rounds.id, len(rounds.workloads))
        made = [
            _round(pair, workload, order, 2 if rounds.has_again else 1)
            for workload, order in zip(rounds.workloads, orders, strict=True)
        ]
        hottest = celsius()
        for call, suffix in enumerate(("", AGAIN)[: len(made[0]["A"])]):
            runs = {side: [one[side][call] for one in made] for side in "AB"}
            reason = _mixed(runs, is_warm=bool(call))
            if reason:
                found.left_out.append(f"{rounds.id}{suffix}: {reason}")
                continue
            a, b = runs["A"][1:], runs["B"][1:]  # without the warm-up
            name, first = f"{rounds.id}{suffix}", rounds.workloads[0]
            found.rows.append(PairRow.of(name, first, orders[1:], a, b, hottest))
    return found


def abba(name: str, rounds: int) -> list[str]:
    """Who goes first: the warm-up's order, then pairs of a drawn order and its reverse."""
    draw = random.Random(name)
    orders = [ORDERS[0]]
    while len(orders) < rounds:
        first = int(draw.random() * 2)
        orders += [ORDERS[first], ORDERS[1 - first]]
    return orders[:rounds]


def _round(pair: Pair, workload: Workload, order: str, calls: int) -> dict[str, list[Run]]:
    """The runs of both sides, each checked."""
    sides = {"A": pair.a, "B": pair.b}
    made: dict[str, list[Run]] = {}
    for side in order:
        made[side] = [sides[side].run(workload) for _ in range(calls)]
    for (side, runs), other in zip(made.items(), reversed(order), strict=True):
        for run in runs:
            require_length(workload, sides[side], run.token_ids)
            if pair.has_same_ids:
                expected = made[other][0].token_ids
                require_same_ids(workload.id, sides[side], run.token_ids, sides[other], expected)
    return made


def _mixed(runs: dict[str, list[Run]], is_warm: bool) -> str:
    """Why the runs make no row: cold ones that found something kept, warm ones that did not all."""
    for side, mine in runs.items():
        warm = sum(run.cached_tokens > 0 for run in mine)
        if not is_warm and warm:
            return f"{side} found kept prefixes in {warm} of {len(mine)} runs that had to be cold"
        if 0 < warm < len(mine):
            return f"{side} found kept prefixes in {warm} of {len(mine)} runs only"
    return ""


def _decode_rate(runs: Sequence[Run]) -> Spread | None:
    rates = [run.decode_tokens_per_s() for run in runs if run.decoded_tokens]
    return Spread.of(rates) if rates else None
