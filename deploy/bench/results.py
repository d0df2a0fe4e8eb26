"""Result files of `nrank bench`: how they are written, read again, and which figures they hold.

A file is the line of JSON that a run ends with; what else was printed may stand above it. Standard
library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any

from deploy.bench.workloads import Spread
from placement.errors import ConfigError
from placement.headers import require_regular
from placement.whole_file import write_whole

BROKEN = (AttributeError, KeyError, OverflowError, TypeError, ValueError)  # what odd JSON leads to
Key = tuple[str, str, str, str]  # workload, system, ranks, figure
MAX_REPEATS = 10_000  # more were never measured
MIN_REPEATS = 3  # of fewer runs least and greatest are no spread
SCHEMA = "nrank-bench/1"  # grows when a field changes its meaning


class Kind(StrEnum):
    SPEED = "speed"  # the engine beside its peer, reuse and drafts
    AGAINST = "against"  # two configurations of the engine
    OPS = "ops"  # operators alone


class Better(StrEnum):
    MORE = "more"
    LESS = "less"
    NEITHER = "neither"  # a ratio of two figures that may both move


# Where rows stand in a result, and which of their figures say how fast something is.
TABLES: Mapping[str, Mapping[str, Better]] = {
    "workloads": {
        "decode_tokens_per_s": Better.MORE,
        "prefill_tokens_per_s": Better.MORE,
        "ttft_s": Better.LESS,
    },
    "gains.drafts": {
        "plain_tokens_per_s": Better.MORE,
        "drafted_tokens_per_s": Better.MORE,
        "speedup": Better.NEITHER,
    },
    "gains.prefixes": {"cold_ttft_s": Better.LESS, "warm_ttft_s": Better.LESS},
    "gains.streams": {
        "alone_tokens_per_s": Better.MORE,
        "beside_tokens_per_s": Better.MORE,
        "prefill_s": Better.LESS,
    },
    "pairs": {
        "a.decode_tokens_per_s": Better.MORE,
        "b.decode_tokens_per_s": Better.MORE,
        "decode_gain": Better.NEITHER,
        "a.ttft_s": Better.LESS,
        "b.ttft_s": Better.LESS,
        "ttft_gain": Better.NEITHER,
    },
    "ops": {"seconds": Better.LESS},
}


@dataclass(frozen=True)
class Result:
    """One file. `values` is the whole object."""

    path: str
    kind: Kind
    repeats: int
    prompts: Mapping[str, str]
    values: Mapping[str, Any]

    def figures(self) -> dict[Key, tuple[Spread, Better]]:
        """ConfigError where a row isn't one of a result."""
        found: dict[Key, tuple[Spread, Better]] = {}
        try:
            for table, names in TABLES.items():
                for row in _at(self.values, table) or ():
                    key = (str(row["id"]), str(row.get("system", "")), str(row.get("ranks", "")))
                    for name, better in names.items():
                        if (spread := _at(row, name)) is not None:
                            found[(*key, name)] = (_spread(f"{name} of {key[0]}", spread), better)
        except BROKEN as error:
            raise self.broken(error) from error
        return found

    def broken(self, error: Exception) -> ConfigError:
        return _broken(self.path, error)


def read_result(path: str) -> Result:
    """ConfigError in one line for whatever isn't a result that can be read here."""
    try:
        require_regular(path)
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        values = json.loads(next((line for line in reversed(lines) if line.strip()), ""))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; check the path") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} doesn't end in a line of JSON; give a file that nrank bench --out wrote"
        ) from error
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != SCHEMA:
        raise ConfigError(
            f"{path} has the schema {schema!r}, this nrank reads {SCHEMA!r}; measure again"
        )
    try:
        repeats, prompts = int(values["settings"]["repeats"]), dict(values["prompts"])
        if not 1 <= repeats <= MAX_REPEATS:
            raise ValueError(f"{repeats} repeats")
        return Result(path, Kind(values["kind"]), repeats, prompts, values)
    except BROKEN as error:
        raise _broken(path, error) from error


def _broken(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is no whole result of nrank bench ({type(error).__name__}: {error}); give a file "
        f"that nrank bench --out wrote"
    )


def write_result(path: str, line: str) -> None:
    """Replaces `path` once all is on the disk. ConfigError where that fails."""
    try:
        write_whole(path, line + "\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--out {path} can't be written: {reason}; choose another") from error


def _spread(what: str, values: Mapping[str, Any]) -> Spread:
    """ValueError that names the figure where a number is none."""
    numbers = {part: float(values[part]) for part in ("median", "min", "max")}
    for part, number in numbers.items():
        if not isfinite(number):
            raise ValueError(f"{part} of {what} is {number}")
    return Spread(**numbers)


def _at(values: Any, dotted: str) -> Any:
    """What stands under names joined by dots; None where one is absent."""
    for name in dotted.split("."):
        if values is None:
            return None
        values = values.get(name)
    return values


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested objects."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
