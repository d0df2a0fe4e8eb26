"""What is read of a checkpoint: rows of one matrix as float32, and bytes that are copied.

At most some MiB at a time, by `pread`, so that no page of the file counts as memory of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from ops.lowbit.packed import Packed, dequantised
from placement.errors import CheckpointError
from placement.formats import WeightFormat
from placement.headers import DTYPE_BITS, CheckpointHeaders, TensorHeader

TORCH_DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
FLOATS = ("F32", "BF16", "F16", "F8_E4M3")
CHUNK_BYTES = 4 << 20  # of bytes that are copied


@dataclass(frozen=True)
class Matrix:
    """One matrix [rows, columns] of a checkpoint; `name` is that of a plain export.

    `at` is the byte in the file where it begins: a bank of experts holds many. `scale` and `form`
    are those of FP8.
    """

    name: str
    shape: tuple[int, int]
    header: TensorHeader
    at: int
    scale: TensorHeader | None = None
    form: WeightFormat | None = None

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * DTYPE_BITS[self.header.dtype] // 8


def stamps(headers: CheckpointHeaders) -> dict[str, list[int]]:
    """Bytes and time of change (ns) of each file of weights; the weights themselves aren't read."""
    found = {}
    for path in sorted({one.file for one in headers.tensors.values()}):
        try:
            status = os.stat(path)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error
        found[os.path.basename(path)] = [status.st_size, status.st_mtime_ns]
    return found


class Source:
    """Open files of one checkpoint; a context manager."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for handle in self._files.values():
            os.close(handle)

    def rows(self, matrix: Matrix, first: int, stop: int) -> Tensor:
        """fp32 [stop - first, columns]; with blocks of scales `first` has to begin one."""
        size = (stop - first) * matrix.row_bytes
        raw = self.read(matrix.header, matrix.at + first * matrix.row_bytes, size, matrix.name)
        values = _typed(raw, matrix.header.dtype).view(stop - first, matrix.shape[1])
        if matrix.scale is None:
            return values.float()
        assert matrix.form is not None
        scale = self._scale(matrix)
        down = matrix.form.block_rows
        own = scale[first // down : -(-stop // down)]
        return dequantised(Packed(matrix.form, tuple(values.shape), values, own))

    def _scale(self, matrix: Matrix) -> Tensor:
        header = matrix.scale
        assert header is not None
        name = f"the scale of {matrix.name}"
        scale = _typed(self.read(header, header.offset, header.nbytes, name), header.dtype)
        if not (torch.isfinite(scale.float()) & (scale.float() > 0)).all():
            raise CheckpointError(f"{header.file}: {name} isn't finite and above 0; fetch it again")
        return scale.view(header.shape)

    def chunks(self, name: str, header: TensorHeader) -> Iterator[tuple[int, bytearray]]:
        """The bytes of a tensor with where they begin in it; CheckpointError for a NaN."""
        for at in range(0, header.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, header.nbytes - at)
            raw = self.read(header, header.offset + at, size, name)
            values = _typed(raw, header.dtype) if header.dtype in FLOATS else None
            if values is not None and not torch.isfinite(values.float()).all():
                raise not_finite(header.file, name)
            yield at, raw

    def read(self, header: TensorHeader, at: int, size: int, name: str) -> bytearray:
        """Raises CheckpointError, naming file and tensor."""
        buffer = bytearray(size)
        view, done = memoryview(buffer), 0
        try:
            if header.file not in self._files:
                self._files[header.file] = os.open(header.file, os.O_RDONLY)
            while done < size:
                got = os.preadv(self._files[header.file], [view[done:]], at + done)
                if not got:
                    raise CheckpointError(f"{header.file} ends in {name}; fetch it again")
                done += got
        except OSError as error:
            raise CheckpointError(f"{header.file}: {name}: {error.strerror}") from error
        return buffer


def not_finite(file: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {name} holds a value that is no finite number; fetch it again, or repair the "
        "checkpoint before it is quantised"
    )


def _typed(raw: bytearray, dtype: str) -> Tensor:
    if not raw:
        return torch.empty(0, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(raw, dtype=TORCH_DTYPES[dtype])
