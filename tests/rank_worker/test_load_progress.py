"""Progress of a load: figures, words, and which rank keeps the others waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from placement.config import EngineConfig
from placement.errors import RankError
from rank_worker import loader
from rank_worker.launch import Engine
from rank_worker.load_progress import (
    bytes_per_s,
    gang_text,
    is_complete,
    rank_text,
    remaining_s,
    slowest,
)
from rank_worker.loader import LoadCounter
from rank_worker.messages import EngineRequest, LoadProgress
from rank_worker.rank import Rank

MIB = 1 << 20
PATIENCE_S = 60.0


def loading(rank: int, read_mib: int, planned_mib: int, seconds: float) -> LoadProgress:
    return LoadProgress(rank, "loading", read_mib * MIB, planned_mib * MIB, seconds)


def test_the_slowest_is_the_one_with_most_time_left_not_with_fewest_bytes() -> None:
    small, large = loading(0, 10, 20, 1.0), loading(1, 40, 100, 2.0)
    assert (bytes_per_s(small), bytes_per_s(large)) == (10 * MIB, 20 * MIB)
    assert (remaining_s(small), remaining_s(large)) == (1.0, 3.0)
    assert slowest([small, large]) is large


def test_a_rank_that_has_not_begun_is_slower_than_any_that_has() -> None:
    waiting, stuck = LoadProgress(0, "starting"), loading(1, 0, 100, 5.0)
    going, done = loading(2, 1, 100, 5.0), loading(3, 100, 100, 1.0)
    assert slowest([done, going]) is going
    assert slowest([done, going, stuck]) is stuck
    assert slowest([going, waiting, done]) is waiting
    assert slowest([done]) is None
    assert [is_complete(one) for one in (waiting, stuck, going, done)] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (LoadProgress(3, "starting"), "rank 3: starting, nothing read yet"),
        (loading(1, 0, 64, 2.0), "rank 1: 0 B of 64.0 MiB (0%)"),
        (loading(1, 16, 64, 2.0), "rank 1: 16.0 MiB of 64.0 MiB (25%), 8.4 MB/s, 6 s left"),
        (loading(0, 1, 1025, 1.0), "rank 0: 1.0 MiB of 1.00 GiB (0%), 1.0 MB/s, 17 min left"),
        (loading(0, 1, 9001, 1.0), "rank 0: 1.0 MiB of 8.79 GiB (0%), 1.0 MB/s, 2 h 30 min left"),
        (loading(2, 64, 64, 2.0), "rank 2: 64.0 MiB of 64.0 MiB (100%), 33.6 MB/s, all read"),
    ],
)
def test_words_of_one_rank(progress: LoadProgress, text: str) -> None:
    assert rank_text(progress) == text


def test_words_of_a_gang_name_the_slowest_until_all_is_read() -> None:
    first, second = loading(0, 64, 64, 2.0), loading(1, 16, 64, 2.0)
    assert gang_text([first, second]) == (
        "80.0 MiB of 128.0 MiB read; slowest is rank 1: 16.0 MiB of 64.0 MiB (25%), "
        "8.4 MB/s, 6 s left"
    )
    assert gang_text([first]) == "64.0 MiB of 64.0 MiB read"
    assert gang_text([LoadProgress(0, "starting"), LoadProgress(1, "loading")]) == (
        "no weights read yet"
    )


def test_the_clock_of_a_load_stops_with_its_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(loader.time, "monotonic", lambda: now[0])
    counter = LoadCounter(planned_bytes=10)
    assert counter.elapsed_s() == 0
    counter.begin()
    now[0] = 104.0
    assert counter.elapsed_s() == 4
    counter.add(6)
    now[0] = 106.0
    counter.begin()  # the next layer's
    assert counter.elapsed_s() == 6, "a rank that stands still has a falling rate"
    counter.add(4)
    now[0] = 200.0
    assert counter.elapsed_s() == 6


class Brake:
    """A pace hook that stops a load after some bytes until it is released."""

    def __init__(self, after_bytes: int) -> None:
        self.left = after_bytes
        self.reached, self.released = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.left -= num_bytes
            stop = self.left < 0
        if stop:
            self.reached.set()
            assert self.released.wait(PATIENCE_S)


@pytest.fixture
def brake() -> Iterator[Brake]:
    made = Brake(after_bytes=4 * MIB)
    yield made
    made.released.set()


def test_the_launcher_hears_of_a_load_in_progress(embedded_model_dir: Path, brake: Brake) -> None:
    waited_for: list[LoadProgress | None] = []

    def listen(ranks: Sequence[LoadProgress]) -> None:
        if brake.reached.is_set() and is_complete(ranks[1]):
            waited_for.append(slowest(ranks))
            brake.released.set()

    engine = Engine(EngineConfig(str(embedded_model_dir), ranks=2, context_tokens=512), listen)
    engine.rank0.pace = brake
    try:
        engine.start()
        (answer,) = engine.generate([EngineRequest("a", (1, 2, 3), 2, ignore_eos=True)])
        assert len(answer.token_ids) == 2
        stats = engine.stats()
    finally:
        engine.close()
    late = waited_for[0]
    assert late is not None
    assert late.rank == 0
    assert 0 < late.read_bytes < late.planned_bytes
    assert stats["bytes_planned"] == stats["bytes_read"]
    assert stats["bytes_planned"][0] == late.planned_bytes
    start = stats["start"]
    assert start["estimated_step_s"] > 0
    assert start["measured_step_s"] > 0
    assert [r["planned_bytes"] for r in start["ranks"]] == [
        r["measured_bytes"] for r in start["ranks"]
    ]


def test_a_load_that_takes_too_long_names_the_rank_and_the_setting(
    embedded_model_dir: Path, brake: Brake
) -> None:
    config = EngineConfig(str(embedded_model_dir), context_tokens=512, load_timeout_s=0.5)
    engine = Engine(config)
    engine.rank0.pace = brake
    try:
        with pytest.raises(RankError, match=r"load_timeout_s=0\.5; slowest is rank 0: .* MiB") as e:
            engine.start()
        assert (e.value.rank, e.value.phase) == (0, "load")
    finally:
        brake.released.set()
        engine.close()


@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_ranks_that_wait_for_a_slow_one_name_it_and_the_setting(
    embedded_model_dir: Path, brake: Brake, comm: str
) -> None:
    config = EngineConfig(
        str(embedded_model_dir),
        ranks=2,
        context_tokens=512,
        comm=comm,
        load_timeout_s=0.5,
        step_timeout_s=1.0,
    )
    ranks = [Rank(config, index, 2) for index in range(2)]
    ranks[1].pace = brake
    port = ranks[0].listen()

    def follow() -> None:
        ranks[1].open(port)
        with suppress(RankError):  # rank 0 has given up
            ranks[1].load()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        ranks[0].open(port)
        with pytest.raises(RankError, match=r"ranks \[1\] .*'loaded'.* raise load_timeout_s") as e:
            ranks[0].load()
        assert e.value.rank == 1
        assert ranks[1].progress().read_bytes < ranks[1].progress().planned_bytes
    finally:
        ranks[0].close()
        brake.released.set()
        thread.join(PATIENCE_S)
        ranks[1].close()
