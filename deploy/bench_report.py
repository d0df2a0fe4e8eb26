"""Results of `nrank bench` with where they come from: a table for people, JSON for machines."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.bench_workloads import Row, Spread
from deploy.version import git_revision, package_version

CPU_INFO = Path("/proc/cpuinfo")
MIN_WIDTH = 120


@dataclass(frozen=True)
class Settings:
    """What all rows have in common."""

    model: str
    dtype: str
    threads_per_rank: int
    repeats: int


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


def to_json(origin: Origin, settings: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        **asdict(origin),
        "settings": asdict(settings),
        "workloads": [asdict(row) for row in rows],
    }


def print_table(origin: Origin, settings: Settings, rows: Sequence[Row], peer: str) -> None:
    """Medians with (least-greatest); the ratio is that of the rate that the workload is about."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, MIN_WIDTH)  # wrapped by the terminal rather than cut
    table = Table("workload", "system", box=SIMPLE_HEAD)
    for heading in ("ranks", "decode tok/s", "prefill tok/s", "TTFT ms", f"x {peer}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.id,
            row.system,
            str(row.ranks),
            _cell(row.decode_tokens_per_s),
            _cell(row.prefill_tokens_per_s),
            _cell(row.ttft_s, 1e3),
            _ratio(row, rows, peer),
        )
    console.print(table)
    for line in _notes(origin, settings, rows):
        console.print(line)


def _notes(origin: Origin, settings: Settings, rows: Sequence[Row]) -> list[str]:
    load = ", ".join(f"{value:.2f}" for value in origin.load_average)
    machine = origin.machine
    notes = [
        f"{Path(settings.model).name} in {settings.dtype}, commit {origin.commit}",
        f"{machine['cpu']}, {machine['cores']} cores; load average {load}",
        f"median (min-max), repeats: {settings.repeats}, systems in turns, threads a rank: "
        f"{settings.threads_per_rank}, same greedy ids from all systems",
    ]
    if any(row.ranks > 1 for row in rows):
        notes.append(
            "ranks share this machine's cores and memory: more of them show the cost of the "
            "exchange, not scaling"
        )
    return notes


def _cell(spread: Spread | None, factor: float = 1.0) -> str:
    if spread is None:
        return "-"
    middle, least, greatest = (
        f"{value * factor:.{0 if value * factor >= 100 else 1}f}"
        for value in (spread.median, spread.min, spread.max)
    )
    return f"{middle} ({least}-{greatest})"


def _ratio(row: Row, rows: Sequence[Row], peer: str) -> str:
    """Median rate against the peer's in the same workload; "-" where it took no part."""
    base = [other.rate for other in rows if (other.id, other.system) == (row.id, peer)]
    return f"{row.rate / base[0]:.2f}" if base else "-"


def _cpu_model() -> str:
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
