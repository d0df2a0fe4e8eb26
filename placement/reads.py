"""Which bytes of which file a rank reads, and where they land in its local tensors.

Exactly the owned bytes: a column split becomes strided runs, never a full read that is cut
afterwards. Pure arithmetic on headers; opens nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod

from placement.config import RankShare
from placement.errors import CheckpointError
from placement.headers import DTYPE_BITS, CheckpointHeaders, TensorHeader
from placement.partition import Range, local_index_ranges, local_shape
from placement.spec import DTypeRule, Piece, TensorSpec


@dataclass(frozen=True)
class Run:
    """`count` reads of `run_bytes`: file byte `offset + i * file_stride` goes to local byte
    `dest_offset + i * dest_stride`. `file` is the path that the headers gave.
    """

    file: str
    offset: int
    run_bytes: int
    count: int
    file_stride: int
    dest_offset: int
    dest_stride: int


@dataclass(frozen=True)
class TensorReads:
    """One local tensor: row-major `local_shape` in `disk_dtype`, filled by `runs` exactly once.

    For a packed low-bit tensor `local_shape` counts stored elements, not values.
    """

    role: str
    local_shape: tuple[int, ...]
    disk_dtype: str
    dtype_rule: DTypeRule
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor in the disk dtype, which is what is read for it."""
        return sum(run.run_bytes * run.count for run in self.runs)


def plan_reads(
    tensors: Sequence[TensorSpec], share: RankShare, headers: CheckpointHeaders
) -> tuple[TensorReads, ...]:
    """Reads of every tensor for one rank, in the order given.

    Raises CheckpointError when pieces of one tensor differ in dtype or don't fill it exactly.
    """
    return tuple(_tensor_reads(tensor, share, headers) for tensor in tensors)


