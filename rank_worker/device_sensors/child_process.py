"""The end of child processes that may hang in a driver, where no signal reaches them."""

from __future__ import annotations

import os
import signal
import subprocess

from rank_worker.device_sensors.source import SensorError

REAP_S = 1.0  # a killed process that is still there hangs in the driver


class Reaper:
    """Ends children of one kind and remembers one that the kernel holds."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._hanging: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """SensorError while a killed child is still there: a second one would hang as well."""
        if self._hanging is not None and self._hanging.poll() is None:
            raise SensorError(
                f"{self._kind} (pid {self._hanging.pid}) hangs in the driver and can't be killed; "
                f"look at `dmesg`, then reset the card or restart the machine"
            )

    def end(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether the child's process group is gone; the kernel may hold it."""
        kill_group(process.pid)
        try:
            process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._hanging = process
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        return process.returncode is not None


def kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
