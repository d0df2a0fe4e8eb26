"""One poller a node: who polls, who follows, and which readings count."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from placement.errors import ConfigError
from rank_worker.device_sensors import node_lock, poller
from rank_worker.device_sensors.node_lock import NodeLock, run_directory
from rank_worker.device_sensors.poller import FILES, SensorPoller
from rank_worker.device_sensors.reading import STALE_S, ChipReading, NodeReading
from rank_worker.device_sensors.reading_file import decode, encode, publish, read_published
from rank_worker.device_sensors.smi import SmiSource
from rank_worker.device_sensors.source import taken_now
from tests.rank_worker.sensors.conftest import FakeSmi, wait_for

ROOT = Path(__file__).parents[3]
CHIP = ChipReading(2, 1, 1, temperature_celsius=71, error_codes=("80E0",), processes=((7, 9),))


class Scripted:
    """A source with one chip whose temperature counts the reads."""

    name = "scripted"

    def __init__(self) -> None:
        self.reads = 0
        self.closed = 0
        self.gate, self.waits = threading.Event(), threading.Event()
        self.gate.set()

    def read(self) -> NodeReading:
        if not self.gate.is_set():
            self.waits.set()
        self.gate.wait(60)
        self.reads += 1
        return taken_now(self.name, (replace(CHIP, temperature_celsius=self.reads),))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "INTERVAL_S", 0.01)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Scripted], SensorPoller]]:
    pollers: list[SensorPoller] = []

    def make(source: Scripted) -> SensorPoller:
        pollers.append(SensorPoller([source], tmp_path))
        return pollers[-1]

    yield make
    for sensors in pollers:
        sensors.close()


def test_the_second_poller_reads_what_the_first_publishes(
    opened: Callable[[Scripted], SensorPoller],
) -> None:
    first, second = Scripted(), Scripted()
    sensors = opened(first)
    wait_for(lambda: sensors.latest() is not None)
    follower = opened(second)
    wait_for(lambda: first.reads > 20 and follower.latest() is not None)
    assert second.reads == 0
    found = follower.latest()
    assert found is not None
    assert found.chips[0].key == (2, 1)
    sensors.close()
    wait_for(lambda: second.reads > 0)
    assert first.closed


class PollerProcess:
    """A poller of its own, killed at the end."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.rank_worker.sensors.poller_process", str(folder)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def latest(self) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


def test_a_follower_takes_over_from_a_killed_poller(
    smi: FakeSmi, recorded: Callable[[str], str]
) -> None:
    (smi.folder / "table").write_text(recorded("info_300iduo_two_cards_idle"))
    smi.runs('[ "$*" = info ] && echo "$PPID" >> polled_by; cat table')
    polled_by = smi.folder / "polled_by"
    processes = [PollerProcess(smi.folder), PollerProcess(smi.folder)]
    try:
        wait_for(lambda: all(p.latest() is not None for p in processes))
        wait_for(lambda: len(polled_by.read_text().split()) >= 20)
        (first,) = set(polled_by.read_text().split())
        holder, follower = sorted(processes, key=lambda p: str(p.pid) != first)
        holder.kill()
        killed_s = time.monotonic()
        wait_for(lambda: (follower.latest() or [0])[0] > killed_s)
        assert set(polled_by.read_text().split()) == {first, str(follower.pid)}
        assert follower.latest()[1:] == ["npu-smi", None]
    finally:
        for process in processes:
            process.kill()


def test_stale_readings_are_dropped(
    tmp_path: Path, opened: Callable[[Scripted], SensorPoller]
) -> None:
    """The holder of the lock has stopped: what it published grows old."""
    holder = NodeLock(tmp_path / f"{FILES}.lock", 60)
    assert holder.try_hold()
    fresh = taken_now("scripted", (CHIP,))
    publish(fresh, tmp_path / f"{FILES}.json")
    source = Scripted()
    follower = opened(source)
    wait_for(lambda: follower.latest() == fresh)
    old = replace(fresh, monotonic_s=time.monotonic() - STALE_S - 1)
    publish(old, tmp_path / f"{FILES}.json")
    wait_for(lambda: (follower.age_s() or 0) > STALE_S)
    assert follower.latest() is None
    before_restart = replace(fresh, monotonic_s=time.monotonic() + 3600)
    publish(before_restart, tmp_path / f"{FILES}.json")
    wait_for(lambda: follower.age_s() is None)
    assert follower.latest() is None
    publish(old, tmp_path / f"{FILES}.json")
    wait_for(lambda: follower.age_s() is not None)
    (tmp_path / f"{FILES}.json").write_text('{"version": 1, "reading": {')
    wait_for(lambda: follower.age_s() is None)
    assert follower.latest() is None
    assert source.reads == 0


