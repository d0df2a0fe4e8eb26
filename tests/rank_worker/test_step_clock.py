"""The split of a step: parts that add up to it, and collectives that count once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from deploy.defaults import EMBEDDED_MODEL
from placement.config import EngineConfig
from rank_worker import comm_shm, step_clock
from rank_worker.comm import LocalComm
from rank_worker.comm_gloo import ControlGroup
from rank_worker.comm_shm import LINE_WORDS, REDUCE, Segment, ShmComm
from rank_worker.comm_store import Meeting
from rank_worker.messages import EngineRequest
from rank_worker.rank import Rank
from rank_worker.step_clock import StepClock, StepPart

COMM = (StepPart.COLLECTIVE_WAIT, StepPart.COLLECTIVE_TRANSFER)


class ToldComm(LocalComm):
    """Its figures are what a test says."""

    def __init__(self, wait_seconds: float | None = 0.0) -> None:
        self.seconds = 0.0
        self.wait_seconds = wait_seconds


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    told = Time()
    monkeypatch.setattr(step_clock, "time", told)
    return told


def collective(time: Time, comm: ToldComm, seconds: float, waited_s: float) -> None:
    time.now_s += seconds
    comm.seconds += seconds
    if comm.wait_seconds is not None:
        comm.wait_seconds += waited_s


def test_a_part_has_no_time_of_collectives(time: Time) -> None:
    comm = ToldComm()
    clock = StepClock(comm)
    time.now_s += 50.0  # between two steps: nobody's
    clock.begin()
    time.now_s += 2.0
    collective(time, comm, 4.0, waited_s=3.0)
    clock.mark(StepPart.ATTENTION)
    time.now_s += 1.0
    clock.mark(StepPart.EXPERTS)
    time.now_s += 0.5
    clock.end()
    assert {part: seconds for part, seconds in clock.seconds.items() if seconds} == {
        StepPart.ATTENTION: 2.0,
        StepPart.EXPERTS: 1.0,
        StepPart.HOST: 0.5,
        StepPart.COLLECTIVE_WAIT: 3.0,
        StepPart.COLLECTIVE_TRANSFER: 1.0,
    }


def test_what_cannot_be_told_apart_is_absent(time: Time) -> None:
    comm = ToldComm(wait_seconds=None)
    clock = StepClock(comm)
    clock.begin()
    collective(time, comm, 4.0, waited_s=3.0)
    time.now_s += 1.0
    clock.end()
    assert set(clock.seconds) == set(StepPart) - set(COMM)
    assert clock.seconds[StepPart.HOST] == 1.0


def test_a_reset_forgets_the_warm_up(time: Time) -> None:
    clock = StepClock(ToldComm())
    clock.begin()
    time.now_s += 1.0
    clock.mark(StepPart.SAMPLING)
    clock.reset()
    assert not any(clock.seconds.values())


def test_shared_memory_tells_waiting_from_the_rest(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is late by 3 s, and then one that was there before."""
    monkeypatch.setattr(comm_shm, "time", time)
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, Segment.size(2, 1024))
    segment = Segment(descriptor, 2, 1024)
    os.close(descriptor)
    meeting, control = SimpleNamespace(rank=0, world_size=2), SimpleNamespace(entered=0)
    comm = ShmComm(cast(Meeting, meeting), segment, cast(ControlGroup, control), 9.0)

    def peer_sums(number: int) -> None:
        segment.flags[LINE_WORDS + 1 + (number & 1)] = REDUCE | 4 * 4 << 2
        segment.flags[LINE_WORDS] = number

    def pauses(timeout_s: float) -> Iterator[None]:
        time.now_s += 3.0
        peer_sums(1)
        yield

    monkeypatch.setattr(comm_shm, "_pauses", pauses)
    comm.all_reduce_(torch.ones(4))
    assert (comm.wait_seconds, comm.seconds) == (3.0, 3.0)
    peer_sums(2)
    comm.all_reduce_(torch.ones(4))
    assert (comm.wait_seconds, comm.seconds) == (3.0, 3.0)


def test_parts_of_a_real_engine_add_up_to_its_steps() -> None:
    """Every part that a rank alone has is there; the sum is the time of its steps."""
    rank = Rank(EngineConfig(str(EMBEDDED_MODEL), mtp=2), 0, 1)
    rank.open(0)
    rank.load()
    assert not any(rank.snapshot().step_parts.values())
    rank.submit([EngineRequest("r", tuple(range(3, 20)), 12, ignore_eos=True)])
    tokens = 0
    assert rank.scheduler is not None
    assert rank.runner is not None
    rank._drain_inbox(rank.scheduler)
    while tokens < 12:
        plan = rank.scheduler.schedule()
        new, logprobs = rank._execute(rank.runner, plan)
        for batch in rank.scheduler.update(new, 0.0, 0.0, logprobs):
            tokens += len(batch.token_ids)
    told = rank.snapshot()
    rank.close()
    parts = told.step_parts
    assert set(parts) == set(StepPart)
    assert all(parts[part] > 0 for part in StepPart if part not in COMM)
    assert not any(parts[part] for part in COMM)
    assert sum(parts.values()) == pytest.approx(told.step_seconds, rel=0.02)
    assert told.ops["moe_experts"].startswith("ops.")
