"""Where figures are from: code, machine, its load before and after, the heat of its chips."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.bench.heat import celsius_text
from deploy.version import git_revision, package_version

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Origin:
    """Code and machine that rates belong to; `load_average` is that before the first run."""

    commit: str
    machine: dict[str, Any]
    load_average: tuple[float, float, float]

    @classmethod
    def here(cls) -> Origin:
        machine = {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "system": platform.platform(terse=True),
            "python": platform.python_version(),
            "torch": package_version("torch"),
            "transformers": package_version("transformers"),
        }
        return cls(git_revision() or "unknown", machine, os.getloadavg())


@dataclass(frozen=True)
class Ending:
    """The machine after the last run; `max_celsius` is that of all runs, None without a sensor."""

    load_average_end: tuple[float, float, float]
    max_celsius: float | None = None

    @classmethod
    def now(cls, celsius: Iterable[float | None] = ()) -> Ending:
        known = [value for value in celsius if value is not None]
        return cls(os.getloadavg(), max(known, default=None))


def machine_line(origin: Origin, ending: Ending) -> str:
    return machine_of({**asdict(origin), **asdict(ending)})


def machine_of(result: Mapping[str, Any]) -> str:
    """Machine, load and heat of a result as it is written; what it doesn't tell is unknown."""
    machine = result.get("machine") or {}
    before, after = (
        ", ".join(f"{value:.2f}" for value in result.get(name) or ()) or "unknown"
        for name in ("load_average", "load_average_end")
    )
    return (
        f"{machine.get('cpu', 'unknown CPU')}, {machine.get('cores', '?')} cores; load average "
        f"{before} before, {after} after; hottest chip: {celsius_text(result.get('max_celsius'))}"
    )


def busy_of(result: Mapping[str, Any]) -> list[str]:
    """A line where more wanted to run than there are cores."""
    loads = [result[name][0] for name in ("load_average", "load_average_end") if result.get(name)]
    cores = (result.get("machine") or {}).get("cores")
    if not cores or max(loads, default=0.0) <= cores:
        return []
    return [
        f"the machine was busy: a load of {max(loads):.1f} on {cores} cores; times and rates are "
        f"those of a busy machine, ratios of runs side by side still hold"
    ]


def _cpu_model() -> str:
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
