"""Logs of ranks that ran on this machine lately: found in Ray's session directories, ends only."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILES = 32  # of the newest; a gang of six ranks has twelve
MAX_BYTES = 256 << 10  # of each file's end
HEAD_BYTES = 4096
ACTOR = b":actor_name:RankWorker"  # Ray's second line in the log of a rank
_WORKER = re.compile(r"worker-[0-9a-f]+-[0-9a-f]+-(?P<pid>\d+)\.(out|err)")


@dataclass(frozen=True)
class RankLog:
    """The end of one file; `name` is unique among all that were found."""

    name: str
    text: str


def session_dirs(temp: str = "") -> list[Path]:
    """Of all Rays of this machine, the newest first."""
    base = Path(temp or os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"
    found = [p for p in base.glob("session_*") if p.is_dir() and not p.is_symlink()]
    return sorted(found, key=lambda path: path.name, reverse=True)


def find_rank_logs(pids: Collection[int], temp: str = "") -> Iterator[RankLog]:
    """Logs of all ranks of one Ray, the newest first: the Ray that has a process of `pids`.

    Without one the newest Ray that ever had a rank: gangs that died before lie in it, too.
    """
    found = [(session, files) for session in session_dirs(temp) if (files := _rank_files(session))]
    running = [entry for entry in found if any(_pid(path) in pids for path in entry[1])]
    for session, files in (running or found)[:1]:
        for path in files[:MAX_FILES]:
            yield RankLog(f"{session.name}/{path.name}", _tail(path))


def _rank_files(session: Path) -> list[Path]:
    dated = [
        (modified, path)
        for path in (session / "logs").glob("worker-*")
        if _pid(path) and (modified := _modified(path)) is not None
        if ACTOR in _part(path, 0, HEAD_BYTES)
    ]
    return [path for _, path in sorted(dated, reverse=True)]


def _pid(path: Path) -> int:
    """Of the process that writes this log; 0 for another kind of file."""
    found = _WORKER.fullmatch(path.name)
    return int(found["pid"]) if found else 0


def _modified(path: Path) -> float | None:
    """When a regular file was written last; None for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_mtime if stat.S_ISREG(status.st_mode) else None


def _part(path: Path, start: int, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(count)
    except OSError:
        return b""


def _tail(path: Path) -> str:
    """Whole lines only: half of one may be a secret without its name."""
    try:
        start = max(0, path.stat().st_size - MAX_BYTES)
    except OSError:
        return ""
    data = _part(path, start, MAX_BYTES)
    if start:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", errors="replace")