def _tensor_reads(tensor: TensorSpec, share: RankShare, headers: CheckpointHeaders) -> TensorReads:
    tensor = _as_stored(tensor)
    found = [(piece, _header(piece, headers)) for piece in tensor.pieces]
    dtype = _common_dtype(tensor, found)
    ranges, shape = local_index_ranges(tensor, share), local_shape(tensor, share)
    cut = _Cut(tensor.split.dim, shape, DTYPE_BITS[dtype] // 8)
    runs = _merged(run for piece, header in found for run in cut.runs(piece, header, ranges))
    is_packed = tensor.format is not None and not tensor.format.is_plain
    rule = DTypeRule.STORED if is_packed else tensor.dtype
    result = TensorReads(tensor.role, shape, dtype, rule, runs)
    _check_exact(result, cut.itemsize)
    return result


def _as_stored(tensor: TensorSpec) -> TensorSpec:
    """The tensor in stored elements: several low-bit columns of it lie in one."""
    if tensor.packed == 1:
        return tensor
    last = len(tensor.shape) - 1
    segments = tensor.split.segments
    if tensor.split.dim == last:
        if any(one.block % tensor.packed for one in segments):
            raise CheckpointError(
                f"{tensor.role}: {tensor.packed} columns share one stored element, so its split "
                f"along the columns needs blocks that are a multiple of {tensor.packed}"
            )
        segments = tuple(replace(one, block=one.block // tensor.packed) for one in segments)
    return replace(
        tensor,
        shape=(*tensor.shape[:last], tensor.shape[last] // tensor.packed),
        split=replace(tensor.split, segments=segments),
        packed=1,
    )


def _header(piece: Piece, headers: CheckpointHeaders) -> TensorHeader:
    header = headers.tensors.get(piece.name)
    if header is None:
        raise CheckpointError(f"{headers.model_dir}: tensor {piece.name} is missing")
    return header


def _common_dtype(tensor: TensorSpec, found: Sequence[tuple[Piece, TensorHeader]]) -> str:
    piece, first = found[0]
    for other, header in found:
        if header.dtype != first.dtype:
            raise CheckpointError(
                f"{header.file}: {other.name} is {header.dtype}, but {piece.name} is "
                f"{first.dtype}; both are parts of {tensor.role} and need one dtype"
            )
    return first.dtype


@dataclass(frozen=True)
class _Cut:
    """Cuts boxes on disk to the owned ranges of one tensor whose local shape is `shape`."""

    dim: int
    shape: tuple[int, ...]
    itemsize: int

    def runs(self, piece: Piece, header: TensorHeader, ranges: Iterable[Range]) -> Iterator[Run]:
        pad = len(self.shape) - len(piece.shape)
        extent = (*[1] * pad, *piece.shape)
        origin = piece.origin
        begin, end = origin[self.dim], origin[self.dim] + extent[self.dim]
        local = 0
        for start, stop in ranges:
            low, high = max(start, begin), min(stop, end)
            if low < high and 0 not in extent:
                yield from self._box(header, extent, origin, low, high, local + low - start)
            local += stop - start

    def _box(
        self,
        header: TensorHeader,
        extent: tuple[int, ...],
        origin: tuple[int, ...],
        low: int,
        high: int,
        local_low: int,
    ) -> Iterator[Run]:
        """The part [low, high) along the split dimension of one piece."""
        dim = self.dim
        box = (*extent[:dim], high - low, *extent[dim + 1 :])
        disk, dest = _strides(extent, self.itemsize), _strides(self.shape, self.itemsize)
        offset = header.offset + (low - origin[dim]) * disk[dim]
        target = (*origin[:dim], local_low, *origin[dim + 1 :])
        dest_offset = sum(at * stride for at, stride in zip(target, dest, strict=True))
        inner = self._contiguous_from(box, extent)
        run_bytes = prod(box[inner:]) * self.itemsize
        if inner == 0:
            yield Run(header.file, offset, run_bytes, 1, run_bytes, dest_offset, run_bytes)
            return
        *outer, count = box[:inner]
        for at in product(*map(range, outer)):
            yield Run(
                header.file,
                offset + sum(i * stride for i, stride in zip(at, disk, strict=False)),
                run_bytes,
                count,
                disk[inner - 1],
                dest_offset + sum(i * stride for i, stride in zip(at, dest, strict=False)),
                dest[inner - 1],
            )

    def _contiguous_from(self, box: tuple[int, ...], extent: tuple[int, ...]) -> int:
        """First dimension from which the box is one run both on disk and in memory."""
        inner = len(box) - 1
        while inner > 0 and box[inner] == extent[inner] == self.shape[inner]:
            inner -= 1
        return inner


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) * itemsize for i in range(len(shape)))


def _merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs that continue each other in the file and in memory become one."""
    merged: list[Run] = []
    for run in map(_flattened, runs):
        last = merged[-1] if merged else None
        if last is not None and _continues(last, run):
            total = last.run_bytes + run.run_bytes
            merged[-1] = replace(last, run_bytes=total, file_stride=total, dest_stride=total)
        else:
            merged.append(run)
    return tuple(merged)


def _flattened(run: Run) -> Run:
    """A strided run without gaps, or with a count of one, is a plain run."""
    dense = run.run_bytes == run.file_stride == run.dest_stride
    if run.count > 1 and not dense:
        return run
    total = run.run_bytes * run.count
    return replace(run, run_bytes=total, count=1, file_stride=total, dest_stride=total)


def _continues(last: Run, run: Run) -> bool:
    return (
        last.count == run.count == 1
        and last.file == run.file
        and last.offset + last.run_bytes == run.offset
        and last.dest_offset + last.run_bytes == run.dest_offset
    )


def _check_exact(reads: TensorReads, itemsize: int) -> None:
    """Every local byte is written once."""
    wanted = prod(reads.local_shape) * itemsize
    if reads.nbytes != wanted:
        raise CheckpointError(
            f"{reads.role}: its pieces on disk hold {reads.nbytes} bytes, {wanted} are needed"
        )
    spans = sorted(_dest_spans(reads.runs))
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise CheckpointError(f"{reads.role}: its pieces on disk overlap at byte {start}")


def _dest_spans(runs: Sequence[Run]) -> Iterator[Range]:
    """Destination ranges; of equally strided runs that stay inside their stride the first each."""
    strides = {(run.count, run.dest_stride) for run in runs if run.count > 1}
    lanes = len(strides) == 1 and all(
        run.count > 1 and run.dest_offset + run.run_bytes <= run.dest_stride for run in runs
    )
    for run in runs:
        for i in range(1 if lanes else run.count):
            start = run.dest_offset + i * run.dest_stride
            yield start, start + run.run_bytes
