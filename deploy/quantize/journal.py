"""What of an output directory is done: a line a file, so that a killed run is gone on with.

The first line says what was asked for, and of which files. The journal is there as long as the
output isn't whole; then the receipts take its place.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.quantize.packing import Receipt
from deploy.quantize.shard_file import unwritable, write_file
from placement.errors import ConfigError
from placement.headers import read_json, require_regular
from placement.whole_file import left_behind, sync_folder

JOURNAL = "nrank.quantize.jsonl"
RECEIPTS = "nrank.quantize.json"

Asked = Mapping[str, Any]  # of strings and numbers
Stamps = Mapping[str, list[int]]  # bytes and time of change of each file of the source


class Journal:
    """The one writer of an output directory, which it makes; close it after use."""

    def __init__(self, folder: Path, asked: Asked, stamps: Stamps) -> None:
        """ConfigError where the directory holds something else, was begun with other files of the
        source, or is written by another process.
        """
        self.folder, self.path = folder, folder / JOURNAL
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            is_other = folder.is_symlink() or folder.exists()
            reason = "is no folder" if is_other and not folder.is_dir() else error.strerror
            raise ConfigError(f"--out {folder}: {reason}; choose another folder") from None
        try:
            self._take_lock()
            self.done: dict[str, list[Receipt]] = {}
            self.is_complete = False
            self._begin(dict(asked), dict(stamps))
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {self.folder} is written by another process; wait for it or choose another"
            ) from None

    def _begin(self, asked: dict[str, Any], stamps: dict[str, list[int]]) -> None:
        if self.path.exists():
            self._resume(asked, stamps)
        elif (self.folder / RECEIPTS).exists():
            was = read_json(str(self.folder / RECEIPTS)).get("asked")
            self._require_same(was, asked)
            self.is_complete = True
        else:
            left = left_behind(self.folder)
            begun = {path.name for path, name in left.items() if name == JOURNAL}
            if names := sorted(set(os.listdir(self.folder)) - begun):
                raise ConfigError(
                    f"--out {self.folder} holds other files ({names[0]}); choose a folder that is "
                    "empty or not there yet"
                )
            write_file(self.path, json.dumps({"asked": asked, "stamps": stamps}) + "\n")
        if not self.is_complete:
            self._clear()

    def _resume(self, asked: dict[str, Any], stamps: dict[str, list[int]]) -> None:
        try:
            require_regular(str(self.path))
            lines = self.path.read_bytes().split(b"\n")
            whole = lines[:-1]  # a line that was torn has no end
            entries = [json.loads(line) for line in whole]
            was, stamped = entries[0]["asked"], dict(entries[0]["stamps"])
            self.done = {
                one["file"]: [Receipt.read(each) for each in one["receipts"]] for one in entries[1:]
            }
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            raise ConfigError(f"{self.path} can't be read; remove {self.folder}") from None
        self._require_same(was, asked)
        if others := [file for file in stamps if stamps[file] != stamped.get(file)]:
            raise ConfigError(
                f"--out {self.folder} was begun with another {others[0]}, of other length or time "
                "of change: remove the folder and give the same command again"
            )
        if lines[-1]:
            write_file(self.path, "".join(line.decode() + "\n" for line in whole))

    def _clear(self) -> None:
        """Of runs that were killed in the middle of a small file."""
        for path in left_behind(self.folder):
            if path.is_file():
                self._remove(path)

    def _require_same(self, was: Any, now: dict[str, Any]) -> None:
        was = was if isinstance(was, dict) else {}
        changes = [
            f"{name} was {_short(was.get(name))}, is {_short(now.get(name))}"
            for name in dict.fromkeys((*was, *now))
            if was.get(name) != now.get(name)
        ]
        if changes:
            raise ConfigError(
                f"--out {self.folder} is of another conversion: {'; '.join(changes)}; choose "
                "another --out or remove it"
            )

    def add(self, file: str, receipts: list[Receipt]) -> None:
        """Of a file that is whole; on the disk when this returns."""
        self.done[file] = receipts
        line = json.dumps({"file": file, "receipts": [asdict(one) for one in receipts]})
        try:
            with self.path.open("a", encoding="utf-8") as journal:
                journal.write(line + "\n")
                journal.flush()
                os.fsync(journal.fileno())
        except OSError as error:
            raise unwritable(self.path, error) from error

    def finish(self) -> None:
        """The receipts are written: nothing is left to go on with."""
        self._remove(self.path)
        sync_folder(self.folder)
        self.is_complete = True

    @staticmethod
    def _remove(path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error

    def close(self) -> None:
        os.close(self._lock)  # the lock ends with it, and with the process


def _short(value: Any) -> str:
    return "none" if value is None else str(value)[:32]
