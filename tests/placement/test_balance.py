"""Balanced ownership: never worse than contiguous, few moves, replicas only where they help."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.balance import (
    LOAD_TOLERANCE,
    add_replicas,
    assign,
    balance_layer,
    busiest_load,
    deal_sizes,
    layer_moves,
    rank_loads,
    rebalance_layer,
    relabel,
    resize,
)
from placement.experts import LayerOwnership, contiguous_ownership, holders

COUNTS = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


def all_ownerships(num_experts: int, sizes: list[int]) -> list[LayerOwnership]:
    """Every ownership with these numbers of experts a rank."""
    found: list[LayerOwnership] = [()]
    for size in sizes:
        found = [
            (*owned, ids)
            for owned in found
            for ids in combinations(
                [e for e in range(num_experts) if all(e not in one for one in owned)], size
            )
        ]
    return found


def is_whole(owned: LayerOwnership, num_experts: int) -> bool:
    return sorted(e for ids in owned for e in ids) == list(range(num_experts))


@settings(deadline=None)
@given(COUNTS, st.integers(1, 8))
def test_balance_is_whole_and_never_worse_than_contiguous(counts: list[int], ranks: int) -> None:
    ranks = min(ranks, len(counts))
    owned = balance_layer(counts, ranks)
    assert is_whole(owned, len(counts))
    assert [len(ids) for ids in owned] == deal_sizes(len(counts), ranks)
    contiguous = contiguous_ownership(len(counts), ranks)
    assert busiest_load(owned, counts) <= busiest_load(contiguous, counts)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=4, max_size=7))
def test_balance_is_near_the_best_of_all(counts: list[int]) -> None:
    """Two ranks, against all ownerships: never more than a quarter above the best."""
    best = min(
        busiest_load(owned, counts)
        for owned in all_ownerships(len(counts), deal_sizes(len(counts), 2))
    )
    assert busiest_load(balance_layer(counts, 2), counts) <= 1.25 * best


def test_skewed_routing_at_the_real_size_is_levelled() -> None:
    """Zipf-like counts of 512 experts, hot ones together: contiguous is far off, balance is not."""
    counts = [1e6 / (rank + 20) for rank in range(512)]
    mean = sum(counts) / 6
    assert busiest_load(contiguous_ownership(512, 6), counts) > 2.5 * mean
    assert busiest_load(balance_layer(counts, 6), counts) < 1.001 * mean


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_resize_moves_as_little_as_any_ownership(data: st.DataObject) -> None:
    experts = data.draw(st.integers(2, 6))
    before = data.draw(st.integers(1, min(3, experts)))
    after = data.draw(st.integers(1, min(3, experts)))
    order = data.draw(st.permutations(range(experts)))
    cuts = sorted(data.draw(st.lists(st.integers(0, experts), min_size=before - 1, max_size=2)))
    edges = [0, *cuts[: before - 1], experts]
    current = tuple(tuple(sorted(order[a:b])) for a, b in pairwise(edges))
    owned = resize(current, experts, after)
    assert is_whole(owned, experts)
    assert [len(ids) for ids in owned] == deal_sizes(experts, after)
    least = min(
        len(layer_moves(current, other))
        for other in all_ownerships(experts, deal_sizes(experts, after))
    )
    assert len(layer_moves(current, owned)) == least


def test_from_four_to_six_ranks_only_the_new_ranks_get_experts() -> None:
    current = contiguous_ownership(512, 4)
    owned = resize(current, 512, 6)
    moves = layer_moves(current, owned)
    assert len(moves) == 170  # what ranks 4 and 5 hold, and nothing else
    assert {move.rank for move in moves} == {4, 5}
    assert len(layer_moves(current, contiguous_ownership(512, 6))) > 2 * len(moves)


@settings(deadline=None)
@given(st.data())
def test_relabel_keeps_as_much_as_any_naming(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    experts = data.draw(st.integers(ranks, 12))
    sizes = deal_sizes(experts, ranks)

    def draw_ownership() -> LayerOwnership:
        order = data.draw(st.permutations(range(experts)))
        starts = [sum(sizes[:r]) for r in range(ranks)]
        return tuple(
            tuple(sorted(order[at : at + size])) for at, size in zip(starts, sizes, strict=True)
        )

    target, current = draw_ownership(), draw_ownership()
    named = relabel(target, current)
    assert sorted(named) == sorted(target)
    least = min(
        len(layer_moves(current, other))
        for other in permutations(target)
        if [len(ids) for ids in other] == sizes
    )
    assert len(layer_moves(current, named)) == least


@settings(deadline=None)
@given(st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 20), min_size=n, max_size=n), min_size=n, max_size=n)
))  # fmt: skip
def test_assignment_is_the_cheapest(costs: list[list[int]]) -> None:
    columns = assign(costs)
    assert sorted(columns) == list(range(len(costs)))
    total = sum(costs[row][column] for row, column in enumerate(columns))
    assert total == min(
        sum(costs[row][column] for row, column in enumerate(order))
        for order in permutations(range(len(costs)))
    )


@settings(deadline=None)
@given(COUNTS, st.integers(1, 6), st.randoms(use_true_random=False))
def test_rebalance_reaches_the_balance_with_no_more_moves_than_a_fresh_one(
    counts: list[int], ranks: int, random: Random
) -> None:
    ranks = min(ranks, len(counts))
    old = counts[:]
    random.shuffle(old)
    current = balance_layer(old, ranks)
    owned = rebalance_layer(current, counts, ranks)
    best = balance_layer(counts, ranks)
    assert is_whole(owned, len(counts))
    assert busiest_load(owned, counts) <= busiest_load(best, counts) * (1 + LOAD_TOLERANCE) + 1e-9
    fresh = layer_moves(current, relabel(best, current))
    assert len(layer_moves(current, owned)) <= len(fresh)


def test_a_balanced_ownership_stays_as_it_is() -> None:
    counts = [float(7 + e % 5) for e in range(64)]
    current = balance_layer(counts, 4)
    drifted = [count * (1.01 if e % 2 else 0.99) for e, count in enumerate(counts)]
    assert rebalance_layer(current, drifted, 4) == current


def test_two_hot_experts_on_one_rank_are_parted_by_one_swap() -> None:
    counts = [10.0] * 64
    current = contiguous_ownership(64, 4)
    counts[3] = counts[4] = 60.0
    moves = layer_moves(current, rebalance_layer(current, counts, 4))
    assert len(moves) == 2
    assert {move.expert for move in moves} & {3, 4}


def test_four_hot_experts_on_one_rank_are_parted_by_three_swaps() -> None:
    """The idle ranks take one each; none gets a second that has to move on."""
    counts = [1000.0] * 4 + [1.0] * 10
    current = contiguous_ownership(14, 4)
    owned = rebalance_layer(current, counts, 4)
    assert busiest_load(owned, counts) == busiest_load(balance_layer(counts, 4), counts) == 1003
    assert len(layer_moves(current, owned)) == 6


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.integers(0, 30), min_size=6, max_size=8))
def test_rebalance_moves_hardly_more_than_any_ownership(counts: list[int]) -> None:
    """Three ranks, against all ownerships within the same limit: one swap more at most."""
    current = contiguous_ownership(len(counts), 3)
    limit = busiest_load(balance_layer(counts, 3), counts) * (1 + LOAD_TOLERANCE)
    least = min(
        len(layer_moves(current, other))
        for other in all_ownerships(len(counts), deal_sizes(len(counts), 3))
        if busiest_load(other, counts) <= limit
    )
    assert len(layer_moves(current, rebalance_layer(current, counts, 3))) <= least + 2


def test_rebalance_from_a_replicated_ownership_has_one_holder_each() -> None:
    current: LayerOwnership = ((0, 1, 2), (0, 3))
    owned = rebalance_layer(current, [1.0, 1.0, 1.0, 1.0], 2)
    assert is_whole(owned, 4)
    assert not layer_moves(current, owned)


def test_the_hot_expert_is_replicated_until_it_no_longer_helps() -> None:
    owned = contiguous_ownership(8, 4)
    counts = [90.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    (layer,) = add_replicas([owned], [counts], [100], [250] * 4)
    assert holders(layer, 8)[0] == (0, 1, 2, 3)
    assert [len(ids) for ids in layer] == [2, 3, 3, 3]
    assert rank_loads(layer, counts) == [32.5, 42.5, 42.5, 42.5]
    assert sum(rank_loads(layer, counts)) == sum(counts)


def test_replicas_stay_within_the_bytes_of_their_rank() -> None:
    owned = contiguous_ownership(8, 4)
    counts = [90.0, *[10.0] * 7]
    (layer,) = add_replicas([owned], [counts], [100], [0, 99, 100, 0])
    assert holders(layer, 8)[0] == (0, 2)
    (same,) = add_replicas([owned], [counts], [100], [99] * 4)
    assert same == owned


def test_replicas_go_to_the_layer_that_gains_most() -> None:
    owned = contiguous_ownership(4, 2)
    mild, strong = [12.0, 8.0, 9.0, 9.0], [100.0, 1.0, 1.0, 1.0]
    layers = add_replicas([owned, owned], [mild, strong], [1, 1], [0, 1])
    assert layers[0] == owned
    assert holders(layers[1], 4)[0] == (0, 1)


@settings(deadline=None)
@given(COUNTS, st.integers(2, 5), st.integers(0, 6))
def test_replicas_never_raise_the_busiest_load(counts: list[int], ranks: int, room: int) -> None:
    ranks = min(ranks, len(counts))
    owned = balance_layer(counts, ranks)
    (layer,) = add_replicas([owned], [counts], [1], [room] * ranks)
    assert busiest_load(layer, counts) <= busiest_load(owned, counts) + 1e-9
    for had, has in zip(owned, layer, strict=True):
        assert set(had) <= set(has)
        assert len(has) - len(had) <= room


@pytest.mark.parametrize(("experts", "ranks"), [(512, 6), (288, 5), (14, 14)])
def test_no_counts_at_all_is_the_contiguous_deal(experts: int, ranks: int) -> None:
    assert balance_layer([0.0] * experts, ranks) == contiguous_ownership(experts, ranks)
