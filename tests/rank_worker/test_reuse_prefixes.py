"""Prefixes that many requests share, states on both tiers, and conversations of many turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rank_worker.messages import EngineRequest
from rank_worker.prefix_cache import PrefixCounts
from tests.rank_worker.test_reuse_grid import MODELS, converse
from tests.rank_worker.test_reuse_truth import (
    FREE,
    GREEDY,
    PAGE,
    Prompts,
    Truth,
    check,
    chunks,
    prefix_cache,
    random_prompt,
    reachable,
)

Truths = Callable[[str], Truth]
SHARED = random_prompt(70, 5 * PAGE)


@pytest.fixture(scope="module")
def one_rank(driver: Callable[..., Any]) -> Any:
    return driver(3, prefix_cache=True)


def with_tails(count: int) -> list[EngineRequest]:
    """All begin with SHARED; every length of tail up to 40 occurs, each tail once."""
    tails = [random_prompt(800 + i, 1 + (i * 7 + 20) % 40) for i in range(count)]
    return [EngineRequest(f"tail {i}", SHARED + t, 2, ignore_eos=True) for i, t in enumerate(tails)]


def one_by_one(
    engine: Any, truth: Truth, requests: list[EngineRequest], interval: int
) -> tuple[list[int], PrefixCounts]:
    """Cached tokens of each, and the counts of all."""
    with prefix_cache(engine, interval=interval) as cache:
        found = [check(engine, truth, [one])[0].cached_tokens for one in requests]
        return found, cache.counts


def test_sixty_four_tails_of_any_length_find_the_beginning_they_share(
    one_rank: Any, truth_of: Truths
) -> None:
    """The second request keeps a state where it leaves the first one's path, all others find it."""
    requests = with_tails(64)
    found, counts = one_by_one(one_rank, truth_of("random-8"), requests, 512)
    assert found == [0, 0] + [len(SHARED)] * 62
    tails = sum(len(r.prompt_ids) - len(SHARED) for r in requests)
    new = sum(reachable(r) - len(SHARED) for r in requests) + len(SHARED)
    assert {reason: count for reason, count in counts.misses.items() if count} == {
        "new": new,
        "no_state": len(SHARED),  # of the second request
        "open_page": tails - (new - len(SHARED)),
    }
    assert counts.hits == 62 * len(SHARED)


def test_a_beginning_longer_than_the_interval_is_found_by_the_second_request(
    one_rank: Any, truth_of: Truths
) -> None:
    found, _ = one_by_one(one_rank, truth_of("random-8"), with_tails(12), interval=48)
    assert found[:2] == [0, 48]
    assert found[2:] == [len(SHARED)] * 10


def test_tails_that_arrive_together_find_the_beginning_as_soon_as_it_is_there(
    one_rank: Any, truth_of: Truths
) -> None:
    requests, slots = with_tails(24), one_rank.config.max_sequences
    with prefix_cache(one_rank), chunks(one_rank, 16, 32):
        results = check(one_rank, truth_of("random-8"), requests)
    assert all(r.cached_tokens == len(SHARED) for r in results[2 * slots :])


def check_tiers(engine: Any, truth: Truth) -> None:
    """Six prompts in turn, for the third time from the newest to the oldest."""
    requests = [
        EngineRequest(f"{i}", random_prompt(60 + i, 20 + 9 * i), 6, p, ignore_eos=True)
        for i, p in enumerate((GREEDY, FREE) * 3)
    ]
    with prefix_cache(engine) as cache:
        for order in (requests, requests, requests[::-1]):
            for one in order:
                check(engine, truth, [one])
        counts = cache.cells.counts
        assert min(counts.restores, counts.fetches, counts.spills, counts.drops) > 0
        assert cache.counts.misses["state_dropped"] > 0


def state_bytes(engine: Any) -> int:
    return engine.rank0.plan.prefix.state_bytes


def test_states_come_back_from_the_device_and_from_the_host(
    driver: Callable[..., Any], one_rank: Any, truth_of: Truths
) -> None:
    """Budgets in bytes for two states here and three there; the sixth makes one go."""
    size = state_bytes(one_rank)
    tiny = {"prefix_bytes": 2 * size + 1, "prefix_host_bytes": 3 * size + size // 2}
    engine = driver(2, prefix_cache=True, **tiny)
    assert (engine.rank.plan.prefix.device, engine.rank.plan.prefix.host) == (2, 3)
    check_tiers(engine, truth_of("random-8"))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ranks", "k"), [(1, 0), (2, 2), (3, 4), (4, 1), (6, 3)])
def test_states_come_back_to_every_rank(
    reusing_alone: Any, truth_of: Truths, model: str, ranks: int, k: int
) -> None:
    with reusing_alone(model, ranks, k) as engine:
        size = state_bytes(engine)
    with reusing_alone(model, ranks, k, prefix_bytes=2 * size, prefix_host_bytes=3 * size) as tiny:
        check_tiers(tiny, truth_of(model))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ranks", "k"), [(1, 0), (1, 3), (2, 2), (6, 1)])
@pytest.mark.parametrize("sampling", [GREEDY, FREE], ids=["greedy", "free"])
def test_a_conversation_of_twelve_turns_answers_as_if_all_were_sent_at_once(
    reusing_alone: Any, truth_of: Truths, prompts_of: Callable[[str], Prompts], model: str,
    ranks: int, k: int, sampling: Any,
) -> None:  # fmt: skip
    """To a rank that keeps nothing."""
    truth = Truth(truth_of(model).driver)
    with reusing_alone(model, ranks, k) as engine, chunks(engine, 64):
        converse(engine, truth, prompts_of(model), sampling, people=6, turns=12, max_tokens=12)
    assert truth.num_tokens == 6 * 12 * 12
