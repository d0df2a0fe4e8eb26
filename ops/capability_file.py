"""What operators were found to do on one machine: a JSON file that `nrank doctor --ops` writes.

A file belongs to a chip, a number type, versions and a model's sizes; with any other it is refused,
since it would tell of operators that are not those which run. Results become components of a
Capability, by which the registry passes over what failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ops.spec import PASSED, PROBED, Capability
from placement.errors import ConfigError
from placement.whole_file import write_whole

SCHEMA = 2  # 1 had no model


@dataclass(frozen=True)
class OpResult:
    """One implementation: `passed`, or `failed: ` and why; its largest error where it ran."""

    op: str
    result: str
    error: float | None = None

    @property
    def is_passed(self) -> bool:
        return self.result == PASSED


def identity(capability: Capability, model: str) -> dict[str, Any]:
    """What a file has to agree with. `model` names the sizes that operators are run at."""
    versions = {name: v for name, v in capability.versions if not name.startswith(PROBED)}
    dtype = str(capability.dtype).removeprefix("torch.")
    own = {"backend": capability.backend, "soc": capability.soc, "dtype": dtype, "model": model}
    return {"torch": torch.__version__, **versions, **own}


def write(path: Path, capability: Capability, model: str, results: Mapping[str, OpResult]) -> None:
    """Whole or not at all. `results` are by the names of implementations."""
    told = {
        "schema": SCHEMA,
        "identity": identity(capability, model),
        "operators": {name: asdict(result) for name, result in results.items()},
    }
    try:
        write_whole(path, json.dumps(told, indent=1))
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}; name another") from error


def with_results(capability: Capability, model: str, path: Path) -> Capability:
    """`capability` with the results in the file; ConfigError for one that is not this machine's."""
    again = "run nrank doctor --ops again"
    try:
        told = json.loads(path.read_text())
        schema, found, operators = told["schema"], dict(told["identity"]), told["operators"]
        results = {name: one["result"] for name, one in operators.items()}
        if not all(isinstance(result, str) for result in results.values()):
            raise TypeError("a result is a text")
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; {again}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} holds no results of operators; {again}") from error
    if schema != SCHEMA:
        raise ConfigError(f"{path} has schema {schema!r}, this version reads {SCHEMA}; {again}")
    mine = identity(capability, model)
    wrong = sorted(name for name in {*mine, *found} if mine.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{path} is of {name} {found.get(name)!r}, this rank has {mine.get(name)!r}; {again}"
        )
    components = tuple((PROBED + name, result) for name, result in results.items())
    return replace(capability, versions=capability.versions + components)
