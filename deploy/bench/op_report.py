"""Operators alone as a table and as JSON, each labelled with what it does not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.bench.cells import cell, make_console, make_table, ratio_cell
from deploy.bench.op_times import OpRow
from deploy.bench.origin import Ending, Origin, machine_line
from deploy.bench.results import SCHEMA, Kind

LABEL = "ops alone: decides nothing; the end-to-end rows decide"


@dataclass(frozen=True)
class MeasuredOps:
    """All that one run found. `without_inputs`: operators that have a variant and no shape here."""

    origin: Origin
    ending: Ending
    threads: int
    repeats: int
    rows: Sequence[OpRow]
    without_inputs: Sequence[str] = ()


def ops_json(measured: MeasuredOps) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": Kind.OPS,
        "label": LABEL,
        **asdict(measured.origin),
        **asdict(measured.ending),
        "settings": {"threads": measured.threads, "repeats": measured.repeats},
        "prompts": {},  # the shape of a row is in its id
        "ops": [asdict(row) for row in measured.rows],
        "without_inputs": list(measured.without_inputs),
    }


def print_ops(measured: MeasuredOps) -> None:
    console = make_console()
    headings = ("us a call", "x reference", "difference")
    table = make_table(LABEL, ("operator and rows", "variant"), headings)
    last = ""
    for row in measured.rows:
        name = "" if row.id == last else row.id
        last = row.id
        table.add_row(name, _short(row), *_figures(row))
    console.print(table)
    if measured.without_inputs:
        console.print(f"no inputs here for: {', '.join(measured.without_inputs)}")
    for row in measured.rows:
        if not row.is_equal:
            console.print(
                f"WRONG: {row.id}: {row.system} is off by {row.difference:.2g} of the largest "
                f"value, allowed are {row.tolerance:.2g}; not timed"
            )
    console.print(
        f"* what a rank takes; median (min-max) of {measured.repeats} rounds in turns, one thread; "
        f"commit {measured.origin.commit}"
    )
    console.print(machine_line(measured.origin, measured.ending))
    console.print(LABEL)


def _figures(row: OpRow) -> tuple[str, str, str]:
    if row.seconds is None or row.speedup is None:
        return "not timed", "-", f"{row.difference:.1e} WRONG"
    if row.is_reference:
        return cell(row.seconds, 1e6), "-", "-"
    return cell(row.seconds, 1e6), ratio_cell(row.speedup), f"{row.difference:.0e}"


def _short(row: OpRow) -> str:
    """The module, which tells variants of one operator apart, and whether it is in use."""
    return row.system.removeprefix("ops.").rpartition(".")[0] + " *" * row.is_in_use
