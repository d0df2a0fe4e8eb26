"""Version numbers and ranges of them, as Huawei's packages write them into their files."""

from __future__ import annotations

import re

Key = tuple[tuple[int, int, str], ...]
MAX_DIGITS = 20  # of a number in any file: 2^64 has as many, and int() of thousands raises
_PART = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}|[a-z]+")
_GROUP = re.compile(r"\[([^\]]*)\]")


def version_key(text: str) -> Key:
    """Sorts 23.0.rc1 before 23.0.1, and 25.5 before 25.5.1.

    A longer run of digits than MAX_DIGITS is no version and is compared in pieces.
    """
    parts = _PART.findall(text.lower())
    return tuple((1, int(p), "") if p.isdigit() else (0, 0, p) for p in parts)


def series(text: str) -> str:
    """Major and minor number: "9.1" of "9.1.0", "8.2" of "8.2.RC1"; "" where there are none."""
    found = re.match(rf"\s*([0-9]{{1,{MAX_DIGITS}}})\.([0-9]{{1,{MAX_DIGITS}}})", text)
    return f"{int(found[1])}.{int(found[2])}" if found else ""


def groups(text: str) -> list[list[str]]:
    """`[a,b],[c]` -> [[a, b], [c]]: ranges, or single versions."""
    return [[part.strip() for part in group.split(",")] for group in _GROUP.findall(text)]


def within(version: str, ranges: list[list[str]]) -> bool:
    """Whether one of the ranges holds the version, bounds included.

    An upper bound that ends in a dot holds every version that begins with it.
    """
    key = version_key(version)
    for bounds in ranges:
        low, high = version_key(bounds[0]), version_key(bounds[-1])
        if low <= key and (key <= high or (bounds[-1].endswith(".") and key[: len(high)] == high)):
            return True
    return False


def key_values(text: str) -> dict[str, str]:
    """Lines `key=value`; the last of a key counts. Others are passed over."""
    lines = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {key.strip(): value.strip() for key, equals, value in lines if equals}


def what_lacks(text: str | None, file: str) -> str:
    """Why a file tells no version; `text` is what was read of it."""
    if text is None:
        return f"no {file}"
    return f"no version in {file}" if text.strip() else f"{file} is empty"
