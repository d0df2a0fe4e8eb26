"""Chooses which rank holds which expert: contiguous, as given, balanced, or with few moves.

Owns the choice and its reason; the arithmetic of one layer is `placement.balance`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from placement.balance import (
    Move,
    add_replicas,
    balance_layer,
    busiest_load,
    layer_moves,
    rank_loads,
    rebalance_layer,
    resize,
)
from placement.errors import ConfigError
from placement.experts import LayerHolders, LayerOwnership, check_rank_count, holders
from placement.partition import layer_ownership
from placement.spec import ModelSpec

Layers = Sequence[Sequence[Sequence[int]]]  # [layer][rank] -> expert ids


@dataclass(frozen=True)
class OwnershipRequest:
    """What a user wants. `exact` is taken as it is; `current` is changed as little as possible.

    `counts` are [layer][expert]; `replicas` are the experts of each layer of `exact` that several
    ranks may hold; `replicas_bytes` of each rank may go into copies of hot experts.
    """

    exact: Layers | None = None
    replicas: Sequence[Collection[int]] = ()
    current: Layers | None = None
    counts: tuple[tuple[float, ...], ...] = ()
    replicas_bytes: int = 0


@dataclass(frozen=True)
class Ownership:
    """`layers` has the draft head's last. `moves` are from `current`, none without it."""

    layers: tuple[LayerOwnership, ...]
    reason: str
    moves: tuple[Move, ...] = ()
    counts: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    @property
    def replicated(self) -> tuple[frozenset[int], ...]:
        """Experts of each layer that more than one rank holds."""
        return tuple(_several(layer) for layer in self.layers)

    def table(self, spec: ModelSpec) -> tuple[LayerHolders, ...]:
        """[layer][expert] -> ranks that hold it."""
        layers = (*spec.layers, *spec.draft_layers)
        pairs = zip(self.layers, layers, strict=True)
        return tuple(holders(owned, layer.channel.num_experts) for owned, layer in pairs)

    @property
    def imbalance(self) -> float | None:
        """Busiest load over the mean load by the counts, averaged over layers; None without."""
        ratios = [
            busiest_load(owned, counts) * len(owned) / total
            for owned, counts in zip(self.layers, self.counts, strict=False)
            if (total := sum(rank_loads(owned, counts)))
        ]
        return sum(ratios) / len(ratios) if ratios else None


def _several(layer: LayerOwnership) -> frozenset[int]:
    seen: set[int] = set()
    twice: set[int] = set()
    for ids in layer:
        twice |= seen.intersection(ids)
        seen.update(ids)
    return frozenset(twice)


def choose_ownership(request: OwnershipRequest, spec: ModelSpec, ranks: int) -> Ownership:
    """The ownership without new replicas. ConfigError for files that contradict or don't fit."""
    check_rank_count(spec.num_experts, ranks)
    if request.exact is not None and (request.current is not None or request.replicas_bytes):
        raise ConfigError(
            "an exact ownership leaves nothing to choose: give it without a current ownership and "
            "without replica bytes"
        )
    if request.replicas_bytes and not request.counts:
        raise ConfigError(
            f"replicas_bytes = {request.replicas_bytes}, but without routing counts no expert is "
            "known to be hot: give counts"
        )
    if request.exact is not None:
        layers = layer_ownership(spec, ranks, request.exact, request.replicas)
        return Ownership(tuple(layers), "as the given ownership says", counts=request.counts)
    if request.current is not None:
        return _moved(request, spec, ranks)
    if request.counts:
        return _balanced(request, spec, ranks)
    return Ownership(tuple(layer_ownership(spec, ranks)), "contiguous, as evenly as they divide")


def _balanced(request: OwnershipRequest, spec: ModelSpec, ranks: int) -> Ownership:
    layers = layer_ownership(spec, ranks)
    for index, counts in enumerate(request.counts):
        if counts:
            layers[index] = balance_layer(counts, ranks)
    return Ownership(
        tuple(layers), "balanced by the routing counts, as many experts a rank as when contiguous",
        counts=request.counts,
    )  # fmt: skip


def _moved(request: OwnershipRequest, spec: ModelSpec, ranks: int) -> Ownership:
    before = _checked_current(request, spec)
    sizes = [layer.channel.num_experts for layer in (*spec.layers, *spec.draft_layers)]
    after = []
    for index, (current, size) in enumerate(zip(before, sizes, strict=True)):
        counts = request.counts[index] if index < len(request.counts) else ()
        if counts:
            after.append(rebalance_layer(current, counts, ranks))
        else:
            after.append(resize(current, size, ranks) if size else ((),) * ranks)
    moves = _moves(before, after)
    reason = "the current ownership with as few moves as possible"
    copies = sum(len(ids) for layer in before for ids in layer) - sum(sizes)
    if copies:
        reason += f", its {copies} copies of experts not kept (replica bytes make copies anew)"
    return Ownership(tuple(after), reason, tuple(moves), request.counts)


def _moves(before: Sequence[LayerOwnership], after: Sequence[LayerOwnership]) -> list[Move]:
    return [
        move
        for layer, (old, new) in enumerate(zip(before, after, strict=True))
        for move in layer_moves(old, new, layer)
    ]


def _checked_current(request: OwnershipRequest, spec: ModelSpec) -> list[LayerOwnership]:
    """The current ownership has its own number of ranks; replicas in it are fine."""
    current = request.current or ()
    ranks = max((len(layer) for layer in current), default=0)
    if not 1 <= ranks <= spec.num_experts:
        raise ConfigError(f"the current ownership names {ranks} ranks, needs 1 to the experts")
    several = [_several(tuple(map(tuple, layer))) for layer in current]
    return layer_ownership(spec, ranks, current, several)


def with_replicas(
    ownership: Ownership,
    request: OwnershipRequest,
    expert_bytes: Sequence[int],
    free_bytes: Sequence[int],
    spec: ModelSpec,
) -> Ownership:
    """Copies of hot experts within the asked bytes and the free bytes of each rank.

    `expert_bytes` is one expert of each layer with counts. Copies count as moves, too.
    """
    budget = [max(0, min(request.replicas_bytes, free)) for free in free_bytes]
    counted = [i for i, counts in enumerate(ownership.counts) if counts]
    grown = add_replicas(
        [ownership.layers[i] for i in counted],
        [ownership.counts[i] for i in counted],
        [expert_bytes[i] for i in counted],
        budget,
    )
    layers = list(ownership.layers)
    for index, layer in zip(counted, grown, strict=True):
        layers[index] = layer
    copies = sum(len(ids) for layer in layers for ids in layer) - sum(
        len(ids) for layer in ownership.layers for ids in layer
    )
    moves: Sequence[Move] = ()
    if request.current is not None:
        moves = _moves(_checked_current(request, spec), layers)
    reason = f"{ownership.reason}, and {copies} copies of hot experts"
    return Ownership(tuple(layers), reason, tuple(moves), ownership.counts)
