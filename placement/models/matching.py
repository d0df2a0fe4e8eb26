"""Compares the tensors that an adapter expects with those on disk.

Knows names, shapes and dtypes only: no model, no file access.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice

from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders, TensorHeader
from placement.spec import Component, DTypeRule, TensorSpec

FLOAT_DTYPES = ("BF16", "F16", "F32")
HALF_DTYPES = ("BF16", "F16")
SHOWN_NAMES = 5
MAX_CANDIDATES = 400  # difflib is slow; a refusal has to come within 2 s


class TensorMismatchError(CheckpointError):
    """Tensors that are missing, and unknown ones with the known name nearest to each (or "")."""

    def __init__(self, message: str, missing: Sequence[str], unknown: Mapping[str, str]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unknown = dict(unknown)


def match(
    tensors: Sequence[TensorSpec], headers: CheckpointHeaders, ignored: Collection[str]
) -> None:
    """Every expected piece is on disk with its shape and a fitting dtype, and nothing else is.

    Tensors with a format, and their scales, were checked when the format was found.
    """
    pieces = {piece.name: (piece, spec) for spec in tensors for piece in spec.pieces}
    missing = [name for name in pieces if name not in headers.tensors]
    unknown = [name for name in headers.tensors if name not in pieces and name not in ignored]
    if missing or unknown:
        raise _difference(headers, pieces, missing, unknown)
    for name, (piece, spec) in pieces.items():
        _check_piece(name, piece.shape, spec, headers.tensors[name])


def _check_piece(name: str, shape: tuple[int, ...], spec: TensorSpec, header: TensorHeader) -> None:
    if header.shape != shape:
        raise CheckpointError(
            f"{header.file}: {name} has shape {list(header.shape)}, config.json says {list(shape)}"
        )
    if spec.format is not None or spec.component is Component.SCALES:
        return
    allowed = ("I64",) if spec.dtype is DTypeRule.INT64 else FLOAT_DTYPES
    is_scale = spec.role.endswith((".scale", ".zero", ".global_scale", ".global_divisor"))
    if header.dtype not in allowed and not is_scale:
        raise CheckpointError(
            f"{header.file}: {name} has dtype {header.dtype}, supported: {', '.join(allowed)}"
        )


def check_float_dtypes(tensors: Sequence[TensorSpec], headers: CheckpointHeaders) -> None:
    """Tensors of one component share one 16-bit dtype; a lone other one is a damaged header.

    BF16 read as F16 has the same size and nonsensical values, so nothing else would notice.
    """
    plain = [
        (spec.component, piece.name, headers.tensors[piece.name])
        for spec in tensors
        if spec.format is None and spec.dtype is DTypeRule.WEIGHT
        for piece in spec.pieces
    ]
    counts = Counter((part, header.dtype) for part, _, header in plain)
    rare = {
        (part, dtype): other
        for dtype, other in zip(HALF_DTYPES, reversed(HALF_DTYPES), strict=True)
        for part in Component
        if 0 < counts[part, dtype] < counts[part, other]
    }
    for part, name, header in plain if rare else ():
        other = rare.get((part, header.dtype), "")
        if other:
            raise CheckpointError(
                f"{header.file}: {name} has dtype {header.dtype}, but the other "
                f"{counts[part, other]} tensors of {part.value} are {other}; one 16-bit dtype a "
                "component is supported"
            )


def _difference(
    headers: CheckpointHeaders,
    known: Collection[str],
    missing: Sequence[str],
    unknown: Sequence[str],
) -> TensorMismatchError:
    nearest = dict.fromkeys(unknown, "")
    nearest |= {name: _nearest(name, missing or known) for name in unknown[:SHOWN_NAMES]}
    parts = [(headers.tensors[unknown[0]].file if unknown else headers.model_dir) + ":"]
    if missing:
        parts.append(f"{len(missing)} missing tensors ({_sample(missing)})")
        unused = [one for one in headers.superseded if one.split(": ", 1)[-1] == missing[0]]
        parts += [f"({unused[0]} is there, but the index doesn't name it)"] if unused else []
    if missing and unknown:
        parts.append("and")
    if unknown:
        hints = [
            f"{name}, nearest known {nearest[name]}" if nearest[name] else name
            for name in unknown[:SHOWN_NAMES]
        ]
        parts.append(f"{len(unknown)} unknown tensors ({_sample(hints, len(unknown))})")
    return TensorMismatchError(" ".join(parts), missing, nearest)


def _sample(names: Sequence[str], total: int | None = None) -> str:
    count = len(names) if total is None else total
    more = f", and {count - SHOWN_NAMES} more" if count > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _nearest(name: str, candidates: Collection[str]) -> str:
    """The known name that this one is probably a misspelling of, or nothing."""
    place = ".".join(name.split(".")[:3])  # as far as the layer number under a short prefix
    pool = list(islice((other for other in candidates if other.startswith(place)), MAX_CANDIDATES))
    nearest = get_close_matches(name, pool or list(islice(candidates, MAX_CANDIDATES)), n=1)
    return nearest[0] if nearest else ""
