"""What drafting costs and brings, and who stops: whole answers at made-up step times."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest

from rank_worker.draft_gain import (
    ALLOWANCE,
    INTERVALS,
    LEAST,
    LEVEL,
    STAKE,
    DraftCost,
    DraftGain,
    DraftTrust,
)
from rank_worker.messages import EngineRequest
from rank_worker.scheduler import Scheduler, SchedulerLimits
from rank_worker.step_plan import Row, RowFlag, StepPlan

ENTERING = 1.13  # of a plain step, where its token enters the draft head
TOKENS = 200
COSTS = ((1, 1.4), (2, 1.6), (2, 1.9), (2, 2.3), (3, 2.3), (4, 2.8))  # drafts, time of a round


class Simulation:
    """A scheduler whose steps take plain steps, rounds and disturbances of a model at hand.

    `chance[i]` is that of each draft of request i; every step is `noise` longer at most, and one
    in thirty takes five times as long. The first token of an answer and its time don't count.
    """

    def __init__(self, drafts: int, round_s: float, noise: float = 0.0, seed: int = 0) -> None:
        limits = SchedulerLimits(
            step_tokens=512, prefill_chunk_tokens=0, page_tokens=64, num_pages=512, num_slots=8,
            context_tokens=4096, check_interval_steps=64, num_drafts=drafts,
        )  # fmt: skip
        self.scheduler = Scheduler(limits)
        self.scheduler.cost.entering = ENTERING
        self.drafts, self.round_s, self.noise = drafts, round_s, noise
        self.random = random.Random(seed)
        self.served = 0

    def seconds(self, plan: StepPlan) -> float:
        flags = [row.flags for row in plan.rows]
        if any(f & RowFlag.DRAFT for f in flags):
            return self.round_s
        if any(f & RowFlag.PROPOSE for f in flags):
            return ENTERING + 0.12 * self.drafts
        return ENTERING if any(f & RowFlag.ENTER for f in flags) else 1.0

    def accepted(self, row: Row, chance: float) -> int:
        drafts = self.drafts if row.flags & RowFlag.DRAFT else 0
        return next((i for i in range(drafts) if self.random.random() >= chance), drafts)

    def speedup(self, *chances: float, tokens: int = TOKENS) -> float:
        """Rate of answers that are made at the same time, over that of plain steps."""
        for index, chance in enumerate(chances):
            name = f"{self.served}:{index}:{chance}"
            self.scheduler.add(EngineRequest(name, (5,) * 20, tokens, ignore_eos=True))
        self.served += 1
        seconds = 0.0
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            taken = self.seconds(plan)
            is_prefill = any(row.flags & RowFlag.PREFILL for row in plan.rows)
            seconds += 0.0 if is_prefill else taken
            factor = 1 + self.noise * self.random.random()
            if self.noise and self.random.random() < 1 / 30:
                factor *= 5
            self.scheduler.update(self.made(plan), seconds=taken * factor)
        return (tokens - 1) / seconds

    def made(self, plan: StepPlan) -> list[list[int]]:
        chance_of = {
            s.slot: float(s.request.request_id.rpartition(":")[2]) for s in self.scheduler.running
        }
        return [[7] * (1 + self.accepted(row, chance_of[row.slot])) for row in plan.rows]


def average(values: Seq[float]) -> float:
    return sum(values) / len(values)


POOR = [
    (drafts, round_s, chance)
    for chance in (0.0, 0.2, 0.4)
    for drafts, round_s in COSTS
    if 1 + chance * (1 + chance) <= round_s  # beyond, drafts pay
]


@pytest.mark.parametrize(("drafts", "round_s", "chance"), POOR)
def test_an_answer_that_drafts_can_not_help_keeps_its_rate(
    drafts: int, round_s: float, chance: float
) -> None:
    """The first one, which everything is learned from, and those that follow."""
    for seed in range(5):
        text = Simulation(drafts, round_s, noise=0.1, seed=seed)
        assert text.speedup(chance) > 0.955
        later = [text.speedup(chance) for _ in range(5)]
        assert average(later) > 0.985
        assert min(later) > 0.965


@pytest.mark.parametrize(("drafts", "round_s"), COSTS[:4])
def test_short_answers_in_turn_that_drafts_can_not_help_keep_their_rate(
    drafts: int, round_s: float
) -> None:
    """64 tokens are the time in which the first one finds out."""
    for seed in range(5):
        text = Simulation(drafts, round_s, noise=0.1, seed=seed)
        assert average([text.speedup(0.2, tokens=64) for _ in range(4)]) > 0.96


@pytest.mark.parametrize(("drafts", "round_s"), COSTS)
@pytest.mark.parametrize("chance", [0.9, 1.0])
def test_an_answer_that_drafts_help_keeps_them(drafts: int, round_s: float, chance: float) -> None:
    """Some stop by bad luck, and lose nothing but the drafts."""
    possible = sum(chance**i for i in range(drafts + 1)) / round_s
    texts = [Simulation(drafts, round_s, noise=0.1, seed=seed) for seed in range(6)]
    first, *later = [[text.speedup(chance) for text in texts] for _ in range(4)]
    assert average(first) > 0.88 * possible
    others = [rate for rates in later for rate in rates]
    assert average(others) > 0.93 * possible
    assert min(first + others) > 0.955


@pytest.mark.parametrize("answers", [1, 4])
def test_drafts_come_back_when_they_pay_again(answers: int) -> None:
    text = Simulation(2, 1.9, noise=0.1)
    for _ in range(6):
        text.speedup(*[0.0] * answers)
    assert text.scheduler.cost.trust.level < 1
    text.speedup(*[0.9] * answers)
    assert text.speedup(*[0.9] * answers) > 1.35


def test_of_answers_at_the_same_time_only_the_poor_one_stops() -> None:
    text = Simulation(2, 1.9)
    for chance in (1.0, 0.0, 1.0):
        name = f"0:{chance}"
        text.scheduler.add(EngineRequest(name, (5,) * 20, TOKENS, ignore_eos=True))
    for _ in range(30):
        plan = text.scheduler.schedule()
        text.scheduler.update(text.made(plan), seconds=text.seconds(plan))
    assert [s.is_drafting for s in text.scheduler.running] == [True, False, True]
    assert {row.count for row in plan.rows} == {1, 3}


def test_the_same_steps_decide_the_same() -> None:
    rates = [Simulation(2, 1.9, noise=0.1, seed=3).speedup(0.6, 0.1, 0.8) for _ in range(2)]
    assert rates[0] == rates[1]


def test_the_cost_is_a_guess_until_both_kinds_were_measured() -> None:
    cost = DraftCost(2)
    guess = cost.ratio(1)
    cost.saw_round(1, 2.5)
    assert cost.ratio(1) == guess
    assert cost.speedup(2.5) is None
    cost.saw_plain(1, 1.0)
    assert (cost.ratio(1), cost.speedup(2.5)) == (guess, None), "rounds after it are compared"
    cost.saw_round(1, 2.0)
    assert cost.ratio(1) == 2.0
    assert cost.speedup(2.5) == 1.25


def test_the_nearest_number_of_rows_speaks_for_one_without_measurement() -> None:
    cost = DraftCost(2)
    for rows, seconds in ((1, 2.0), (4, 2.5)):
        cost.saw_plain(rows, 1.0)
        cost.saw_round(rows, seconds)
    assert [cost.ratio(rows) for rows in (1, 2, 3, 4, 9)] == [2.0, 2.0, 2.5, 2.5, 2.5]
    assert not cost.wants_plain(9), "a guess is there, so there is time"


def test_a_step_that_enters_the_head_counts_as_the_plain_one_that_it_stands_for() -> None:
    cost = DraftCost(2, entering=1.25)
    cost.saw_plain(1, 1.25, entered=True)
    cost.saw_round(1, 2.0)
    assert cost.ratio(1) == 2.0


@pytest.mark.parametrize("disturbed", ["plain", "round"])
def test_one_disturbed_step_changes_nothing(disturbed: str) -> None:
    cost = DraftCost(2)
    for index in range(3):
        is_slow = index == 1
        cost.saw_plain(1, 9.0 if is_slow and disturbed == "plain" else 1.0)
        for _ in range(3):
            cost.saw_round(1, 20.0 if is_slow and disturbed == "round" else 2.0)
    assert cost.ratio(1) == 2.0


def test_a_ratio_that_can_not_be_is_cut() -> None:
    cost = DraftCost(2)
    cost.saw_plain(1, 1.0)
    cost.saw_round(1, 20.0)
    assert cost.ratio(1) == 3.0


def test_a_plain_step_that_was_disturbed_is_forgotten_and_made_again_soon() -> None:
    cost = DraftCost(2)
    for rows in (1, 4):
        cost.saw_plain(rows, 1.0 if rows == 1 else 9.0)
        cost.saw_round(rows, 1.75)
    assert cost.ratio(4) == 1.75, "that of the nearest number of rows"
    for _ in range(INTERVALS[0] - 1):
        assert not cost.wants_plain(4)
        cost.saw_round(4, 2.25)
    assert cost.wants_plain(4)
    cost.saw_plain(4, 1.0)
    cost.saw_round(4, 2.25)
    assert cost.ratio(4) == 2.25


def test_plain_steps_are_made_at_first_and_then_seldom() -> None:
    cost, rounds = DraftCost(2), []
    assert cost.wants_plain(1)
    for _ in range(6):
        cost.saw_plain(1, 1.0)
        rounds.append(0)
        while not cost.wants_plain(1):
            cost.saw_round(1, 2.0)
            rounds[-1] += 1
    assert rounds == [*INTERVALS[1:], *[INTERVALS[-1]] * 3]


def test_a_sequence_may_fall_behind_its_best_as_far_as_all_others_leave_it() -> None:
    gain = DraftGain(DraftTrust(2))
    rounds = 0
    while not gain.is_lost:
        gain.note(2, 1.75)  # gains come first, and don't count against what is lost later
        gain.note(0, 1.75)
        gain.note(0, 1.75)
        gain.note(0, 1.75)
        rounds += 3
    assert gain.best - gain.steps > min(2 * ALLOWANCE, gain.trust.level) + STAKE * gain.best
    assert rounds * 0.75 < 2 * LEVEL
    other = DraftGain(gain.trust)
    other.trust.level = 0.0
    other.note(0, 1.0 + LEAST / 2)
    assert not other.is_lost
    other.note(0, 1.0 + LEAST)
    assert other.is_lost
    for _ in range(20):
        DraftGain(gain.trust).note(2, 1.75)
    assert gain.trust.level == 2 * LEVEL
