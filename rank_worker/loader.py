"""Reads one rank's bytes of a checkpoint with `pread`, nothing else, into its own tensors.

Driven by the planned reads of `placement.reads`. A few threads read in file order through one
bounded staging buffer each, and convert to the run's dtype while bytes arrive, so no bank of
experts exists twice. What was planned and what was read must agree to the byte.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from placement.errors import CheckpointError
from placement.reads import Run, TensorReads
from placement.spec import DTypeRule

STAGING_BYTES = 4 << 20  # a thread
READ_THREADS = 4
_DISK_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass
class LoadCounter:
    """Bytes planned and read so far; polled by other threads."""

    planned_bytes: int = 0
    read_bytes: int = 0
    first_s: float = 0.0  # time.monotonic() when reading began; 0 before
    last_s: float = 0.0  # when bytes came last
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def begin(self) -> None:
        self.first_s = self.first_s or time.monotonic()

    def add(self, num_bytes: int) -> None:
        with self.lock:
            self.read_bytes += num_bytes
            self.last_s = time.monotonic()

    def elapsed_s(self) -> float:
        """Since reading began; stands still once all that was planned is read."""
        if not self.first_s:
            return 0.0
        is_done = self.read_bytes >= self.planned_bytes and self.last_s > 0
        return (self.last_s if is_done else time.monotonic()) - self.first_s


@dataclass(frozen=True)
class _Job:
    """One read of at most a staging buffer, and where its values go."""

    role: str
    chunk: Run
    flat: Tensor  # the whole local tensor, in its final dtype
    disk_dtype: torch.dtype
    is_plain: bool  # values, not codes or scales, of which `PackedReader` knows what they may be


class Loader:
    """`load()` returns role -> tensor. One open file descriptor a shard, closed at its end.

    `pace` is called before each read, with its bytes, from several threads; it may block.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        counter: LoadCounter,
        pace: Callable[[int], None] | None = None,
    ) -> None:
        self.dtype, self.counter, self.pace = dtype, counter, pace
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def load(self, reads: Sequence[TensorReads], is_announced: bool = False) -> dict[str, Tensor]:
        """All tensors of `reads`. Raises CheckpointError, naming file and tensor, also for plain
        values that aren't finite.

        `is_announced`: the counter's planned bytes have them already.
        """
        planned = sum(t.nbytes for t in reads)
        before = self.counter.read_bytes
        if not is_announced:
            self.counter.planned_bytes += planned
        self.counter.begin()
        out = {t.role: torch.empty(t.local_shape, dtype=self._target_dtype(t)) for t in reads}
        jobs = [job for tensor in reads for job in self._jobs(tensor, out[tensor.role])]
        jobs.sort(key=lambda job: (job.chunk.file, job.chunk.offset))
        try:
            self._run(jobs)
        finally:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()
        read = self.counter.read_bytes - before
        if read != planned:
            raise CheckpointError(f"{read} bytes were read where {planned} were planned")
        for tensor in reads:
            _check_range(tensor, out[tensor.role])
        return out

    def _run(self, jobs: Sequence[_Job]) -> None:
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="loader") as pool:
            futures = [pool.submit(self._work, job) for job in jobs]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _jobs(self, reads: TensorReads, out: Tensor) -> Iterator[_Job]:
        disk_dtype = _DISK_DTYPES[reads.disk_dtype]
        flat = out.view(-1)
        is_plain = reads.dtype_rule is not DTypeRule.STORED and disk_dtype.is_floating_point
        for run in reads.runs:
            for chunk in self._chunks(run, disk_dtype.itemsize):
                yield _Job(reads.role, chunk, flat, disk_dtype, is_plain)

    def _work(self, job: _Job) -> None:
        if self.pace is not None:
            self.pace(job.chunk.run_bytes * job.chunk.count)
        raw = self._read(job.role, job.chunk.file, job.chunk)
        width = job.disk_dtype.itemsize
        if job.flat.dtype is job.disk_dtype and width == 1:  # codes: not every type can be copied
            values = torch.frombuffer(raw, dtype=torch.uint8)
            self._store(job.flat.view(torch.uint8), values, job.chunk, width)
            return
        values = torch.frombuffer(raw, dtype=job.disk_dtype)
        if job.is_plain and values.numel() and not _all_finite(values):
            raise CheckpointError(
                f"{job.chunk.file}: tensor {job.role} holds a value that is no finite number; "
                "fetch the file again, or repair the checkpoint"
            )
        self._store(job.flat, values, job.chunk, width)

    def _target_dtype(self, reads: TensorReads) -> torch.dtype:
        if reads.dtype_rule is DTypeRule.WEIGHT:
            return self.dtype
        if reads.dtype_rule is DTypeRule.STORED:
            return _DISK_DTYPES[reads.disk_dtype]
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

    def _open(self, file: str) -> int:
        with self._lock:
            fd = self._files.get(file)
            if fd is None:
                try:
                    fd = self._files[file] = os.open(file, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"{file} can't be opened: {error.strerror}") from error
            return fd

    def _staging(self, size: int) -> memoryview:
        """This thread's buffer; larger only when a single value run needs it."""
        held: memoryview | None = getattr(self._local, "staging", None)
        if held is None or len(held) < size:
            held = self._local.staging = memoryview(bytearray(max(STAGING_BYTES, size)))
        return held[:size]

    def _read(self, role: str, file: str, chunk: Run) -> memoryview:
        fd = self._open(file)
        buffer = self._staging(chunk.run_bytes * chunk.count)
        for index in range(chunk.count):
            part = buffer[index * chunk.run_bytes : (index + 1) * chunk.run_bytes]
            self._fill(fd, part, chunk.offset + index * chunk.file_stride, role, file)
        return buffer

    def _fill(self, fd: int, part: memoryview, offset: int, role: str, file: str) -> None:
        done = 0
        while done < len(part):
            try:
                got = os.preadv(fd, [part[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{file} can't be read at byte {offset + done}, in tensor {role}: "
                    f"{error.strerror}"
                ) from error
            if got == 0:
                raise CheckpointError(
                    f"{file} ends at byte {os.fstat(fd).st_size}, but tensor {role} goes to "
                    f"byte {offset + len(part)}: the file was truncated, download it again"
                )
            done += got
        self.counter.add(done)

    @staticmethod
    def _store(flat: Tensor, values: Tensor, chunk: Run, itemsize: int) -> None:
        first, run = chunk.dest_offset // itemsize, chunk.run_bytes // itemsize
        stride = chunk.dest_stride // itemsize if chunk.count > 1 else run
        target = torch.as_strided(flat, (chunk.count, run), (stride, 1), first)
        target.copy_(values.view(chunk.count, run))


def _all_finite(values: Tensor) -> bool:
    """By the extremes, which a NaN becomes, too: `isfinite` takes twenty times as long."""
    return all(math.isfinite(one.item()) for one in torch.aminmax(values))


def _check_range(reads: TensorReads, tensor: Tensor) -> None:
    """Values that the run's dtype can't hold are refused, not turned into infinities."""
    is_stored = reads.disk_dtype == "F16" or reads.dtype_rule is DTypeRule.STORED
    if tensor.dtype is not torch.float16 or is_stored:
        return
    if not torch.isfinite(tensor).all():
        raise CheckpointError(
            f"tensor {reads.role} has values beyond float16's 65504: use --dtype float32"
        )
