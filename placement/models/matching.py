"""Compares the tensors that an adapter expects with those on disk.

Knows names, shapes and dtypes only: no model, no file access.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from itertools import islice

from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders, TensorHeader
from placement.spec import DTypeRule, TensorSpec

FLOAT_DTYPES = ("BF16", "F16", "F32")
SHOWN_NAMES = 5
MAX_CANDIDATES = 400  # difflib is slow; a refusal has to come within 2 s


def refuse_quantised(headers: CheckpointHeaders, ignored: Collection[str]) -> None:
    """Only plain floats (and int64 constants) can be loaded; anything else is low-bit data."""
    for name, header in headers.tensors.items():
        if header.dtype not in (*FLOAT_DTYPES, "I64") and name not in ignored:
            raise CheckpointError(
                f"{header.file}: {name} has dtype {header.dtype}: quantised weights can't be "
                f"loaded, supported now: {', '.join(FLOAT_DTYPES)}"
            )


def match(
    tensors: Sequence[TensorSpec], headers: CheckpointHeaders, ignored: Collection[str]
) -> None:
    """Every expected piece is on disk with its shape and a fitting dtype, and nothing else is."""
    pieces = {piece.name: (piece, spec) for spec in tensors for piece in spec.pieces}
    missing = [name for name in pieces if name not in headers.tensors]
    unknown = [name for name in headers.tensors if name not in pieces and name not in ignored]
    if missing or unknown:
        raise CheckpointError(_difference(headers, pieces, missing, unknown))
    for name, (piece, spec) in pieces.items():
        _check_piece(name, piece.shape, spec.dtype, headers.tensors[name])


def _check_piece(name: str, shape: tuple[int, ...], rule: DTypeRule, header: TensorHeader) -> None:
    if header.shape != shape:
        raise CheckpointError(
            f"{header.file}: {name} has shape {list(header.shape)}, config.json says {list(shape)}"
        )
    allowed = ("I64",) if rule is DTypeRule.INT64 else FLOAT_DTYPES
    if header.dtype not in allowed:
        raise CheckpointError(
            f"{header.file}: {name} has dtype {header.dtype}, supported: {', '.join(allowed)}"
        )


def _difference(
    headers: CheckpointHeaders,
    known: Collection[str],
    missing: Sequence[str],
    unknown: Sequence[str],
) -> str:
    parts = [headers.model_dir + ":"]
    if missing:
        parts.append(f"{len(missing)} missing tensors ({_sample(missing)})")
    if missing and unknown:
        parts.append("and")
    if unknown:
        hints = [_with_nearest(name, missing or known) for name in unknown[:SHOWN_NAMES]]
        parts.append(f"{len(unknown)} unknown tensors ({_sample(hints, len(unknown))})")
    return " ".join(parts)


def _sample(names: Sequence[str], total: int | None = None) -> str:
    count = len(names) if total is None else total
    more = f", and {count - SHOWN_NAMES} more" if count > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _with_nearest(name: str, candidates: Collection[str]) -> str:
    """The name with the known one that it is probably a misspelling of."""
    place = ".".join(name.split(".")[:3])  # as far as the layer number under a short prefix
    pool = list(islice((other for other in candidates if other.startswith(place)), MAX_CANDIDATES))
    nearest = get_close_matches(name, pool or list(islice(candidates, MAX_CANDIDATES)), n=1)
    return f"{name}, nearest known {nearest[0]}" if nearest else name
