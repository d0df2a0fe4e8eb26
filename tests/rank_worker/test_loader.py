"""A rank reads exactly the bytes it owns, from any layout, and gets the checkpoint's own values."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from placement.config import RankShare
from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders
from placement.models.registry import load_model_spec
from placement.partition import make_shares
from placement.reads import plan_reads
from placement.spec import Axis, DTypeRule, ModelSpec, TensorSpec
from rank_worker import loader
from rank_worker.loader import LoadCounter, Loader

ROOT = Path(__file__).parents[2]
RANKS = (1, 2, 3, 4, 6)
LAYOUTS = {
    "split": {"experts": "split"},
    "fused": {"experts": "fused"},
    "split-nested": {"experts": "split", "prefix": "model.language_model."},
    "fused-nested": {"experts": "fused", "prefix": "model.language_model."},
}
MEASURE = """
import json, sys
from pathlib import Path
import torch
from placement.models.registry import load_model_spec
from placement.partition import make_shares
from placement.reads import plan_reads
from rank_worker.loader import LoadCounter, Loader

def read_so_far():
    return int(Path("/proc/self/io").read_text().split()[1])

for model_dir in sys.argv[1:]:
    for ranks in (1, 2, 3, 4, 6):
        for rank in range(ranks):
            before = read_so_far()
            spec, headers = load_model_spec(model_dir)
            share = make_shares(spec, ranks)[rank]
            reads = plan_reads(spec.tensors, share, headers)
            after_headers = read_so_far()
            counter = LoadCounter()
            Loader(torch.float32, counter).load(reads)
            print(json.dumps({
                "ranks": ranks, "rank": rank, "owned": sum(r.nbytes for r in reads),
                "headers": headers.header_bytes, "header_rchar": after_headers - before,
                "counted": counter.read_bytes, "load_rchar": read_so_far() - after_headers,
            }))
