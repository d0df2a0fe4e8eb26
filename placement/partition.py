"""Deals the axes of a model out over the ranks, and cuts tensors accordingly.

Every tensor has one rule (its `Split`). Uneven and empty shares are normal: the first ranks get
the odd units, and a rank may own no head or no row at all. Knows no bytes and no files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

from placement.config import RankShare
from placement.errors import CheckpointError, ConfigError
from placement.experts import (
    LayerOwnership,
    check_rank_count,
    contiguous_ownership,
    deal,
    validate_ownership,
)
from placement.spec import Axis, ModelSpec, Segment, TensorSpec

# An axis that follows another one: its units are shared by consecutive groups of the leader's.
FOLLOWS = {Axis.KV_HEADS: Axis.QUERY_HEADS, Axis.KEY_HEADS: Axis.VALUE_HEADS}

Range = tuple[int, int]  # half-open


def axis_units(spec: ModelSpec) -> dict[Axis, int]:
    """Units of each axis that some tensor is split by. One number an axis in the whole model."""
    units: dict[Axis, int] = {}
    for tensor in (*spec.tensors, *spec.draft_tensors):
        for segment in tensor.split.segments:
            if units.setdefault(segment.axis, segment.units) != segment.units:
                raise CheckpointError(
                    f"{spec.name}: {tensor.role} has {segment.units} {segment.axis}, "
                    f"an earlier tensor {units[segment.axis]}; one number a model is supported"
                )
    return units


def make_shares(
    spec: ModelSpec,
    ranks: int,
    ownership: Sequence[Sequence[Sequence[int]]] | None = None,
    replicas: Sequence[Collection[int]] = (),
) -> tuple[RankShare, ...]:
    """What each rank holds. `ownership` is [layer][rank] -> expert ids, contiguous by default.

    `replicas` are the experts of each layer that several ranks may hold. `RankShare.experts` has
    the main layers first and then those of the draft head; a layer without experts has none.
    Raises ConfigError for a rank count or an ownership that can't be.
    """
    check_rank_count(spec.num_experts, ranks)
    experts = layer_ownership(spec, ranks, ownership, replicas)
    ranges = _axis_ranges(axis_units(spec), ranks)
    return tuple(
        RankShare(
            rank=rank,
            world_size=ranks,
            ranges={axis.value: dealt[rank] for axis, dealt in ranges.items()},
            experts=tuple(layer[rank] for layer in experts),
        )
        for rank in range(ranks)
    )


def layer_ownership(
    spec: ModelSpec,
    ranks: int,
    ownership: Sequence[Sequence[Sequence[int]]] | None = None,
    replicas: Sequence[Collection[int]] = (),
) -> list[LayerOwnership]:
    """Ownership of every layer, draft layers last; those that aren't given are contiguous."""
    layers = (*spec.layers, *spec.draft_layers)
    if len(ownership or ()) > len(layers):
        raise ConfigError(
            f"ownership has {len(ownership or ())} layers, {spec.name} has {len(layers)} "
            "(those of the draft head included): is it of another model?"
        )
    dealt = [_contiguous(layer.channel.num_experts, ranks) for layer in layers]
    for layer, owned in enumerate(ownership or ()):
        several = replicas[layer] if layer < len(replicas) else ()
        count = layers[layer].channel.num_experts
        dealt[layer] = validate_ownership(owned, count, ranks, layer, several)
    return dealt


def _contiguous(num_experts: int, ranks: int) -> LayerOwnership:
    return contiguous_ownership(num_experts, ranks) if num_experts else ((),) * ranks


def _axis_ranges(units: dict[Axis, int], ranks: int) -> dict[Axis, tuple[Range, ...]]:
    ranges: dict[Axis, tuple[Range, ...]] = {
        axis: deal(count, ranks)
        for axis, count in units.items()
        if axis not in FOLLOWS and axis is not Axis.EXPERTS
    }
    for axis, leader in FOLLOWS.items():
        if axis in units:
            group = units[leader] // units[axis]
            ranges[axis] = tuple(_covering(span, group) for span in ranges[leader])
    return ranges


def _covering(span: Range, group: int) -> Range:
    """Followers that a range of leaders needs; two neighbours may both need the one between."""
    start, stop = span
    return (start // group, ceil(stop / group)) if stop > start else (0, 0)


def local_index_ranges(tensor: TensorSpec, share: RankShare) -> tuple[Range, ...]:
    """Positions along the split dimension that the rank owns, in local order, adjacent merged.

    The whole dimension for a replicated tensor, nothing for a rank without a unit.
    """
    if not tensor.split.segments:
        return ((0, tensor.shape[tensor.split.dim]),)
    owned: list[Range] = []
    base = 0
    for segment in tensor.split.segments:
        for start, stop in _owned_units(tensor, segment, share):
            first, last = base + start * segment.block, base + stop * segment.block
            if owned and owned[-1][1] == first:
                first = owned.pop()[0]
            owned.append((first, last))
        base += segment.block * segment.units
    return tuple(owned)


def _owned_units(tensor: TensorSpec, segment: Segment, share: RankShare) -> list[Range]:
    if segment.axis is Axis.EXPERTS:
        return [(one, one + 1) for one in share.experts[tensor.expert_layer]]
    start, stop = share.ranges[segment.axis.value]
    return [(start, stop)] if stop > start else []


def local_shape(tensor: TensorSpec, share: RankShare) -> tuple[int, ...]:
    """Shape of the rank's part; 0 along the split dimension for a rank that owns nothing."""
    dim = tensor.split.dim
    size = sum(stop - start for start, stop in local_index_ranges(tensor, share))
    return (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
