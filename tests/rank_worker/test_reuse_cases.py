"""Tails of one token, cancelled requests, late copies of states, and values that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from placement.config import EngineConfig
from rank_worker import rank as rank_module
from rank_worker import runner as runner_module
from rank_worker.device import CpuDevice
from rank_worker.late_streams import LateStreams
from rank_worker.messages import EngineRequest, FinishReason, SamplingParams
from rank_worker.state_store import StateStore
from rank_worker.step_plan import RowFlag
from rank_worker.streams import Streams
from tests.rank_worker.test_rank_failures import ThreadGang
from tests.rank_worker.test_reuse_truth import (
    FREE,
    GREEDY,
    PAGE,
    Truth,
    check,
    check_idle,
    random_prompt,
    reachable,
)

Drivers = Callable[..., Any]
Truths = Callable[[str], Truth]


def has_tail_beside_drafts(driver: Any) -> bool:
    """A prompt's last token, alone in its row, in a step with draft rows."""
    tail = RowFlag.PREFILL | RowFlag.SAMPLE
    return any(
        any(row.count == 1 and row.flags & tail == tail for row in plan.rows)
        and any(row.flags & RowFlag.DRAFT for row in plan.rows)
        for plan in driver.plans
    )


@pytest.mark.parametrize(
    ("k", "sampling"),
    [
        (2, FREE),
        *(pytest.param(k, p, marks=pytest.mark.slow) for k in (1, 2, 3, 4) for p in (GREEDY, FREE)),
    ],
)
def test_the_last_token_of_a_prompt_beside_draft_rows_is_one_token(
    driver: Drivers, truth_of: Truths, k: int, sampling: SamplingParams
) -> None:
    """Prompts of m chunks and a token join two answers that draft: cold, and from the cache,
    which has all but that token.
    """
    one = driver(k, prefill_chunk_tokens=PAGE, step_tokens=48, prefix_cache=True)
    late = [
        EngineRequest(f"m{m}", random_prompt(20 + m, m * PAGE + 1), 9, sampling, ignore_eos=True)
        for m in (1, 2, 3, 4)
    ]
    for seed in (1, 2):  # of the two that run
        running = [
            EngineRequest(f"r{i}", random_prompt(seed * i, 10 + i), 50, sampling, ignore_eos=True)
            for i in (3, 4)
        ]
        one.plans.clear()
        results = one.generate([*running, *late], every=2)
        assert has_tail_beside_drafts(one)
        for request, result in zip((*running, *late), results, strict=True):
            truth_of("random-8").check(request, result.token_ids)
        found = [result.cached_tokens for result in results[2:]]
        assert found == ([0] * 4 if seed == 1 else [reachable(request) for request in late])
    check_idle(one)


def shared_prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    """Beginnings of one to three pages, each shared by several prompts."""
    random = Random(seed)
    stems = [random_prompt(seed + i, PAGE * random.randint(1, 3)) for i in range(4)]
    return [
        random.choice(stems) + random_prompt(seed + 100 + i, random.randint(1, 30))
        for i in range(count)
    ]


def cancel_all(driver: Any, requests: Sequence[EngineRequest], random: Random) -> set[str]:
    """Cancels each somewhere on its way; returns in which places it happened."""
    scheduler, places, coming = driver.scheduler, set(), list(requests)
    while coming or scheduler.has_work:
        while coming and len(scheduler.waiting) + len(scheduler.running) < 8:
            scheduler.add(coming.pop(0))
        doomed = []
        for sequence in (*scheduler.waiting, *scheduler.running):
            if random.random() < 0.2:
                doomed.append(sequence.request.request_id)
                where = "waits" if sequence.slot < 0 else "prefill"
                if sequence.is_decode:
                    where = "drafts" if sequence.has_drafts else "decode"
                places.add(where)
        if random.random() < 0.3:
            scheduler.abort(doomed)
            doomed = []
        if scheduler.has_work:
            assert not any(batch.finish_reason for batch in driver.step(abort=doomed))
    return places


