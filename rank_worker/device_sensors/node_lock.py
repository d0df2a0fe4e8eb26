"""The directory where processes of a node meet, and locks in it that a dead holder gives back.

Knows nothing of sensors.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

from placement.errors import ConfigError

TEMPORARY = Path("/tmp")  # not TMPDIR, which differs from job to job


def run_directory() -> Path:
    """/tmp/nrank-UID, made when missing. All gangs of a user have to find the same place.

    XDG_RUNTIME_DIR is no such place: a job or a service has none, and it goes when the user logs
    out. ConfigError when somebody else made the directory or can write to it.
    """
    path = TEMPORARY / f"nrank-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not private or found.st_uid != os.getuid():
        raise ConfigError(
            f"{path} must be a directory of user {os.getuid()} with mode 0700, is of user "
            f"{found.st_uid} with mode {stat.filemode(found.st_mode)}; remove it"
        )
    return path


class NodeLock:
    """One holder on a node. The kernel frees it when the holder dies, however it dies.

    A file that was replaced under its holder is no longer held: whoever broke it has the new one.
    """

    def __init__(self, path: Path, stopped_s: float) -> None:
        self._path = path
        self._stopped_s = stopped_s  # a lock that was taken later has a holder that starts
        self._descriptor: int | None = None

    def try_hold(self) -> bool:
        """Whether this object holds the lock, taking it when it is free."""
        if self._descriptor is not None:
            if self._is_current(self._descriptor):
                return True
            self.release()
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if lock_now(descriptor) and self._is_current(descriptor):
            os.utime(descriptor)
            self._descriptor = descriptor
            return True
        os.close(descriptor)
        return False

    def take_from_stopped(self) -> bool:
        """Replace the file of a holder that lives and does nothing; one process at a time."""
        guard = os.open(f"{self._path}.guard", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not lock_now(guard):
                return False
            if time.time() - self._path.stat().st_mtime < self._stopped_s:
                return False
            self._path.unlink()
            return self.try_hold()
        finally:
            os.close(guard)

    def release(self) -> None:
        if self._descriptor is not None:
            unlock(self._descriptor)
            self._descriptor = None

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def lock_now(descriptor: int) -> bool:
    """Whether the open file is now locked by this descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Free the lock and close the file, also where a forked process has a copy of it."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
