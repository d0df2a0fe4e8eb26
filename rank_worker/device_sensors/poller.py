"""One process of a node asks the chips' sensors once a second; all of the node know the answer.

Owns who polls, the thread, and how old a reading may be. Knows no source.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rank_worker.device_sensors.node_lock import NodeLock
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.device_sensors.reading_file import VERSION, publish, read_published
from rank_worker.device_sensors.source import Source
from rank_worker.device_sensors.source_chain import SourceChain

logger = logging.getLogger("nrank.sensors")

FILES = f"sensors-{VERSION}"  # processes that can't read each other don't meet
INTERVAL_S = 1.0
STOPPED_S = 15.0  # a holder of the lock that publishes nothing for so long is replaced
SAY_PACE_S = 60.0
JOIN_S = 5.0


class SensorPoller:
    """latest() from any thread, without waiting. `directory` is where the node's processes meet.

    The holder of the lock polls and publishes; the others read what it published and try the lock
    every second, so that one of them follows when it dies. One that lives but has stopped
    (SIGSTOP) is replaced after STOPPED_S.
    """

    def __init__(self, sources: Sequence[Source], directory: Path) -> None:
        self._chain = SourceChain(sources)
        self._lock = NodeLock(directory / f"{FILES}.lock", STOPPED_S)
        self._path = directory / f"{FILES}.json"
        self._latest: NodeReading | None = None
        self._quiet_since_s: float | None = None
        self._said, self._say_again_s = "", 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)
        self._thread.start()

    def latest(self) -> NodeReading | None:
        """The node's reading, None when there is none that is not older than 5 s.

        Sensors that fail give a reading without chips that says why.
        """
        reading = self._latest
        return reading if reading is not None and reading.is_fresh(time.monotonic()) else None

    def age_s(self) -> float | None:
        """Age of the last reading, also of one that latest() no longer gives.

        None without one, and for one that was left from before the machine restarted.
        """
        reading = self._latest
        age_s = -1.0 if reading is None else reading.age_s(time.monotonic())
        return age_s if age_s >= 0 else None

    def close(self) -> None:
        """End the thread and free the lock. Waits for a query that runs, at most 5 s."""
        self._closing.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                start = time.monotonic()
                self._latest = reading = self._turn()
                if reading is not None:
                    self._log(reading)
                self._closing.wait(max(INTERVAL_S - (time.monotonic() - start), 0))
        finally:
            self._chain.close()
            self._lock.release()

    def _turn(self) -> NodeReading | None:
        try:
            polls = self._holds_lock()
        except OSError as error:
            self._say(logging.WARNING, f"sensors are read by this process alone: {error}")
            polls = True
        if not polls:
            self._chain.close()
            return read_published(self._path)
        reading = self._chain.read()
        self._share(reading)
        return reading

    def _share(self, reading: NodeReading) -> None:
        """A full disk must not blind this process, whatever the others know."""
        try:
            # Whoever was stopped and replaced meanwhile must not overwrite what is newer.
            if self._lock.try_hold():
                publish(reading, self._path)
        except OSError as error:
            self._say(logging.WARNING, f"sensors are read for this process alone: {error}")

    def _holds_lock(self) -> bool:
        if self._lock.try_hold():
            return True
        now = time.monotonic()
        if self._quiet_since_s is None or (self._latest and self._latest.is_fresh(now)):
            self._quiet_since_s = now
        return now - self._quiet_since_s > STOPPED_S and self._lock.take_from_stopped()

    def _log(self, reading: NodeReading) -> None:
        if reading.error:
            self._say(logging.WARNING, reading.error)
        else:
            self._say(logging.INFO, f"sensors of {len(reading.chips)} chips by {reading.source}")

    def _say(self, level: int, text: str) -> None:
        """What changed, at most once a minute."""
        if text == self._said or time.monotonic() < self._say_again_s:
            return
        self._said, self._say_again_s = text, time.monotonic() + SAY_PACE_S
        logger.log(level, "%s", text)
