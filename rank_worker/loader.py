"""Reads one rank's bytes of a checkpoint with `pread`, nothing else, into its own tensors.

Driven by the planned reads of `placement.reads`. Bytes are converted to the run's dtype while
they arrive, through a bounded staging buffer, so no bank of experts exists twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placement.errors import CheckpointError
from placement.reads import Run, TensorReads
from placement.spec import DTypeRule

STAGING_BYTES = 8 << 20
_DISK_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
}


@dataclass
class LoadCounter:
    """Bytes that the loader has read so far; polled by other threads."""

    planned_bytes: int = 0
    read_bytes: int = 0
    seconds: float = 0.0


class Loader:
    """`load()` returns role -> tensor. One open file descriptor a shard, closed at the end."""

    def __init__(self, dtype: torch.dtype, counter: LoadCounter) -> None:
        self.dtype, self.counter = dtype, counter
        self._files: dict[str, int] = {}
        self._staging = memoryview(bytearray(STAGING_BYTES))

    def load(self, reads: Sequence[TensorReads]) -> dict[str, Tensor]:
        self.counter.planned_bytes += sum(r.run_bytes * r.count for t in reads for r in t.runs)
        began = time.monotonic()
        try:
            return {tensor.role: self._tensor(tensor) for tensor in reads}
        finally:
            self.counter.seconds += time.monotonic() - began
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()

    def _tensor(self, reads: TensorReads) -> Tensor:
        disk_dtype = _DISK_DTYPES[reads.disk_dtype]
        target = self._target_dtype(reads)
        out = torch.empty(reads.local_shape, dtype=target)
        flat, itemsize = out.view(-1), disk_dtype.itemsize
        for run in reads.runs:
            for chunk in self._chunks(run, itemsize):
                raw = self._read(reads.role, run.file, chunk)
                values = torch.frombuffer(raw, dtype=disk_dtype)
                self._store(flat, values, chunk, itemsize)
        if target != disk_dtype and target == torch.float16 and not torch.isfinite(out).all():
            raise CheckpointError(
                f"tensor {reads.role} has values beyond float16's 65504: use --dtype float32"
            )
        return out

    def _target_dtype(self, reads: TensorReads) -> torch.dtype:
        if reads.dtype_rule is DTypeRule.WEIGHT:
            return self.dtype
        return torch.float32 if reads.dtype_rule is DTypeRule.FLOAT32 else torch.int64

    @staticmethod
    def _chunks(run: Run, itemsize: int) -> Iterator[Run]:
        """`run` in parts that fit the staging buffer."""
        if run.run_bytes <= STAGING_BYTES:
            per_chunk = max(1, STAGING_BYTES // run.run_bytes) if run.run_bytes else run.count
            for first in range(0, run.count, per_chunk):
                yield Run(
                    run.file, run.offset + first * run.file_stride, run.run_bytes,
                    min(per_chunk, run.count - first), run.file_stride,
                    run.dest_offset + first * run.dest_stride, run.dest_stride,
                )  # fmt: skip
            return
        size = STAGING_BYTES // itemsize * itemsize
        for index in range(run.count):
            offset = run.offset + index * run.file_stride
            dest = run.dest_offset + index * run.dest_stride
            for at in range(0, run.run_bytes, size):
                part = min(size, run.run_bytes - at)
                yield Run(run.file, offset + at, part, 1, 0, dest + at, 0)

    def _read(self, role: str, file: str, chunk: Run) -> memoryview:
        fd = self._files.get(file)
        if fd is None:
            fd = self._files[file] = os.open(file, os.O_RDONLY)
        buffer = self._staging[: chunk.run_bytes * chunk.count]
        for index in range(chunk.count):
            part = buffer[index * chunk.run_bytes : (index + 1) * chunk.run_bytes]
            self._fill(fd, part, chunk.offset + index * chunk.file_stride, role, file)
        return buffer

    def _fill(self, fd: int, part: memoryview, offset: int, role: str, file: str) -> None:
        done = 0
        while done < len(part):
            got = os.preadv(fd, [part[done:]], offset + done)
            if got == 0:
                raise CheckpointError(
                    f"{file} ends at byte {os.fstat(fd).st_size}, but tensor {role} goes to "
                    f"byte {offset + len(part)}: the file was truncated, download it again"
                )
            done += got
            self.counter.read_bytes += got

    @staticmethod
    def _store(flat: Tensor, values: Tensor, chunk: Run, itemsize: int) -> None:
        first, run = chunk.dest_offset // itemsize, chunk.run_bytes // itemsize
        stride = chunk.dest_stride // itemsize if chunk.count > 1 else run
        target = torch.as_strided(flat, (chunk.count, run), (stride, 1), first)
        target.copy_(values.view(chunk.count, run))
