"""A conversion that was stopped, and a model that is another one when it goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.quantize.conversion import Conversion
from deploy.quantize.journal import JOURNAL
from deploy.quantize.packing import Receipt
from deploy.quantize.recipe import Recipe
from deploy.quantize.shard_file import OutputError
from placement.errors import CheckpointError, ConfigError
from tests.deploy.quantize.conftest import Convert, convert_into, files_of
from tests.golden.lowbit_checkpoint import Pair

EXPERT = "model.layers.0.mlp.experts.5.up_proj.weight"


@pytest.fixture
def model(sources: Pair, tmp_path: Path) -> Path:
    folder = tmp_path / "twin"
    shutil.copytree(sources.twin, folder)
    return folder


def conversion(model: Path, out: Path) -> Conversion:
    return Conversion(str(model), out, Recipe.parse("w4g32", None))


def stopped(monkeypatch: pytest.MonkeyPatch, model: Path, out: Path) -> None:
    """All shards are written, nothing else."""
    work = conversion(model, out)
    monkeypatch.setattr(work, "_write_rest", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        work.run(None, lambda *_: None)


def rewrite(model: Path) -> None:
    """One weight is another; names, types, shapes and length stay."""
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors[EXPERT] = torch.full_like(tensors[EXPERT], 0.5)
    save_file(tensors, file)


def test_weights_that_changed_since_it_was_stopped_are_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stopped(monkeypatch, model, out)
    before = files_of(out)
    rewrite(model)
    with pytest.raises(ConfigError, match=r"was begun with another m.safetensors, .*remove the"):
        convert_into(out, model, "w4g32")
    assert files_of(out) == before


def test_weights_that_change_while_they_are_read_make_no_model(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"m.safetensors was changed while it was read"):
        conversion(model, out).run(None, lambda *_: rewrite(model))
    assert not (out / "config.json").exists()
    with pytest.raises(ConfigError, match="was begun with another"):
        convert_into(out, model, "w4g32")


def test_a_stopped_one_goes_on_with_a_model_that_is_the_same(
    model: Path, sources: Pair, converted: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stopped(monkeypatch, model, out)
    convert_into(out, model, "w4g32")
    assert files_of(out) == files_of(converted(sources.twin, "w4g32"))


@pytest.mark.parametrize("change", [{"name": 3}, {"error": None}, {"cosine": "1"}])
def test_a_receipt_of_a_journal_that_is_none_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    out = tmp_path / "out"
    stopped(monkeypatch, model, out)
    first, second, *others = (out / JOURNAL).read_text().splitlines()
    entry = json.loads(second)
    entry["receipts"][0] |= change
    (out / JOURNAL).write_text("\n".join((first, json.dumps(entry), *others)) + "\n")
    with pytest.raises(ConfigError, match=f"{JOURNAL} can't be read; remove"):
        convert_into(out, model, "w4g32")


def test_a_receipt_is_read_as_it_was_stored() -> None:
    one = Receipt("a", "w4g32", 0.5, 1.0, 1e-05)
    assert Receipt.read(json.loads(json.dumps(vars(one)))) == one


def test_what_is_left_of_a_small_file_and_can_not_be_removed_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that turned read-only; a folder of such a name stays where it is."""
    out = tmp_path / "out"
    stopped(monkeypatch, model, out)
    (out / ".config.json.0123abcd.part").mkdir()
    left = out / ".config.json.89abcdef.part"
    left.write_text("{")
    unlink: Callable[..., None] = Path.unlink

    def fail(path: Path, **how: bool) -> None:
        if path == left:
            raise OSError(30, os.strerror(30))
        unlink(path, **how)

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(OutputError, match=r"89abcdef.part can't be written: Read-only file system"):
        convert_into(out, model, "w4g32")
    monkeypatch.setattr(Path, "unlink", unlink)
    convert_into(out, model, "w4g32")
    assert not left.exists()
