"""Output files: whole or not there at all, and never in place of something that is no file.

A link is followed: what it names is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path

from placement.errors import ConfigError

OWNER_ONLY, SHARED = 0o600, 0o666  # as the umask leaves them
_PART = re.compile(r"\.(.+)\.[0-9a-f]{8}\.part")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_file(flag: str, path: str | Path) -> None:
    """ConfigError where something that is no file stands, or what stands there can't be told."""
    try:
        if kind := _other_kind(_target(path)):
            raise ConfigError(f"{flag} {path} is {kind}; give a file")
    except OSError as error:
        raise ConfigError(f"{flag} {path} can't be used: {error.strerror}; give a file") from None


def require_place(flag: str, path: str | Path) -> None:
    """ConfigError where no file can be written: to be asked before the work, not behind it."""
    require_file(flag, path)
    folder = _target(path).parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: {folder} can't be written to; choose another place")


def write_whole(path: str | Path, content: str | bytes, mode: int = SHARED) -> None:
    """Replaces `path`, which is on the disk when this returns. OSError when it can't."""
    target = _target(path)
    if kind := _other_kind(target):
        raise OSError(errno.EINVAL, f"it is {kind}", str(path))
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    data = content.encode() if isinstance(content, str) else content
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        with contextlib.suppress(OSError):  # replaced, or never made
            part.unlink()
    sync_folder(target.parent)


def left_behind(folder: Path) -> dict[Path, str]:
    """What writers of `folder` left that were killed, and the file that each was to become: for a
    process that knows itself the only writer there.
    """
    found = {path: _PART.fullmatch(path.name) for path in folder.iterdir()}
    return {path: match[1] for path, match in found.items() if match}


def _target(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _other_kind(path: Path) -> str:
    """What stands there; "" for a file or nothing. OSError where that can't be told."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def sync_folder(folder: Path) -> None:
    """A new file is there after a power cut only when its folder was synced, too."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
