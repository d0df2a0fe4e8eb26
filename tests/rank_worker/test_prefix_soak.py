"""Random traffic through scheduler, prefix cache and state store on a device that is late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from rank_worker.messages import EngineRequest, FinishReason, TokenBatch
from rank_worker.scheduler import Scheduler, SchedulerLimits
from rank_worker.step_plan import CopyKind
from tests.rank_worker.fake_device import FakeDevice, Run, check_answers, expected_ids
from tests.rank_worker.soak import soak as engine_soak
from tests.rank_worker.traffic import Lengths, Traffic

WORLD = 100  # operations between a start with drawn limits and an end with nothing left
VOCAB = 9  # small, so that prompts meet by chance too
MOST_OPEN = 8  # requests

MakeDevice = Callable[[SchedulerLimits, int, bool], FakeDevice]
MakeScheduler = Callable[[SchedulerLimits], Scheduler]


def random_limits(random: Random) -> SchedulerLimits:
    """From a pool of barely one context to a roomy one, from one cell to enough."""
    page, context = random.randint(2, 4), random.randint(12, 40)
    least = -(-context // page)
    return SchedulerLimits(
        step_tokens=random.randint(1, 20),
        prefill_chunk_tokens=random.randint(0, 6),
        page_tokens=page,
        num_pages=least + random.choice([0, 1, 3, least, 3 * least]),
        num_slots=random.randint(1, 4),
        context_tokens=context,
        check_interval_steps=3,
        num_drafts=random.randint(0, 4),
        drafts_auto=random.random() < 0.5,
        prefix_states=random.randint(0, 5),
        prefix_host_states=random.randint(0, 4),
        prefix_interval_tokens=random.choice([1, 2, 3, 5, 1000]) * page,
        decode_share=random.choice([0.0, 0.5, 0.9]),
    )


class World:
    """One scheduler on one device from start to end, and the requests that it gets."""

    def __init__(
        self, limits: SchedulerLimits, device: FakeDevice, scheduler: Scheduler | None = None
    ) -> None:
        self.limits = limits
        self.run = Run(limits, device, scheduler)
        self.open: dict[str, EngineRequest] = {}
        self.answers: dict[str, list[int]] = {}
        self.known: list[tuple[int, ...]] = []  # prompts with their answers
        self.counts: Counter[str] = Counter()
        self.num_seen = 0
        self.is_sound = True

    def add(self, request: EngineRequest) -> None:
        self.counts["requests"] += 1
        self.open[request.request_id] = request
        self.answers[request.request_id] = []
        self.run.add(request)

    def step(
        self, seconds: float = 0.01, during: tuple[str, ...] = (), spoil: int | None = None
    ) -> None:
        self.is_sound = False  # unless all checks pass
        self.drop(during)
        self.run.step(during, spoil, seconds)
        counts = self.run.scheduler.cache.counts
        assert counts.queries == counts.hits + sum(counts.misses.values()), "a token not counted"
        for batch in self.run.batches[self.num_seen :]:
            self.listen(batch)
        self.num_seen = len(self.run.batches)
        self.is_sound = True

    def listen(self, batch: TokenBatch) -> None:
        """Each answer is the model's, however it came about; a spoilt one as far as it goes."""
        name, request = batch.request_id, self.open[batch.request_id]
        if request.prompt_logprobs and not self.answers[name]:
            told = [score.logprob for score in batch.prompt_logprobs]
            assert told == list(request.prompt_ids[1:]), "scores of other tokens"
        self.answers[name] += batch.token_ids
        assert 0 <= batch.cached_tokens < len(request.prompt_ids)
        if batch.finish_reason is None:
            return
        made, right = self.answers[name], expected_ids(request, self.limits.context_tokens)
        if batch.finish_reason is FinishReason.ERROR:
            self.counts["spoilt"] += 1
            right = right[: len(made)]
        else:
            self.counts["finished"] += 1
            self.counts["hits"] += batch.cached_tokens > 0
            self.counts["accepted drafts"] += batch.accepted_tokens
            self.known.append((*request.prompt_ids, *made))
        assert tuple(made) == right, "not the model's answer"
        self.drop((name,))

    def drop(self, names: tuple[str, ...]) -> None:
        for name in names:
            del self.open[name], self.answers[name]

    def cancel(self, kind: str, which: int) -> None:
        """A waiting or running request between steps, or one while its step runs."""
        scheduler = self.run.scheduler
        queue = scheduler.waiting if kind == "waiting" else scheduler.running
        if not queue:
            return
        name = queue[which % len(queue)].request.request_id
        self.counts[f"cancelled {kind}"] += 1
        if kind == "in flight":
            self.step(during=(name,))
            return
        self.drop((name,))
        scheduler.abort([name])
        scheduler.check_integrity()

    def strike(self, slot: int) -> None:
        """What the slot computes in the next step is not finite."""
        self.run.device.struck.add(slot % self.limits.num_slots)
        self.step()

    def stop_drafting(self, which: int) -> None:
        """One sequence does, as it would when drafts had slowed it down for long."""
        running = self.run.scheduler.running
        if running:
            sequence = running[which % len(running)]
            sequence.is_drafting = sequence.has_drafts = False

    def finish(self) -> None:
        """Until nothing is left; then nothing may be left."""
        for _ in range(1000):
            if not self.run.scheduler.has_work:
                assert not self.open, "a request without an end"
                self.run.check_idle()
                return
            self.step()
        raise AssertionError("the requests never end")

    def close(self) -> None:
        """Ends everything and adds up what has happened."""
        self.finish()
        scheduler, counts = self.run.scheduler, self.counts
        copies = Counter(copy.kind.name for plan in self.run.device.plans for copy in plan.copies)
        cells = scheduler.cache.cells.counts
        assert (cells.saves, cells.spills) == (copies["SAVE"], copies["SPILL"])
        assert (cells.restores, cells.fetches) == (copies["RESTORE"], copies["FETCH"])
        for kind in CopyKind:
            counts[f"{kind.name.lower()} copies"] = copies[kind.name]
        counts["evictions"] = scheduler.cache.counts.evicted_pages
        counts["dropped states"] = cells.drops
        counts["preemptions"] = scheduler.num_preemptions
        counts["steps"] = len(self.run.device.plans)


