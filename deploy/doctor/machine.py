"""The machine as the checks see it: files, variables, installed packages, and who asks.

Owns every read, so that tests can hand in another root. Nothing here raises for what is missing.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

MAX_BYTES = 1 << 20  # of any file that is read; version files have a few hundred


@dataclass(frozen=True)
class Machine:
    """This machine, unless a test says otherwise.

    `root` stands before every absolute path, `packages` in place of `sys.path`.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    packages: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    uid: int = field(default_factory=os.geteuid)
    groups: frozenset[int] = field(default_factory=lambda: frozenset(_own_groups()))

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """The text of a regular file; None where there is none that can be read."""
        try:
            with open(self.path(name), "rb", opener=_without_waiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return None
                return file.read(MAX_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """What a directory holds, sorted; nothing where it can't be read."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def is_dir(self, name: str) -> bool:
        return self.path(name).is_dir()

    def distribution(self, name: str) -> metadata.Distribution | None:
        """An installed distribution, found by its metadata: nothing is imported."""
        found = metadata.distributions(name=name, path=list(self.packages))
        return next(iter(found), None)

    def on_search_path(self, folder: str) -> bool:
        """Whether there is this folder; the search path of packages has no other root."""
        return Path(folder).is_dir()

    def version(self, name: str) -> str:
        """The version of an installed distribution, "" where it is not installed."""
        found = self.distribution(name)
        return str(found.version or "") if found is not None else ""


def _own_groups() -> list[int]:
    return [os.getegid(), *os.getgroups()]


def _without_waiting(path: str, flags: int) -> int:
    """A FIFO in place of a file must not stop the doctor."""
    return os.open(path, flags | os.O_NONBLOCK)
