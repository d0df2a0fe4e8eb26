"""How `nrank bench` measures: systems in turns, and no figure unless all made the same ids."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

from deploy.bench.heat import Celsius, no_sensor
from deploy.bench.workloads import Row, Run, System, Workload
from placement.errors import NrankError

TokenIds = Sequence[Sequence[int]]  # one a request
Item = TypeVar("Item")


def measure(
    systems: Sequence[System],
    workloads: Sequence[Workload],
    repeats: int,
    celsius: Celsius = no_sensor,
) -> list[Row]:
    """One row for each workload and system; NrankError when ids differ."""
    rows: list[Row] = []
    for workload in with_progress(workloads, "beside the peer"):
        celsius()  # what was before is not this workload's
        runs = take_turns(systems, workload, repeats)
        hottest = celsius()
        rows += [
            Row.of(workload, system, made, hottest)
            for system, made in zip(systems, runs, strict=True)
        ]
    return rows


def take_turns(systems: Sequence[System], workload: Workload, repeats: int) -> list[list[Run]]:
    """Runs of each system, in order of time; NrankError when ids differ or are too few.

    One more run of each comes first and only warms it up.
    """
    runs: list[list[Run]] = [[] for _ in systems]
    for _ in range(1 + repeats):
        for system, made in zip(systems, runs, strict=True):
            made.append(system.run(workload))
            token_ids, expected = made[-1].token_ids, runs[0][0].token_ids
            require_length(workload, system, token_ids)
            require_same_ids(workload.id, system, token_ids, systems[0], expected)
    return [made[1:] for made in runs]


def require_length(workload: Workload, system: System, token_ids: TokenIds) -> None:
    """NrankError when an answer that can't end early is not of the length that was asked for."""
    for index, ids in enumerate(token_ids):
        if len(ids) != workload.max_tokens and not workload.end_token_ids:
            raise NrankError(
                f"{workload.id}: {system.name} made {len(ids)} tokens for request {index} where "
                f"{workload.max_tokens} were asked for; no rate is printed"
            )


def require_same_ids(
    workload_id: str, system: System, found: TokenIds, other: System, expected: TokenIds
) -> None:
    """NrankError naming the first request and position at which `found` is not `expected`."""
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if mine != theirs:
            same = (a == b for a, b in zip(mine, theirs, strict=False))
            at = sum(1 for _ in takewhile(bool, same))
            raise NrankError(
                f"{workload_id}: {system.name} with ranks={system.ranks} made other ids than "
                f"{other.name} with ranks={other.ranks} from token {at} of request {index} on "
                f"({list(mine[at : at + 3])}, not {list(theirs[at : at + 3])}); no rate is "
                f"printed, as the work was not the same: run make test to find the fault"
            )


def with_progress(items: Sequence[Item], what: str) -> Iterable[Item]:
    """`items` with a bar on a terminal's stderr, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import track

    disable, console = not sys.stderr.isatty(), Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=disable)
