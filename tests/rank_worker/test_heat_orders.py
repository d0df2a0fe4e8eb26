"""What a rank does when the heat guard gives orders: no step, no read, and nothing lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from placement.config import EngineConfig
from placement.errors import RankError
from rank_worker import cool_reads
from rank_worker import rank as rank_module
from rank_worker.cool_reads import CoolReads
from rank_worker.guard_word import GuardWord, Order
from rank_worker.launch import Engine
from rank_worker.messages import EngineRequest, FinishReason

PATIENCE_S = 60.0
NUM_TOKENS = 40


class Idles:
    """Counts the plans that rank 0 sends while it stands still."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen = threading.Semaphore(0)
        send = engine.rank0.comm.send_plan

        def counted(words: Any) -> None:
            send(words)
            if engine.rank0.word.order.is_still:
                self._seen.release()

        monkeypatch.setattr(engine.rank0.comm, "send_plan", counted)

    def wait(self, count: int) -> None:
        """Until `count` more were sent, from now on."""
        while self._seen.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self._seen.acquire(timeout=PATIENCE_S)


@pytest.fixture(params=[0, 2], ids=["plain", "drafts"])
def engine(
    request: pytest.FixtureRequest, embedded_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    monkeypatch.setattr(rank_module, "HEARTBEAT_S", 0.02)
    config = EngineConfig(
        str(embedded_model_dir), ranks=2, context_tokens=1024, mtp=request.param, prefix_cache=True
    )
    made = Engine(config)
    try:
        made.start()
        yield made
    finally:
        made.close()


def requests(prefix: str) -> list[EngineRequest]:
    prompts = [(7, 8, 9), tuple(range(100, 300)), (5,) * 70, (9, 8)]
    return [
        EngineRequest(f"{prefix}{i}", ids, NUM_TOKENS, ignore_eos=True)
        for i, ids in enumerate(prompts)
    ]


@pytest.mark.parametrize("order", [Order.HOLD, Order.CUT])
def test_a_held_gang_makes_no_step_and_goes_on_where_it_was(
    engine: Engine, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheld = [r.token_ids for r in engine.generate(requests("unheld"))]
    idles, rank0 = Idles(engine, monkeypatch), engine.rank0
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests("held")}
    rank0.submit(requests("held"))
    extra = EngineRequest("extra", (1, 2, 3), 500, ignore_eos=True)
    num_open, is_held = len(tokens), False
    rank0.submit([extra])
    while num_open:
        for batch in rank0.poll_outputs(PATIENCE_S):
            if batch.request_id == extra.request_id:
                continue
            tokens[batch.request_id] += batch.token_ids
            num_open -= batch.finish_reason is not None
            assert batch.finish_reason in (None, FinishReason.LENGTH)
        if not is_held and all(tokens.values()):
            rank0.obey(order)
            is_held = True
            idles.wait(2)  # by the second one the step in flight has ended
            step, before = rank0.snapshot().step, rank0.snapshot().running
            idles.wait(5)
            assert rank0.snapshot().step == step
            rank0.abort([extra.request_id])
            idles.wait(2)
            assert rank0.snapshot().running == before - 1, "who leaves is let go"
            late = EngineRequest("late", (4, 4), 1, ignore_eos=True)
            rank0.submit([late])
            tokens["late"] = []
            num_open += 1
            idles.wait(2)
            assert (rank0.snapshot().step, rank0.snapshot().waiting) == (step, 1)
            rank0.obey(Order.RUN)
    assert is_held
    assert [tuple(tokens[r.request_id]) for r in requests("held")] == unheld


def test_a_held_gang_can_be_stopped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    idles = Idles(engine, monkeypatch)
    engine.rank0.submit(requests("held"))
    engine.rank0.obey(Order.HOLD)
    idles.wait(2)
    engine.close()
    assert [child.process.exitcode for child in engine._children] == [0]


class Clock:
    """Time that passes only in sleep; `on_sleep` may change the word."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.on_sleep = lambda: None
        monkeypatch.setattr(cool_reads, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()


@pytest.mark.parametrize("order", [Order.HOLD, Order.CUT])
def test_a_load_waits_while_it_is_held(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, word = Clock(monkeypatch), GuardWord()
    reads = CoolReads(word, lambda: False)
    word.give(order)
    clock.on_sleep = lambda: word.give(Order.RUN) if clock.now_s > 30 else None
    reads.before_read(1)
    assert clock.now_s > 30
    before_s = clock.now_s
    reads.before_read(1)
    assert clock.now_s == before_s


def test_a_paced_load_rests_as_long_as_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, word = Clock(monkeypatch), GuardWord()
    reads = CoolReads(word, lambda: False)
    word.give(Order.PACE)
    reads.before_read(1)
    assert clock.now_s == 0
    clock.now_s += 2.0  # the read
    reads.before_read(1)
    assert clock.now_s == pytest.approx(4.0, abs=2 * cool_reads.LOOK_S)


def test_a_load_that_is_given_up_ends_its_wait() -> None:
    word = GuardWord()
    word.give(Order.HOLD)
    with pytest.raises(RankError, match="told to stop while it loaded"):
        CoolReads(word, lambda: True).before_read(1)


def test_a_hold_while_loading_only_delays_it(embedded_model_dir: Path) -> None:
    engine = Engine(EngineConfig(str(embedded_model_dir), context_tokens=512))
    reads, entered = engine.rank0.pace, threading.Event()
    assert reads is not None
    engine.rank0.obey(Order.HOLD)

    def told(nbytes: int) -> None:
        entered.set()
        reads(nbytes)

    engine.rank0.pace = told

    def cool() -> None:
        assert entered.wait(PATIENCE_S)
        assert engine.rank0.progress().read_bytes == 0
        engine.rank0.obey(Order.RUN)

    cooler = threading.Thread(target=cool)
    cooler.start()
    try:
        engine.start()
        (answer,) = engine.generate([EngineRequest("a", (1, 2), 2, ignore_eos=True)])
        assert len(answer.token_ids) == 2
    finally:
        engine.rank0.obey(Order.RUN)
        cooler.join()
        engine.close()
