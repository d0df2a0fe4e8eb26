"""What one bad request, one stale slot or one rank gone astray does to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from placement.config import EngineConfig
from placement.errors import NrankError, RankError
from rank_worker.messages import EngineRequest, FinishReason, SamplingParams, TokenBatch
from rank_worker.rank import Rank

PATIENCE_S = 60.0
Answers = dict[str, tuple[tuple[int, ...], TokenBatch]]  # name -> ids, last batch


class ThreadGang:
    """A gang whose ranks are threads of this process, so that a test can spoil any of them."""

    def __init__(self, config: EngineConfig) -> None:
        self.ranks = [Rank(config, rank, config.ranks) for rank in range(config.ranks)]
        self.errors: dict[int, NrankError] = {}
        self._go = threading.Event()
        self._loaded = threading.Barrier(config.ranks + 1)
        port = self.ranks[0].listen() if config.ranks > 1 else 0
        self._threads = [
            threading.Thread(target=self._live, args=(rank, port), daemon=True)
            for rank in self.ranks
        ]
        for thread in self._threads:
            thread.start()
        self._loaded.wait(PATIENCE_S)

    def _live(self, rank: Rank, port: int) -> None:
        try:
            rank.open(port)
            rank.load()
            self._loaded.wait(PATIENCE_S)
            assert self._go.wait(PATIENCE_S)
            rank.run()
        except NrankError as error:
            self.errors[rank.rank] = error
        finally:
            rank.close()

    def run(self, *requests: EngineRequest) -> Answers:
        """Ids and last batch of every request; of those that ended when a rank failed."""
        self._go.set()
        leader, answers = self.ranks[0], {}
        ids: dict[str, tuple[int, ...]] = {r.request_id: () for r in requests}
        leader.submit(requests)
        while len(answers) < len(requests) and 0 not in self.errors:
            for batch in leader.poll_outputs(0.1):
                ids[batch.request_id] += batch.token_ids
                if batch.finish_reason:
                    answers[batch.request_id] = ids[batch.request_id], batch
        return answers

    def end(self) -> None:
        self._go.set()
        self.ranks[0].stop()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a rank does not end"

    def model(self, rank: int = 0) -> Any:
        runner = self.ranks[rank].runner
        assert runner is not None
        return runner.model


MakeGang = Callable[..., Any]


@pytest.fixture
def gang_of(random_checkpoint: Callable[..., Path]) -> MakeGang:
    @contextmanager
    def make(ranks: int, **config: Any) -> Iterator[ThreadGang]:
        settings: dict[str, Any] = {
            "page_tokens": 16, "context_tokens": 128, "max_sequences": 3,
            "check_interval_steps": 1, "check_contracts": True, "step_timeout_s": 30.0,
        }  # fmt: skip
        folder = str(random_checkpoint(layers=4))
        gang = ThreadGang(EngineConfig(folder, ranks=ranks, **{**settings, **config}))
        try:
            yield gang
        finally:
            gang.end()

    return make


def request(name: str, length: int = 20, max_tokens: int = 12, **options: Any) -> EngineRequest:
    first = sum(name.encode())
    prompt = tuple((first + 7 * i * i + i) % 500 for i in range(length))
    return EngineRequest(name, prompt, max_tokens, ignore_eos=True, **options)


def ids_of(answers: Answers) -> dict[str, tuple[int, ...]]:
    return {name: ids for name, (ids, _) in answers.items()}


@contextmanager
def poisoned_embedding(gang: ThreadGang, token: int) -> Iterator[None]:
    """The embedding of `token` is NaN on the rank that owns it."""
    spoilt = []
    for rank in range(len(gang.ranks)):
        model = gang.model(rank)
        row = token - model.first_vocab
        if 0 <= row < model.embed.shape[0]:
            spoilt.append((model.embed, row, model.embed[row].clone()))
            model.embed[row] = float("nan")
    assert len(spoilt) == 1
    yield
    embed, row, before = spoilt[0]
    embed[row] = before


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, 20, 0.9, seed=4)])
def test_a_request_with_nan_ends_alone_and_leaves_nothing_behind(
    gang_of: MakeGang, ranks: int, sampling: SamplingParams
) -> None:
    requests = [request(name, 12 + 9 * i, sampling=sampling) for i, name in enumerate("abc")]
    with gang_of(ranks) as gang:
        clean = ids_of(gang.run(*requests))
        others = {*requests[0].prompt_ids, *requests[2].prompt_ids, *clean["a"], *clean["c"]}
        seen = {*requests[1].prompt_ids, *others}
        at = next(i for i, token in enumerate(clean["b"][:-1]) if token not in seen)
        with poisoned_embedding(gang, clean["b"][at]):
            answers = gang.run(*requests)
        ids, last = answers["b"]
        assert ids == clean["b"][: at + 1]
        assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, "non_finite")
        for name in "ac":
            assert answers[name][0] == clean[name]
            assert answers[name][1].finish_reason is FinishReason.LENGTH
        assert gang.ranks[0].snapshot().nonfinite_rows == 1
        assert ids_of(gang.run(*requests)) == clean, "slots and pages with NaN are used again"
    assert not gang.errors


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, 20, 0.9, seed=4)])
def test_logits_that_are_infinite_on_one_rank_end_the_request_on_all(
    gang_of: MakeGang, sampling: SamplingParams
) -> None:
    one = request("a", 20, 4, sampling=sampling)
    with gang_of(2) as gang:
        clean = ids_of(gang.run(one))
        head = gang.model(1).head.weights[0]
        before = head[3].clone()
        head[3] = float("inf")
        ids, last = gang.run(one)["a"]
        assert (ids, last.error_kind) == ((), "non_finite")
        head[3] = before
        assert ids_of(gang.run(one)) == clean
        assert [rank.snapshot().nonfinite_rows for rank in gang.ranks] == [1, 0]
    assert not gang.errors


def test_a_recurrent_state_with_nan_ends_its_request_only(gang_of: MakeGang) -> None:
    """A state spoilt between two steps: the heads of one rank see it, all ranks agree on it."""
    requests = [request(name, 14 + i) for i, name in enumerate("abc")]
    with gang_of(2) as gang:
        clean = ids_of(gang.run(*requests))
        scheduler = gang.ranks[0].scheduler
        update = scheduler.update

        def spoil_after(*step: Any) -> list[TokenBatch]:
            batches: list[TokenBatch] = update(*step)
            running = {s.request.request_id: s for s in scheduler.running}
            if "b" in running and running["b"].num_generated == 4:
                gang.model(1).layers[0].mixer.state.recurrent[running["b"].slot].fill_(torch.nan)
            return batches

        scheduler.update = spoil_after
        answers = gang.run(*requests)
        scheduler.update = update
        assert answers["b"][0] == clean["b"][:4]
        assert answers["b"][1].error_kind == "non_finite"
        assert {n: ids_of(answers)[n] for n in "ac"} == {n: clean[n] for n in "ac"}
        assert ids_of(gang.run(*requests)) == clean
    assert not gang.errors


def first_logits(gang: ThreadGang, one: EngineRequest) -> tuple[tuple[int, ...], torch.Tensor]:
    runner = gang.ranks[0].runner
    assert runner is not None
    runner.logits_log = []
    ids = ids_of(gang.run(one))[one.request_id]
    log, runner.logits_log = runner.logits_log, None
    return ids, torch.cat(log)


def others(seed: int) -> list[EngineRequest]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(20):
        length = int(torch.randint(1, 60, (1,), generator=generator))
        ids = torch.randint(0, 512, (length,), generator=generator).tolist()
        sampling = SamplingParams(temperature=i % 2 * 0.7, seed=i)
        made.append(EngineRequest(f"o{i}", tuple(ids), 4, sampling, ignore_eos=True))
    return made


def test_a_recycled_slot_inherits_nothing(gang_of: MakeGang) -> None:
    """Bit for bit; and the same comparison notices slots that are not reset."""
    one = request("same", 30)
    with gang_of(1, max_sequences=2) as gang:
        ids, logits = first_logits(gang, one)
        gang.run(*others(1))
        again = first_logits(gang, one)
        assert again[0] == ids
        assert torch.equal(again[1], logits)
        gang.model().reset_slot = lambda slot: None
        gang.run(*others(2))
        stale = first_logits(gang, one)
        assert not torch.equal(stale[1], logits), "slots that keep their state go unnoticed here"
    assert not gang.errors


def states(gang: ThreadGang) -> list[Any]:
    layers = gang.model().layers
    return [layer.mixer.state for layer in layers] + [x.ngram.state for x in layers if x.ngram]


@pytest.mark.parametrize("index", range(5))
def test_each_kind_of_state_is_reset(gang_of: MakeGang, index: int) -> None:
    """Without the reset of any single one the answer's logits change.

    Index keys of an open block (layer 3) are the exception: they are always written before they
    are read, so their reset is for tidiness.
    """
    one = request("same", 30)
    with gang_of(1, max_sequences=1) as gang:
        _, logits = first_logits(gang, one)
        kept = states(gang)
        assert len(kept) == 5
        gang.run(*others(3)[:3])
        kept[index].reset = lambda slot: None
        _, stale = first_logits(gang, one)
        assert torch.equal(stale, logits) == (index == 3)
    assert not gang.errors


def reversed_routes(gang: ThreadGang, rank: int) -> None:
    """The same experts in another order: the same output, but not the same decision."""
    ops = gang.model(rank).ops
    route = ops.route

    def reverse(logits: Any, top_k: int, normalise: bool) -> Any:
        weights, ids = route(logits, top_k, normalise)
        return weights.flip(1).contiguous(), ids.flip(1).contiguous()

    ops.route = reverse


def reversed_blocks(gang: ThreadGang, rank: int) -> None:
    ops = gang.model(rank).ops
    select = ops.select_blocks
    ops.select_blocks = lambda *args: select(*args).flip(-1).contiguous()


def other_tokens(gang: ThreadGang, rank: int) -> None:
    sampler: Any = gang.ranks[rank].runner.sampler  # type: ignore[union-attr]
    draw = sampler.sample
    sampler.sample = lambda *args: draw(*args) ^ 1


DEVIATIONS = (reversed_routes, reversed_blocks, other_tokens)


@pytest.mark.parametrize("spoil", DEVIATIONS)
@pytest.mark.parametrize(("ranks", "wrong"), [(2, 1), (3, 2)])
def test_a_rank_that_decides_otherwise_is_named(
    gang_of: MakeGang, spoil: Callable[[ThreadGang, int], None], ranks: int, wrong: int
) -> None:
    with gang_of(ranks) as gang:
        assert ids_of(gang.run(request("before", 40, 3)))
        spoil(gang, wrong)
        assert gang.run(request("after", 40, 3)) == {}
    assert sorted(gang.errors) == list(range(ranks))
    for error in gang.errors.values():
        assert isinstance(error, RankError)
        assert f"rank {wrong} decided otherwise than rank 0 in step 4" in str(error)
        assert (error.rank, error.step, error.phase) == (wrong, 4, "check")


def test_decisions_are_compared_at_the_interval_only(gang_of: MakeGang) -> None:
    with gang_of(2, check_interval_steps=8) as gang:
        reversed_routes(gang, 1)
        answers = gang.run(request("a", 20, 12))
    assert answers == {}
    assert "in step 8" in str(gang.errors[0])


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_inside_a_step_names_rank_and_step(gang_of: MakeGang, failing: int) -> None:
    with gang_of(2, step_timeout_s=1.0) as gang:
        assert ids_of(gang.run(request("before", 20, 2)))

        def broken(batch: object) -> None:
            raise ValueError("a bug")

        gang.model(failing).forward = broken
        assert gang.run(request("after", 20, 2)) == {}
    assert sorted(gang.errors) == [0, 1]
    where = f"rank {failing} failed in step 3 (phase step) of request after"
    assert str(gang.errors[failing]) == f"{where}: ValueError: a bug"
    assert isinstance(gang.errors[1 - failing], RankError)