@pytest.mark.parametrize("k", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (0, 4))])
def test_two_hundred_cancelled_requests_leave_nothing_behind(
    driver: Drivers, truth_of: Truths, k: int
) -> None:
    """In every place of their way; then the next ones are answered as ever."""
    one = driver(k, prefill_chunk_tokens=PAGE, step_tokens=40, max_sequences=4, prefix_cache=True)
    prompts = shared_prompts(40, seed=300)
    requests = [
        EngineRequest(f"{i}", prompts[i % 40], 300, (GREEDY, FREE)[i % 2], ignore_eos=True)
        for i in range(200)
    ]
    places = cancel_all(one, requests, Random(k))
    assert places == {"waits", "prefill", "drafts" if k else "decode"}
    check_idle(one)
    after = [EngineRequest(f"after {i}", p, 6, ignore_eos=True) for i, p in enumerate(prompts[:8])]
    results = check(one, truth_of("random-8"), after)
    assert any(result.cached_tokens for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_hundred_cancelled_requests_of_a_gang(
    reusing_alone: Any, truth_of: Truths, ranks: int
) -> None:
    """Whenever it happens to be: cancelled as soon as another one says something."""
    random, prompts = Random(ranks), shared_prompts(40, seed=400)
    requests = [EngineRequest(f"{i}", prompts[i % 40], 1000, ignore_eos=True) for i in range(200)]
    with reusing_alone("random-8", ranks, 2) as engine:
        coming, going = list(requests), list[str]()
        while coming or going:
            count = random.randint(1, 12) if coming else 0
            engine.rank0.submit(coming[:count])
            going += [request.request_id for request in coming[:count]]
            del coming[:count]
            engine.rank0.poll_outputs(random.choice([0.0, 0.01, 0.1]))
            random.shuffle(going)
            count = random.randint(1, len(going))
            engine.rank0.abort(going[:count])
            del going[:count]
        last = EngineRequest("after", prompts[0], 6, ignore_eos=True)
        engine.rank0.submit([last])
        batches = [engine.rank0.poll_outputs(60.0)]
        while not any(batch.request_id == "after" and batch.finish_reason for batch in batches[-1]):
            assert batches[-1]
            batches.append(engine.rank0.poll_outputs(60.0))
        mine = [batch for some in batches for batch in some if batch.request_id == "after"]
        truth_of("random-8").check(last, [token for batch in mine for token in batch.token_ids])
        check_idle(engine)


class LateDevice(CpuDevice):
    """Its copies beside the model complete late and out of order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def open_streams(self) -> Streams:
        return LateStreams(self.seed)


class NoFences(StateStore):
    def _wait(self, *_: Any) -> None:
        pass


@pytest.fixture
def late_driver(driver: Drivers, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A rank with three states on the device and four on the host, and copies that lag."""

    def start(store: type[StateStore], seed: int = 7, k: int = 2) -> Any:
        size = driver(0, prefix_cache=True).rank.plan.prefix.state_bytes
        with monkeypatch.context() as patch:
            patch.setattr(rank_module, "open_device", lambda name: LateDevice(seed))
            patch.setattr(runner_module, "StateStore", store)
            one = driver(
                k, prefix_cache=True, prefix_bytes=3 * size, prefix_host_bytes=4 * size,
                max_sequences=4, prefix_interval_tokens=32,
            )  # fmt: skip
        assert isinstance(one.runner.store, store)
        return one

    return start


def random_requests(count: int) -> list[EngineRequest]:
    random, prompts = Random(9), shared_prompts(24, seed=500)
    return [
        EngineRequest(f"{i}", random.choice(prompts), 3, random.choice((GREEDY, FREE)), (), True)
        for i in range(count)
    ]


def wrong_answers(driver: Any, truth: Truth, requests: Sequence[EngineRequest]) -> list[str]:
    wrong = []
    for request, result in zip(requests, driver.generate(requests, every=1), strict=True):
        try:
            truth.check(request, result.token_ids)
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


@pytest.mark.parametrize(
    ("count", "seed", "k"),
    [
        (90, 7, 2),
        *(pytest.param(300, i, k, marks=pytest.mark.slow) for i in (1, 2) for k in (0, 3)),
    ],
)
def test_three_states_and_late_copies_give_what_no_cache_gives(
    late_driver: Any, truth_of: Truths, count: int, seed: int, k: int
) -> None:
    one = late_driver(StateStore, seed, k)
    assert wrong_answers(one, truth_of("random-8"), random_requests(count)) == []
    check_idle(one)
    counts = one.scheduler.cache.cells.counts
    assert min(counts.saves, counts.spills, counts.drops, counts.restores, counts.fetches) > 10


def test_a_store_without_fences_is_noticed(late_driver: Any, truth_of: Truths) -> None:
    assert wrong_answers(late_driver(NoFences), truth_of("random-8"), random_requests(60))


@contextmanager
def spoilt_experts(gang: ThreadGang, rank: int, name: str, when: Callable[[Any], bool]) -> Any:
    """That rank's experts of the third layer give NaN for request `name` whenever `when` says so
    of its sequence.
    """
    channel = gang.model(rank).layers[2].channel
    scheduler: Any = gang.ranks[0].scheduler
    forward = channel.forward

    def spoilt(x: Tensor, positions: Tensor, batch: Any) -> Tensor:
        y: Tensor = forward(x, positions, batch)
        for sequence in scheduler.running:
            if sequence.request.request_id == name and when(sequence):
                y[tokens_of(batch, sequence.slot)] = torch.nan
        return y

    channel.forward = spoilt
    try:
        yield
    finally:
        channel.forward = forward


def tokens_of(batch: Any, slot: int) -> list[int]:
    """Which tokens of the step are the slot's."""
    found: list[int] = []
    for group in batch.groups:
        for row, at in enumerate(group.slots.tolist()):
            if at == slot:
                begin = group.begin + row * group.width
                found += range(begin, begin + group.width)
    for row in batch.prefill:
        if row.slot == slot:
            found += range(row.begin, row.end)
    return found


@pytest.fixture
def spoilable(random_checkpoint: Callable[..., Path]) -> Iterator[ThreadGang]:
    """Two ranks with drafts, prefixes and prefill in chunks."""
    config = EngineConfig(
        str(random_checkpoint(layers=8)), ranks=2, page_tokens=PAGE, context_tokens=256,
        kv_pool_tokens=2048, max_sequences=4, prefill_chunk_tokens=PAGE, check_contracts=True,
        check_interval_steps=1, step_timeout_s=30.0, mtp=2, mtp_auto=False, prefix_cache=True,
    )  # fmt: skip
    gang = ThreadGang(config)
    yield gang
    gang.end()
    assert not gang.errors


@pytest.mark.parametrize("at", ["prefill", "drafts"])
def test_values_of_one_rank_that_are_not_finite_end_one_of_four(
    spoilable: ThreadGang, truth_of: Truths, at: str
) -> None:
    """Its error, nothing of it kept, the others as ever; and right when all is well again."""
    truth, scheduler = truth_of("random-8"), spoilable.ranks[0].scheduler
    assert scheduler is not None
    requests = [
        EngineRequest(f"{i}", random_prompt(600 + i, 36 + i), 12, p, ignore_eos=True)
        for i, p in enumerate((GREEDY, FREE, GREEDY, FREE))
    ]

    def when(sequence: Any) -> bool:
        if at == "prefill":
            return bool(sequence.num_computed == PAGE)
        return bool(sequence.num_generated >= 4 and sequence.has_drafts)

    with spoilt_experts(spoilable, 1, "2", when):
        answers = spoilable.run(*requests)
    ids, last = answers["2"]
    assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, "non_finite")
    true = truth.of(requests[2]).token_ids
    assert ids == true[: len(ids)]
    assert (len(ids) == 0) == (at == "prefill")
    assert spoilable.ranks[0].snapshot().nonfinite_rows == 1
    for is_last in (False, True):
        for request in requests:
            if request.request_id != "2" or is_last:
                truth.check(request, answers[request.request_id][0])
        scheduler.check_integrity()
        if not is_last:
            answers = spoilable.run(*requests)
    found = [answers[request.request_id][1].cached_tokens for request in requests]
    assert found == [32, 32, 0, 32]