def test_a_holder_that_has_stopped_is_replaced(
    tmp_path: Path,
    opened: Callable[[Scripted], SensorPoller],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poller, "STOPPED_S", 0.2)
    stopped = NodeLock(tmp_path / f"{FILES}.lock", 0.2)
    assert stopped.try_hold()
    source = Scripted()
    follower = opened(source)
    wait_for(lambda: source.reads > 0 and follower.latest() is not None)
    assert not stopped.try_hold()  # it wakes up and finds that it is a follower


def test_a_poller_that_was_replaced_publishes_nothing(
    tmp_path: Path,
    opened: Callable[[Scripted], SensorPoller],
) -> None:
    source = Scripted()
    sensors = opened(source)
    wait_for(lambda: sensors.latest() is not None)
    source.gate.clear()
    assert source.waits.wait(30)  # what it read before is published
    other = NodeLock(tmp_path / f"{FILES}.lock", 0)
    assert other.take_from_stopped()
    mine = taken_now("other", (CHIP,))
    publish(mine, tmp_path / f"{FILES}.json")
    source.gate.set()
    wait_for(lambda: sensors.latest() == mine)
    assert read_published(tmp_path / f"{FILES}.json") == mine


def test_a_lock_that_was_just_taken_is_not_broken(tmp_path: Path) -> None:
    first, second = (NodeLock(tmp_path / "lock", 60) for _ in range(2))
    assert first.try_hold()
    assert not second.take_from_stopped()
    assert first.try_hold()
    first.release()
    assert second.try_hold()


def test_a_lock_is_free_after_release_though_a_forked_process_has_it(tmp_path: Path) -> None:
    first, second = (NodeLock(tmp_path / "lock", 60) for _ in range(2))
    assert first.try_hold()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    first.release()
    assert second.try_hold()
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)


def test_a_full_disk_does_not_blind_the_poller(
    opened: Callable[[Scripted], SensorPoller],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(reading: NodeReading, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(poller, "publish", full)
    source = Scripted()
    with caplog.at_level(logging.WARNING, "nrank.sensors"):
        sensors = opened(source)
        wait_for(lambda: source.reads > 20)
    assert sensors.latest() is not None
    assert len(caplog.records) == 1


def test_sensors_that_hang_give_a_fresh_error(smi: FakeSmi, caplog: Any) -> None:
    """Serving goes on, and the log has one line a minute at most."""
    smi.runs("sleep 1000")
    source = SmiSource(smi.program(0.05))
    with caplog.at_level(logging.INFO, "nrank.sensors"):
        sensors = SensorPoller([source], smi.folder)
        try:
            wait_for(lambda: sensors.latest() is not None)
            found = sensors.latest()
            assert found is not None
            assert found.chips == ()
            assert found.error is not None
            assert "did not end within 0.05 s" in found.error
            wait_for(lambda: len(smi.calls()) >= 2)
        finally:
            sensors.close()
    assert len(caplog.records) == 1


def test_readings_survive_the_file(tmp_path: Path) -> None:
    reading = taken_now("scripted", (CHIP, ChipReading(32768, 0)), error="half\nof it")
    assert reading.error == "half of it"
    publish(reading, tmp_path / "file")
    assert read_published(tmp_path / "file") == reading
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    text = encode(reading)
    for length in range(len(text)):
        with pytest.raises(ValueError, match=r"\S"):
            decode(text[:length])
    for wrong in ('{"version": 2, "reading": {}}', "[]", '{"version": 1, "reading": {"a": 1}}'):
        with pytest.raises(ValueError, match="reading"):
            decode(wrong)


def test_the_meeting_place_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_lock, "TEMPORARY", tmp_path)
    path = run_directory()
    assert path.stat().st_mode & 0o777 == 0o700
    assert run_directory() == path
    path.chmod(0o770)
    with pytest.raises(ConfigError, match=r"must be a directory of user \d+ with mode 0700"):
        run_directory()
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="mode lrwx"):
        run_directory()
