"""Ownership and routing counts from JSON files. Every fault is one line with the file's name.

Ownership: `[layer][rank] -> expert ids`, or an object with that under `experts` and, for experts
that several ranks hold, `replicas`: `[layer] -> {expert id: [ranks]}`; or what
`nrank plan --json` printed. Counts: `[layer][expert]`, or an object with that under
`expert_counts`, also inside `stats`, as `nrank generate --json` prints it, or under `layers`, as a
server answers `GET /status/experts`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from placement.errors import ConfigError
from placement.experts import LayerOwnership
from placement.headers import require_regular
from placement.spec import ModelSpec

MAX_EXPERT_ID = 1 << 20


@dataclass(frozen=True)
class OwnershipFile:
    """`replicas` are the experts of each layer that the file says several ranks hold."""

    layers: tuple[LayerOwnership, ...]
    replicas: tuple[frozenset[int], ...] = ()


def read_ownership(path: str) -> OwnershipFile:
    """Checks types only; ids are judged against a model in `placement.experts`."""
    data = _read(path)
    if not isinstance(data, Mapping):
        return OwnershipFile(_layers(path, data))
    if "plan_id" in data:
        layers = _plan_layers(path, data)
    elif "experts" in data:
        layers = _layers(path, data["experts"])
    else:
        raise ConfigError(f"{path}: has no 'experts': needs [layer][rank] -> expert ids")
    return OwnershipFile(layers, _replicas(path, data.get("replicas", []), layers))


def read_counts(path: str, spec: ModelSpec) -> tuple[tuple[float, ...], ...]:
    """Tokens routed to each expert of each layer; draft layers may be left out."""
    return checked_counts(path, _read(path), spec)


def checked_counts(path: str, data: Any, spec: ModelSpec) -> tuple[tuple[float, ...], ...]:
    """Counts in any accepted form that were read from `path`, a file or an address."""
    for key in ("stats", "expert_counts", "layers"):
        if isinstance(data, Mapping) and key in data:
            data = data[key]
    layers = (*spec.layers, *spec.draft_layers)
    if not isinstance(data, list) or len(data) not in (len(spec.layers), len(layers)):
        size = f"{len(data)} layers" if isinstance(data, list) else "no list of layers"
        raise ConfigError(
            f"{path}: counts have {size}, {spec.name} needs [layer][expert] for "
            f"{len(spec.layers)} layers (or {len(layers)} with its draft head)"
        )
    for index, (row, layer) in enumerate(zip(data, layers, strict=False)):
        _check_counts(path, index, row, layer.channel.num_experts)
    return tuple(tuple(float(count) for count in row) for row in data)


def _check_counts(path: str, layer: int, row: Any, num_experts: int) -> None:
    if not isinstance(row, list) or len(row) != num_experts:
        size = len(row) if isinstance(row, list) else repr(row)
        raise ConfigError(
            f"{path}: counts of layer {layer} have {size} entries, needs {num_experts}, one an "
            "expert"
        )
    for expert, count in enumerate(row):
        if type(count) not in (int, float) or not isfinite(count) or count < 0:
            raise ConfigError(
                f"{path}: count of expert {expert} in layer {layer} is {count!r}, needs a number "
                ">= 0"
            )


def _read(path: str) -> Any:
    try:
        require_regular(path)
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: bad JSON ({error})") from error


def _layers(path: str, data: Any) -> tuple[LayerOwnership, ...]:
    if not isinstance(data, list):
        raise ConfigError(f"{path}: ownership must be a list of layers, each a list of ranks")
    return tuple(_layer(path, index, layer) for index, layer in enumerate(data))


def _layer(path: str, index: int, layer: Any) -> LayerOwnership:
    if not isinstance(layer, list) or not all(isinstance(ids, list) for ids in layer):
        raise ConfigError(f"{path}: layer {index} must be a list of ranks, each a list of ids")
    for rank, ids in enumerate(layer):
        for expert in ids:
            _whole(expert, f"{path}: layer {index}, rank {rank}")
    return tuple(tuple(ids) for ids in layer)


def _whole(value: Any, place: str) -> int:
    if type(value) is not int or abs(value) > MAX_EXPERT_ID:
        raise ConfigError(f"{place}: {value!r} is no expert id")
    return value


def _plan_layers(path: str, plan: Mapping[str, Any]) -> tuple[LayerOwnership, ...]:
    """Experts of each rank, draft layers last: per layer inclusive [first, last] ranges."""
    ranks = plan.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise ConfigError(f"{path}: a plan needs a list of ranks, has {reprlib.repr(ranks)}")
    by_rank = [_rank_layers(path, rank, entry) for rank, entry in enumerate(ranks)]
    for rank, layers in enumerate(by_rank):
        if len(layers) != len(by_rank[0]):
            raise ConfigError(
                f"{path}: rank {rank} has experts of {len(layers)} layers, rank 0 of "
                f"{len(by_rank[0])}: layer {min(len(layers), len(by_rank[0]))} is on one of them"
            )
    return tuple(zip(*by_rank, strict=True))


def _rank_layers(path: str, rank: int, entry: Any) -> list[tuple[int, ...]]:
    fields = entry if isinstance(entry, Mapping) else {}
    layers, drafts = fields.get("experts"), fields.get("draft_experts", [])
    if not isinstance(layers, list) or not isinstance(drafts, list):
        raise ConfigError(f"{path}: rank {rank} has no ranges of experts, needs a list a layer")
    return [
        _ids(f"{path}: layer {layer}, rank {rank}", runs)
        for layer, runs in enumerate((*layers, *drafts))
    ]


def _ids(place: str, runs: Any) -> tuple[int, ...]:
    if not isinstance(runs, list):
        raise ConfigError(f"{place}: {reprlib.repr(runs)} is no list of [first, last] ranges")
    ids: list[int] = []
    for run in runs:
        if not isinstance(run, list) or len(run) != 2:
            raise ConfigError(f"{place}: {reprlib.repr(run)} is no [first, last] range")
        ids += range(_whole(run[0], place), _whole(run[1], place) + 1)
    return tuple(ids)


def _replicas(
    path: str, data: Any, layers: tuple[LayerOwnership, ...]
) -> tuple[frozenset[int], ...]:
    """Replicated ids a layer; what the file says of their ranks has to be what `experts` says."""
    if not isinstance(data, list) or not all(isinstance(one, Mapping) for one in data):
        raise ConfigError(f"{path}: replicas must be a list of objects, one a layer")
    found: list[frozenset[int]] = []
    for layer, entries in zip(layers, data, strict=False):
        for expert, ranks in entries.items():
            held = [rank for rank, ids in enumerate(layer) if expert in map(str, ids)]
            if ranks != held or len(held) < 2:
                raise ConfigError(
                    f"{path}: replicas of layer {len(found)} have expert {expert} on ranks "
                    f"{ranks}, its experts on {held}; a replica is on two ranks or more"
                )
        found.append(frozenset(map(int, entries)))
    return tuple(found)
