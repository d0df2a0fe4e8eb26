"""What `nrank quantize` refuses: one line that names it, and nothing half-written."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.quantize.journal import JOURNAL, RECEIPTS
from placement.errors import ConfigError
from tests.deploy.quantize.conftest import Convert, convert_into
from tests.golden.lowbit_checkpoint import Pair

Refused = Callable[..., str]
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight"
NARROW = ("--dense", "w4g128")  # the heads' columns are no whole groups


def changed(source: Path, folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """A copy of a model of one file with a tensor replaced or left out."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor.to(tensors[name].dtype)
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--format", "w5"), "'w5' is unknown, known: f32"),
        (("--format", "w4g48"), "'w4g48' is unknown"),
        (("--format", "mxfp8"), "mxfp8 can't be run packed; use one of"),
        (("--format", "w4g32", *NARROW), "192 columns, which aren't whole groups of 128"),
        (("--format", "w4g32:0-9"), "names layer 9, but twin has 2 layers and 1 of drafts"),
        (("--format", "w4g32:0"), "says nothing about layer 1: add a range"),
        (("--format", "w4g32:1-0"), "'1-0' is no range of layers"),
        (("--format", "w4g32:"), "'' is no range of layers"),
        (("--format", "w4g32:0-"), "'0-' is no range of layers"),
        (("--format", "w4g32:\u0660-\u0662"), "is no range of layers"),
        (("--format", "f32"), "leaves twin as it is; name a format below 16 bits"),
        (("--format", "bf16:0,w2:1-2"), "floats of twin are float32 and stay so"),
        (("--format", "w4g32", "--dense", "w8_sym:0-1"), "names layers; it takes one format"),
        (("--format", "w4g32", "--calibration", "none.txt"), "has no tokenizer.json to read it"),
    ],
)
def test_what_can_not_be_made_is_told_before_a_folder_is(
    sources: Pair, refused: Refused, tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    out = tmp_path / "out"
    assert named in refused("--model", str(sources.twin), "--out", str(out), *flags)
    assert not out.exists()


def test_a_model_without_a_name_is_told(refused: Refused, tmp_path: Path) -> None:
    line = ("--format", "w4g32", "--out", str(tmp_path / "out"))
    assert "'' is no model directory" in refused("--model", "", *line)


def test_a_missing_tensor_is_named(sources: Pair, refused: Refused, tmp_path: Path) -> None:
    folder = changed(sources.twin, tmp_path / "model", EXPERT, None)
    out = tmp_path / "out"
    said = refused("--model", str(folder), "--format", "w4g32", "--out", str(out))
    assert "1 missing tensors" in said
    assert EXPERT in said
    assert not out.exists()


def test_a_file_of_the_model_that_is_missing_is_named(
    sources: Pair, refused: Refused, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sources.twin, folder)
    (file,) = folder.glob("*.safetensors")
    names = {name: "gone.safetensors" if name == EXPERT else file.name for name in load_file(file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    out = tmp_path / "out"
    said = refused("--model", str(folder), "--format", "w4g32", "--out", str(out))
    assert "gone.safetensors: shard is missing" in said
    assert EXPERT in said
    assert not out.exists()


@pytest.mark.parametrize("name", [EXPERT, "model.layers.1.mlp.gate.weight"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_named(
    sources: Pair, refused: Refused, tmp_path: Path, name: str, bad: float
) -> None:
    """Packed or copied; what is there then is no model, and can be gone on with."""
    (file,) = sources.twin.glob("*.safetensors")
    tensor = load_file(file)[name]
    tensor[-1, -1] = bad
    folder = changed(sources.twin, tmp_path / "model", name, tensor)
    out = tmp_path / "out"
    said = refused("--model", str(folder), "--format", "w4g32", "--out", str(out))
    assert f"{name} holds a value that is no finite number" in said
    assert sorted(path.suffix for path in out.iterdir()) == [".jsonl", ".safetensors"]
    assert (out / JOURNAL).exists()


@pytest.mark.parametrize(
    ("name", "rule"),
    [(EXPERT, "w4g32"), (EXPERT, "w4g32:0,f32:1-2"), (TABLE, "w4g32")],
    ids=["packed", "left in floats", "copied"],
)
def test_an_fp8_code_that_is_no_number_is_named(
    sources: Pair, refused: Refused, tmp_path: Path, name: str, rule: str
) -> None:
    (file,) = sources.packed.glob("*.safetensors")
    tensor = load_file(file)[name]
    tensor.view(torch.uint8)[1, 2] = 0x7F
    folder, out = changed(sources.packed, tmp_path / "model", name, tensor), tmp_path / "out"
    said = refused("--model", str(folder), "--format", rule, "--out", str(out))
    assert f"{name} holds a value that is no finite number" in said
    assert not (out / "config.json").exists()


@pytest.mark.parametrize("rule", ["w4g32", "w4g32_asym", "w8_sym", "nvfp4", "mxfp4", "fp8", "w2"])
def test_a_value_whose_scale_no_rank_would_load_is_named(
    sources: Pair, refused: Refused, tmp_path: Path, rule: str
) -> None:
    (file,) = sources.twin.glob("*.safetensors")
    tensor = load_file(file)[EXPERT]
    tensor[3, 5] = -2e5
    folder, out = changed(sources.twin, tmp_path / "model", EXPERT, tensor), tmp_path / "out"
    said = refused("--model", str(folder), "--format", rule, "--out", str(out))
    assert re.search(f"{EXPERT} holds a value that is too large for {rule}.*is the limit", said)
    assert not (out / "config.json").exists()


@pytest.mark.parametrize("kind", ["FIFO", "link to nowhere"])
def test_an_output_that_is_no_folder_is_told(
    sources: Pair, refused: Refused, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    os.mkfifo(out) if kind == "FIFO" else out.symlink_to(tmp_path / "nowhere")
    line = ("--model", str(sources.twin), "--format", "w4g32", "--out", str(out))
    assert f"--out {out}: is no folder; choose another folder" in refused(*line)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["too long", "link to itself"])
def test_an_output_that_can_be_no_folder_is_told(
    sources: Pair, refused: Refused, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / ("a" * 300 if kind == "too long" else "out")
    if kind == "link to itself":
        out.symlink_to("out")
    for place in (out, out / "below"):
        line = ("--model", str(sources.twin), "--format", "w4g32", "--out", str(place))
        assert re.search(f"--out {place}: .*; choose another folder", refused(*line))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_journal_that_is_no_file_is_told(
    sources: Pair, refused: Refused, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / JOURNAL)
    line = ("--model", str(sources.twin), "--format", "w4g32", "--out", str(tmp_path))
    assert f"{JOURNAL} can't be read; remove" in refused(*line)


@pytest.mark.parametrize("harm", ["removed", "cut"])
def test_a_complete_output_that_lost_a_file_since_is_told(
    sources: Pair, converted: Convert, tmp_path: Path, harm: str
) -> None:
    shutil.copytree(converted(sources.twin, "w4g32"), tmp_path / "out")
    convert_into(tmp_path / "out", sources.twin, "w4g32")  # complete: nothing to do
    file = min((tmp_path / "out").glob("*.safetensors"))
    file.unlink() if harm == "removed" else os.truncate(file, 100)
    with pytest.raises(ConfigError, match=f"was complete, but {file.name} is missing or of an"):
        convert_into(tmp_path / "out", sources.twin, "w4g32")


def test_a_model_that_was_written_after_its_output_is_told(
    sources: Pair, converted: Convert, tmp_path: Path
) -> None:
    shutil.copytree(converted(sources.twin, "w4g32"), tmp_path / "out")
    shutil.copytree(sources.twin, tmp_path / "twin")
    (file,) = (tmp_path / "twin").glob("*.safetensors")
    convert_into(tmp_path / "out", tmp_path / "twin", "w4g32")
    file.touch()
    with pytest.raises(ConfigError, match=f"was complete before {file.name} of the model was wri"):
        convert_into(tmp_path / "out", tmp_path / "twin", "w4g32")


@pytest.mark.parametrize("lost", ["matrices", "components", "growth"])
def test_receipts_that_lack_a_part_are_told(
    sources: Pair, converted: Convert, refused: Refused, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, lost: str,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    shutil.copytree(converted(sources.twin, "w4g32"), out)
    monkeypatch.setattr("deploy.quantize_command.calibration_of", lambda *_: None)
    receipts = json.loads((out / RECEIPTS).read_text())
    del receipts[lost]
    (out / RECEIPTS).write_text(json.dumps(receipts))
    line = ("--model", str(sources.twin), "--format", "w4g32", "--out", str(out))
    assert f"{RECEIPTS} can't be read; remove the folder" in refused(*line)


def test_a_folder_of_something_else_is_left_alone(
    sources: Pair, converted: Convert, refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    line = ("--model", str(sources.twin), "--format", "w4g32", "--out")
    assert "holds other files (notes.txt)" in refused(*line, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert "is no folder; choose another" in refused(*line, str(tmp_path / "notes.txt"))
    assert "is the model itself" in refused(*line, str(sources.twin))
    other = converted(sources.twin, "w8_sym")
    said = refused(*line, str(other))
    assert "is of another conversion: format was w8_sym, is w4g32" in said


def test_a_folder_that_another_process_writes_is_left_alone(
    sources: Pair, refused: Refused, tmp_path: Path
) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        line = ("--model", str(sources.twin), "--format", "w4g32", "--out", str(tmp_path))
        assert "is written by another process" in refused(*line)
    finally:
        os.close(handle)


def test_too_little_space_is_told_with_what_is_missing(
    sources: Pair, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    out = tmp_path / "deep" / "out"
    line = ("--model", str(sources.twin), "--format", "w4g32", "--out", str(out))
    said = refused(*line, code=1)
    assert f"{tmp_path} has 1,000 free: make room for" in said
    assert not out.parent.exists()


def test_a_disk_that_fills_up_leaves_what_can_be_gone_on_with(
    sources: Pair, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.pwrite, [40]

    def pwrite(handle: int, raw: bytes, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(handle, raw, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    out = tmp_path / "out"
    line = ("--model", str(sources.twin), "--format", "w4g32", "--out", str(out))
    said = refused(*line, code=1)
    assert "No space left on device; make room and give the same command again" in said
    assert (out / JOURNAL).exists()
    assert not [path.name for path in out.iterdir() if path.name.endswith(".part")]
    monkeypatch.undo()
    convert_into(tmp_path / "again", sources.twin, "w4g32")


def test_a_disk_that_turns_read_only_is_told_in_one_line(
    sources: Pair, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be removed there either: what could not be written is the error to tell."""

    real, unlink, written = os.pwrite, Path.unlink, [0]

    def fails() -> int:
        raise OSError(30, "Read-only file system")

    def pwrite(handle: int, raw: bytes, at: int) -> int:
        written[0] += 1
        return real(handle, raw, at) if written[0] < 5 else fails()

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(
        Path, "unlink", lambda path, **how: fails() if path.exists() else unlink(path, **how)
    )
    line = ("--model", str(sources.twin), "--format", "w4g32", "--out", str(tmp_path / "out"))
    assert "can't be written: Read-only file system; see to the disk and" in refused(*line, code=1)


def test_weights_that_are_packed_already_are_refused(
    sources: Pair, converted: Convert, refused: Refused, tmp_path: Path
) -> None:
    packed = str(converted(sources.twin, "w4g32"))
    said = refused("--model", packed, "--format", "w8_sym", "--out", str(tmp_path / "out"))
    assert "is stored as w4g32 already; quantise from floats or fp8_block128" in said


@pytest.mark.parametrize("text", [json.dumps(["no"]), "[" * 100_000], ids=["list", "deep"])
def test_a_journal_that_can_not_be_read_is_told(
    sources: Pair, refused: Refused, tmp_path: Path, text: str
) -> None:
    (tmp_path / JOURNAL).write_text(text + "\n")
    line = ("--model", str(sources.twin), "--format", "w4g32", "--out", str(tmp_path))
    assert f"{JOURNAL} can't be read; remove" in refused(*line)
