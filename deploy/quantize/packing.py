"""One matrix into its stored tensors, in bands of rows, and how far that is from what it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from deploy.quantize.recipe import writer_of
from deploy.quantize.source import Matrix, Source, not_finite
from ops.lowbit.pack import quantise, stored
from ops.lowbit.packed import Packed, dequantised, whole_scales
from placement.errors import CheckpointError
from placement.formats import WeightFormat

BAND_BYTES = 8 << 20  # of float32 values at a time; packing takes some six times as much
BAND_ROWS = 128  # bands end at whole blocks of scales, whatever the format
DIGITS = 4


@dataclass(frozen=True)
class Receipt:
    """What packing did to one matrix: |packed - was| / |was|, cosine, and the largest error."""

    name: str
    format: str
    error: float
    cosine: float
    largest_error: float

    @classmethod
    def read(cls, stored: Any) -> Receipt:
        """The receipt that was stored as JSON. TypeError or LookupError for what is none."""
        named = [stored[key] for key in ("name", "format")]
        figures = [stored[key] for key in ("error", "cosine", "largest_error")]
        if not all(isinstance(one, str) for one in named) or not all(
            isinstance(one, float) for one in figures
        ):
            raise TypeError
        return cls(*named, *figures)


@dataclass
class Deviations:
    """Sums over the bands of a matrix."""

    squares: float = 0.0
    packed_squares: float = 0.0
    products: float = 0.0
    errors: float = 0.0
    largest: float = 0.0

    def add(self, was: Tensor, packed: Tensor) -> None:
        off = packed - was
        self.squares += _sum(was, was)
        self.packed_squares += _sum(packed, packed)
        self.products += _sum(was, packed)
        self.errors += _sum(off, off)
        self.largest = max(self.largest, _largest(off))

    def receipt(self, name: str, form: WeightFormat) -> Receipt:
        error = (self.errors / self.squares) ** 0.5 if self.squares else 0.0
        norm = (self.squares * self.packed_squares) ** 0.5
        cosine = self.products / norm if norm else 1.0
        return Receipt(name, form.name, *map(rounded, (error, cosine, self.largest)))


def rounded(value: float) -> float:
    """To fewer digits than a sum keeps in any order of its parts."""
    return float(f"{value:.{DIGITS}g}")


def pack_matrix(
    source: Source, matrix: Matrix, form: WeightFormat
) -> tuple[dict[str, Tensor], Receipt]:
    """Stored tensors by name, and the receipt. CheckpointError for a value that isn't finite."""
    rows, columns = matrix.shape
    band = max(BAND_ROWS, BAND_BYTES // (4 * max(columns, 1)) // BAND_ROWS * BAND_ROWS)
    spans = [(first, min(first + band, rows)) for first in range(0, rows, band)] or [(0, 0)]
    largest = None
    if form.tensor_bytes:  # one scale stands for all rows, which are read twice
        largest = max((_largest(source.rows(matrix, *span)) for span in spans), default=0.0)
    whole, deviations = None, Deviations()
    for span in spans:
        values = source.rows(matrix, *span)
        try:
            packed = quantise(values, form, largest=largest)
        except ValueError as error:
            raise not_finite(matrix.header.file, matrix.name) from error
        _require_scales(matrix, packed)
        deviations.add(values, dequantised(packed))
        whole = _room_for(packed, matrix.shape) if whole is None else whole
        _put(packed, whole, span[0])
    assert whole is not None
    tensors = stored(base_name(matrix), whole, writer_of(form))
    return tensors, deviations.receipt(matrix.name, form)


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def _require_scales(matrix: Matrix, packed: Packed) -> None:
    """CheckpointError for values so large that a rank would refuse their scale."""
    limit, scales = packed.form.largest_scale, whole_scales(packed)
    if scales.numel() and not (largest := scales.max().item()) <= limit:
        raise CheckpointError(
            f"{matrix.header.file}: {matrix.name} holds a value that is too large for "
            f"{packed.form.name}: its scale would be {largest:g}, {limit:g} is the limit; leave "
            "the matrix in floats, or repair the checkpoint before it is quantised"
        )


def blank(matrix: Matrix, form: WeightFormat) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes of the stored tensors, from BAND_ROWS rows of zeros: rows of codes,
    scales and zero points are in proportion, what a matrix has once has fewer dimensions.
    """
    rows, columns = matrix.shape
    sample = stored(
        base_name(matrix), quantise(torch.zeros(BAND_ROWS, columns), form), writer_of(form)
    )
    return {
        name: (one.dtype, (ceil(rows * one.shape[0] / BAND_ROWS), *one.shape[1:]))
        if one.dim() > 1
        else (one.dtype, tuple(one.shape))
        for name, one in sample.items()
    }


def base_name(matrix: Matrix) -> str:
    return matrix.name.removesuffix(".weight")


def _room_for(band: Packed, shape: tuple[int, int]) -> Packed:
    """What all bands of a matrix go into. Bands that are kept until they are joined lie between
    what was freed, so that the next one finds no room there: seven times the packed size was seen.
    """
    counts = band.form.scale_counts(shape)
    return replace(
        band,
        shape=shape,
        codes=band.codes.new_empty(shape[0], band.codes.shape[1]),
        scale=band.scale.new_empty(counts),
        zero=None if band.zero is None else band.zero.new_empty(counts),
    )


def _put(band: Packed, whole: Packed, first: int) -> None:
    """`first`: the row that the band begins with."""
    block = first // band.form.block_rows
    pairs = [(whole.codes, band.codes, first), (whole.scale, band.scale, block)]
    if whole.zero is not None and band.zero is not None:
        pairs.append((whole.zero, band.zero, block))
    for target, source, at in pairs:
        if source.element_size() == 1:  # not every 8-bit float can be copied
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        target[at : at + source.shape[0]] = source


def _sum(a: Tensor, b: Tensor) -> float:
    """In double precision: in float32 the order of a machine's sum shows in the fourth digit."""
    return torch.dot(a.flatten().double(), b.flatten().double()).item()
