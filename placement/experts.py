"""Which rank holds which expert of a layer. Experts are held whole; a hot one may be on several.

Knows no counts (`placement.balance`) and no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from placement.errors import ConfigError

SHOWN_IDS = 20

LayerOwnership = tuple[tuple[int, ...], ...]  # [rank] -> sorted expert ids
LayerHolders = tuple[tuple[int, ...], ...]  # [expert] -> sorted ranks


def deal(units: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of `units` in order over `ranks`; the first ranks get the odd ones.

    512 over 6 gives sizes 86, 86, 85, 85, 85, 85; a rank left with nothing gets (0, 0).
    """
    size, odd = divmod(units, ranks)
    ranges = []
    start = 0
    for rank in range(ranks):
        stop = start + size + (rank < odd)
        ranges.append((start, stop) if stop > start else (0, 0))
        start = stop
    return tuple(ranges)


def contiguous_ownership(num_experts: int, ranks: int) -> LayerOwnership:
    """Whole experts in id order, as evenly as they divide. ConfigError outside 1..experts."""
    check_rank_count(num_experts, ranks)
    return tuple(tuple(range(start, stop)) for start, stop in deal(num_experts, ranks))


def check_rank_count(num_experts: int, ranks: int) -> None:
    if not 1 <= ranks <= num_experts:
        raise ConfigError(
            f"ranks = {ranks}, but the model has {num_experts} experts and each rank owns whole "
            f"experts: choose 1 to {num_experts} ranks"
        )


def validate_ownership(
    owned: Sequence[Sequence[int]],
    num_experts: int,
    ranks: int,
    layer: int,
    replicas: Collection[int] = (),
) -> LayerOwnership:
    """A user's ownership of one layer, sorted. ConfigError with the list of all wrong ids.

    Only the ids in `replicas` may be on several ranks, and none twice on one.
    """
    if len(owned) != ranks:
        raise ConfigError(f"ownership of layer {layer} names {len(owned)} ranks, there are {ranks}")
    counts = Counter(expert for ids in owned for expert in ids)
    twice = {e for ids in owned for e, count in Counter(ids).items() if count > 1}
    twice |= {e for e, count in counts.items() if count > 1 and e not in replicas}
    faults = {
        "out of range": sorted(e for e in counts if not 0 <= e < num_experts),
        "duplicate": sorted(twice),
        "missing": [e for e in range(num_experts) if e not in counts],
    }
    told = "; ".join(f"{fault} {_listed(ids)}" for fault, ids in faults.items() if ids)
    if told:
        raise ConfigError(
            f"ownership of layer {layer}: {told}; each expert of 0..{num_experts - 1} needs "
            "exactly one rank, or several when it is listed as a replica"
        )
    return tuple(tuple(sorted(ids)) for ids in owned)


def holders(owned: LayerOwnership, num_experts: int) -> LayerHolders:
    """For each expert the ranks that hold it, in order."""
    ranks: list[list[int]] = [[] for _ in range(num_experts)]
    for rank, ids in enumerate(owned):
        for expert in ids:
            ranks[expert].append(rank)
    return tuple(map(tuple, ranks))


def as_ranges(ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sorted ids as inclusive [first, last] runs."""
    runs: list[tuple[int, int]] = []
    for one in ids:
        if runs and one == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], one)
        else:
            runs.append((one, one))
    return tuple(runs)


def _listed(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    return ", ".join(map(str, ids[:SHOWN_IDS])) + more
