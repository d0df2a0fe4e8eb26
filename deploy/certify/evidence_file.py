"""The evidence file while it is written: whole after every cell, by one process at a time.

A killed run leaves all cells that it had finished; the same command goes on behind them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from placement.errors import ConfigError, NrankError
from placement.evidence import Asked, Cell, Evidence, read_evidence
from placement.whole_file import require_file, write_whole


class EvidenceFailure(NrankError):
    """Evidence that could not be written (exit code 1); what stood there before still does."""


def require_usable(path: Path, overwrite: bool) -> None:
    """ConfigError for what can be told without a tokenizer; `EvidenceFile` asks again."""
    require_file("--out", path)
    lock = _lock_path(path)
    if lock.is_file():
        os.close(_locked(path, os.open(lock, os.O_RDWR | os.O_CLOEXEC)))
    if os.path.lexists(path) and not overwrite:
        read_evidence(str(path))


class EvidenceFile:
    """The one writer; close it after use. `evidence` is what the file holds."""

    def __init__(self, path: Path, wanted: Evidence, overwrite: bool = False) -> None:
        """Starts `wanted`, which has no cells yet, or goes on with a file of the same.

        ConfigError when another process writes it or, unless `overwrite`, when it is of something
        else.
        """
        self._path = path
        self._fd = self._open_lock()
        try:
            self.evidence = wanted
            if os.path.lexists(path) and not overwrite:
                self.evidence = _same(path, wanted)
            self._write()
        except BaseException:
            self.close()
            raise

    def add(self, cells: Sequence[Cell]) -> None:
        """On the disk when this returns. EvidenceFailure when it can't be."""
        self.evidence = replace(self.evidence, cells=(*self.evidence.cells, *cells))
        self._write()

    def close(self) -> None:
        os.close(self._fd)  # the lock ends with it, and with the process

    def _open_lock(self) -> int:
        require_file("--out", self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(_lock_path(self._path), flags, 0o666)
        except OSError as error:
            text = f"{self._path} can't be written: {error.strerror}; choose another --out"
            raise ConfigError(text) from None
        return _locked(self._path, fd)

    def _write(self) -> None:
        try:
            write_whole(self._path, self.evidence.to_json())
        except OSError as error:
            raise EvidenceFailure(
                f"{self._path} can't be written: {error.strerror}; make room and give the same "
                f"command again"
            ) from None


def _lock_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _locked(path: Path, fd: int) -> int:
    """`fd`, of the lock of `path`, with the lock on it; closed when another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(
            f"{path} is written by another process; wait for it or choose another --out"
        ) from None
    return fd


def _same(path: Path, wanted: Evidence) -> Evidence:
    found = read_evidence(str(path))
    changes = found.binding.differences(wanted.binding)
    if found.model != wanted.model:
        changes.insert(0, f"model was {found.model}, is {wanted.model}")
    changes += _asked_otherwise(found.asked, wanted.asked)
    if changes:
        raise ConfigError(
            f"{path} is of another certification: {'; '.join(changes)}; choose another --out, or "
            f"--overwrite to begin anew"
        )
    return found


def _asked_otherwise(was: Asked, now: Asked) -> list[str]:
    """Prompts follow from the rest and from the code; they are told where nothing else differs."""
    names = [
        field.name
        for field in fields(Asked)
        if getattr(was, field.name) != getattr(now, field.name)
    ]
    told = [name for name in names if name != "prompts_sha256"] or names
    return [
        f"{name} was {_text(getattr(was, name))}, is {_text(getattr(now, name))}" for name in told
    ]


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)[:16]
