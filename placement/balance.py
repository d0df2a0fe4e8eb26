"""Balanced ownership of experts by measured routing counts, with few moves and with replicas.

The load of a rank in a layer is the sum of the counts of its experts; the count of a replicated
expert is shared evenly by the ranks that hold it. The busiest rank decides how long a layer takes,
so that is what is lowered. Ranks keep the number of experts that the contiguous deal gives them,
replicas apart: balance costs no memory. Knows one layer at a time, no model and no file.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.experts import LayerOwnership, contiguous_ownership, deal, holders

LOAD_TOLERANCE = 0.05  # a busiest rank this much above the best balance is not worth a move
MIN_GAIN = 0.01  # of the mean load: what a copy must take off the busiest rank to be made
Counts = Sequence[float]  # [expert], not negative


@dataclass(frozen=True)
class Move:
    """An expert of a layer that has to be copied to a rank which didn't hold it."""

    layer: int
    expert: int
    rank: int


def rank_loads(owned: LayerOwnership, counts: Counts) -> list[float]:
    """Counts that fall on each rank."""
    copies = [len(ranks) for ranks in holders(owned, len(counts))]
    return [sum(counts[e] / copies[e] for e in ids) for ids in owned]


def busiest_load(owned: LayerOwnership, counts: Counts) -> float:
    return max(rank_loads(owned, counts))


def deal_sizes(num_experts: int, ranks: int) -> list[int]:
    return [stop - start for start, stop in deal(num_experts, ranks)]


def balance_layer(counts: Counts, ranks: int) -> LayerOwnership:
    """Hottest experts first, each to the least loaded rank with room; never worse than contiguous.

    This is the longest-processing-time rule (Graham 1969) with a fixed number of experts a rank,
    followed by swaps with the busiest rank as long as they help.
    """
    contiguous = contiguous_ownership(len(counts), ranks)
    room = deal_sizes(len(counts), ranks)
    loads = [0.0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(counts)), key=lambda e: (-counts[e], e)):
        rank = min((r for r in range(ranks) if room[r]), key=lambda r: (loads[r], r))
        dealt[rank].append(expert)
        loads[rank] += counts[expert]
        room[rank] -= 1
    swapped = _swap_until(_frozen(dealt), counts, 0.0)
    best = min(contiguous, swapped, key=lambda owned: busiest_load(owned, counts))
    return best


def _frozen(dealt: Sequence[Sequence[int]]) -> LayerOwnership:
    return tuple(tuple(sorted(ids)) for ids in dealt)


def resize(current: LayerOwnership, num_experts: int, ranks: int) -> LayerOwnership:
    """One holder an expert on `ranks` ranks, with the fewest moves that the deal's sizes allow.

    A rank gives away only what is above its size, and replicas go first: the experts that it
    alone holds and has room for stay. Without replicas no ownership of these sizes moves less.
    """
    sizes = deal_sizes(num_experts, ranks)
    kept: list[list[int]] = [[] for _ in range(ranks)]
    copies = holders(current, num_experts)
    placed = [False] * num_experts
    for expert in sorted(range(num_experts), key=lambda e: (len(copies[e]), e)):
        free = [r for r in copies[expert] if r < ranks and len(kept[r]) < sizes[r]]
        if free:
            kept[min(free, key=lambda r: (len(kept[r]) - sizes[r], r))].append(expert)
            placed[expert] = True
    homeless = [e for e in range(num_experts) if not placed[e]]
    for rank in range(ranks):
        need = sizes[rank] - len(kept[rank])
        kept[rank] += homeless[:need]
        homeless = homeless[need:]
    return _frozen(kept)


def rebalance_layer(current: LayerOwnership, counts: Counts, ranks: int) -> LayerOwnership:
    """Few moves from `current` to a busiest load within LOAD_TOLERANCE of the best balance.

    None when it is there already. Otherwise the fewer moves of two ways, both without what the
    limit doesn't need: swaps with the busiest rank, unless they get stuck, and the best balance
    with its parts named after the ranks that hold most of them.
    """
    start = resize(current, len(counts), ranks)
    best = balance_layer(counts, ranks)
    limit = busiest_load(best, counts) * (1 + LOAD_TOLERANCE)
    ways = [relabel(best, start)]
    swapped = _swap_until(start, counts, limit)
    if busiest_load(swapped, counts) <= limit:
        ways.insert(0, swapped)
    ways = [_bring_home(start, way, counts, limit) for way in ways]
    return min(ways, key=lambda owned: len(layer_moves(start, owned)))


