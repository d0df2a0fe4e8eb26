"""The run's file: one record a line, appended and synced one by one, by one process at a time.

A record counts once its line has its end. What a killed process left of a last line is cut off
when the run resumes, so nothing is lost and nothing counts twice. A file that does not begin as a
ledger does is left as it is. Knows nothing of scores.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from deploy.gpqa.records import Answer, Header, Record, from_line, to_line
from placement.errors import ConfigError, NrankError
from placement.headers import require_regular

FILE = "ledger.jsonl"
HEADER_START = b'{"kind":"header","run_id":"'  # as `to_line` writes it
IGNORE = "*\n"  # answers may quote questions: they stay out of any repository


class LedgerFailure(NrankError):
    """A record that could not be written (exit code 1); the run can be resumed."""


@dataclass(frozen=True)
class Contents:
    """What a ledger holds. `records` are in the order of writing."""

    header: Header
    records: tuple[Record, ...]

    def answered(self) -> frozenset[str]:
        """Ids of questions that need not be asked again."""
        return frozenset(record.id for record in self.records if isinstance(record, Answer))


def read_ledger(folder: str | Path) -> Contents:
    """A run's file as it is now, also while it is written. ConfigError without a run."""
    path = Path(folder) / FILE
    try:
        require_regular(str(path))
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; give a run's --out") from None
    contents = _parse(path, data)
    if contents is None:
        raise ConfigError(f"{path} holds no run yet")
    return contents


class Ledger:
    """The one writer. `contents` is what was there when it was opened; close it after use."""

    def __init__(self, folder: str | Path, header: Header) -> None:
        """Starts the run of `header`, or resumes one of an equal header.

        ConfigError when another process writes it or its header differs.
        """
        self.path = Path(folder) / FILE
        self._fd = _open(self.path)
        self._failed = ""
        try:
            self._lock()
            self.contents = self._resume(header)
        except BaseException:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """On the disk when this returns. LedgerFailure when it can't be."""
        self._write(to_line(record))

    def close(self) -> None:
        os.close(self._fd)

    def _lock(self) -> None:
        """Held by the open file: it ends with the process, however that ends."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path} is written by another process; wait for it or choose another --out"
            ) from None

    def _resume(self, header: Header) -> Contents:
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        contents = _parse(self.path, data)
        if contents is None:
            if not _begins_header(data):
                raise ConfigError(f"{self.path} is no ledger of a run; choose another --out")
            os.ftruncate(self._fd, 0)
            self._write(to_line(header))
            _sync_folder(self.path.parent)
            return Contents(header, ())
        if differences := contents.header.differences(header):
            raise ConfigError(
                f"{self.path} is another run: {', '.join(differences)}; resume it as it began or "
                f"choose another --out"
            )
        if end < len(data):
            os.ftruncate(self._fd, end)
        return contents

    def _write(self, line: bytes) -> None:
        """Nothing more after a failure: half a line may be there, which only resuming cuts off."""
        try:
            while line and not self._failed:
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
        except OSError as error:
            self._failed = self._failed or str(error.strerror)
        if self._failed:
            raise LedgerFailure(
                f"{self.path} can't be written: {self._failed}; the run resumes with the same "
                f"command"
            )


def _open(path: Path) -> int:
    try:
        if not path.parent.exists():  # a folder that was there may hold more than a run
            path.parent.mkdir(parents=True)
            (path.parent / ".gitignore").write_text(IGNORE)
        if path.exists():
            require_regular(str(path))
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"--out {path.parent} can't be used: {path.name}: {error.strerror}; give a folder that "
            f"can be written"
        ) from None


def _parse(path: Path, data: bytes) -> Contents | None:
    """Complete lines only; None when there is none."""
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(from_line(line))
        except ConfigError as error:
            raise ConfigError(f"{path} line {number} is {error}; choose another --out") from None
    if not records:
        return None
    header, *rest = records
    others = [record for record in rest if not isinstance(record, Header)]
    if not isinstance(header, Header) or len(others) < len(rest):
        raise ConfigError(f"{path} has its header not in line 1 alone; choose another --out")
    return Contents(header, tuple(others))


def _begins_header(data: bytes) -> bool:
    """Whether it may be what a process that was killed at once left of a header: all or nothing."""
    return data[: len(HEADER_START)] == HEADER_START[: len(data)] and b"\n" not in data


def _sync_folder(folder: Path) -> None:
    """A new file is there after a power cut only when its folder was synced, too."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
