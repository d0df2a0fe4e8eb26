"""`nrank bench --compare OLD NEW`: what became faster or slower between two results.

A figure is called faster or slower only where the spreads of both files lie apart; everything else
is no claim. Files that measured different work are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import comb
from typing import Any

from deploy.bench.cells import make_console, make_table
from deploy.bench.origin import busy_of, machine_of
from deploy.bench.results import (
    BROKEN,
    MIN_REPEATS,
    SCHEMA,
    Better,
    Key,
    Result,
    leaves,
    read_result,
)
from deploy.bench.workloads import Spread
from placement.errors import ConfigError

NO_SETTING = ("settings.repeats", "settings.model")  # told apart, or a mere path


class Verdict(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    CHANGED = "changed"  # a ratio, of which neither way is better
    NO_CLAIM = "no claim"  # the spreads overlap


COUNTED = {
    Verdict.SLOWER: "slower",
    Verdict.FASTER: "faster",
    Verdict.CHANGED: "ratios changed",
    Verdict.NO_CLAIM: "without a claim as spreads overlap",
}


@dataclass(frozen=True)
class Change:
    """One figure of one row in both files; `ratio` is that of the medians, new over old."""

    workload: str
    system: str
    ranks: str
    figure: str
    old: Spread
    new: Spread
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        return self.new.median / self.old.median if self.old.median else None


@dataclass(frozen=True)
class Comparison:
    """`notes`: what else differs between the files, a line each."""

    old: str  # path, like the next
    new: str
    changes: Sequence[Change]
    notes: Sequence[str]
    chance: float  # that a figure whose speed is the same is called slower; 0: nothing is claimed

    def count(self, verdict: Verdict) -> int:
        return Counter(change.verdict for change in self.changes)[verdict]


def compare_files(old_path: str, new_path: str) -> Comparison:
    """ConfigError when a file can't be read or when they measured different work."""
    old, new = read_result(old_path), read_result(new_path)
    _require_same_work(old, new)
    before, after = old.figures(), new.figures()
    common = [key for key in before if key in after]
    if not common:
        raise ConfigError(
            f"{old.path} and {new.path} have no row in common; measure the same systems and ranks"
        )
    has_spread = min(old.repeats, new.repeats) >= MIN_REPEATS
    changes = []
    for key in common:
        (was, better), (now, _) = before[key], after[key]
        verdict = verdict_of(was, now, better) if has_spread else Verdict.NO_CLAIM
        changes.append(Change(*key, was, now, verdict))
    try:
        notes = [*_differences(old, new), *_only_in_one(list(before), list(after))]
    except BROKEN as error:
        raise new.broken(error) from error
    if not has_spread:
        notes.append(
            f"{old.repeats} and {new.repeats} repeats: nothing is claimed below {MIN_REPEATS}"
        )
    chance = 1 / comb(old.repeats + new.repeats, old.repeats) if has_spread else 0.0
    return Comparison(old.path, new.path, changes, notes, chance)


def verdict_of(old: Spread, new: Spread, better: Better) -> Verdict:
    """Touching spreads overlap."""
    if old.min <= new.max and new.min <= old.max:
        return Verdict.NO_CLAIM
    if better is Better.NEITHER:
        return Verdict.CHANGED
    return Verdict.FASTER if (new.min > old.max) is (better is Better.MORE) else Verdict.SLOWER


def _require_same_work(old: Result, new: Result) -> None:
    if old.kind is not new.kind:
        raise ConfigError(
            f"{old.path} is of the kind {old.kind.value!r}, {new.path} of {new.kind.value!r}; "
            f"compare two of one kind"
        )
    if old.prompts.keys() != new.prompts.keys():
        lone = sorted(old.prompts.keys() ^ new.prompts.keys())
        where = old.path if lone[0] in old.prompts else new.path
        raise ConfigError(
            f"the files are of different workloads: {len(lone)} are in one of them only, {lone[0]} "
            f"in {where}; measure both with the same flags (--quick, --peer) and model"
        )
    for name, prompts in old.prompts.items():
        if prompts != new.prompts[name]:
            raise ConfigError(
                f"{name} had other prompts in {old.path} ({prompts}) than in {new.path} "
                f"({new.prompts[name]}); measure both with the same model and version of the bench"
            )


def _differences(old: Result, new: Result) -> list[str]:
    """Whatever else has moved: a change of speed may be theirs."""
    notes = []
    for what in ("commit", "machine", "settings"):
        was, now = (dict(leaves({what: r.values.get(what)})) for r in (old, new))
        for name in dict.fromkeys([*was, *now]):
            if name not in NO_SETTING and was.get(name) != now.get(name):
                label = "other machine: " if what == "machine" else ""
                notes.append(f"{label}{name}: {was.get(name)} -> {now.get(name)}")
    for name, result in (("old", old), ("new", new)):
        notes.append(f"{name}: {machine_of(result.values)}")
        notes += busy_of(result.values)
    return notes


def _only_in_one(old: Sequence[Key], new: Sequence[Key]) -> list[str]:
    notes = []
    for name, mine, others in (("OLD", old, new), ("NEW", new, old)):
        lone = dict.fromkeys(_row_name(key) for key in mine if key not in others)
        if lone:
            notes.append(f"in {name} only: {', '.join(lone)}")
    return notes


def _row_name(key: Key) -> str:
    workload, system, ranks, _ = key
    place = f" x{ranks}" if ranks else ""
    return f"{workload} {system}{place}".strip()


def print_comparison(found: Comparison) -> None:
    headings = ("ranks", "old", "new", "new/old", "")
    table = make_table("new against old", ("workload", "system", "figure"), headings)
    for one in found.changes:
        names = (one.workload, one.system, one.figure, one.ranks)
        ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
        table.add_row(*names, _text(one.old), _text(one.new), ratio, one.verdict.value)
    console = make_console()
    console.print(table)
    for note in found.notes:
        console.print(note)
    counts = (f"{found.count(verdict)} {text}" for verdict, text in COUNTED.items())
    total = len(found.changes)
    by_chance = ""
    if found.chance:
        by_chance = f"; about {_count(found.chance * total)} would be called slower by chance"
    console.print(f"{total} figures: {', '.join(counts)}{by_chance}")


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Of a kind of its own, which is no result to compare with."""
    return {
        "schema": SCHEMA,
        "kind": "comparison",
        "old": found.old,
        "new": found.new,
        "figures": [{**asdict(one), "ratio": one.ratio} for one in found.changes],
        "counts": {verdict.value: found.count(verdict) for verdict in Verdict},
        "chance": found.chance,
        "notes": list(found.notes),
    }


def _count(expected: float) -> str:
    """Two digits or whole: 0.0079, 0.12, 3.4, 30."""
    return f"{expected:.2g}" if expected < 10 else f"{expected:.0f}"


def _text(spread: Spread) -> str:
    return f"{spread.median:.4g} ({spread.min:.4g}-{spread.max:.4g})"