def _bring_home(
    start: LayerOwnership, owned: LayerOwnership, counts: Counts, limit: float
) -> LayerOwnership:
    """`owned` with moved experts swapped back to their rank in `start` where `limit` allows it.

    The partner is an expert that was moved, too, so every swap saves a move or two; it ends when
    no expert can go back.
    """
    home = {expert: rank for rank, ids in enumerate(start) for expert in ids}
    now = {expert: rank for rank, ids in enumerate(owned) for expert in ids}
    loads = [sum(counts[e] for e in ids) for ids in owned]
    changed = True
    while changed:
        changed = False
        for expert in sorted(e for e in now if now[e] != home[e]):
            partner = _partner_home(expert, home, now, loads, counts, limit)
            if partner is None:
                continue
            here, there = now[expert], home[expert]
            shift = counts[expert] - counts[partner]
            loads[here] -= shift
            loads[there] += shift
            now[expert], now[partner] = there, here
            changed = True
    ranks = range(len(owned))
    return _frozen([[e for e, rank in now.items() if rank == one] for one in ranks])


def _partner_home(
    expert: int,
    home: Mapping[int, int],
    now: Mapping[int, int],
    loads: Sequence[float],
    counts: Counts,
    limit: float,
) -> int | None:
    """A moved expert on the home of `expert` to swap it with; one that comes home, too, if any."""
    here, there = now[expert], home[expert]
    found: int | None = None
    if here == there:
        return None
    for other, rank in now.items():
        if rank != there or home[other] == there:
            continue
        shift = counts[expert] - counts[other]
        if max(loads[here] - shift, loads[there] + shift) <= limit:
            if home[other] == here:
                return other
            found = other if found is None else found
    return found


def _swap_until(start: LayerOwnership, counts: Counts, limit: float) -> LayerOwnership:
    """Swaps one expert of the busiest rank for a cooler one elsewhere until `limit` is met.

    Each swap takes the partner and pair that leave the lower of the two loads, the idler partner
    where these are equal; it stops when no swap lowers the busiest rank. Every swap lowers the sum
    of squares, so it ends.
    """
    owned = [sorted(ids, key=lambda e: counts[e]) for ids in start]
    loads = [sum(counts[e] for e in ids) for ids in owned]
    for _ in range(2 * len(counts)):
        busiest = max(range(len(loads)), key=lambda r: (loads[r], -r))
        if loads[busiest] <= limit:
            break
        found = _best_swap(owned, loads, counts, busiest)
        if found is None:
            break
        other, hot, cool = found
        for rank, out, into in ((busiest, hot, cool), (other, cool, hot)):
            owned[rank].remove(out)
            owned[rank].append(into)
            owned[rank].sort(key=lambda e: counts[e])
            loads[rank] += counts[into] - counts[out]
    return _frozen(owned)


def _best_swap(
    owned: Sequence[Sequence[int]], loads: Sequence[float], counts: Counts, busiest: int
) -> tuple[int, int, int] | None:
    """(partner, expert out, expert in) of the swap that leaves the lower of the two loads."""
    best: tuple[int, int, int] | None = None
    least = (float("inf"), 0.0)  # higher load of the two after the best swap, partner's before
    top = loads[busiest]
    for other in range(len(loads)):
        if other == busiest:
            continue
        cool_counts = [counts[e] for e in owned[other]]
        for hot in owned[busiest]:
            wanted = counts[hot] - (top - loads[other]) / 2
            at = bisect_left(cool_counts, wanted)
            for near in (at - 1, at):
                if not 0 <= near < len(cool_counts):
                    continue
                shift = counts[hot] - cool_counts[near]
                after = max(top - shift, loads[other] + shift), loads[other]
                if shift > 0 and after[0] < top and after < least:
                    least, best = after, (other, hot, owned[other][near])
    return best


def relabel(target: LayerOwnership, current: LayerOwnership) -> LayerOwnership:
    """`target` with its parts given to the ranks that hold most of them; sizes a rank stay.

    Exact: no other naming of the parts moves fewer experts (assignment problem).
    """
    sizes = [len(ids) for ids in target]
    held = [set(ids) for ids in current] + [set[int]()] * (len(target) - len(current))
    worst = sum(sizes) + 1
    costs = [
        [
            len(ids) - len(held[rank].intersection(ids)) if sizes[rank] == len(ids) else worst
            for rank in range(len(target))
        ]
        for ids in target
    ]
    named: list[tuple[int, ...]] = [()] * len(target)
    for part, rank in enumerate(assign(costs)):
        named[rank] = target[part]
    return tuple(named)


