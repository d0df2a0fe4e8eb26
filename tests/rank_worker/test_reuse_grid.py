"""Cache, drafts, ranks, chunks and company change speed and nothing else: one grid of all.

A cell is a gang (model, ranks, drafts), a chunk size and a temperature. In each, prompts of every
length up to three pages run with the cache off, cold and warm; so do the prompts that transformers
has answered or filtered samples; and six conversations go on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rank_worker.launch import Engine
from rank_worker.messages import EngineRequest, SamplingParams
from tests.rank_worker.test_reuse_truth import (
    FILTERS,
    FREE,
    GREEDY,
    Prompts,
    Truth,
    check,
    chunks,
    generated,
    prefix_cache,
    reachable,
)

MODELS = ("embedded", "random-8")
LENGTHS = tuple(range(1, 51))


def requests_of(
    prompts: Prompts, lengths: tuple[int, ...], sampling: SamplingParams, max_tokens: int
) -> list[EngineRequest]:
    return [
        EngineRequest(
            f"length {n}", prompts.of_length(n), max_tokens,
            replace(sampling, seed=sampling.seed * n), ignore_eos=True,
        )
        for n in lengths
    ]  # fmt: skip


def filtered(prompts: Prompts, max_tokens: int) -> list[EngineRequest]:
    """One request for each filter; a greedy one and one without filters beside them."""
    return [
        EngineRequest(f"filter {i}", prompts.of_length(20 + 5 * i), max_tokens, p, ignore_eos=True)
        for i, p in enumerate((*FILTERS, FREE, GREEDY))
    ]


def check_reuse(engine: Engine, truth: Truth, requests: list[EngineRequest]) -> None:
    """Without the cache, with an empty one, and with one that knows the prompts."""
    with prefix_cache(engine, states=0):
        off = check(engine, truth, requests)
        assert not any(r.cached_tokens for r in off)
    with prefix_cache(engine) as cache:
        cold = check(engine, truth, requests)
        assert not any(r.cached_tokens for r in cold)
        warm = check(engine, truth, requests)
        assert [r.cached_tokens for r in warm] == [reachable(r) for r in requests]
        counts = cache.cells.counts
        assert counts.restores + counts.fetches == sum(reachable(r) > 0 for r in requests)


def check_goldens(engine: Engine, golden: Any, lengths: Sequence[int], max_tokens: int) -> None:
    cases = [golden.cases[length] for length in lengths]
    requests = [EngineRequest(c.name, c.prompt_ids, max_tokens, ignore_eos=True) for c in cases]
    with prefix_cache(engine):
        for is_warm in (False, True):
            for case, request, result in zip(
                cases, requests, generated(engine, requests), strict=True
            ):
                case.check_ids(result.token_ids)
                assert len(result.token_ids) == max_tokens
                if is_warm:
                    assert result.cached_tokens == reachable(request)


def converse(
    engine: Engine, truth: Truth, prompts: Prompts, sampling: SamplingParams, people: int,
    turns: int, max_tokens: int,
) -> None:  # fmt: skip
    """All talk at once. A prompt is all that was said before, and something new."""
    said: list[tuple[int, ...]] = [()] * people
    sayable = [0] * people  # tokens that the next turn finds at least
    accepted = 0
    with prefix_cache(engine):
        for turn in range(turns):
            requests = [
                EngineRequest(
                    f"person {i}, turn {turn}", said[i] + prompts.turn(i, turn), max_tokens,
                    replace(sampling, seed=sampling.seed + i), ignore_eos=True,
                )
                for i in range(people)
            ]  # fmt: skip
            results = check(engine, truth, requests)
            for i, (request, result) in enumerate(zip(requests, results, strict=True)):
                assert result.cached_tokens >= sayable[i], request.request_id
                sayable[i] = reachable(request)
                said[i] = request.prompt_ids + result.token_ids
                accepted += result.accepted_tokens
    if prompts.text and engine.config.mtp:
        assert accepted > 0


@dataclass(frozen=True)
class Cell:
    model: str
    ranks: int
    k: int
    chunk: int
    sampling: SamplingParams
    lengths: tuple[int, ...] = LENGTHS
    goldens: tuple[int, ...] = (64, 300)
    people: int = 6
    tokens: int = 10  # of an answer in a conversation

    def __str__(self) -> str:
        kind = "free" if self.sampling.temperature else "greedy"
        return f"{self.model}-r{self.ranks}-k{self.k}-c{self.chunk}-{kind}"

    def check(self, engine: Engine, truth: Truth, prompts: Prompts, golden: Any) -> None:
        with chunks(engine, self.chunk, 4 * self.chunk):
            check_reuse(engine, truth, requests_of(prompts, self.lengths, self.sampling, 4))
            if self.sampling.temperature:
                check_reuse(engine, truth, filtered(prompts, self.tokens))
            elif self.goldens:
                check_goldens(engine, golden, self.goldens, 2 * self.tokens)
            if self.people:
                converse(engine, truth, prompts, self.sampling, self.people, 3, self.tokens)


QUICK = (
    Cell("random-8", 1, 3, 16, GREEDY, goldens=(), people=2, tokens=4),
    Cell("random-8", 1, 1, 0, FREE, LENGTHS[::5], people=2, tokens=6),
    Cell("random-8", 1, 1, 2, GREEDY, LENGTHS[1::8], (), people=0),  # as long as a draft row
    Cell("embedded", 1, 2, 64, GREEDY, LENGTHS[2::7], (63, 64, 65, 300), 6, 5),
    Cell("embedded", 2, 4, 16, FREE, LENGTHS[6::22], people=2, tokens=4),
    Cell("random-8", 2, 3, 0, GREEDY, LENGTHS[9::15], (64, 65, 300), 2, 5),
    Cell("random-8", 4, 0, 16, GREEDY, LENGTHS[11::15], (), 2, 4),
    Cell("embedded", 4, 2, 64, FREE, LENGTHS[12::20], people=0, tokens=3),
)


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_reuse_and_drafts_change_nothing(
    reusing: Callable[..., Engine], truth_of: Callable[[str], Truth], prompts_of: Any,
    golden: Callable[[str], Any], cell: Cell,
) -> None:  # fmt: skip
    engine = reusing(cell.model, cell.ranks, cell.k)
    cell.check(engine, truth_of(cell.model), prompts_of(cell.model), golden(cell.model))


GANGS = [(m, r, k) for m in MODELS for r in (1, 2, 4) for k in range(5)]
UNEVEN = [(m, r, k) for m in MODELS for r, k in ((3, 2), (6, 3), (6, 0))]


@pytest.fixture(scope="module")
def gang(request: pytest.FixtureRequest, reusing_alone: Callable[..., Any]) -> Iterator[Engine]:
    """Started once for all its cells, and ended before the next."""
    with reusing_alone(*request.param) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gang", GANGS + UNEVEN, indirect=True, ids="{0[0]}-r{0[1]}-k{0[2]}".format)
@pytest.mark.parametrize("chunk", [16, 64, 0])
@pytest.mark.parametrize("sampling", [GREEDY, FREE], ids=["greedy", "free"])
def test_whole_grid(
    gang: Engine, request: pytest.FixtureRequest, truth_of: Callable[[str], Truth],
    prompts_of: Any, golden: Callable[[str], Any], chunk: int, sampling: SamplingParams,
) -> None:  # fmt: skip
    model, ranks, k = request.node.callspec.params["gang"]
    goldens = (64, 65, 300) if chunk == 16 else (63, 64, 300, 1100)
    cell = Cell(model, ranks, k, chunk, sampling, goldens=goldens, tokens=8)
    cell.check(gang, truth_of(model), prompts_of(model), golden(model))