class Soak(World):
    """A world whose requests and disturbances are drawn."""

    def __init__(
        self, random: Random, limits: SchedulerLimits, device: FakeDevice, scheduler: Scheduler
    ) -> None:
        super().__init__(limits, device, scheduler)
        self.random = random
        page, context = limits.page_tokens, limits.context_tokens
        lengths = Lengths((1, context - 2), (0, 2 * page), (1, 12), context)
        self.traffic = Traffic(random, VOCAB, lengths)

    def listen(self, batch: TokenBatch) -> None:
        super().listen(batch)
        if self.known:
            self.traffic.heard(self.known.pop())

    def operate(self) -> None:
        """One random operation."""
        draw, pick = self.random.random(), self.random.randrange(100)
        if draw < 0.3 and len(self.open) < MOST_OPEN:
            self.add(self.request())
        elif draw < 0.36:
            self.cancel(self.random.choice(["waiting", "running", "in flight"]), pick)
        elif draw < 0.37:
            self.step(spoil=pick)
        elif draw < 0.38:
            self.strike(pick)
        elif draw < 0.40:
            self.stop_drafting(pick)
        elif draw < 0.41:
            self.finish()
        else:
            self.step(self.random.choice([0.001, 0.002, 0.01, 0.1]))

    def request(self) -> EngineRequest:
        return self.traffic.draw(
            priority=self.random.choice([0, 0, 0, -1, 1]),
            stop_token_ids=tuple(self.random.sample(range(997), 20)),
            prompt_logprobs=self.random.random() < 0.1,
        )

    def close(self) -> None:
        super().close()
        self.counts["forks"] = self.traffic.num_forks
        self.counts["extensions"] = self.traffic.num_extensions


