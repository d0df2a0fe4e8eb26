"""Readings from libdcmi.so through a child process that may hang or crash.

Owns the child: its start, its time limit and its end. Makes no call of the library.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from rank_worker.device_sensors.child_process import Reaper
from rank_worker.device_sensors.dcmi_reader import NAME
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.device_sensors.reading_file import decode
from rank_worker.device_sensors.smi_program import LIBRARIES, driver_environment
from rank_worker.device_sensors.source import SensorError, taken_now

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 2.0
START_TIMEOUT_S = 4.0  # with the start of Python and the library's own
MAX_BYTES = 1 << 20


def find_library() -> Path | None:
    """Where drivers put libdcmi.so; /usr/local/dcmi is what containers mount."""
    for folder in reversed(LIBRARIES):
        path = Path(folder) / "libdcmi.so"
        if path.exists():
            return path
    return None


class DcmiSource:
    """One child, started at the first reading and after every failure."""

    name = NAME

    def __init__(
        self,
        path: Path,
        timeout_s: float = TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._reaper = Reaper("a process that reads libdcmi.so")

    def read(self) -> NodeReading:
        try:
            return self._ask()
        except SensorError as error:
            self.close()
            return taken_now(self.name, error=str(error))

    def close(self) -> None:
        if self._child is not None:
            self._reaper.end(self._child)
            self._child = None

    def _ask(self) -> NodeReading:
        timeout_s = self._timeout_s if self._child else self._start_timeout_s
        if self._child is None:
            self._reaper.check()
            self._child = self._start()
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # its last line may tell why
        line = self._line(self._child, timeout_s)
        try:
            return decode(line.decode("utf-8", "replace"))
        except ValueError as error:
            raise SensorError(f"libdcmi.so: {error}; report this with the driver version") from None

    def _start(self) -> subprocess.Popen[bytes]:
        """A bare Python that imports from nowhere but nrank."""
        command = (sys.executable, "-S", "-P", "-m", "rank_worker.device_sensors.dcmi_child")
        try:
            return subprocess.Popen(
                (*command, str(self._path), str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**driver_environment(), "PYTHONPATH": str(ROOT)},
            )
        except OSError as error:
            raise SensorError(f"can't start {sys.executable}: {error.strerror}") from error

    def _line(self, child: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        assert child.stdout is not None
        deadline, line = time.monotonic() + timeout_s, bytearray()
        poll = select.poll()
        poll.register(child.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or len(line) > MAX_BYTES or not poll.poll(left_s * 1000):
                raise SensorError(
                    f"libdcmi.so did not answer within {timeout_s:g} s, its process was killed; "
                    f"look at `dmesg`, then reset the card"
                )
            part = os.read(child.stdout.fileno(), 65536)
            if not part:
                raise SensorError(f"libdcmi.so {self._end_of(child)}; look at `dmesg`")
            line += part
        return bytes(line)

    def _end_of(self, child: subprocess.Popen[bytes]) -> str:
        try:
            code = child.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"ended its process by signal {-code}" if code < 0 else f"ended with {code}"
