"""The npu-smi program: where it is, and one call of it at a time on a node.

Owns the call's lock, time limit, size limit and end. Knows no layout of its output.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

from rank_worker.device_sensors.child_process import Reaper, kill_group
from rank_worker.device_sensors.node_lock import lock_now, unlock
from rank_worker.device_sensors.smi_parser import find_failure
from rank_worker.device_sensors.source import SensorError

PLACES = ("/usr/local/sbin", "/usr/local/bin", "/usr/local/Ascend/driver/tools")
LIBRARIES = (
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/lib64/common",
    "/usr/local/Ascend/driver/lib64/driver",
    "/usr/local/dcmi",
)
TIMEOUT_S = 3.0
MAX_BYTES = 1 << 20
LOCK_GRACE_S = 1.0  # a call ends so long after its limit at most
LOCK_PACE_S = 0.05
PID_WIDTH = 20


def find_program() -> Path | None:
    """npu-smi on PATH, else where drivers put it."""
    path = os.environ.get("PATH", os.defpath)
    found = shutil.which("npu-smi", path=os.pathsep.join((path, *PLACES)))
    return Path(found) if found else None


def driver_environment() -> dict[str, str]:
    """This process's environment with the driver's libraries last, and English words."""
    environment = dict(os.environ)
    known = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(
        [p for p in known if p] + [p for p in LIBRARIES if p not in known]
    )
    environment["LC_ALL"] = "C"
    return environment


class SmiProgram:
    """Runs npu-smi, which must not run twice at once (Huawei's manual).

    The lock goes into the called process, so that it is held until that has ended, even where the
    caller was killed meanwhile.
    """

    def __init__(self, path: Path, directory: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.path = path
        self._lock_path = directory / "npu-smi.lock"
        self._timeout_s = timeout_s
        self._reaper = Reaper("npu-smi")

    def run(self, *arguments: str) -> str:
        """What it printed on stdout, complete. SensorError when it failed in any way."""
        self._reaper.check()
        lock, ended = self._take_lock(), True
        call = " ".join(("npu-smi", *arguments))
        try:
            process = self._start(lock, arguments)
            try:
                out, errors = self._collect(process, call)
            finally:
                ended = self._reaper.end(process)
        finally:
            if ended:
                unlock(lock)
            else:  # it keeps the lock, which it has a copy of
                os.close(lock)
        return _checked(call, process.returncode, out, errors)

    def _start(self, lock: int, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [str(self.path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(lock,),
                env=driver_environment(),
            )
        except OSError as error:
            raise SensorError(
                f"can't start {self.path}: {error.strerror}; check the driver's installation"
            ) from error
        _note(lock, str(process.pid))
        return process

    def _collect(self, process: subprocess.Popen[bytes], call: str) -> tuple[bytes, bytes]:
        """Both outputs up to their ends; SensorError at the limit of time or size."""
        assert process.stdout is not None
        assert process.stderr is not None
        parts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        out, errors = parts.values()
        poll, open_ends = select.poll(), set(parts)
        for descriptor in open_ends:
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + self._timeout_s
        while open_ends:
            left_s = deadline - time.monotonic()
            ready = poll.poll(left_s * 1000) if left_s > 0 else []
            if not ready:
                raise SensorError(
                    f"`{call}` did not end within {self._timeout_s:g} s and was killed; look at "
                    f"`dmesg` and run it by hand"
                )
            for descriptor, _ in ready:
                part = os.read(descriptor, 65536)
                parts[descriptor] += part
                if not part:
                    poll.unregister(descriptor)
                    open_ends.discard(descriptor)
            if len(out) + len(errors) > MAX_BYTES:
                raise SensorError(
                    f"`{call}` printed more than {MAX_BYTES} bytes and was killed; run it by hand"
                )
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired as error:
            raise SensorError(f"`{call}` closed its output and did not end; killed") from error
        return bytes(out), bytes(errors)

    def _take_lock(self) -> int:
        """The open lock file. A call that outlived its own limit has lost its caller: kill it."""
        try:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SensorError(
                f"can't lock {self._lock_path} for npu-smi: {error.strerror}; make room or the "
                f"folder"
            ) from error
        first, deadline = _pid_in(lock), time.monotonic() + self._timeout_s + LOCK_GRACE_S
        while not lock_now(lock):
            if time.monotonic() < deadline:
                time.sleep(LOCK_PACE_S)
                continue
            pid = _pid_in(lock)
            os.close(lock)
            if pid is not None and pid == first:
                kill_group(pid)
            raise SensorError(
                f"another npu-smi of nrank (pid {pid or 'unknown'}) still ran after "
                f"{self._timeout_s + LOCK_GRACE_S:g} s; look at `dmesg` if this comes again"
            )
        _note(lock, "")  # the last call's pid may be another's by now
        return lock


def _note(lock: int, pid: str) -> None:
    """For whoever finds the lock held for too long; a full disk must not stop the call."""
    with contextlib.suppress(OSError):
        os.pwrite(lock, pid.ljust(PID_WIDTH).encode(), 0)


def _pid_in(lock: int) -> int | None:
    text = os.pread(lock, PID_WIDTH, 0).strip()
    return int(text) if text.isdigit() else None


def _checked(call: str, code: int, out: bytes, errors: bytes) -> str:
    printed, said = (part.decode("utf-8", "replace") for part in (out, errors))
    # A line about one chip must not cost the others' rows: those and key lines begin so.
    answered = not code and any(line[:1] in "|\t" for line in printed.splitlines() if line)
    failure = find_failure(f"{printed}\n") or find_failure(f"{said}\n")
    if failure and not answered:
        raise SensorError(failure)
    if code < 0:
        raise SensorError(f"`{call}` was ended by signal {-code}; look at `dmesg`")
    if code:
        first = (said.strip() or printed.strip() or "nothing was printed").splitlines()[0]
        raise SensorError(f"`{call}` ended with {code}: {first[:200]}; run it by hand")
    # Ended by itself, so that a last line without its end is not a cut one.
    return printed if printed.endswith("\n") else f"{printed}\n"
