"""Read plans: the right bytes to the right place, each exactly once over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.config import RankShare
from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders
from placement.models.qwen4_exp import build_spec
from placement.partition import make_shares
from placement.reads import Run, TensorReads, plan_reads
from placement.spec import Axis, ModelSpec, TensorSpec

Loaded = tuple[ModelSpec, CheckpointHeaders]


@cache
def contents(path: str) -> bytes:
    return Path(path).read_bytes()


def execute(reads: TensorReads) -> bytearray:
    """What a loader does with the runs; a byte that no run fills stays 0xEE."""
    local = bytearray(b"\xee") * reads.nbytes
    for run in reads.runs:
        data = contents(run.file)
        for i in range(run.count):
            source, dest = run.offset + i * run.file_stride, run.dest_offset + i * run.dest_stride
            local[dest : dest + run.run_bytes] = data[source : source + run.run_bytes]
    return local


def whole(tensor: TensorSpec, headers: CheckpointHeaders) -> bytes:
    """The full tensor of an at most 3-dimensional spec, put together row by row."""
    rows: dict[tuple[int, ...], bytes] = {}
    for piece in tensor.pieces:
        header = headers.tensors[piece.name]
        shape = (1,) * (len(tensor.shape) - len(piece.shape)) + piece.shape
        row_bytes = shape[-1] * 2
        for i in range(prod(shape[:-1])):
            at = [i] if len(shape) == 2 else list(divmod(i, shape[1]))
            key = tuple(a + o for a, o in zip(at, piece.origin, strict=False))
            start = header.offset + i * row_bytes
            rows[key] = contents(header.file)[start : start + row_bytes]
    return b"".join(rows[key] for key in sorted(rows))


def picked(data: bytes, shape: tuple[int, ...], dim: int, positions: list[int]) -> bytes:
    """`positions` along `dim` of a row-major 2-byte tensor."""
    inner = prod(shape[dim + 1 :]) * 2
    outer = shape[dim] * inner
    return b"".join(
        data[o * outer + p * inner : o * outer + (p + 1) * inner]
        for o in range(prod(shape[:dim]))
        for p in positions
    )


def units(first: int, last: int, block: int, base: int = 0) -> list[int]:
    return list(range(base + first * block, base + last * block))


def wanted_positions(role: str, share: RankShare) -> list[int]:
    """Positions written down by hand from the model's shapes, not from the split rules."""
    value, query = share.ranges["value_heads"], share.ranges["query_heads"]
    key, kv = share.ranges["key_heads"], share.ranges["kv_heads"]
    return {
        "layers.0.mixer.qkv": units(*key, 32) + units(*key, 32, 128) + units(*value, 32, 256),
        "layers.0.mixer.out": units(*value, 32),
        "layers.3.mixer.q": units(*query, 64),
        "layers.3.mixer.v": units(*kv, 32),
        "layers.3.mixer.o": units(*query, 32),
        "layers.2.channel.experts_gate_up": list(share.experts[2]),
        "layers.2.channel.experts_down": list(share.experts[2]),
        "layers.2.channel.shared_down": units(*share.ranges["shared_ffn"], 1),
        "layers.1.ngram.table": units(*share.ranges["ngram_rows"], 1),
        "embed": units(*share.ranges["vocab"], 1),
        "draft.layers.0.channel.experts_gate_up": list(share.experts[8]),
    }[role]


@pytest.mark.parametrize(
    ("role", "dim"),
    [
        ("layers.0.mixer.qkv", 0),
        ("layers.0.mixer.out", 1),
        ("layers.3.mixer.q", 0),
        ("layers.3.mixer.v", 0),
        ("layers.3.mixer.o", 1),
        ("layers.2.channel.experts_gate_up", 0),
        ("layers.2.channel.experts_down", 0),
        ("layers.2.channel.shared_down", 1),
        ("layers.1.ngram.table", 0),
        ("embed", 0),
        ("draft.layers.0.channel.experts_gate_up", 0),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3, 14])
def test_bytes_equal_a_slice_of_the_whole_tensor(
    tiny: Loaded, role: str, dim: int, ranks: int
) -> None:
    spec, headers = tiny
    tensor = next(t for t in (*spec.tensors, *spec.draft_tensors) if t.role == role)
    full = whole(tensor, headers)
    for share in make_shares(spec, ranks):
        (reads,) = plan_reads([tensor], share, headers)
        positions = wanted_positions(role, share)
        assert reads.local_shape[dim] == len(positions)
        assert bytes(execute(reads)) == picked(full, tensor.shape, dim, positions)


