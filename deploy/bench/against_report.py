"""What `nrank bench --against` found: a table for people, JSON for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.bench.against import PairRow, PairRows, SideRow
from deploy.bench.cells import cell, make_console, make_table, ratio_cell, split_table
from deploy.bench.heat import celsius_text
from deploy.bench.origin import Ending, Origin, busy_of, machine_line
from deploy.bench.results import MIN_REPEATS, SCHEMA, Kind
from deploy.bench.sides import Sides
from deploy.bench.workloads import Spread

if TYPE_CHECKING:
    from rich.table import Table

DIFFERENT = "ids not compared, as types or weights differ"


@dataclass(frozen=True)
class MeasuredPairs:
    """All that one run found. `prompts`: see `fingerprints`; those of later rounds follow."""

    origin: Origin
    ending: Ending
    sides: Sides
    checkpoint: str
    threads_per_rank: int
    repeats: int
    prompts: Mapping[str, str]
    pairs: PairRows


def pairs_json(measured: MeasuredPairs) -> dict[str, Any]:
    sides = measured.sides
    return {
        "schema": SCHEMA,
        "kind": Kind.AGAINST,
        **asdict(measured.origin),
        **asdict(measured.ending),
        "settings": {
            "model": sides.a.model_dir,
            "checkpoint": measured.checkpoint,
            "threads_per_rank": measured.threads_per_rank,
            "repeats": measured.repeats,
            "a": _config(asdict(sides.a)),
            "b": _config(asdict(sides.b)),
            "expert_bytes": sides.expert_bytes(),
        },
        "prompts": dict(measured.prompts),
        "pairs": [asdict(row) for row in measured.pairs.rows],
        "left_out": measured.pairs.left_out,
    }


def _config(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "model_dir"}


def print_pairs(measured: MeasuredPairs) -> None:
    """Both sides and what they gain over each other, the split of their steps, the conditions."""
    console, rows = make_console(), measured.pairs.rows
    for table in (_gains(rows), _sides(rows), split_table(_splits(rows, measured.sides))):
        if table.rows:
            console.print(table)
    for line in _notes(measured):
        console.print(line)


def _gains(rows: Sequence[PairRow]) -> Table:
    headings = ("A", "B", "B is x times faster", "in all rounds")
    table = make_table("B against A, in rounds side by side", ("workload", "figure"), headings)
    for row in rows:
        a, b = row.a, row.b
        if row.decode_gain is not None:
            rates = cell(a.decode_tokens_per_s), cell(b.decode_tokens_per_s)
            table.add_row(row.id, "decode tok/s", *rates, *_gain(row, row.decode_gain))
        times = cell(a.ttft_s, 1e3), cell(b.ttft_s, 1e3)
        table.add_row(row.id, "TTFT ms", *times, *_gain(row, row.ttft_gain))
    return table


def _gain(row: PairRow, gain: Spread) -> tuple[str, str]:
    """The ratio, and who was faster in every single round, where there are enough of them."""
    if len(row.orders) < MIN_REPEATS:
        return ratio_cell(gain), "too few rounds"
    if gain.min > 1:
        return ratio_cell(gain), "B faster"
    return ratio_cell(gain), "A faster" if gain.max < 1 else "neither"


def _sides(rows: Sequence[PairRow]) -> Table:
    headings = ("prompts", "tokens kept, A", "B", "drafts kept, A", "B", "hottest chip")
    table = make_table("what they worked on", ("workload",), headings)
    for row in rows:
        kept = str(row.a.cached_tokens), str(row.b.cached_tokens)
        prompts = f"{row.prompts} of {row.prompt_tokens} tokens together"
        heat = celsius_text(row.max_celsius)
        table.add_row(row.id, prompts, *kept, _drafts(row.a), _drafts(row.b), heat)
    return table


def _drafts(side: SideRow) -> str:
    if side.acceptance is None:
        return "-"
    return f"{side.acceptance:.2f} of {side.draft_tokens}"


def _splits(rows: Sequence[PairRow], sides: Sides) -> list[tuple[str, str, str, Any]]:
    return [
        (row.id, name, str(config.ranks), side.step_split)
        for row in rows
        for name, side, config in (("A", row.a, sides.a), ("B", row.b, sides.b))
    ]


def _notes(measured: MeasuredPairs) -> list[str]:
    origin, sides = measured.origin, measured.sides
    lines = [f"left out: {line}" for line in measured.pairs.left_out]
    for index, name in enumerate("AB"):
        values = (f"{field}={_value(sides.value(index, field))}" for field in sides.differences)
        lines.append(f"{name}: {', '.join(values) or 'the same: gains show the noise'}")
    if (sizes := sides.expert_bytes()) is not None:
        a, b = sizes
        lines.append(
            f"routed experts with scales, in memory: A {a:,} bytes, B {b:,}, {a / b:.2f} times less"
        )
    lines += [
        f"{Path(sides.a.model_dir).name} in {sides.a.dtype}, commit {origin.commit}",
        machine_line(origin, measured.ending),
        *busy_of({**asdict(origin), **asdict(measured.ending)}),
        f"median (min-max), rounds: {measured.repeats}, who goes first is drawn and turned round; "
        + ("same greedy ids from both" if sides.has_same_ids else DIFFERENT),
    ]
    return lines


def _value(value: object) -> str:
    """As it may be given again."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)