@pytest.mark.parametrize("has_state", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_prefix_that_is_not_finite_fails_one_request_and_no_more(
    spoilable: ThreadGang, truth_of: Truths, has_state: bool
) -> None:
    """Whoever computed it was cancelled before its values showed: after its state was kept, or
    before, so that a healthy request keeps its own with those pages.
    """
    prompt, truth = random_prompt(650, 60), truth_of("random-8")
    scheduler: Any = spoilable.ranks[0].scheduler
    update = scheduler.update

    def cancelling(*args: Any) -> Any:
        if has_state and any(s.num_computed == 48 for s in scheduler.running):
            scheduler.abort(["first"])
        batches = update(*args)
        if any(s.num_computed == 48 for s in scheduler.running) and not has_state:
            scheduler.abort(["first"])
        return batches

    scheduler.update = cancelling
    other = EngineRequest("other", random_prompt(651, 30), 8, ignore_eos=True)
    with spoilt_experts(spoilable, 1, "first", lambda sequence: True):
        spoilable.ranks[0].submit([EngineRequest("first", prompt, 6, ignore_eos=True)])
        truth.check(other, spoilable.run(other)["other"][0])
    scheduler.update = update
    seen = []
    for number in range(4):
        again = EngineRequest(f"again {number}", prompt, 6, ignore_eos=True)
        ids, last = spoilable.run(again)[again.request_id]
        seen.append((last.cached_tokens, last.error_kind))
        if last.error_kind is None:
            truth.check(again, ids)
    bad, good = [(48, "non_finite")], [(0, None)]
    assert seen == (bad if has_state else good + bad) + good + [(48, None)] * (2 - (not has_state))
