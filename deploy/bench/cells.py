"""How figures of `nrank bench` look in a table: medians with (least-greatest), splits of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from deploy.bench.steps import REST, StepSplit
from deploy.bench.workloads import Spread

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MIN_WIDTH = 140


def make_console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, MIN_WIDTH)  # wrapped by the terminal rather than cut
    return console


def make_table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    """Columns of names, then of figures to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD)
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def cell(spread: Spread | None, factor: float = 1.0) -> str:
    if spread is None:
        return "-"
    middle, least, greatest = (
        f"{value * factor:.{0 if value * factor >= 100 else 1}f}"
        for value in (spread.median, spread.min, spread.max)
    )
    return f"{middle} ({least}-{greatest})"


def ratio_cell(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.min:.2f}-{spread.max:.2f})"


def split_table(rows: Iterable[tuple[str, str, str, StepSplit | None]]) -> Table:
    """Rows of (workload, system, ranks, split); those without a split are left out."""
    told = [(names, split) for *names, split in rows if split is not None]
    parts = list(dict.fromkeys(p for _, split in told for p in split.parts_ms if p != REST))
    headings = [part.removeprefix("collective_") for part in (*parts, REST)]
    table = make_table(
        "a step of rank 0 by part, ms (means of all runs, prefill steps among them)",
        ("workload", "system"),
        ("ranks", "steps", "ms a step", *headings),
    )
    for names, split in told:
        cells = [_part_cell(split, part) for part in (*parts, REST)]
        table.add_row(*names, str(split.steps), f"{split.step_ms:.2f}", *cells)
    return table


def _part_cell(split: StepSplit, part: str) -> str:
    return f"{split.parts_ms[part]:.2f}" if part in split.parts_ms else "-"