def test_scattered_experts_keep_their_order(tiny: Loaded) -> None:
    spec, headers = tiny
    tensor = next(t for t in spec.tensors if t.role == "layers.0.channel.experts_gate_up")
    owned = [[13, 2, 7], [e for e in range(14) if e not in (13, 2, 7)]]
    share = make_shares(spec, 2, [owned])[0]
    (reads,) = plan_reads([tensor], share, headers)
    full = whole(tensor, headers)
    assert bytes(execute(reads)) == picked(full, tensor.shape, 0, [2, 7, 13])


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 14])
def test_all_ranks_read_every_byte_exactly_once(tiny: Loaded, ranks: int) -> None:
    spec, headers = tiny
    files = {header.file for header in headers.tensors.values()}
    counts = {file: np.zeros(Path(file).stat().st_size, np.uint8) for file in files}
    tensors = [*spec.tensors, *spec.draft_tensors]
    for share in make_shares(spec, ranks):
        for reads in plan_reads(tensors, share, headers):
            for run in reads.runs:
                mark(counts[run.file], run)
    for tensor in tensors:
        axes = {segment.axis for segment in tensor.split.segments}
        for piece in tensor.pieces:
            header = headers.tensors[piece.name]
            read = set(np.unique(counts[header.file][header.offset :][: header.nbytes]).tolist())
            if not axes:
                assert read == {ranks}, tensor.role
            elif axes & {Axis.KEY_HEADS, Axis.KV_HEADS}:
                assert 0 not in read, tensor.role
            else:
                assert read == {1}, tensor.role


def mark(counts: np.ndarray, run: Run) -> None:
    for i in range(run.count):
        start = run.offset + i * run.file_stride
        counts[start : start + run.run_bytes] += 1


def test_one_rank_reads_the_data_of_all_files(tiny: Loaded) -> None:
    spec, headers = tiny
    (share,) = make_shares(spec, 1)
    reads = plan_reads([*spec.tensors, *spec.draft_tensors], share, headers)
    files = {header.file for header in headers.tensors.values()}
    size = sum(Path(file).stat().st_size for file in files)
    assert sum(tensor.nbytes for tensor in reads) + headers.header_bytes == size


def test_runs_are_merged(real: Loaded) -> None:
    spec, headers = real
    share = make_shares(spec, 6)[1]
    reads = {r.role: r for r in plan_reads(spec.tensors, share, headers)}
    experts = reads["layers.7.channel.experts_gate_up"]
    assert [(run.count, run.run_bytes) for run in experts.runs] == [(1, 86 * 1280 * 2560 * 2)]
    out = reads["layers.0.mixer.out"]  # value heads 8..15 of 48, each 128 columns of bf16
    assert [(r.count, r.run_bytes, r.file_stride, r.dest_stride) for r in out.runs] == [
        (2560, 8 * 128 * 2, 48 * 128 * 2, 8 * 128 * 2)
    ]
    assert len(reads["layers.0.mixer.qkv"].runs) == 3
    assert len(reads["layers.1.ngram.table"].runs) == 1  # shards that follow each other in a file


def test_reads_cover_the_rank_in_the_real_geometry(real: Loaded) -> None:
    spec, headers = real
    sizes = [
        sum(reads.nbytes for reads in plan_reads(spec.tensors, share, headers))
        for share in make_shares(spec, 6)
    ]
    assert sizes[0] > sizes[-1]  # 86 experts against 85
    split = sum(prod(t.shape) * 2 for t in spec.tensors if t.split.segments)
    assert split < sum(sizes) < 1.5 * split


def test_a_rank_without_heads_reads_nothing_of_them(tiny: Loaded) -> None:
    spec, headers = tiny
    last = make_shares(spec, 14)[-1]
    reads = {r.role: r for r in plan_reads(spec.tensors, last, headers)}
    assert reads["layers.0.mixer.out"].runs == ()
    assert reads["layers.0.mixer.out"].local_shape == (192, 0)


def test_pieces_of_two_dtypes_are_refused(
    tiny_config: dict[str, Any], make_headers: Callable[..., CheckpointHeaders]
) -> None:
    headers = make_headers(tiny_config, per_expert=True)
    name = "model.layers.4.mlp.experts.3.up_proj.weight"
    changed = replace(headers.tensors[name], dtype="F16")
    mixed = replace(headers, tensors={**headers.tensors, name: changed})
    spec = build_spec("t", tiny_config, None, headers)
    with pytest.raises(CheckpointError, match=rf"{name} is F16.*BF16.*experts_gate_up"):
        plan_reads(spec.tensors, make_shares(spec, 1)[0], mixed)


def broken(tensor: TensorSpec, headers: CheckpointHeaders, spec: ModelSpec) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan_reads([tensor], make_shares(spec, 1)[0], headers)
    return str(caught.value)


def test_pieces_that_do_not_tile_the_tensor_are_refused(tiny: Loaded) -> None:
    spec, headers = tiny
    table = next(t for t in spec.tensors if t.role == "layers.1.ngram.table")
    short = replace(table, pieces=table.pieces[:-1])
    assert "are needed" in broken(short, headers, spec)
    doubled = replace(table, pieces=(*table.pieces[:-1], table.pieces[0]))
    assert "overlap" in broken(doubled, headers, spec)
    gone = replace(table, pieces=(replace(table.pieces[0], name="ghost"),))
    assert "ghost is missing" in broken(gone, headers, spec)
