"""The shapes that compressed-tensors states beside packed words, compared with what is loaded.

Some bytes a matrix, of a rank's own experts only. Words that were padded, or come from another
model of the same width, have the length that is expected, so nothing else would notice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from placement.config import RankShare
from placement.errors import CheckpointError
from placement.headers import DTYPE_BITS, CheckpointHeaders, TensorHeader
from placement.models.layouts import stated_shape_name
from placement.partition import local_index_ranges
from placement.spec import Piece, TensorSpec


def check_stated_shapes(
    tensors: Iterable[TensorSpec], share: RankShare, headers: CheckpointHeaders
) -> None:
    """CheckpointError for a `weight_shape` that isn't its matrix's [rows, columns]."""
    wanted = [
        (headers.tensors[name], name, [piece.shape[0], piece.shape[1] * tensor.packed])
        for tensor in tensors
        if tensor.format is not None
        for piece in _own_pieces(tensor, share)
        if (name := stated_shape_name(piece.name)) in headers.tensors
    ]
    wanted.sort(key=lambda one: (one[0].file, one[0].offset))
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for header, name, shape in wanted:
            try:
                if header.file not in files:
                    files[header.file] = os.open(header.file, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, files[header.file])
                raw = os.pread(files[header.file], header.nbytes, header.offset)
            except OSError as error:
                raise CheckpointError(f"{header.file}: {name}: {error.strerror}") from error
            if (stated := _integers(header, raw)) != shape:
                raise CheckpointError(
                    f"{header.file}: {name} says {stated}, but its matrix is {shape} by "
                    "config.json and by its codes: quantise the model again or load the file again"
                )


def _own_pieces(tensor: TensorSpec, share: RankShare) -> Iterator[Piece]:
    """Pieces of which the rank owns a part, with a shape beside them."""
    dim = tensor.split.dim
    owned = local_index_ranges(tensor, share)
    for piece in tensor.pieces:
        if not piece.name.endswith(".weight_packed"):
            continue
        extent = (*[1] * (len(tensor.shape) - len(piece.shape)), *piece.shape)
        first = piece.origin[dim]
        width = extent[dim] * (tensor.packed if dim == len(tensor.shape) - 1 else 1)
        if any(start < first + width and first < stop for start, stop in owned):
            yield piece


def _integers(header: TensorHeader, raw: bytes) -> list[int]:
    size = DTYPE_BITS[header.dtype] // 8
    parts = (raw[at : at + size] for at in range(0, len(raw), size))
    return [int.from_bytes(part, "little", signed=True) for part in parts]
