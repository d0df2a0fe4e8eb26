"""Headers of model directories: what is accepted, and what each fault is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placement.errors import CheckpointError
from placement.headers import (
    INDEX_FILE,
    CheckpointHeaders,
    header_dump,
    read_file_headers,
    read_header_dump,
    read_headers,
)

Write = Callable[..., None]


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_index(model_dir: Path, weight_map: dict[str, Any]) -> None:
    (model_dir / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def refused(model_dir: Path, *words: str) -> None:
    """The directory is refused in one line that has all these words."""
    with pytest.raises(CheckpointError) as caught:
        read_headers(str(model_dir))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_single_file_without_index(model_dir: Path, write_file: Write) -> None:
    write_file(model_dir / "model.safetensors", {"a": ("BF16", (2, 3)), "b": ("F32", (4,))})
    headers = read_headers(str(model_dir))
    a, b = headers.tensors["a"], headers.tensors["b"]
    assert (a.shape, a.nbytes, b.shape, b.nbytes) == ((2, 3), 12, (4,), 16)
    assert a.offset == headers.header_bytes
    assert b.offset == a.offset + 12
    assert b.offset + b.nbytes == (model_dir / "model.safetensors").stat().st_size


def test_several_files_without_index_are_joined(model_dir: Path, write_file: Write) -> None:
    write_file(model_dir / "x.safetensors", {"a": ("F16", (1,))})
    write_file(model_dir / "y.safetensors", {"b": ("F16", (1,))})
    assert set(read_headers(str(model_dir)).tensors) == {"a", "b"}


def test_index_wins_over_a_superseded_copy(model_dir: Path, write_file: Write) -> None:
    write_file(model_dir / "old.safetensors", {"a": ("F16", (1,)), "b": ("F16", (1,))})
    write_file(model_dir / "new.safetensors", {"a": ("F32", (5,))})
    write_index(model_dir, {"a": "new.safetensors", "b": "old.safetensors"})
    headers = read_headers(str(model_dir))
    assert headers.tensors["a"].shape == (5,)
    assert headers.superseded == ("old.safetensors: a",)


def test_files_outside_the_index_are_not_read(model_dir: Path, write_file: Write) -> None:
    write_file(model_dir / "a.safetensors", {"a": ("F16", (1,))})
    (model_dir / "stray.safetensors").write_bytes(b"not safetensors")
    write_index(model_dir, {"a": "a.safetensors"})
    assert set(read_headers(str(model_dir)).tensors) == {"a"}


def test_missing_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "no such model directory")


def test_directory_without_config(tmp_path: Path, write_file: Write) -> None:
    write_file(tmp_path / "model.safetensors", {"a": ("F16", (1,))})
    refused(tmp_path, "config.json")


def test_directory_without_weights(model_dir: Path) -> None:
    refused(model_dir, "no weights")


def test_missing_shard(model_dir: Path, write_file: Write) -> None:
    write_file(model_dir / "a.safetensors", {"a": ("F16", (1,))})
    write_index(model_dir, {"a": "a.safetensors", "b": "b.safetensors"})
    refused(model_dir, "b.safetensors", "missing")


@pytest.mark.parametrize("cut_bytes", [1, 12])
def test_truncated_data(model_dir: Path, write_file: Write, cut_bytes: int) -> None:
    path = model_dir / "model.safetensors"
    write_file(path, {"a": ("F16", (4,)), "last": ("F16", (8,))})
    path.write_bytes(path.read_bytes()[:-cut_bytes])
    refused(model_dir, "model.safetensors", "last", "truncated")


@pytest.mark.parametrize("keep_bytes", [0, 5, 8, 30])
def test_truncated_header(model_dir: Path, write_file: Write, keep_bytes: int) -> None:
    path = model_dir / "model.safetensors"
    write_file(path, {"a": ("F16", (4,))})
    path.write_bytes(path.read_bytes()[:keep_bytes])
    refused(model_dir, "model.safetensors", "truncated")


def test_header_above_the_limit(
    model_dir: Path, write_header: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placement.headers.MAX_HEADER_BYTES", 10)
    write_header(model_dir / "model.safetensors", b'{"a": null }', 0)
    refused(model_dir, "header of 12 bytes", "limit 10")


def test_lfs_pointer(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(model_dir, "model.safetensors", "git lfs pull")


def test_index_names_a_missing_tensor(model_dir: Path, write_file: Write) -> None:
    write_file(model_dir / "a.safetensors", {"a": ("F16", (1,))})
    write_index(model_dir, {"a": "a.safetensors", "ghost": "a.safetensors"})
    refused(model_dir, "ghost", "a.safetensors", "no shard holds it")


def test_index_names_the_wrong_file(model_dir: Path, write_file: Write) -> None:
    write_file(model_dir / "a.safetensors", {"a": ("F16", (1,))})
    write_file(model_dir / "b.safetensors", {"b": ("F16", (1,)), "c": ("F16", (1,))})
    write_index(model_dir, {"a": "a.safetensors", "b": "a.safetensors", "c": "b.safetensors"})
    refused(model_dir, "b should be in a.safetensors", "it is in b.safetensors")


def test_index_names_a_tensor_twice(model_dir: Path, write_file: Write) -> None:
    write_file(model_dir / "a.safetensors", {"a": ("F16", (1,))})
    text = '{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}'
    (model_dir / INDEX_FILE).write_text(text)
    refused(model_dir, INDEX_FILE, "names a twice")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_unusable_index(model_dir: Path, text: str) -> None:
    (model_dir / INDEX_FILE).write_text(text)
    refused(model_dir, INDEX_FILE)


@pytest.mark.parametrize("file", ["../a.safetensors", "", 3, None])
def test_index_with_an_impossible_file_name(model_dir: Path, file: object) -> None:
    write_index(model_dir, {"a": file})
    refused(model_dir, INDEX_FILE, "a", "no plain file name")


def test_one_tensor_in_two_files_without_index(model_dir: Path, write_file: Write) -> None:
    write_file(model_dir / "x.safetensors", {"a": ("F16", (1,))})
    write_file(model_dir / "y.safetensors", {"a": ("F16", (1,))})
    refused(model_dir, "a is in both x.safetensors and y.safetensors")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", ["bad JSON"]),
        (b"\xff\xfe", ["bad JSON"]),
        (b"[1]", ["list"]),
        (b'{"a": 1}', ["a", "dtype, shape and data_offsets"]),
        (json.dumps({"a": entry("F16", [-1], 0, 2)}).encode(), ["a", "shape"]),
        (json.dumps({"a": entry("F16", [1], 0, 4)}).encode(), ["a", "needs 2 bytes", "gives 4"]),
        (json.dumps({"a": entry("Q7", [1], 0, 1)}).encode(), ["a", "unknown dtype Q7"]),
        (
            json.dumps({"a": entry("F16", [4], 0, 8), "b": entry("F16", [2], 6, 10)}).encode(),
            ["a and b overlap"],
        ),
        (
            json.dumps({"a": entry("F16", [4], 0, 8), "b": entry("F16", [4], 0, 8)}).encode(),
            ["a and b overlap"],
        ),
        (b'{"a": null, "a": null}', ["names a twice"]),
    ],
)
def test_faulty_file_header(
    model_dir: Path, write_header: Write, header: bytes, words: list[str]
) -> None:
    write_header(model_dir / "model.safetensors", header, 16)
    refused(model_dir, "model.safetensors", *words)


def test_empty_tensors_overlap_nothing(model_dir: Path, write_file: Write) -> None:
    path = model_dir / "model.safetensors"
    write_file(path, {"none": ("F16", (0, 4)), "a": ("F16", (2,)), "void": ("F32", (0,))})
    tensors, _ = read_file_headers(str(path))
    assert tensors["none"].nbytes == tensors["void"].nbytes == 0


def test_shard_that_is_a_directory(model_dir: Path) -> None:
    (model_dir / "a.safetensors").mkdir()
    write_index(model_dir, {"a": "a.safetensors"})
    refused(model_dir, "a.safetensors", "can't be read")


def dumped(path: Path, headers: CheckpointHeaders) -> Path:
    path.write_text(json.dumps(header_dump(headers)))
    return path


def test_a_dump_gives_the_same_headers(
    model_dir: Path, write_file: Write, tmp_path_factory: pytest.TempPathFactory
) -> None:
    write_file(model_dir / "a.safetensors", {"x": ("BF16", (2, 3)), "y": ("F32", (4,))})
    write_file(model_dir / "b.safetensors", {"y": ("F32", (4,)), "z": ("F8_E4M3", (5, 1))})
    write_index(model_dir, {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"})
    headers = read_headers(str(model_dir))
    path = dumped(tmp_path_factory.mktemp("elsewhere") / "headers.json", headers)
    assert json.loads(path.read_text())["files"]["a.safetensors"]["bytes"] == (
        (model_dir / "a.safetensors").stat().st_size
    )
    for file in model_dir.iterdir():
        file.unlink()
    assert read_header_dump(str(path)) == headers


def test_the_embedded_model_dumps_and_reads_back(embedded_dir: Path, tmp_path: Path) -> None:
    headers = read_headers(str(embedded_dir))
    assert read_header_dump(str(dumped(tmp_path / "h.json", headers))) == headers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nrank_headers": 2}, ["version 2", "reads 1"]),
        ({"files": {}}, ["needs model_dir"]),
        ({"superseded": None}, ["superseded"]),
        ({"model_dir": 3}, ["model_dir"]),
        ({"files": {"a.safetensors": {"tensors": {}}}}, ["a.safetensors needs bytes"]),
        ({"files": {"a.safetensors": {"bytes": 5, "tensors": {"x": entry("F16", [4], 0, 8)}}}},
         ["a.safetensors", "x ends at byte 8", "file has 5"]),
        ({"files": {"a.safetensors": {"bytes": 9, "tensors": {"x": entry("F16", [4], 0, 6)}}}},
         ["a.safetensors", "x", "needs 8 bytes"]),
        ({"files": {f: {"bytes": 9, "tensors": {"x": entry("F16", [4], 0, 8)}} for f in "ab"}},
         ["x is in two files"]),
    ],
)  # fmt: skip
def test_faulty_dump(
    model_dir: Path, write_file: Write, change: dict[str, Any], words: list[str]
) -> None:
    write_file(model_dir / "a.safetensors", {"x": ("F16", (4,))})
    path = model_dir / "headers.json"
    path.write_text(json.dumps({**header_dump(read_headers(str(model_dir))), **change}))
    with pytest.raises(CheckpointError) as caught:
        read_header_dump(str(path))
    for word in words:
        assert word in str(caught.value)
