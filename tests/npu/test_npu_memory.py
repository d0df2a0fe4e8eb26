"""The allocator's bytes on a pretend 310P, and the ledger that planned them: equal to the byte.

Compared are weights, caches, states, tables and the padding of each, under the embedded model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from placement import ledger, ledger_weights, topology
from placement.config import EngineConfig
from placement.ledger_state import Blocks
from placement.prepare import prepare

Engines = Callable[..., list[dict[str, Any]]]
MIB = 1 << 20
UNIT, EXTRA = 512, 32  # of the allocator: it adds 32 bytes on a 310P and rounds up to 512
ELSEWHERE = ("graph", "collective", "workspace", "reserve")  # rows that are no tensors after a load
HIDDEN_BYTES = 192 * 4  # of the embedded model: operators keep vectors of ones, no longer than this
RUNS: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": 1},
    "two ranks": {"ranks": 2},
    "drafts and kept states": {
        "ranks": 2, "mtp": 2, "prefix_cache": True, "memory_only": True,
    },
    "4-bit experts": {"ranks": 1, "model": "tiny-flash-next-w4", "memory_only": True},
    "4-bit experts on two ranks": {
        "ranks": 2, "mtp": 2, "model": "tiny-flash-next-w4", "int8_activations": True,
        "memory_only": True,
    },
    "float32": {"ranks": 1, "dtype": "float32", "prefix_cache": True, "memory_only": True},
}  # fmt: skip
CHIP = topology.PROFILES["310p3"]
runs = pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)


def up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def blocks(sizes: list[int]) -> int:
    return sum(up(size + EXTRA, UNIT) for size in sizes)


def planned(told: dict[str, Any]) -> int:
    return sum(size for row, size in told["planned"].items() if row not in ELSEWHERE)


@runs
def test_tensors_take_what_was_planned_to_the_byte(
    engines: Engines, options: dict[str, Any]
) -> None:
    for told in engines(**options):
        assert "error" not in told, told
        assert blocks(told["held"]) == planned(told)


@runs
def test_the_allocator_holds_what_was_planned_to_the_byte(
    engines: Engines, options: dict[str, Any]
) -> None:
    """Beside it are the buffers of collectives, a row of their own, and operators' constants.

    A tensor above 1 MiB also keeps what is left of its segment, when that is less than 1 MiB:
    it happens in float32, and belongs to the row `reserve`.
    """
    for told in engines(**options):
        assert max(told["constants"], default=0) <= HIDDEN_BYTES
        assert set(told["buffers"]) <= {options["ranks"] << 20}
        assert bool(told["buffers"]) == (options["ranks"] > 1)
        kept = told["allocated"] - blocks(told["constants"] + told["buffers"])
        rest = kept - planned(told)
        assert rest == 0 if options.get("dtype") != "float32" else 0 < rest < MIB


@runs
def test_tiles_take_what_the_planner_thinks(engines: Engines, options: dict[str, Any]) -> None:
    """16 x 16 values of fp16: both sizes of a matrix are padded to whole tiles."""
    for told in engines(**options):
        assert len(told["tiles"]) > 50 or options.get("dtype") == "float32"
        for shape, nbytes in told["tiles"]:
            assert nbytes == 2 * prod((*shape[:-2], up(shape[-2], 16), up(shape[-1], 16))), shape


def without_tiles(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(topology.PROFILES, "310p3", replace(CHIP, fractal_layout=False))


def without_units(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(topology.PROFILES, "310p3", replace(CHIP, allocation_bytes=1))


def without_extra_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(topology.PROFILES, "310p3", replace(CHIP, allocation_extra_bytes=0))


def without_joined_matrices(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger_weights, "_PLACES", {})


def without_padding_of_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Blocks, "padding", lambda *_: 0)


def without_tables(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger, "table_blocks", lambda *_: ())


@pytest.mark.parametrize(
    "fault",
    [None, without_tiles, without_units, without_extra_bytes, without_joined_matrices,
     without_padding_of_states, without_tables],
    ids=lambda fault: fault.__name__ if fault else "whole",
)  # fmt: skip
def test_a_plan_that_drops_a_padding_is_noticed(
    engines: Engines, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = engines(**RUNS["one rank"])
    if fault is not None:
        fault(monkeypatch)
    rows = prepare(EngineConfig(**told["config"])).plan.ranks[0].rows
    assert (planned({"planned": rows}) == blocks(told["held"])) == (fault is None)