def assign(costs: Sequence[Sequence[float]]) -> list[int]:
    """Column of each row such that the sum of costs is least; square matrix.

    Hungarian algorithm with potentials (Kuhn 1955, Munkres 1957), O(n^3).
    """
    size = len(costs)
    row_potential, column_potential = [0.0] * (size + 1), [0.0] * (size + 1)
    row_of = [0] * (size + 1)  # of each column, 1-based, 0: free
    for row in range(1, size + 1):
        row_of[0] = row
        _augment(costs, row_of, row_potential, column_potential)
    columns = [0] * size
    for column in range(1, size + 1):
        columns[row_of[column] - 1] = column - 1
    return columns


def _augment(
    costs: Sequence[Sequence[float]],
    row_of: list[int],
    row_potential: list[float],
    column_potential: list[float],
) -> None:
    """One shortest augmenting path from the row in `row_of[0]`."""
    size = len(costs)
    least, came_from = [float("inf")] * (size + 1), [0] * (size + 1)
    done = [False] * (size + 1)
    column = 0
    while row_of[column]:
        done[column] = True
        row = row_of[column]
        for other in range(1, size + 1):
            if not done[other]:
                reduced = costs[row - 1][other - 1] - row_potential[row] - column_potential[other]
                if reduced < least[other]:
                    least[other], came_from[other] = reduced, column
        target = min((c for c in range(1, size + 1) if not done[c]), key=lambda c: least[c])
        step = least[target]
        for other in range(size + 1):
            if done[other]:
                row_potential[row_of[other]] += step
                column_potential[other] -= step
            else:
                least[other] -= step
        column = target
    while column:
        row_of[column] = row_of[came_from[column]]
        column = came_from[column]


def layer_moves(before: LayerOwnership, after: LayerOwnership, layer: int = 0) -> list[Move]:
    """Copies that have to be made; dropping one is free."""
    had = [set(ids) for ids in before]
    return [
        Move(layer, expert, rank)
        for rank, ids in enumerate(after)
        for expert in ids
        if rank >= len(had) or expert not in had[rank]
    ]


def add_replicas(
    layers: Sequence[LayerOwnership],
    counts: Sequence[Counts],
    expert_bytes: Sequence[int],
    budget_bytes: Sequence[int],
) -> tuple[LayerOwnership, ...]:
    """Copies of hot experts on other ranks, as long as they help and their bytes fit.

    The next copy is always the one that lowers the busiest load of its layer most; its rank pays
    `expert_bytes[layer]` of its `budget_bytes[rank]`.
    """
    owned = [list(layer) for layer in layers]
    left = list(budget_bytes)
    queue: list[tuple[float, int, int, int]] = []

    def offer(layer: int) -> None:
        found = _best_copy(owned[layer], counts[layer], expert_bytes[layer], left)
        if found is not None:
            heapq.heappush(queue, (-found[0], layer, found[1], found[2]))

    for layer in range(len(owned)):
        offer(layer)
    while queue:
        _, layer, expert, rank = heapq.heappop(queue)
        if left[rank] >= expert_bytes[layer]:
            owned[layer][rank] = tuple(sorted((*owned[layer][rank], expert)))
            left[rank] -= expert_bytes[layer]
        offer(layer)
    return tuple(map(tuple, owned))


def _best_copy(
    owned: Sequence[tuple[int, ...]], counts: Counts, cost: int, left: Sequence[int]
) -> tuple[float, int, int] | None:
    """(gain, expert, rank) of the copy that takes most off the busiest rank, or None."""
    layer = tuple(owned)
    held_by = holders(layer, len(counts))
    loads = rank_loads(layer, counts)
    top = max(loads)
    busiest = loads.index(top)
    best: tuple[float, int, int] | None = None
    for rank in range(len(owned)):
        if left[rank] < cost or rank == busiest:
            continue
        for expert in set(owned[busiest]).difference(owned[rank]):
            gain = top - max(_loads_with_copy(loads, counts[expert], held_by[expert], rank))
            if gain > MIN_GAIN * sum(loads) / len(loads) and (
                best is None or (gain, -expert) > (best[0], -best[1])
            ):
                best = (gain, expert, rank)
    return best


def _loads_with_copy(
    loads: Sequence[float], count: float, held_by: Sequence[int], rank: int
) -> list[float]:
    after = list(loads)
    for holder in held_by:
        after[holder] -= count / len(held_by) - count / (len(held_by) + 1)
    after[rank] += count / (len(held_by) + 1)
    return after
