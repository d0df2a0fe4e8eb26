"""Which processor cores the step loop of a rank runs on: dealt out by chip, set, and read back.

Owns the dealing and the calls of the kernel. Pinned is the calling thread; what it starts inherits
its cores, and other threads of the process are left where they are. Knows no device, and not which
cores lie near which card: chips in order get cores in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

SYSFS = Path("/sys/devices/system")
CGROUP = Path("/sys/fs/cgroup/cpu.max")
MIN_CORES = 2  # of a share: one core alone is worse than the scheduler's choice of all

Core = tuple[int, ...]  # the logical processors of one core


def read_cores(allowed: Set[int], sysfs: Path = SYSFS) -> list[Core]:
    """The cores among the `allowed` processors, those of one memory node next to each other."""
    cores: dict[Core, tuple[int, int]] = {}
    for cpu in sorted(allowed):
        siblings = _siblings(cpu, sysfs) & allowed
        cores.setdefault(tuple(sorted(siblings)), (_node(cpu, sysfs), cpu))
    return sorted(cores, key=lambda core: cores[core])


def _siblings(cpu: int, sysfs: Path) -> set[int]:
    """Processors that share a core with `cpu`, itself among them; itself where none is told."""
    try:
        text = (sysfs / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        return {cpu, *parse_cpus(text)}
    except (OSError, ValueError):
        return {cpu}


def _node(cpu: int, sysfs: Path) -> int:
    nodes = [
        path.name.removeprefix("node") for path in (sysfs / f"cpu/cpu{cpu}").glob("node[0-9]*")
    ]
    return min((int(node) for node in nodes if node.isdecimal()), default=0)


def deal_cores(cores: Sequence[Core], chips: int) -> list[tuple[int, ...]]:
    """Processors for each chip: whole cores, as many for each; empty when there are too few.

    One more share than chips is dealt: the last, with what is left over, is nobody's and stays for
    Ray, the ingress and the coordinator.
    """
    count = len(cores) // (chips + 1)
    if count < MIN_CORES:
        return []
    shares = (cores[chip * count : (chip + 1) * count] for chip in range(chips))
    return [tuple(sorted(cpu for core in share for cpu in core)) for share in shares]


def read_quota(cgroup: Path = CGROUP) -> float | None:
    """Processors' worth of time that a container may use; None where it isn't bounded."""
    try:
        most, period = cgroup.read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return None


def pin_thread(chip: int, chips: int, sysfs: Path = SYSFS, cgroup: Path = CGROUP) -> str:
    """Puts the calling thread on the cores of `chip` of `chips`; returns why not, "" when done."""
    try:
        allowed = os.sched_getaffinity(0)
        quota = read_quota(cgroup)
        if quota is not None and quota < len(allowed):
            return f"it sees {len(allowed)} processors and may use the time of {quota:g}"
        shares = deal_cores(read_cores(allowed, sysfs), chips)
        if not shares:
            return (
                f"{len(read_cores(allowed, sysfs))} cores are too few for {chips} chips and the "
                f"rest at {MIN_CORES} each"
            )
        os.sched_setaffinity(0, shares[chip])
    except OSError as error:
        return f"the system refused: {error.strerror}"
    return ""


def cpus_of(thread_id: int) -> tuple[int, ...]:
    """Processors that a thread of this process may run on, as the kernel says; empty if gone."""
    try:
        return tuple(sorted(os.sched_getaffinity(thread_id)))
    except OSError:
        return ()


def parse_cpus(text: str) -> list[int]:
    """The kernel's lists: `0-3,8`. ValueError for anything else."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def cpus_text(cpus: Iterable[int]) -> str:
    """`(0, 1, 2, 8)` as `0-2,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
