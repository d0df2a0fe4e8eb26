"""What an output directory will hold, decided before a weight is read: files, tensors, bytes.

A layer makes one file, or several where it is large. Within a file wide types come first, as the
safetensors library orders them, so that every tensor begins at a multiple of its item size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch

from deploy.quantize.packing import blank
from deploy.quantize.recipe import Recipe, every_tensor
from deploy.quantize.source import TORCH_DTYPES, Matrix
from placement.formats import WeightFormat
from placement.headers import DTYPE_BITS, CheckpointHeaders, TensorHeader
from placement.models.rows import matrix_pieces
from placement.spec import ModelSpec, Piece, TensorSpec

SHARD_BYTES = 4 << 30  # of the output
DISK_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor of an output file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Copy:
    """A tensor that stays as it is."""

    group: str
    component: str
    name: str
    header: TensorHeader
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Pack:
    """A matrix that is packed; a plain `form` writes FP8 as floats."""

    group: str
    component: str
    matrix: Matrix
    form: WeightFormat
    entries: tuple[Entry, ...]


Job = Copy | Pack


@dataclass(frozen=True)
class Shard:
    """One output file. `group` is a layer, the draft head, or the rest."""

    file: str
    group: str
    jobs: tuple[Job, ...]

    @property
    def entries(self) -> list[Entry]:
        """In the order of the file."""
        found = [entry for job in self.jobs for entry in job.entries]
        return sorted(found, key=lambda one: (-DTYPE_BITS[one.dtype], one.name))

    @property
    def header(self) -> bytes:
        """Length and JSON; data begins behind it, at a multiple of 8."""
        at = 0
        described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for entry in self.entries:
            span = [at, at := at + entry.nbytes]
            described[entry.name] = {
                "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span,
            }  # fmt: skip
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def data_bytes(self) -> int:
        return sum(entry.nbytes for job in self.jobs for entry in job.entries)


def plan_shards(spec: ModelSpec, headers: CheckpointHeaders, recipe: Recipe) -> list[Shard]:
    """All files, layers in order, then drafts, then the rest. Reads no weight."""
    jobs = list(_jobs(spec, headers, recipe))
    jobs += list(_unused(spec, headers, jobs))
    order = {group: index for index, group in enumerate(_groups(spec))}
    jobs.sort(key=lambda job: order[job.group])
    parts = [
        (group, part)
        for group, members in groupby(jobs, key=lambda job: job.group)
        for part in _cut(list(members))
    ]
    return [
        Shard(f"model-{number:05}-of-{len(parts):05}.safetensors", group, tuple(part))
        for number, (group, part) in enumerate(parts, 1)
    ]


def _groups(spec: ModelSpec) -> list[str]:
    return [*(str(layer.index) for layer in spec.layers), "draft", "rest"]


def group_of(role: str) -> str:
    if role.startswith("draft."):
        return "draft"
    return role.split(".")[1] if role.startswith("layers.") else "rest"


def _jobs(spec: ModelSpec, headers: CheckpointHeaders, recipe: Recipe) -> Iterator[Job]:
    scales = {one.role: one for one in (*spec.scale_tensors, *spec.draft_scale_tensors)}
    blanks: dict[tuple[str, tuple[int, int]], list[tuple[str, str, tuple[int, ...]]]] = {}
    held: set[str] = set()  # a tied head is stored once
    for tensor, is_draft in every_tensor(spec):
        form = recipe.format_of(tensor, is_draft)
        is_tied = tensor.pieces[0].name in held
        beside = [one for role, one in scales.items() if role.rpartition(".")[0] == tensor.role]
        held |= {piece.name for piece in tensor.pieces}
        if is_tied:
            continue
        if form is None or (form.is_plain and (tensor.format is None or tensor.format.is_plain)):
            for one in (tensor, *beside):
                yield from _copies(one, tensor, headers, held if one is not tensor else set())
            continue
        for matrix in _matrices(tensor, headers, beside[0] if beside else None):
            yield _pack(tensor, matrix, form, spec.checkpoint_dtype, blanks)


def _copies(
    tensor: TensorSpec, owner: TensorSpec, headers: CheckpointHeaders, held: set[str]
) -> Iterator[Copy]:
    """`held`: names that were copied before, such as a scale that several tables share."""
    for name in dict.fromkeys(piece.name for piece in tensor.pieces):
        if name not in held:
            held.add(name)
            yield _copy(group_of(owner.role), owner.component, name, headers.tensors[name])


def _copy(group: str, component: str, name: str, header: TensorHeader) -> Copy:
    return Copy(group, component, name, header, (Entry(name, header.dtype, header.shape),))


def _unused(spec: ModelSpec, headers: CheckpointHeaders, jobs: Sequence[Job]) -> Iterator[Copy]:
    """Tensors that no part of the engine reads (vision) go along as they are."""
    taken = {job.name for job in jobs if isinstance(job, Copy)}
    for name in spec.ignored_tensors:
        if name not in taken:
            yield _copy("rest", "ignored", name, headers.tensors[name])


def _matrices(
    tensor: TensorSpec, headers: CheckpointHeaders, scale: TensorSpec | None
) -> Iterator[Matrix]:
    """Every matrix of a tensor, those of a bank of experts one by one."""
    for index, (piece, stored) in enumerate(matrix_pieces(tensor)):
        header = headers.tensors[stored.name]
        beside = None if scale is None else headers.tensors[scale.pieces[index].name]
        at = header.offset + _skipped(piece, stored) * DTYPE_BITS[header.dtype] // 8
        rows, columns = piece.shape
        form = None if beside is None else tensor.format
        yield Matrix(piece.name, (rows, columns), header, at, beside, form)


def _skipped(piece: Piece, stored: Piece) -> int:
    """Values of the stored tensor before a matrix of it."""
    at, rows, columns = 0, stored.shape[-2], stored.shape[-1]
    if len(stored.shape) == 3:
        at = (piece.origin[0] - stored.origin[0]) * rows + piece.origin[1] - stored.origin[1]
    return at * columns


def _pack(
    tensor: TensorSpec, matrix: Matrix, form: WeightFormat, dtype: str,
    blanks: dict[tuple[str, tuple[int, int]], list[tuple[str, str, tuple[int, ...]]]],
) -> Pack:  # fmt: skip
    """`blanks`: what a matrix of a shape becomes, by suffix; few shapes make a checkpoint."""
    if form.is_plain:
        plain = Entry(matrix.name, DISK_DTYPES[getattr(torch, dtype)], matrix.shape)
        return Pack(group_of(tensor.role), tensor.component, matrix, form, (plain,))
    base = matrix.name.removesuffix(".weight")
    key = form.name, matrix.shape
    if key not in blanks:
        blanks[key] = [
            (name.removeprefix(base), DISK_DTYPES[one], shape)
            for name, (one, shape) in blank(matrix, form).items()
        ]
    entries = tuple(Entry(base + suffix, dtype, shape) for suffix, dtype, shape in blanks[key])
    return Pack(group_of(tensor.role), tensor.component, matrix, form, entries)


def _cut(jobs: list[Job]) -> Iterator[list[Job]]:
    part, size = list[Job](), 0
    for job in jobs:
        nbytes = sum(entry.nbytes for entry in job.entries)
        if part and size + nbytes > SHARD_BYTES:
            yield part
            part, size = [], 0
        part.append(job)
        size += nbytes
    yield part


def component_bytes(jobs: Sequence[Job]) -> dict[str, tuple[int, int]]:
    """By ledger row: bytes before and after, scales included on both sides."""
    found: dict[str, tuple[int, int]] = {}
    for job in jobs:
        before, after = found.get(job.component, (0, 0))
        if isinstance(job, Copy):
            was = job.header.nbytes
        else:
            was = job.matrix.shape[0] * job.matrix.row_bytes
            was += job.matrix.scale.nbytes if job.matrix.scale is not None else 0
        now = sum(entry.nbytes for entry in job.entries)
        found[job.component] = before + was, after + now
    return found
