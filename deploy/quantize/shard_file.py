"""One safetensors file, written tensor by tensor under another name until it is whole on the disk.

The header comes first and is known before any weight, so tensors may come in any order.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from deploy.quantize.shards import DISK_DTYPES, Shard
from placement.errors import NrankError
from placement.whole_file import SHARED, sync_folder, write_whole

PART = ".part"  # ends the name of a file that isn't whole


class OutputError(NrankError):
    """Output that could not be written (exit code 1); the same command goes on."""


class ShardFile:
    """A context manager; the file has its name when it ends without an error."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.path = folder / shard.file
        self._part = self.path.with_name(shard.file + PART)
        header = shard.header
        at = len(header)
        self._places: dict[str, tuple[int, int]] = {}  # offset and bytes still to come
        for entry in shard.entries:
            self._places[entry.name] = (at, entry.nbytes)
            at += entry.nbytes
        self._described = {entry.name: (entry.dtype, entry.shape) for entry in shard.entries}
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            for stale in (self.path, self._part):  # of a run that was killed; their room is needed
                stale.unlink(missing_ok=True)
            self._handle = os.open(self._part, flags, SHARED)
        except OSError as error:
            raise unwritable(self.path, error) from error
        try:
            self._put(0, header)
        except OutputError:
            self._close()
            raise

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            if kind is None:
                self._finish()
        finally:
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            os.close(self._handle)
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)

    def _finish(self) -> None:
        missing = [name for name, (_, left) in self._places.items() if left]
        assert not missing, f"never written: {missing[:3]}"
        try:
            os.fsync(self._handle)
            os.replace(self._part, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def write(self, name: str, tensor: Tensor) -> None:
        assert (DISK_DTYPES[tensor.dtype], tuple(tensor.shape)) == self._described[name], name
        if tensor.numel():
            raw = tensor.contiguous().flatten().view(torch.uint8)
            self.write_part(name, 0, raw.numpy().data)

    def write_part(self, name: str, at: int, raw: bytes | bytearray | memoryview) -> None:
        """Bytes of a tensor from its byte `at` on."""
        offset, left = self._places[name]
        self._put(offset + at, raw)
        self._places[name] = (offset, left - len(raw))

    def _put(self, offset: int, raw: bytes | bytearray | memoryview) -> None:
        view, done = memoryview(raw), 0
        try:
            while done < len(view):
                done += os.pwrite(self._handle, view[done:], offset + done)
        except OSError as error:
            raise unwritable(self.path, error) from error


def write_file(path: Path, content: str | bytes) -> None:
    """A small file, whole and on the disk when this returns."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> OutputError:
    remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see to the disk"
    return OutputError(
        f"{path} can't be written: {error.strerror}; {remedy} and give the same command again, "
        "files that are whole are kept"
    )
