"""Bytes of a rank's weights by ledger row, and what tiles and the allocator add to them.

The worker puts matrices that read one input below each other in one; which these are stands in
JOINED. Values are counted by their own row, whatever matrix they lie in; what is no value is
`padding`. `tests/npu/test_npu_memory.py` compares the result with an allocator's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from math import prod

from placement.config import RankShare
from placement.formats import WeightFormat
from placement.partition import local_shape
from placement.physical import block_bytes, is_packed, tensor_bytes, tiled_shape, value_bytes
from placement.spec import Component, TensorSpec
from placement.topology import HOST_PROFILE, ChipProfile

PADDING = "padding"
# Names of tensors of one part of a layer that the worker has in one matrix, in their order there.
JOINED = (
    ("down", "inject"),
    ("qkv", "z", "b", "a"),
    ("q", "k", "v", "index_qk"),
    ("router", "shared_gate", "shared_gate_proj", "shared_up_proj"),
)
_PLACES = {name: (group, at) for group, names in enumerate(JOINED) for at, name in enumerate(names)}

Shape = tuple[int, ...]
Part = tuple[TensorSpec, Shape]  # with the shape that the rank has


def weight_rows(
    tensors: Iterable[TensorSpec], share: RankShare, item_bytes: int, profile: ChipProfile
) -> dict[str, int]:
    """Ledger row -> bytes of the rank's parts; scales and padding in rows of their own.

    Scales of the draft head stay in its row.
    """
    rows: Counter[str] = Counter()
    known: dict[Hashable, Counter[str]] = {}  # layers are alike: each kind is measured once
    for run in matrices(tensors):
        kind = tuple(_kind(tensor, share) for tensor in run)
        if kind not in known:
            parts = [(tensor, local_shape(tensor, share)) for tensor in run]
            known[kind] = _matrix_rows(parts, item_bytes, profile)
        rows.update(known[kind])
    return dict(rows)


def matrices(tensors: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """The tensors that lie in one matrix together, one at a time; most lie alone."""
    groups: dict[Hashable, list[TensorSpec]] = {}
    for tensor in tensors:
        part, _, name = tensor.role.rpartition(".")
        place = _PLACES.get(name)
        groups.setdefault((part, place[0]) if place else tensor.role, []).append(tensor)
    for group in groups.values():
        ordered = sorted(group, key=lambda tensor: _PLACES.get(_name(tensor), (0, 0)))
        for _, run in groupby(ordered, _join_key):
            yield list(run)


def _matrix_rows(parts: Sequence[Part], item_bytes: int, profile: ChipProfile) -> Counter[str]:
    """Rows of the values in one matrix, and its padding."""
    rows: Counter[str] = Counter()
    for tensor, shape in parts:
        size = tensor_bytes(tensor, shape, item_bytes, HOST_PROFILE)
        scale_row = tensor.component if tensor.component is Component.MTP else Component.SCALES
        rows[tensor.component.value] += size.payload
        rows[scale_row.value] += size.scales
    taken = sum(block_bytes(size, profile) for size in _tensor_sizes(parts, item_bytes, profile))
    rows[PADDING] = taken - rows.total()
    return rows


def _tensor_sizes(parts: Sequence[Part], item_bytes: int, profile: ChipProfile) -> list[int]:
    """Bytes of each tensor in memory that holds something of one matrix."""
    first, shape = parts[0]
    if len(parts) > 1:
        shape = (sum(one[0] for _, one in parts), *shape[1:])
    if not prod(shape):
        return []
    if not is_packed(first):
        width = value_bytes(first, item_bytes)
        return [prod(tiled_shape(first, shape, width, profile)) * width]
    sizes = [tensor_bytes(*part, item_bytes, profile) for part in parts]
    return [
        sum(size.payload for size in sizes),
        *_scale_sizes(parts, sum(size.scales for size in sizes)),
    ]


def _scale_sizes(parts: Sequence[Part], scales: int) -> list[int]:
    """Scales, zero points and scales of a whole matrix are a tensor each."""
    form = parts[0][0].format
    assert form is not None
    whole = form.tensor_bytes * sum(tensor.stacked * prod(shape[:-2]) for tensor, shape in parts)
    each = form.scale_bytes + form.zero_bytes
    blocks = (scales - whole) // each if each else 0
    return [blocks * form.scale_bytes, blocks * form.zero_bytes, whole]


def _join_key(tensor: TensorSpec) -> Hashable:
    """Equal for neighbours that can lie in one matrix: plain ones, or packed ones of one format
    whose scales don't reach over several rows.
    """
    if _name(tensor) not in _PLACES:
        return tensor.role
    if not is_packed(tensor):
        return (tensor.dtype, tensor.shape[1:])
    form = tensor.format
    assert form is not None
    return (form, tensor.shape[1:]) if _joins(form) else tensor.role


def _joins(form: WeightFormat) -> bool:
    return form.block_rows == 1 and not form.tensor_bytes


def _name(tensor: TensorSpec) -> str:
    return tensor.role.rpartition(".")[2]


def _kind(tensor: TensorSpec, share: RankShare) -> Hashable:
    """Equal for tensors whose parts take equal bytes on the rank."""
    layer = tensor.expert_layer
    experts = len(share.experts[layer]) if layer >= 0 else -1
    return (
        _name(tensor), tensor.shape, tensor.split, tensor.component, tensor.dtype, tensor.format,
        tensor.stacked, experts,
    )  # fmt: skip