"""


class Checkpoint:
    """A model directory, and its logical tensors as safetensors reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec: ModelSpec
        self.headers: CheckpointHeaders
        self.spec, self.headers = load_model_spec(str(folder))
        self._whole: dict[str, Tensor] = {}

    def whole(self, spec: TensorSpec) -> Tensor:
        """The whole logical tensor in its dtype on disk."""
        if spec.role not in self._whole:
            parts = [(piece, self._read(piece.name)) for piece in spec.pieces]
            out = torch.full(spec.shape, 77, dtype=parts[0][1].dtype)
            for piece, value in parts:
                box = (1,) * (len(spec.shape) - len(piece.shape)) + piece.shape
                where = tuple(slice(o, o + n) for o, n in zip(piece.origin, box, strict=True))
                out[where] = value.view(box)
            self._whole[spec.role] = out
        return self._whole[spec.role]

    def _read(self, name: str) -> Tensor:
        with safe_open(self.headers.tensors[name].file, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def owned(self, spec: TensorSpec, share: RankShare) -> Tensor:
        """The rank's part in its dtype on disk."""
        whole = self.whole(spec)
        if not spec.split.segments:
            return whole
        index: list[int] = []
        base = 0
        for segment in spec.split.segments:
            units = range(*share.ranges[segment.axis]) if segment.axis != Axis.EXPERTS else ()
            chosen = share.experts[spec.expert_layer] if segment.axis == Axis.EXPERTS else units
            for unit in chosen:
                index += range(base + unit * segment.block, base + (unit + 1) * segment.block)
            base += segment.units * segment.block
        assert base == spec.shape[spec.split.dim]
        return whole.index_select(spec.split.dim, torch.tensor(index, dtype=torch.int64))

    def load(
        self, share: RankShare, dtype: torch.dtype = torch.float32
    ) -> tuple[dict[str, Tensor], LoadCounter]:
        counter = LoadCounter()
        reads = plan_reads(self.spec.tensors, share, self.headers)
        return Loader(dtype, counter).load(reads), counter


@pytest.fixture(scope="module")
def checkpoint(
    embedded_model_dir: Path, random_checkpoint: Callable[..., Path]
) -> Callable[[str], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            folder = embedded_model_dir
            if name != "embedded":
                folder = random_checkpoint(layers=4, **LAYOUTS[name])
            made[name] = Checkpoint(folder)
        return made[name]

    return get


def in_memory(value: Tensor, rule: DTypeRule, dtype: torch.dtype) -> Tensor:
    types = {DTypeRule.WEIGHT: dtype, DTypeRule.FLOAT32: torch.float32}
    return value.to(types.get(rule, torch.int64))


def check_loaded(found: Checkpoint, share: RankShare, dtype: torch.dtype = torch.float32) -> None:
    loaded, counter = found.load(share, dtype)
    owned_bytes = 0
    assert sorted(loaded) == sorted(t.role for t in found.spec.tensors)
    for spec in found.spec.tensors:
        expected = found.owned(spec, share)
        owned_bytes += expected.nbytes
        got = loaded[spec.role]
        wanted = in_memory(expected, spec.dtype, dtype)
        assert got.dtype == wanted.dtype, spec.role
        assert torch.equal(got, wanted), spec.role
    assert counter.read_bytes == counter.planned_bytes == owned_bytes


@pytest.mark.parametrize("name", ["embedded", *LAYOUTS])
@pytest.mark.parametrize("ranks", RANKS)
def test_each_rank_gets_its_values_and_reads_only_its_bytes(
    checkpoint: Callable[[str], Checkpoint], name: str, ranks: int
) -> None:
    found = checkpoint(name)
    for share in make_shares(found.spec, ranks):
        check_loaded(found, share)


def test_experts_in_any_order_of_owners(checkpoint: Callable[[str], Checkpoint]) -> None:
    found = checkpoint("fused")
    scattered = [[1, 4, 5, 13], [0, 2, 3, 6, 7, 8, 9, 10, 11, 12]]
    for share in make_shares(found.spec, 2, [scattered] * len(found.spec.layers)):
        check_loaded(found, share)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["embedded", "split"])
def test_values_are_converted_while_they_arrive(
    checkpoint: Callable[[str], Checkpoint], name: str, dtype: torch.dtype
) -> None:
    found = checkpoint(name)
    check_loaded(found, make_shares(found.spec, 3)[1], dtype)


def test_more_ranks_than_heads_leave_empty_tensors(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    found = checkpoint("split")
    share = make_shares(found.spec, 14)[13]
    check_loaded(found, share)
    loaded, _ = found.load(share)
    assert any(tensor.numel() == 0 for tensor in loaded.values())


@pytest.mark.parametrize("staging_bytes", [1002, 65536 + 2])
@pytest.mark.parametrize("name", ["split", "fused"])
def test_a_staging_buffer_smaller_than_a_run_gives_the_same_tensors(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str,
    staging_bytes: int,
) -> None:  # fmt: skip
    found = checkpoint(name)
    share = make_shares(found.spec, 3)[0]
    reads = plan_reads(found.spec.tensors, share, found.headers)
    assert any(run.run_bytes > staging_bytes for tensor in reads for run in tensor.runs)
    monkeypatch.setattr(loader, "STAGING_BYTES", staging_bytes)
    check_loaded(found, share)


def test_the_kernel_counts_what_the_loader_counts(
    embedded_model_dir: Path, random_checkpoint: Callable[..., Path]
) -> None:
    """In a process of its own: a thread of this one may read at the same time."""
    folders = [str(embedded_model_dir), str(random_checkpoint(layers=4, experts="fused"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, *folders], env=environment, check=True,
        capture_output=True, text=True, timeout=120,
    ).stdout  # fmt: skip
    lines = [json.loads(line) for line in output.splitlines()]
    assert len(lines) == len(folders) * sum(RANKS)
    for seen in lines:
        assert seen["counted"] == seen["owned"], seen
        assert seen["owned"] <= seen["load_rchar"] <= 1.05 * seen["owned"], seen
        assert seen["header_rchar"] <= seen["headers"] + 0.05 * seen["owned"], seen


@pytest.fixture
def private_copy(random_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(random_checkpoint(layers=4, experts="fused"), folder)
    return folder


def place_of(found: Checkpoint, role: str) -> tuple[str, int, int]:
    """(file, offset, bytes) of a tensor with one piece."""
    (spec,) = [t for t in found.spec.tensors if t.role == role]
    (piece,) = spec.pieces
    header = found.headers.tensors[piece.name]
    assert header.nbytes == prod(header.shape) * 4
    return header.file, header.offset, header.nbytes


def test_a_file_cut_inside_a_tensor_names_file_and_tensor(private_copy: Path) -> None:
    found = Checkpoint(private_copy)
    roles = [t.role for t in found.spec.tensors if len(t.pieces) == 1]
    role = max(roles, key=lambda role: place_of(found, role)[:2])  # the last one of its file
    file, offset, nbytes = place_of(found, role)
    os.truncate(file, offset + nbytes // 2)
    share = make_shares(found.spec, 1)[0]
    with pytest.raises(CheckpointError) as caught:
        found.load(share)
    assert str(caught.value) == (
        f"{file} ends at byte {offset + nbytes // 2}, but tensor {role} goes to byte "
        f"{offset + nbytes}: the file was truncated, download it again"
    )
    links = [f for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    assert not [f for f in links if os.readlink(f).startswith(str(private_copy))]
    with pytest.raises(CheckpointError, match=Path(file).name):
        load_model_spec(str(private_copy))


def test_bytes_of_another_rank_are_not_looked_at(private_copy: Path) -> None:
    found = Checkpoint(private_copy)
    role = "layers.3.channel.experts_down"
    file, offset, nbytes = place_of(found, role)
    with open(file, "r+b") as handle:
        handle.seek(offset + nbytes - 4)  # of the last expert
        handle.write(struct.pack("<f", float("nan")))
    first, second = make_shares(found.spec, 2)
    assert torch.isfinite(found.load(first)[0][role]).all()
    with pytest.raises(CheckpointError, match=f"tensor {role} holds a value that is no finite"):
        found.load(second)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("role", ["layers.1.ngram.table", "embed", "layers.0.mixer.dt_bias"])
def test_a_plain_value_that_is_no_finite_number_is_refused(
    private_copy: Path, role: str, value: float
) -> None:
    found = Checkpoint(private_copy)
    (spec,) = [t for t in found.spec.tensors if t.role == role]
    header = found.headers.tensors[spec.pieces[-1].name]
    with open(header.file, "r+b") as handle:
        handle.seek(header.offset + header.nbytes - 4)
        handle.write(struct.pack("<f", value))
    with pytest.raises(CheckpointError) as caught:
        found.load(make_shares(found.spec, 1)[0])
    assert str(caught.value).startswith(f"{header.file}: tensor {role} holds a value that is no")


@pytest.mark.parametrize("value", [65536.0, -1e9])
def test_values_beyond_float16_are_refused(private_copy: Path, value: float) -> None:
    found = Checkpoint(private_copy)
    role = "layers.1.channel.experts_gate_up"
    file, offset, _ = place_of(found, role)
    with open(file, "r+b") as handle:
        handle.seek(offset + 400)
        handle.write(struct.pack("<f", value))
    share = make_shares(found.spec, 1)[0]
    with pytest.raises(CheckpointError, match=rf"tensor {role} has values beyond float16's 65504"):
        found.load(share, torch.float16)
    for dtype in (torch.float32, torch.bfloat16):
        assert found.load(share, dtype)[0][role].flatten()[100] == value
