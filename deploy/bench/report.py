"""Results of `nrank bench` with where they come from: a table for people, JSON for machines."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.bench.gains import DraftRow, Gains, PrefixRow, StreamRow
from deploy.bench.workloads import Row, Spread
from deploy.version import git_revision, package_version

if TYPE_CHECKING:
    from rich.table import Table

CPU_INFO = Path("/proc/cpuinfo")
MIN_WIDTH = 120


@dataclass(frozen=True)
class Settings:
    """What all rows have in common."""

    model: str
    dtype: str
    threads_per_rank: int
    repeats: int
    drafts: int  # a step, in the rows of drafts
    decode_share: float  # that running answers are to keep beside prefill


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


def to_json(
    origin: Origin, settings: Settings, rows: Sequence[Row], gains: Gains
) -> dict[str, Any]:
    drafts = [{**asdict(row), "acceptance": row.acceptance} for row in gains.drafts]
    return {
        **asdict(origin),
        "settings": asdict(settings),
        "workloads": [asdict(row) for row in rows],
        "gains": {**asdict(gains), "drafts": drafts},
    }


def print_report(
    origin: Origin, settings: Settings, rows: Sequence[Row], gains: Gains, peer: str
) -> None:
    """Medians with (least-greatest) as tables, then what was left out and where it is from."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, MIN_WIDTH)  # wrapped by the terminal rather than cut
    for table in (
        _peer_table(rows, peer),
        _draft_table(gains.drafts, settings.drafts),
        _prefix_table(gains.prefixes),
        _stream_table(gains.streams, settings.decode_share),
    ):
        if table.rows:
            console.print(table)
    for line in [
        *(f"left out: {line}" for line in gains.left_out),
        *_notes(origin, settings, rows),
    ]:
        console.print(line)


def _peer_table(rows: Sequence[Row], peer: str) -> Table:
    """The ratio is that of the rate that the workload is about."""
    headings = ("ranks", "decode tok/s", "prefill tok/s", "TTFT ms", f"x {peer}")
    table = _table("decode and prefill, no drafts, no reuse", ("workload", "system"), headings)
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
    return table


def _draft_table(rows: Sequence[DraftRow], drafts: int) -> Table:
    """Tokens: how many prompts, theirs and those of the answers; accepted of all that were made."""
    headings = ("ranks", "tokens", "no drafts", f"{drafts} drafts", "accepted", "speed-up")
    table = _table("drafts, decode tok/s", ("workload",), headings)
    for row in rows:
        share = "-" if row.acceptance is None else f"{row.acceptance:.2f}"
        table.add_row(
            row.id,
            str(row.ranks),
            f"{row.prompts}: {row.prompt_tokens}+{row.answer_tokens}",
            _cell(row.plain_tokens_per_s),
            _cell(row.drafted_tokens_per_s),
            f"{share} of {row.draft_tokens}",
            _ratio_cell(row.speedup),
        )
    return table


def _prefix_table(rows: Sequence[PrefixRow]) -> Table:
    headings = ("ranks", "cached", "new", "again", "times shorter")
    table = _table("prompt that was computed before, TTFT ms", ("workload",), headings)
    for row in rows:
        table.add_row(
            row.id,
            str(row.ranks),
            f"{row.cached_tokens} of {row.prompt_tokens}",
            _cell(row.cold_ttft_s, 1e3),
            _cell(row.warm_ttft_s, 1e3),
            _ratio_cell(row.speedup),
        )
    return table


def _stream_table(rows: Sequence[StreamRow], decode_share: float) -> Table:
    title = f"one stream while a prompt is computed, decode tok/s (decode_share {decode_share:g})"
    table = _table(title, ("workload",), ("ranks", "alone", "beside", "share kept", "prefill s"))
    for row in rows:
        table.add_row(
            row.id,
            str(row.ranks),
            _cell(row.alone_tokens_per_s),
            _cell(row.beside_tokens_per_s),
            _ratio_cell(row.share),
            _cell(row.prefill_s),
        )
    return table


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    """Columns of names, then of figures to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*names, title=title, title_justify="left", title_style="", box=SIMPLE_HEAD)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


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


def _ratio_cell(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.min:.2f}-{spread.max:.2f})"


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
