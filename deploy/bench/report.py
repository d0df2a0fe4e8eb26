"""Results of `nrank bench` with where they come from: a table for people, JSON for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.bench.cells import cell, make_console, make_table, ratio_cell, split_table
from deploy.bench.gains import DraftRow, Gains, PrefixRow, StreamRow
from deploy.bench.origin import Ending, Origin, busy_of, machine_line
from deploy.bench.results import SCHEMA, Kind
from deploy.bench.workloads import Row

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Settings:
    """What all rows have in common."""

    model: str
    checkpoint: str  # hash of its files
    dtype: str
    threads_per_rank: int
    repeats: int
    drafts: int  # a step, in the rows of drafts
    decode_share: float  # that running answers are to keep beside prefill


@dataclass(frozen=True)
class Measured:
    """All that one run of `nrank bench` found. `prompts`: see `fingerprints`."""

    origin: Origin
    ending: Ending
    settings: Settings
    prompts: Mapping[str, str]
    rows: Sequence[Row]
    gains: Gains


def to_json(measured: Measured) -> dict[str, Any]:
    rows, gains = measured.rows, measured.gains
    drafts = [{**asdict(row), "acceptance": row.acceptance} for row in gains.drafts]
    return {
        "schema": SCHEMA,
        "kind": Kind.SPEED,
        **asdict(measured.origin),
        **asdict(measured.ending),
        "settings": asdict(measured.settings),
        "prompts": dict(measured.prompts),
        "workloads": [asdict(row) for row in rows],
        "gains": {**asdict(gains), "drafts": drafts},
    }


def print_report(measured: Measured, peer: str) -> None:
    """Medians with (least-greatest) as tables, then what was left out and where it is from."""
    console, settings, gains = make_console(), measured.settings, measured.gains
    for table in (
        _peer_table(measured.rows, peer),
        split_table((r.id, r.system, str(r.ranks), r.step_split) for r in measured.rows),
        _draft_table(gains.drafts, settings.drafts),
        _prefix_table(gains.prefixes),
        _stream_table(gains.streams, settings.decode_share),
    ):
        if table.rows:
            console.print(table)
    for line in [*(f"left out: {line}" for line in gains.left_out), *_notes(measured)]:
        console.print(line)


def _peer_table(rows: Sequence[Row], peer: str) -> Table:
    """The ratio is that of the rate that the workload is about."""
    headings = ("ranks", "decode tok/s", "prefill tok/s", "TTFT ms", f"x {peer}")
    table = make_table("decode and prefill, no drafts, no reuse", ("workload", "system"), headings)
    for row in rows:
        table.add_row(
            row.id,
            row.system,
            str(row.ranks),
            cell(row.decode_tokens_per_s),
            cell(row.prefill_tokens_per_s),
            cell(row.ttft_s, 1e3),
            _ratio(row, rows, peer),
        )
    return table


def _draft_table(rows: Sequence[DraftRow], drafts: int) -> Table:
    """Tokens: how many prompts, theirs and those of the answers; accepted of all that were made."""
    headings = ("ranks", "tokens", "no drafts", f"{drafts} drafts", "accepted", "speed-up")
    table = make_table("drafts, decode tok/s", ("workload",), headings)
    for row in rows:
        share = "-" if row.acceptance is None else f"{row.acceptance:.2f}"
        table.add_row(
            row.id,
            str(row.ranks),
            f"{row.prompts}: {row.prompt_tokens}+{row.answer_tokens}",
            cell(row.plain_tokens_per_s),
            cell(row.drafted_tokens_per_s),
            f"{share} of {row.draft_tokens}",
            ratio_cell(row.speedup),
        )
    return table


def _prefix_table(rows: Sequence[PrefixRow]) -> Table:
    headings = ("ranks", "cached", "new", "again", "times shorter")
    table = make_table("prompt that was computed before, TTFT ms", ("workload",), headings)
    for row in rows:
        table.add_row(
            row.id,
            str(row.ranks),
            f"{row.cached_tokens} of {row.prompt_tokens}",
            cell(row.cold_ttft_s, 1e3),
            cell(row.warm_ttft_s, 1e3),
            ratio_cell(row.speedup),
        )
    return table


def _stream_table(rows: Sequence[StreamRow], decode_share: float) -> Table:
    title = f"one stream while a prompt is computed, decode tok/s (decode_share {decode_share:g})"
    table = make_table(
        title, ("workload",), ("ranks", "alone", "beside", "share kept", "prefill s")
    )
    for row in rows:
        table.add_row(
            row.id,
            str(row.ranks),
            cell(row.alone_tokens_per_s),
            cell(row.beside_tokens_per_s),
            ratio_cell(row.share),
            cell(row.prefill_s),
        )
    return table


def _notes(measured: Measured) -> list[str]:
    origin, settings = measured.origin, measured.settings
    notes = [
        f"{Path(settings.model).name} in {settings.dtype}, commit {origin.commit}",
        machine_line(origin, measured.ending),
        *busy_of({**asdict(origin), **asdict(measured.ending)}),
        f"median (min-max), repeats: {settings.repeats}, systems in turns, threads a rank: "
        f"{settings.threads_per_rank}, same greedy ids from all systems",
    ]
    if any(row.ranks > 1 for row in measured.rows):
        notes.append(
            "ranks share this machine's cores and memory: more of them show the cost of the "
            "exchange, not scaling"
        )
    return notes


def _ratio(row: Row, rows: Sequence[Row], peer: str) -> str:
    """Median rate against the peer's in the same workload; "-" where it took no part."""
    base = [other.rate for other in rows if (other.id, other.system) == (row.id, peer)]
    return f"{row.rate / base[0]:.2f}" if base else "-"
