"""Files of a model directory or a plan that can't be opened, are too short or too long."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from placement.errors import CheckpointError, ConfigError
from placement.headers import INDEX_FILE, read_header_dump, read_headers
from placement.models.registry import load_model_spec, spec_from_config
from placement.ownership_files import read_counts, read_ownership
from placement.spec import ModelSpec

Write = Callable[..., None]
Make = Callable[[Path], object]
SHARD = "a.safetensors"


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


SPECIAL: list[Make] = [os.mkfifo, make_socket, lambda path: path.symlink_to("/dev/zero")]
special = pytest.mark.parametrize("make", SPECIAL, ids=["fifo", "socket", "device"])


def refused(read: Callable[[], object], *words: str) -> str:
    """The read is refused in one line that has all these words."""
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def two_shards(model_dir: Path, write_file: Write) -> None:
    """Shard a holds x, y and z; shard b holds w."""
    write_file(model_dir / SHARD, dict.fromkeys("zyx", ("F16", (4,))))
    write_file(model_dir / "b.safetensors", {"w": ("F16", (4,))})
    placed = {"z": SHARD, "y": SHARD, "x": SHARD, "w": "b.safetensors"}
    (model_dir / INDEX_FILE).write_text(json.dumps({"weight_map": placed}))


@special
@pytest.mark.parametrize("name", ["config.json", INDEX_FILE, SHARD])
def test_a_special_file_in_a_model_directory(
    model_dir: Path, write_file: Write, make: Make, name: str
) -> None:
    two_shards(model_dir, write_file)
    (model_dir / name).unlink()
    make(model_dir / name)
    refused(lambda: load_model_spec(str(model_dir)), name, "is no regular file")


@special
def test_a_special_file_as_a_shard_without_index(model_dir: Path, make: Make) -> None:
    make(model_dir / SHARD)
    refused(lambda: read_headers(str(model_dir)), SHARD, "is no regular file")


@special
def test_a_special_file_given_to_a_plan(
    tmp_path: Path, make: Make, tiny: tuple[ModelSpec, object]
) -> None:
    path = str(tmp_path / "given")
    make(tmp_path / "given")
    for read in (
        lambda: spec_from_config(path),
        lambda: read_header_dump(path),
        lambda: read_ownership(path),
        lambda: read_counts(path, tiny[0]),
    ):
        refused(read, path, "is no regular file")


def cut(keep_bytes: int) -> Make:
    return lambda path: path.write_bytes((20).to_bytes(8, "little")[:keep_bytes])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, "missing"),
        (lambda path: path.symlink_to("nowhere"), "missing"),
        (lambda path: path.symlink_to(path.name), "can't be read"),
        (lambda path: path.mkdir(), "can't be read"),
        (os.mkfifo, "can't be read"),
        (cut(0), "truncated"),
        (cut(7), "truncated"),
        (cut(8), "truncated"),
        (lambda path: path.write_bytes((2).to_bytes(8, "little") + b"{["), "bad JSON"),
    ],
)
def test_a_shard_without_header_names_its_tensors(
    model_dir: Path, write_file: Write, make: Make, words: str
) -> None:
    two_shards(model_dir, write_file)
    (model_dir / SHARD).unlink()
    make(model_dir / SHARD)
    refused(lambda: read_headers(str(model_dir)), SHARD, words, "has x and 2 more in it")


def test_a_lost_shard_of_one_tensor_names_it(model_dir: Path, write_file: Write) -> None:
    two_shards(model_dir, write_file)
    (model_dir / "b.safetensors").unlink()
    message = refused(lambda: read_headers(str(model_dir)), "b.safetensors", "missing")
    assert message.endswith(f"({INDEX_FILE} has w in it)")


def test_a_cut_shard_without_index_names_the_file_alone(model_dir: Path) -> None:
    cut(8)(model_dir / SHARD)
    message = refused(lambda: read_headers(str(model_dir)), SHARD, "truncated")
    assert INDEX_FILE not in message


@pytest.mark.parametrize("entries", [{"x": ("F16", (4,)), "none": ("F16", (0,))}, {}])
def test_bytes_behind_the_last_tensor(
    model_dir: Path, write_file: Write, entries: dict[str, object]
) -> None:
    path = model_dir / SHARD
    write_file(path, entries)
    size = path.stat().st_size
    assert set(read_headers(str(model_dir)).tensors) == set(entries)
    path.write_bytes(path.read_bytes() + b"\0")
    refused(lambda: read_headers(str(model_dir)), SHARD, f"is {size + 1} bytes", f"it is {size};")


def ranks(*layers: object) -> dict[str, object]:
    """A printed plan whose ranks have these experts."""
    return {"plan_id": "x", "ranks": [{"experts": one} for one in layers]}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (ranks([[[0, 1]], [[0, 1]]], [[[2, 3]]]), "rank 1 has experts of 1 layers, rank 0 of 2"),
        (ranks([[[0, 1]]], [[[2, 3]], []]), "rank 0 of 1: layer 1 is on one of them"),
        (ranks([[[0, 1]]], [[[2]]]), "layer 0, rank 1: [2] is no [first, last] range"),
        (ranks([[], [[1, 2, 3]]]), "layer 1, rank 0: [1, 2, 3] is no [first, last] range"),
        (ranks([[], [4]]), "layer 1, rank 0: 4 is no [first, last] range"),
        (ranks([[], 4]), "layer 1, rank 0: 4 is no list of [first, last] ranges"),
        (ranks([[], [[0, "b"]]]), "layer 1, rank 0: 'b' is no expert id"),
        (ranks([[]], 7), "rank 1 has no ranges of experts"),
        ({"plan_id": "x", "ranks": [{"experts": []}, 5]}, "rank 1 has no ranges of experts"),
        ({"plan_id": "x", "ranks": [{"experts": [[]], "draft_experts": [[[1]]]}]},
         "layer 1, rank 0: [1] is no"),
        ({"plan_id": "x", "ranks": []}, "a plan needs a list of ranks, has []"),
        ({"plan_id": "x"}, "a plan needs a list of ranks, has None"),
    ],
)  # fmt: skip
def test_a_printed_plan_that_was_damaged(
    tmp_path: Path, plan: dict[str, object], words: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    message = refused(lambda: read_ownership(str(path)), "plan.json: ", words)
    assert "Error" not in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "other.json: required key hidden_size is missing"),
        ({"hidden_size": 0}, "other.json: hidden_size = 0, supported: a whole number"),
    ],
)
def test_a_bad_key_names_the_config_that_was_given(
    tmp_path: Path, embedded_dir: Path, change: dict[str, object], words: str
) -> None:
    config = json.loads((embedded_dir / "config.json").read_text())
    text = config.get("text_config", config)
    assert text.keys() >= change.keys()
    text.update(change)
    path = tmp_path / "other.json"
    path.write_text(json.dumps(config))
    message = refused(lambda: spec_from_config(str(path)), words)
    assert message.startswith(str(path))
