"""Builders of tensor specs that the families share: whole tensors, norms, splits, experts.

Knows how published checkpoints lay experts out (fused, or one matrix each), not what a layer is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from placement.headers import CheckpointHeaders
from placement.spec import (
    Axis,
    Component,
    DTypeRule,
    MoeSpec,
    Piece,
    Segment,
    Split,
    TensorSpec,
)

REPLICATED = Split()
# A matrix of one expert under the suffixes that the known formats give it.
EXPERT_SUFFIXES = (".weight", ".weight_packed", "_codes")


@dataclass(frozen=True)
class Names:
    """What all rows of a family need: the width, and which layout lies on disk.

    Without headers a plain checkpoint is taken as fused and whole; `export` says that the
    config is that of a quantised release, which stores experts and table shards one by one.
    """

    hidden: int
    headers: CheckpointHeaders | None = None
    export: bool = False

    def on_disk(self, name: str) -> bool:
        return self.export if self.headers is None else name in self.headers.tensors

    def per_expert(self, base: str) -> bool:
        """True where `base`, the name up to `experts.`, has a matrix for each expert."""
        return any(self.on_disk(f"{base}0.gate_proj{suffix}") for suffix in EXPERT_SUFFIXES)


def whole(
    role: str,
    name: str,
    shape: tuple[int, ...],
    split: Split = REPLICATED,
    component: Component = Component.DENSE,
    dtype: DTypeRule = DTypeRule.WEIGHT,
) -> TensorSpec:
    """A tensor that is one piece on disk."""
    piece = Piece(name, shape, (0,) * len(shape))
    return TensorSpec(role, shape, split, component, (piece,), dtype)


def norm(role: str, name: str, size: int) -> TensorSpec:
    return whole(role, name, (size,), dtype=DTypeRule.FLOAT32)


def by_rows(axis: Axis, block: int, units: int) -> Split:
    return Split(0, (Segment(axis, block, units),))


def by_columns(axis: Axis, block: int, units: int) -> Split:
    return Split(1, (Segment(axis, block, units),))


def feed_forward(
    role: str, base: str, hidden: int, inner: int, axis: Axis, component: Component
) -> Iterator[TensorSpec]:
    """Gate, up and down of a block that is split along its inner width."""
    for part in ("gate_proj", "up_proj"):
        split = by_rows(axis, 1, inner)
        yield whole(role + part, f"{base}{part}.weight", (inner, hidden), split, component)
    down = by_columns(axis, 1, inner)
    yield whole(role + "down", f"{base}down_proj.weight", (hidden, inner), down, component)


def experts(
    names: Names, role: str, base: str, spec: MoeSpec, expert_layer: int
) -> Iterator[TensorSpec]:
    """Two tensors a layer, gate above up; `base` ends in `experts.`."""
    count, inner, hidden = spec.num_experts, spec.intermediate, names.hidden
    gate_up, down = (count, 2 * inner, hidden), (count, hidden, inner)
    pieces = _per_expert_pieces(base, spec, hidden) if names.per_expert(base) else None
    for part, shape, stacked in (("gate_up", gate_up, 2), ("down", down, 1)):
        fused = (Piece(f"{base}{part}_proj", shape, (0, 0, 0)),)
        yield TensorSpec(
            role=f"{role}experts_{part}",
            shape=shape,
            split=by_rows(Axis.EXPERTS, 1, count),
            component=Component.ROUTED_EXPERTS,
            pieces=pieces[part] if pieces else fused,
            expert_layer=expert_layer,
            stacked=stacked,
        )


def _per_expert_pieces(base: str, spec: MoeSpec, hidden: int) -> dict[str, tuple[Piece, ...]]:
    inner, gate_up, down = spec.intermediate, [], []
    for e in range(spec.num_experts):
        gate_up.append(Piece(f"{base}{e}.gate_proj.weight", (inner, hidden), (e, 0, 0)))
        gate_up.append(Piece(f"{base}{e}.up_proj.weight", (inner, hidden), (e, inner, 0)))
        down.append(Piece(f"{base}{e}.down_proj.weight", (hidden, inner), (e, 0, 0)))
    return {"gate_up": tuple(gate_up), "down": tuple(down)}


def matrix_pieces(tensor: TensorSpec) -> list[tuple[Piece, Piece]]:
    """Matrices of a tensor under the names that a checkpoint of single ones gives them, each with
    the stored piece that holds it: a bank of experts is many.
    """
    found = []
    for stored in tensor.pieces:
        if len(stored.shape) != 3:
            found.append((stored, stored))
            continue
        count, rows, columns = stored.shape
        base, _, part = stored.name.rpartition(".")
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        each = rows // len(parts)
        found += [
            (Piece(f"{base}.{e}.{one}.weight", (each, columns), (e, i * each, 0)), stored)
            for e in range(count)
            for i, one in enumerate(parts)
        ]
    return found