def soak(
    operations: int,
    seed: int,
    late_compute: bool = False,
    make_device: MakeDevice = FakeDevice,
    make_scheduler: MakeScheduler = Scheduler,
) -> Counter[str]:
    """What has happened in `operations`; AssertionError when anything went wrong."""
    random, total = Random(seed), Counter[str]()
    for _ in range(-(-operations // WORLD)):
        limits = random_limits(random)
        device = make_device(limits, random.randrange(2**32), late_compute)
        world = Soak(random, limits, device, make_scheduler(limits))
        for _ in range(WORLD):
            world.operate()
        world.close()
        total += world.counts
    return total


SEEN = (
    "finished", "hits", "accepted drafts", "spoilt", "cancelled waiting", "cancelled running",
    "cancelled in flight", "save copies", "spill copies", "restore copies", "fetch copies",
    "evictions", "dropped states", "preemptions", "forks", "extensions",
)  # fmt: skip


@pytest.mark.parametrize("late_compute", [False, True])
def test_two_thousand_random_operations(late_compute: bool) -> None:
    counts = soak(2_000, 0, late_compute)
    assert not [kind for kind in SEEN if not counts[kind]], "something was never tried"


@pytest.mark.slow
@pytest.mark.parametrize("late_compute", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ten_thousand_random_operations(seed: int, late_compute: bool) -> None:
    counts = soak(10_000, seed, late_compute)
    assert not [kind for kind in SEEN if not counts[kind]], "something was never tried"


@pytest.mark.slow
def test_a_minute_of_mixed_traffic_on_the_engine() -> None:
    """Longer ones: `python -m tests.rank_worker.soak`."""
    figures = engine_soak(60.0, seed=3, ranks=2).figures()
    seen = ("with a hit", "cancelled", "evicted pages", "save copies", "spill copies")
    assert all(figures[name] > 0 for name in seen), figures


LIMITS = SchedulerLimits(
    step_tokens=64, prefill_chunk_tokens=7, page_tokens=4, num_pages=10, num_slots=2,
    context_tokens=36, check_interval_steps=4, prefix_states=4, prefix_interval_tokens=1024,
)  # fmt: skip
LONG = tuple(range(100, 130))


def test_a_prompt_goes_on_when_the_only_answer_that_held_it_back_is_preempted() -> None:
    """The answer needs a page and is the last in order; the prompt before it owes it time."""
    run = Run(replace(LIMITS, num_pages=9, prefix_states=0, decode_share=0.5))
    answer, prompt = EngineRequest("a", LONG[:5], 20), EngineRequest("p", LONG[:24], 2, priority=-1)
    run.add(answer)
    for _ in range(5):
        run.step(seconds=1e-3)
    run.add(prompt)
    for seconds in (1e-3, 1e-3, 1.0):
        run.step(seconds=seconds)
    assert run.scheduler.num_preemptions == 0
    run.step()
    assert run.scheduler.num_preemptions == 1
    run.finish()
    check_answers(run, [answer, prompt])


def test_a_prompt_that_is_computed_again_takes_no_more_pages_than_it_has() -> None:
    """Its log-probabilities are asked for, so it can't use the pages that are cached."""
    run = Run(replace(LIMITS, num_pages=9))
    run.answer(*LONG[:24])
    run.answer(*LONG, 1, 2, max_tokens=2, prompt_logprobs=True)
    assert run.scheduler.num_preemptions == 0


def test_a_prefix_that_is_not_finite_fails_one_request_and_is_computed_again() -> None:
    """Whoever computed it was cancelled before a row of it was looked at."""
    run = Run(replace(LIMITS, prefix_interval_tokens=8))
    run.device.struck.add(0)
    run.add(EngineRequest("cancelled", LONG, 2))
    for _ in range(3):
        run.step()
    run.scheduler.abort(["cancelled"])
    fails = EngineRequest("fails", LONG, 2)
    run.add(fails)
    run.finish()
    assert run.reason(fails) is FinishReason.ERROR
    assert run.batches[-1].cached_tokens == 8
    assert run.answer(*LONG).cached_tokens == 0
    assert run.answer(*LONG).cached_tokens == 28


def test_what_a_preempted_request_has_added_is_forgotten_with_it() -> None:
    """It found its own beginning, made a token, and then a row was not finite."""
    run = Run(replace(LIMITS, prefix_interval_tokens=8))
    run.answer(*LONG[:5], max_tokens=1)
    preempted, other = EngineRequest("preempted", LONG[:21], 12), EngineRequest("a", LONG[8:21], 12)
    run.add(replace(other, priority=-1), preempted)
    while not run.scheduler.num_preemptions:
        run.step()
    while run.scheduler.waiting or not run.scheduler.running[-1].last_on_device:
        run.step()
    sequence = run.scheduler.running[-1]
    assert sequence.num_hit > sequence.cached_tokens == 4
    run.step(spoil=-1)
    assert run.reason(preempted) is FinishReason.ERROR
    assert len(run.scheduler.cache.tree.match(LONG[:21], 5)) == 1
